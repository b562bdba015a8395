//! Every row of the acceptance tables: tokens per verification of greedy chains and trees, beside
//! what the code that trained the heads computed.
//!
//! `cargo run --release -p aquila-engine --example acceptance_tables` prints them all and fails if
//! one is more than 2 % off.

#[path = "../tests/engine/support/mod.rs"]
mod support;

use aquila_spec::Shape;
use support::answers::{acceptance, shape, table};
use support::shipped::Algorithm;

fn main() {
    let chains = table("tiny-acceptance.json");
    let trees = table("tiny-tree-acceptance.json");
    let mut rows: Vec<_> =
        (1..=8).map(|steps| (Shape::chain(steps), steps.to_string(), &chains)).collect();
    for (steps, topk, nodes) in [(5, 1, 6), (3, 4, 16), (5, 4, 16), (5, 8, 48)] {
        let key = format!("steps {steps} topk {topk} nodes {nodes}");
        rows.push((shape(steps, topk, nodes), key, &trees));
    }
    println!("| algorithm | shape | kind | ours | theirs | off by |");
    println!("|---|---|---|---|---|---|");
    let mut worst: f64 = 0.0;
    for (algorithm, name) in [(Algorithm::Eagle3, "eagle3"), (Algorithm::Standalone, "standalone")]
    {
        for (shape, key, table) in &rows {
            for (kind, ours) in acceptance(algorithm, *shape) {
                let theirs = table[name][&kind][key].as_f64().expect("the table has the row");
                let off = ours / theirs - 1.0;
                worst = worst.max(off.abs());
                println!(
                    "| {name} | {shape} | {kind} | {ours:.3} | {theirs:.3} | {:+.1} % |",
                    100.0 * off
                );
            }
        }
    }
    println!("\nthe largest difference: {:.2} %", 100.0 * worst);
    assert!(worst <= 0.02, "a row is more than 2 % off");
}
