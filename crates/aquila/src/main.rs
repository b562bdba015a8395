//! Aquila with the algorithms that it brings.

use std::process::ExitCode;

fn main() -> ExitCode {
    aquila::run(&aquila::Algorithms::built_in())
}
