//! The kernels: compiled ahead by `build-kernels.sh`, shipped compressed, loaded when a backend is
//! opened. So nothing but the driver is needed.

use std::ffi::CString;
use std::io::Read;
use std::mem::zeroed;
use std::sync::Arc;

use cudarc::driver::sys::{
    CUfunction, CUfunction_attribute, CUlaunchAttribute, CUlaunchAttributeID, CUlaunchConfig,
    CUmodule, cuOccupancyMaxActiveClusters,
};
use cudarc::driver::{CudaContext, result};

use super::contract::SLICES;
use super::device::{Device, failed};
use super::tile_projection::{TILE_SHAPES, TileShape};
use crate::{Error, Result};

/// Machine code for compute capability 9.0.
const HOPPER: &[u8] = include_bytes!("kernels/built/sm_90a.cubin.zst");
/// PTX for compute capability 8.0, which the driver compiles for later devices too.
const PTX: &[u8] = include_bytes!("kernels/built/sm_80.ptx.zst");
/// The hash of the sources that both were compiled from.
pub(super) const SOURCES: &str = include_str!("kernels/built/sources.sha256");

/// Bytes of shared memory that a launch may have where no more was set.
const UNASKED: usize = 48 << 10;
/// Threads of a thread block of `project_middle.cu`: `MULTIPLIERS` and `ADDERS` there, and a warp.
pub(super) const MIDDLE_THREADS: u32 = 416;

/// Threads of a thread block of `project_tiles.cu`.
pub(super) const TILES_THREADS: u32 = 384;

/// Rows that the kernels of `project_middle.cu` take at a time.
pub(super) const MIDDLE_ROWS: [usize; 3] = [32, 64, 128];

/// A kernel of the module, which lives as long as all its kernels.
pub(super) struct Kernel {
    pub(super) name: String,
    /// Bytes of shared memory that a launch may ask for, beside what the kernel declares for itself.
    pub(super) shared_bytes: usize,
    /// Whether its code waits for its inputs, so that it may begin before those are there: Hopper's does,
    /// the PTX does not.
    pub(super) waits: bool,
    /// Whether other kernels read what it writes before they wait for their inputs: plans, block tables
    /// and packed weights.
    pub(super) read_early: bool,
    function: CUfunction,
    _module: Arc<Module>,
}

// SAFETY: a handle that the driver takes from any thread.
unsafe impl Send for Kernel {}
// SAFETY: as above; nothing is written through it after it was loaded.
unsafe impl Sync for Kernel {}

impl Kernel {
    pub(super) fn function(&self) -> CUfunction {
        self.function
    }
}

struct Module {
    module: CUmodule,
    context: Arc<CudaContext>,
}

// SAFETY: a handle that the driver takes from any thread.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

impl Drop for Module {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: no kernel of it is left. A failure means a lost context, which took it along.
            let _ = unsafe { result::module::unload(self.module) };
        }
    }
}

/// A kernel over stored elements, once for each way of storing them.
pub(super) struct ByElement {
    bf16: Kernel,
    f32: Kernel,
}

impl ByElement {
    /// The kernel for elements that are bfloat16, or are not.
    pub(super) fn of(&self, bf16: bool) -> &Kernel {
        if bf16 { &self.bf16 } else { &self.f32 }
    }
}

/// Projections by tensor cores.
pub(super) struct TensorProjections {
    /// For up to 8 and up to 16 rows, and those of gates and ups; Hopper's alone.
    pub(super) skinny: Option<[[Kernel; 2]; 2]>,
    /// For up to 32, 64 and 128 rows, and those of gates and ups, with the clusters that a device
    /// runs at a time; Hopper's alone.
    pub(super) middle: Option<([[Kernel; 3]; 2], usize)>,
    /// For more rows, and those of gates and ups; with one group of inputs and with more; Hopper's alone.
    pub(super) many: Option<[[Kernel; 2]; 2]>,
    /// In tiles that the thread blocks of a cluster share; Hopper's alone.
    pub(super) tiles: Option<Vec<Tiles>>,
    /// For tiles of 64 and of 128 rows; with one group of inputs and with more.
    pub(super) wide: [[Kernel; 2]; 2],
}

/// The kernels of `project_tiles.cu` of one shape.
pub(super) struct Tiles {
    pub(super) shape: TileShape,
    /// That of gates and ups second.
    pub(super) kernels: [Kernel; 2],
    /// Clusters that a device runs at a time.
    pub(super) clusters: usize,
}

/// Attention by tensor cores, by the width of a head: 16 queries at a time, and 64.
pub(super) struct TensorAttention {
    pub(super) of_64: [Kernel; 2],
    pub(super) of_128: [Kernel; 2],
    pub(super) of_any: Kernel,
}

/// The steps of a round.
pub(super) struct Steps {
    pub(super) admit: Kernel,
    pub(super) change_slots: Kernel,
    pub(super) begin_rows: Kernel,
    pub(super) start_trees: Kernel,
    pub(super) grow: Kernel,
    pub(super) build_trees: Kernel,
    pub(super) prune_trees: Kernel,
    pub(super) retain_nodes: Kernel,
    pub(super) plan_target: Kernel,
    pub(super) plan_extend: Kernel,
    pub(super) plan_level: Kernel,
    pub(super) plan_layer_level: Kernel,
    pub(super) scan: Kernel,
    pub(super) rank: Kernel,
    pub(super) race: Kernel,
    pub(super) near: Kernel,
    pub(super) draw: Kernel,
    pub(super) tell_logprobs: Kernel,
    pub(super) accept: Kernel,
    pub(super) follow_paths: Kernel,
    pub(super) compact_slots: Kernel,
    pub(super) compact_rows: Kernel,
    pub(super) publish: Kernel,
    pub(super) park_rows: Kernel,
    pub(super) begin_extend: Kernel,
    pub(super) begin_catch_up: Kernel,
    pub(super) take_seeds: Kernel,
    pub(super) keep_states: Kernel,
}

/// Every kernel of `kernels.cu`.
pub(super) struct Kernels {
    pub(super) steps: Steps,
    pub(super) change_tables: Kernel,
    pub(super) embed: ByElement,
    pub(super) rms_norm_plain: Kernel,
    pub(super) rms_norm_tensor: Kernel,
    pub(super) project_plain: ByElement,
    pub(super) project_tensor: TensorProjections,
    pub(super) pack: Kernel,
    pub(super) random: ByElement,
    pub(super) write_kv_plain: ByElement,
    pub(super) write_kv_tensor: Kernel,
    pub(super) attend_plain: ByElement,
    pub(super) attend_tensor: TensorAttention,
    pub(super) attend_merge: Kernel,
    pub(super) route: Kernel,
    pub(super) group_pairs: Kernel,
    pub(super) project_experts_plain: ByElement,
    pub(super) project_experts_tensor: Kernel,
    pub(super) mix_experts: Kernel,
    pub(super) routed_experts: Kernel,
    pub(super) gate: Kernel,
    pub(super) add: Kernel,
    pub(super) soft_cap: Kernel,
    pub(super) gather: Kernel,
    pub(super) scatter: Kernel,
    pub(super) copy_columns: Kernel,
    pub(super) clear_first: Kernel,
    pub(super) move_rows: Kernel,
    pub(super) move_slots: Kernel,
}

fn unpack(compressed: &[u8]) -> Result<Vec<u8>> {
    let damaged = |error: &dyn std::fmt::Display| {
        Error::Device(format!("the kernels of this build are damaged: {error}"))
    };
    let mut image = Vec::new();
    ruzstd::decoding::StreamingDecoder::new(compressed)
        .map_err(|error| damaged(&error))?
        .read_to_end(&mut image)
        .map_err(|error| damaged(&error))?;
    // PTX is text, which ends with a zero.
    image.push(0);
    Ok(image)
}

/// How many clusters of so many thread blocks of a kernel run at a time, each of `threads` threads with
/// `shared_bytes`.
fn clusters(kernel: &Kernel, blocks: usize, threads: u32, shared_bytes: usize) -> Result<usize> {
    // SAFETY: plain C structures, of which all that matters is set below.
    let (mut cluster, mut config): (CUlaunchAttribute, CUlaunchConfig) =
        unsafe { (zeroed(), zeroed()) };
    cluster.id = CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    cluster.value.clusterDim.x = blocks as u32;
    cluster.value.clusterDim.y = 1;
    cluster.value.clusterDim.z = 1;
    (config.gridDimX, config.gridDimY, config.gridDimZ) = (blocks as u32, 1, 1);
    (config.blockDimX, config.blockDimY, config.blockDimZ) = (threads, 1, 1);
    config.sharedMemBytes = shared_bytes as u32;
    (config.attrs, config.numAttrs) = (&raw mut cluster, 1);
    let mut count = 0;
    // SAFETY: the function is loaded and takes as much shared memory.
    unsafe { cuOccupancyMaxActiveClusters(&mut count, kernel.function, &config) }
        .result()
        .map_err(failed("asking how many clusters run at a time"))?;
    match count {
        0 => Err(Error::Device(format!(
            "no cluster of {blocks} thread blocks of kernel {} fits on this device",
            kernel.name
        ))),
        count => Ok(count as usize),
    }
}

impl Kernels {
    /// Loads the kernels for a device whose thread blocks may have `shared_bytes` of shared memory:
    /// those of this build, or `image`.
    pub(super) fn load(
        device: &Device,
        shared_bytes: usize,
        image: Option<Vec<u8>>,
    ) -> Result<Self> {
        let (major, minor) = device.capability;
        let hopper = (major, minor) == (9, 0);
        if major < 8 {
            return Err(Error::Capability { major, minor });
        }
        let image = match image {
            Some(mut image) => {
                image.push(0);
                image
            }
            None => unpack(if hopper { HOPPER } else { PTX })?,
        };
        let waits = image.starts_with(b"\x7fELF");
        device.context.bind_to_thread().map_err(failed("binding the device"))?;
        // SAFETY: an image that nvcc has made, ending with a zero.
        let module = unsafe { result::module::load_data(image.as_ptr().cast()) };
        let needs = "loading the kernels, which needs a driver for CUDA 13.0 or newer";
        let module = module.map_err(failed(needs))?;
        let module = Arc::new(Module { module, context: device.context.clone() });
        let load = |name: &str| -> Result<Kernel> {
            let missing = |error| failed(&format!("kernel {name} is missing"))(error);
            let of_driver = CString::new(name).expect("names have no zero");
            // SAFETY: the module is loaded, and the kernel keeps it.
            let function = unsafe { result::module::get_function(module.module, of_driver) };
            let (name, function) = (name.into(), function.map_err(missing)?);
            let _module = module.clone();
            Ok(Kernel { name, shared_bytes: UNASKED, waits, read_early: false, function, _module })
        };
        let read_early =
            |name: &str| -> Result<Kernel> { Ok(Kernel { read_early: true, ..load(name)? }) };
        let large = |name: &str| -> Result<Kernel> {
            let mut kernel = load(name)?;
            let own = CUfunction_attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES;
            let most = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function is loaded.
            let own = unsafe { result::function::get_function_attribute(kernel.function, own) }
                .map_err(failed("asking for a kernel's shared memory"))?;
            // What a kernel declares for itself is of the same memory.
            let bytes = shared_bytes as i32 - own;
            // SAFETY: the function is loaded.
            unsafe { result::function::set_function_attribute(kernel.function, most, bytes) }
                .map_err(failed("asking for shared memory"))?;
            kernel.shared_bytes = bytes as usize;
            Ok(kernel)
        };
        let pair = |name: &str| -> Result<ByElement> {
            Ok(ByElement {
                bf16: load(&format!("{name}_bf16"))?,
                f32: load(&format!("{name}_f32"))?,
            })
        };
        let two = |name: &str, ends: [&str; 2]| -> Result<[Kernel; 2]> {
            Ok([large(&format!("{name}{}", ends[0]))?, large(&format!("{name}{}", ends[1]))?])
        };
        let three = |name: &str| -> Result<[Kernel; 3]> {
            let of_rows = |rows: usize| large(&format!("{name}{rows}"));
            let [few, some, many] = MIDDLE_ROWS;
            Ok([of_rows(few)?, of_rows(some)?, of_rows(many)?])
        };
        // Machine code has them, PTX for older devices does not.
        let skinny = match load("project_skinny_8") {
            Err(_) => None,
            Ok(_) => Some([
                two("project_skinny_", ["8", "16"])?,
                two("project_skinny_gated_", ["8", "16"])?,
            ]),
        };
        let middle = match load("project_middle_32") {
            Err(_) => None,
            Ok(_) => {
                let kernels = [three("project_middle_")?, three("project_middle_gated_")?];
                let clusters = clusters(&kernels[0][1], SLICES, MIDDLE_THREADS, shared_bytes)?;
                Some((kernels, clusters))
            }
        };
        let many = match load("project_many") {
            Err(_) => None,
            Ok(_) => Some([
                two("project_many", ["", "_groups"])?,
                two("project_many_gated", ["", "_groups"])?,
            ]),
        };
        let tiles_of = |shape: TileShape| -> Result<Tiles> {
            let TileShape { rows, share_weights, share_rows } = shape;
            let name = format!("project_tiles_{rows}_{share_weights}x{share_rows}");
            let kernels = two(&name, ["", "_gated"])?;
            let clusters = clusters(&kernels[0], shape.blocks(), TILES_THREADS, shared_bytes)?;
            Ok(Tiles { shape, kernels, clusters })
        };
        let tiles = match load("project_many") {
            Err(_) => None,
            Ok(_) => Some(TILE_SHAPES.into_iter().map(tiles_of).collect::<Result<_>>()?),
        };
        let steps = Steps {
            admit: load("admit")?,
            change_slots: read_early("change_slots")?,
            begin_rows: load("begin_rows")?,
            start_trees: load("start_trees")?,
            grow: load("grow")?,
            build_trees: load("build_trees")?,
            prune_trees: load("prune_trees")?,
            retain_nodes: load("retain_nodes")?,
            plan_target: read_early("plan_target")?,
            plan_extend: read_early("plan_extend")?,
            plan_level: read_early("plan_level")?,
            plan_layer_level: read_early("plan_layer_level")?,
            scan: large("scan")?,
            rank: large("rank")?,
            race: large("race")?,
            near: large("near")?,
            draw: large("draw")?,
            tell_logprobs: load("tell_logprobs")?,
            accept: load("accept")?,
            follow_paths: large("follow_paths")?,
            compact_slots: load("compact_slots")?,
            compact_rows: load("compact_rows")?,
            publish: load("publish")?,
            park_rows: load("park_rows")?,
            begin_extend: load("begin_extend")?,
            begin_catch_up: load("begin_catch_up")?,
            take_seeds: load("take_seeds")?,
            keep_states: load("keep_states")?,
        };
        Ok(Self {
            steps,
            change_tables: read_early("change_tables")?,
            embed: pair("embed")?,
            rms_norm_plain: load("rms_norm_plain")?,
            rms_norm_tensor: load("rms_norm_tensor")?,
            project_plain: pair("project_plain")?,
            project_tensor: TensorProjections {
                skinny,
                middle,
                many,
                tiles,
                wide: [
                    two("project_wide_64", ["", "_many"])?,
                    two("project_wide_128", ["", "_many"])?,
                ],
            },
            pack: read_early("pack")?,
            random: pair("random")?,
            write_kv_plain: pair("write_kv_plain")?,
            write_kv_tensor: load("write_kv_tensor")?,
            attend_plain: pair("attend_plain")?,
            attend_tensor: TensorAttention {
                of_64: two("attend_tensor_64", ["", "_many"])?,
                of_128: two("attend_tensor_128", ["", "_many"])?,
                of_any: large("attend_tensor")?,
            },
            attend_merge: load("attend_merge")?,
            route: load("route")?,
            group_pairs: load("group_pairs")?,
            project_experts_plain: pair("project_experts_plain")?,
            project_experts_tensor: load("project_experts_tensor")?,
            mix_experts: load("mix_experts")?,
            routed_experts: load("routed_experts")?,
            gate: load("gate")?,
            add: load("add")?,
            soft_cap: load("soft_cap")?,
            gather: load("gather")?,
            scatter: load("scatter")?,
            copy_columns: load("copy_columns")?,
            clear_first: load("clear_first")?,
            move_rows: load("move_rows")?,
            move_slots: load("move_slots")?,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::fmt::Write;
    use std::path::Path;

    /// Sources in the order in which `build-kernels.sh` hashes them.
    fn sources() -> Vec<u8> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/cuda/kernels");
        let mut files: Vec<_> = std::fs::read_dir(folder)
            .expect("the sources are there")
            .map(|entry| entry.expect("a file").path())
            .filter(|path| path.extension().is_some_and(|end| end == "cu" || end == "cuh"))
            .collect();
        files.sort();
        files.iter().flat_map(|path| std::fs::read(path).expect("a source")).collect()
    }

    #[test]
    fn shipped_kernels_were_built_from_these_sources() {
        let hash = ring::digest::digest(&ring::digest::SHA256, &sources());
        let mut text = String::new();
        hash.as_ref().iter().for_each(|byte| write!(text, "{byte:02x}").expect("a string"));
        assert_eq!(text, super::SOURCES.trim(), "run crates/aquila-compute/build-kernels.sh");
    }

    #[test]
    fn shipped_kernels_unpack() {
        let code = super::unpack(super::HOPPER).expect("machine code");
        assert!(code.starts_with(b"\x7fELF"));
        let text = super::unpack(super::PTX).expect("PTX");
        let text = std::str::from_utf8(&text).expect("text");
        assert!(text.contains(".target sm_80") && text.ends_with('\0'));
    }
}
