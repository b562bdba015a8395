//! One body of code, compiled for the widest vectors of this machine.
//!
//! The instruction set changes the speed and nothing else: no operation here is fused or
//! reordered by being compiled for another one.

/// Work whose loops are worth wide vectors; `run` must be inlined into its caller.
pub trait Work {
    /// What it answers.
    type Out;
    /// Does it.
    fn run(self) -> Self::Out;
}

/// Does `work` with the widest vectors that this machine has.
pub fn widest<W: Work>(work: W) -> W::Out {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx2")
        {
            // SAFETY: the features were detected above.
            return unsafe { with_avx512(work) };
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the features were detected above.
            return unsafe { with_avx2(work) };
        }
    }
    work.run()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512dq,avx512vl,avx2")]
fn with_avx512<W: Work>(work: W) -> W::Out {
    work.run()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn with_avx2<W: Work>(work: W) -> W::Out {
    work.run()
}

/// Does `work` in every way that this machine has, the portable one first.
#[cfg(test)]
pub fn every_way<W: Work + Clone>(work: &W) -> Vec<W::Out> {
    let mut answers = vec![work.clone().run(), widest(work.clone())];
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the features were detected above.
        answers.push(unsafe { with_avx2(work.clone()) });
    }
    answers
}
