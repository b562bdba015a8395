//! The CPU as a backend: what it owns, and how it is made.

use std::sync::{Arc, Mutex};

use super::int8::QuantizedRows;
use super::isa::Detected;
use super::pool::Pool;
use super::watch::Watch;
use super::weight::CpuWeight;
use super::{Isa, IsaChoice};
use crate::{Error, Result, WeightFormat};

/// The CPU, with its kernels and threads.
pub struct CpuBackend {
    pub(super) isa: Detected,
    pub(super) pool: Pool,
    /// Kept between products; held for one at a time.
    pub(super) quantized: Mutex<QuantizedRows>,
    pub(super) watch: Option<Arc<dyn Watch>>,
}

impl CpuBackend {
    /// A backend of `threads` threads (0: one per core) on the instruction set chosen.
    pub fn new(isa: IsaChoice, threads: usize) -> Result<Self> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = if threads == 0 { cores } else { threads };
        let pool = Pool::new(threads)
            .map_err(|e| Error::Unavailable(format!("cannot start {threads} threads: {e}")))?;
        Ok(Self { isa: Detected::pick(isa)?, pool, quantized: Mutex::default(), watch: None })
    }

    /// How many threads there are, the caller's included.
    pub fn threads(&self) -> usize {
        self.pool.threads()
    }

    /// Bytes that a projection takes once packed.
    pub fn packed_bytes(outputs: usize, inputs: usize, format: WeightFormat) -> usize {
        CpuWeight::packed_bytes(outputs, inputs, format)
    }

    /// The instruction set in use.
    pub fn isa(&self) -> Isa {
        self.isa.isa()
    }
}
