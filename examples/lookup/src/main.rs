//! Aquila with one algorithm more: `cargo run --release -p aquila-lookup -- serve
//! --speculative-algorithm LOOKUP`.

use std::process::ExitCode;

fn main() -> ExitCode {
    let mut algorithms = aquila::Algorithms::built_in();
    algorithms.register(Box::new(aquila_lookup::Lookup)).expect("the name is not taken");
    aquila::run(&algorithms)
}
