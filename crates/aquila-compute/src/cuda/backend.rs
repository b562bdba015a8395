//! One device as a backend: what it owns, and how it is opened.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, Mutex};

use cudarc::driver::sys::CUdevice_attribute;

use super::attention::{Attention, SharedMemory};
use super::copies::Mailbox;
use super::device::{Device, failed};
use super::kernels::{Kernels, SOURCES};
use super::memory::MOVES;
use super::projection::Projections;
use super::rows::CudaRows;
use super::transfer::Staging;
use super::{Arithmetic, Graph, Mark, ProjectionKernel, TileShape};
use crate::{Error, Result};

/// One CUDA device, with its kernels.
pub struct CudaBackend {
    pub(super) device: Arc<Device>,
    pub(super) kernels: Kernels,
    pub(super) arithmetic: Arithmetic,
    pub(super) projections: Projections,
    pub(super) attention: Attention,
    /// Rows that move, on their way to the device.
    pub(super) moves: Mutex<Mailbox>,
    /// Keys and values on their way from and to other machines.
    pub(super) staging: Mutex<Staging>,
    pub(super) description: String,
    pub(super) family: String,
}

impl CudaBackend {
    /// Opens device `ordinal`; [`Error::Unavailable`] says what the machine lacks.
    pub fn new(ordinal: usize, arithmetic: Arithmetic) -> Result<Self> {
        Self::open(ordinal, arithmetic, None)
    }

    /// The same with other kernels than those of this build, as `nvcc` has made them: a way to try
    /// kernels.
    pub fn with_kernels(ordinal: usize, arithmetic: Arithmetic, image: Vec<u8>) -> Result<Self> {
        Self::open(ordinal, arithmetic, Some(image))
    }

    fn open(ordinal: usize, arithmetic: Arithmetic, image: Option<Vec<u8>>) -> Result<Self> {
        let device = Device::open(ordinal)?;
        let about = failed("asking about the device");
        let (major, minor) = device.capability;
        let number = |attribute| Ok::<_, Error>(device.attribute(attribute)? as usize);
        let multiprocessors = number(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let shared_bytes =
            number(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
        let shared = SharedMemory {
            bytes: number(
                CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR,
            )?,
            of_block: shared_bytes,
            reserved: number(
                CUdevice_attribute::CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK,
            )?,
        };
        let name = device.context.name().map_err(&about)?;
        let gib = device.context.total_mem().map_err(&about)? as f64 / (1u64 << 30) as f64;
        let code = image.as_deref().map_or_else(|| SOURCES.trim().into(), fingerprint);
        let kernels = Kernels::load(&device, shared_bytes, image)?;
        let moves = Mutex::new(Mailbox::new(&device, "moves", 2 * MOVES)?);
        Ok(Self {
            device: Arc::new(device),
            kernels,
            moves,
            staging: Mutex::default(),
            arithmetic,
            projections: Projections::new(multiprocessors, shared_bytes),
            attention: Attention::new(multiprocessors, shared),
            description: format!(
                "cuda:{ordinal}, {name}, compute capability {major}.{minor}, \
                 {multiprocessors} multiprocessors, {gib:.0} GiB, {arithmetic}"
            ),
            family: family((major, minor), arithmetic, &code),
        })
    }

    /// Projects with `kernel` whatever it can take, or with the fastest again; this changes no bit, and
    /// is for checks and timings.
    pub fn prefer_projection(&mut self, kernel: Option<ProjectionKernel>) {
        self.projections.preferred = kernel;
    }

    /// The shapes of tiles that this device has kernels of, and how many clusters of each it runs at a
    /// time.
    pub fn clusters_of_tiles(&self) -> impl Iterator<Item = (TileShape, usize)> {
        let tiles = self.kernels.project_tensor.tiles.iter().flatten();
        tiles.map(|tiles| (tiles.shape, tiles.clusters))
    }

    /// Norms up to so many rows where they are projected, as far as that is possible; this changes no bit,
    /// and is for checks and timings.
    pub fn norm_where_projected(&mut self, rows: usize) {
        self.projections.norm_up_to(rows);
    }

    /// Leaves so many bytes of blocks for others to merge in attention at most; this changes no bit, and
    /// is for checks.
    pub fn bound_attention(&mut self, bytes: usize) {
        self.attention.most_bytes = bytes;
    }

    /// How it computes.
    pub fn arithmetic(&self) -> Arithmetic {
        self.arithmetic
    }

    /// Bytes that are free on the device, and all that it has.
    pub fn free_and_total(&self) -> Result<(usize, usize)> {
        self.device.free_and_total()
    }

    /// Bytes that one value of a row takes.
    pub fn bytes_per_value(&self) -> usize {
        match self.arithmetic {
            Arithmetic::Plain => 4,
            Arithmetic::Tensor => 6,
        }
    }

    /// The graph of the operations that `enqueue` calls, which are not run.
    ///
    /// The row counts of now are the graph's; a plan placed later may have fewer rows. Run the pass
    /// once before, so that all memory is there.
    pub fn graph_of(&self, enqueue: impl FnOnce(&Self) -> Result<()>) -> Result<Graph> {
        Graph::capture(&self.device, || enqueue(self))
    }

    /// A mark behind all that was enqueued so far, for timing.
    pub fn mark(&self) -> Result<Mark> {
        self.device.outside_capture("a mark")?;
        Mark::new(&self.device)
    }

    /// Rows with these values, for tests and timings.
    pub fn rows_of(&self, width: usize, values: &[f32]) -> Result<CudaRows> {
        let capacity = values.len() / width;
        let mut rows = CudaRows::new(&self.device, capacity, width, false)?;
        let mut padded = vec![0.0; capacity * rows.stride];
        for (to, from) in padded.chunks_exact_mut(rows.stride).zip(values.chunks_exact(width)) {
            to[..width].copy_from_slice(from);
        }
        self.device.write(&rows.values, 0, &padded)?;
        if self.arithmetic == Arithmetic::Tensor {
            let halves: Vec<u16> =
                padded.iter().map(|&x| half::bf16::from_f32(x).to_bits()).collect();
            let memory = self.device.allocate("rows", 2 * halves.len())?;
            self.device.write(&memory, 0, &halves)?;
            rows.halves = Some(memory);
        }
        Ok(rows)
    }

    /// The first `rows` rows as tensor cores read them.
    pub fn read_halves(&self, rows_of: &CudaRows, rows: usize) -> Result<Vec<half::bf16>> {
        let Some(halves) = &rows_of.halves else { return Ok(Vec::new()) };
        rows_of.hold("rows to read", rows, rows_of.width)?;
        let words = self.device.read(halves, (rows * rows_of.stride).div_ceil(2))?;
        let halves: Vec<half::bf16> = words
            .iter()
            .flat_map(|word| [word.to_bits() as u16, (word.to_bits() >> 16) as u16])
            .map(half::bf16::from_bits)
            .collect();
        let of_row = |row: &[half::bf16]| row[..rows_of.width].to_vec();
        Ok(halves.chunks(rows_of.stride).take(rows).flat_map(of_row).collect())
    }

    pub(super) fn new_rows(&self, capacity: usize, width: usize) -> Result<CudaRows> {
        CudaRows::new(&self.device, capacity, width, self.arithmetic == Arithmetic::Tensor)
    }
}

/// Which kernels a device runs: its index, name and size change no bit. `code` tells kernels apart.
fn family((major, minor): (i32, i32), arithmetic: Arithmetic, code: &str) -> String {
    match arithmetic {
        Arithmetic::Tensor => {
            format!("cuda, compute capability {major}.{minor}, {arithmetic}, kernels {code}")
        }
        // Its bits are the CPU's.
        Arithmetic::Plain => "cpu".into(),
    }
}

/// A number that tells an image of kernels from others.
fn fingerprint(image: &[u8]) -> String {
    let mut hasher = DefaultHasher::new();
    image.hash(&mut hasher);
    format!("{:016x}", hasher.finish())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_of_one_capability_have_one_kernel_family() {
        let shipped = SOURCES.trim();
        let hopper = family((9, 0), Arithmetic::Tensor, shipped);
        assert_eq!(
            hopper,
            format!("cuda, compute capability 9.0, tensor cores, kernels {shipped}")
        );
        // A step of a tensor core is that of its generation, and other kernels may order sums otherwise.
        assert_ne!(hopper, family((8, 0), Arithmetic::Tensor, shipped));
        assert_ne!(hopper, family((9, 0), Arithmetic::Tensor, &fingerprint(b"other kernels")));
        assert_ne!(fingerprint(b"other kernels"), fingerprint(b"kernels"));
    }

    #[test]
    fn plain_arithmetic_is_of_the_family_of_the_cpu() {
        let cpu = crate::cpu::CpuBackend::new(crate::cpu::IsaChoice::Auto, 1).unwrap();
        let plain = family((9, 0), Arithmetic::Plain, SOURCES);
        assert_eq!(plain, crate::Backend::kernel_family(&cpu));
    }
}
