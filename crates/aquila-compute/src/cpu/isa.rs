//! Which instruction set the kernels use. It changes the speed and nothing else.

#[cfg(target_arch = "x86_64")]
use super::simd::{Avx2, Avx512, Vnni};
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
    /// This instruction set, or an error where the CPU lacks it.
    Only(Isa),
}

/// An instruction set that this machine was found to have, with the token that proves it.
#[derive(Clone, Copy)]
pub(super) enum Detected {
    #[cfg(target_arch = "x86_64")]
    Avx512(Avx512),
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2),
    Portable,
}

/// The same for products of integers.
#[derive(Clone, Copy)]
pub(super) enum DetectedInt8 {
    #[cfg(target_arch = "x86_64")]
    Vnni(Vnni),
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2),
    Portable,
}

impl Isa {
    const ALL: [Isa; 3] = [Isa::Avx512, Isa::Avx2, Isa::Portable];

    /// Every instruction set of this machine, best first.
    pub fn available() -> Vec<Isa> {
        Self::ALL.into_iter().filter(|isa| isa.detect().is_some()).collect()
    }

    fn detect(self) -> Option<Detected> {
        match self {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => Avx512::detect().map(Detected::Avx512),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => Avx2::detect().map(Detected::Avx2),
            #[cfg(not(target_arch = "x86_64"))]
            Isa::Avx512 | Isa::Avx2 => None,
            Isa::Portable => Some(Detected::Portable),
        }
    }
}

impl Detected {
    /// The instruction set to use, or why it cannot be used.
    pub(super) fn pick(choice: IsaChoice) -> Result<Self> {
        match choice {
            IsaChoice::Auto => {
                let best = Isa::ALL.into_iter().find_map(Isa::detect);
                Ok(best.unwrap_or(Detected::Portable))
            }
            IsaChoice::Only(isa) => isa.detect().ok_or(Error::NoSuchIsa(isa)),
        }
    }

    /// Which one it is.
    pub(super) fn isa(self) -> Isa {
        match self {
            #[cfg(target_arch = "x86_64")]
            Detected::Avx512(_) => Isa::Avx512,
            #[cfg(target_arch = "x86_64")]
            Detected::Avx2(_) => Isa::Avx2,
            Detected::Portable => Isa::Portable,
        }
    }

    /// Its products of integers: AVX-512 without VNNI takes those of AVX2.
    pub(super) fn int8(self) -> DetectedInt8 {
        match self {
            #[cfg(target_arch = "x86_64")]
            Detected::Avx512(l) => {
                l.vnni().map_or(DetectedInt8::Avx2(l.avx2()), DetectedInt8::Vnni)
            }
            #[cfg(target_arch = "x86_64")]
            Detected::Avx2(l) => DetectedInt8::Avx2(l),
            Detected::Portable => DetectedInt8::Portable,
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
