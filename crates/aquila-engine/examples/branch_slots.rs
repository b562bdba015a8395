//! What attention to true ancestors gives over attention to whoever sat in a branch's slots:
//! tokens per verification of greedy trees, both ways.
//!
//! `cargo run -p aquila-engine --example branch_slots`, without `--release`: known bugs can be put back
//! in builds with debug assertions alone.

#[path = "../tests/engine/support/mod.rs"]
mod support;

use aquila_spec::known_bugs::Bug;
use support::answers::{acceptance, shape};
use support::shipped::Algorithm;

fn main() {
    println!("| algorithm | steps / topk / nodes | kind | branch slots | true ancestors | gain |");
    println!("|---|---|---|---|---|---|");
    for (algorithm, name) in [(Algorithm::Eagle3, "EAGLE3"), (Algorithm::Standalone, "STANDALONE")]
    {
        for (steps, topk, nodes) in [(3, 4, 16), (5, 4, 16), (5, 8, 48)] {
            let shape = shape(steps, topk, nodes);
            let branches = {
                let _alive = Bug::BranchSlots.put_back();
                acceptance(algorithm, shape)
            };
            for (kind, ours) in acceptance(algorithm, shape) {
                let theirs = branches[&kind];
                let gain = 100.0 * (ours / theirs - 1.0);
                println!(
                    "| {name} | {steps} / {topk} / {nodes} | {kind} | {theirs:.3} | {ours:.3} | {gain:+.1} % |"
                );
            }
        }
    }
}
