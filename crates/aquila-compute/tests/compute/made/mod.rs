//! Made-up values and the backends of this machine, for tests that compare bits.
#![allow(dead_code)]

use aquila_compute::cpu::{CpuBackend, Isa, IsaChoice};

/// Values around zero, the same for the same seed.
pub fn made(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    };
    (0..count).map(|_| next() * (1.0 + 3.0 * next())).collect()
}

/// Bits, so that `==` tells zeros apart and numbers that are none are equal to themselves.
pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// One backend for each instruction set of this machine and for one and two threads.
pub fn backends() -> Vec<CpuBackend> {
    Isa::available()
        .into_iter()
        .flat_map(|isa| [(isa, 1), (isa, 2)])
        .map(|(isa, threads)| CpuBackend::new(IsaChoice::Only(isa), threads).unwrap())
        .collect()
}
