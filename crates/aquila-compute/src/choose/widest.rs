//! One body of code, compiled for the widest vectors of this machine.
//!
//! The instruction set changes the speed and nothing else: a fused multiply-add rounds once,
//! whether the machine has it or [`math::fma`] emulates it.

use crate::math;

/// Where fused multiply-adds come from.
pub trait Fused {
    /// `a * b + c`, rounded once.
    fn fma(a: f32, b: f32, c: f32) -> f32;
}

/// Fused multiply-adds as the build has them.
pub struct Portable;

impl Fused for Portable {
    #[inline(always)]
    fn fma(a: f32, b: f32, c: f32) -> f32 {
        math::fma(a, b, c)
    }
}

/// Fused multiply-adds as an instruction.
#[cfg(target_arch = "x86_64")]
struct Instruction;

#[cfg(target_arch = "x86_64")]
impl Fused for Instruction {
    #[inline(always)]
    fn fma(a: f32, b: f32, c: f32) -> f32 {
        a.mul_add(b, c)
    }
}

/// Work whose loops are worth wide vectors; `run` must be inlined into its caller.
pub trait Work {
    /// What it answers.
    type Out;
    /// Does it.
    fn run<F: Fused>(self) -> Self::Out;
}

/// Does `work` with the widest vectors that this machine has.
pub fn widest<W: Work>(work: W) -> W::Out {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("fma")
        {
            // SAFETY: the features were detected above.
            return unsafe { with_avx512(work) };
        }
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            // SAFETY: the features were detected above.
            return unsafe { with_avx2(work) };
        }
    }
    work.run::<Portable>()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512dq,avx512vl,avx2,fma")]
fn with_avx512<W: Work>(work: W) -> W::Out {
    work.run::<Instruction>()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn with_avx2<W: Work>(work: W) -> W::Out {
    work.run::<Instruction>()
}

/// Does `work` in every way that this machine has, the portable one first.
#[cfg(test)]
pub fn every_way<W: Work + Clone>(work: &W) -> Vec<W::Out> {
    let mut answers = vec![work.clone().run::<Portable>(), widest(work.clone())];
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
        // SAFETY: the features were detected above.
        answers.push(unsafe { with_avx2(work.clone()) });
    }
    answers
}
