//! The crate through its public surface: references, bits, bad input, places.

mod golden;
mod sequence;
