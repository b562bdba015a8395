//! Which instruction set the kernels use. It changes the speed and nothing else.

use crate::{Error, Result};

/// An instruction set that kernels are compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Isa {
    /// AVX-512 F, BW, DQ and VL; int8 products also need VNNI.
    Avx512,
    /// AVX2 and FMA.
    Avx2,
    /// No instruction beyond the target's baseline.
    Portable,
}

/// What the user asked for: `auto` or one instruction set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum IsaChoice {
    /// The best that the machine has.
    #[default]
    Auto,
    /// This one, or an error.
    Only(Isa),
}

impl Isa {
    /// Every instruction set of this machine, best first.
    pub fn available() -> Vec<Isa> {
        let mut list = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("fma")
            {
                list.push(Isa::Avx512);
            }
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                list.push(Isa::Avx2);
            }
        }
        list.push(Isa::Portable);
        list
    }

    /// The instruction set to use, or why it cannot be used.
    pub fn pick(choice: IsaChoice) -> Result<Isa> {
        let available = Isa::available();
        match choice {
            IsaChoice::Auto => Ok(available[0]),
            IsaChoice::Only(isa) if available.contains(&isa) => Ok(isa),
            IsaChoice::Only(isa) => Err(Error::Unavailable(format!(
                "--cpu-isa {isa}: this machine has no such instructions; it has {}",
                available.iter().map(Isa::to_string).collect::<Vec<_>>().join(", ")
            ))),
        }
    }
}

impl std::fmt::Display for Isa {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Isa::Avx512 => "avx512",
            Isa::Avx2 => "avx2",
            Isa::Portable => "portable",
        })
    }
}
