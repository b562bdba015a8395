//! Projections by `project_tiles.cu`: how rows and outputs are cut into tiles, and how the work is divided
//! among clusters.

use cudarc::driver::sys::{
    CUtensorMapDataType, CUtensorMapFloatOOBfill, CUtensorMapInterleave, CUtensorMapL2promotion,
    CUtensorMapSwizzle, cuTensorMapEncodeTiled,
};

use super::arguments::TensorMap;
use super::c_layout::Address;
use super::contract::{PAIR, SLICES};
use super::device::failed;
use super::rows::CudaRows;
use super::weight::{CudaWeight, TILE};
use crate::Result;

/// Outputs of the tile of a thread block, and inputs of a stage.
const OUTPUTS: usize = 128;
const INPUTS: usize = 64;
/// Threads that multiply, each of which has so many values of a tile of eight rows.
const MULTIPLIERS: usize = 256;
/// Stages at most, and bytes of one beside its rows.
const STAGES: usize = 8;
const STAGE_WEIGHTS: usize = OUTPUTS * INPUTS * 2;
/// What clusters may have more to do than they would on average, one in so many, before tiles are cut
/// finer.
const IDLE: usize = 20;

/// A kernel of `project_tiles.cu`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TileShape {
    /// Rows of the tile of a thread block.
    pub rows: usize,
    /// Thread blocks of a cluster that have the same outputs.
    pub share_weights: usize,
    /// Thread blocks of a cluster that have the same rows.
    pub share_rows: usize,
}

const fn shape(rows: usize, share_weights: usize, share_rows: usize) -> TileShape {
    TileShape { rows, share_weights, share_rows }
}

/// The kernels that there are.
pub const TILE_SHAPES: [TileShape; 6] = [
    shape(64, 1, 2),
    shape(128, 1, 2),
    shape(128, 1, 4),
    shape(128, 2, 1),
    shape(128, 2, 2),
    shape(128, 2, 4),
];

/// How a launch is divided.
pub(super) struct Division {
    /// Clusters, and of how many slices what each has of divided tiles is a multiple.
    pub(super) clusters: usize,
    pub(super) grain: usize,
    /// Tiles that are not divided, and parts of as many slices of the others.
    pub(super) whole: usize,
    pub(super) parts: usize,
    /// Tiles of rows that a cluster has one after the other.
    pub(super) row_tiles: usize,
}

impl TileShape {
    /// Thread blocks of a cluster.
    pub(super) fn blocks(self) -> usize {
        self.share_weights * self.share_rows
    }

    /// Whether every slice has a block of inputs, as the kernel expects.
    pub(super) fn takes(weight: &CudaWeight) -> bool {
        weight.inputs.div_ceil(PAIR) >= SLICES * weight.groups()
    }

    /// Stages of the ring, and bytes of shared memory with them.
    pub(super) fn shared(self, weight: &CudaWeight, gated: bool, most: usize) -> (usize, usize) {
        // Sums of the groups before, or what gates and ups exchange, which is half of that.
        let held = MULTIPLIERS * self.rows / 8 * 16;
        let held = match (weight.groups(), gated) {
            (1, false) => 0,
            (1, true) => held / 2,
            _ => held,
        };
        // Stages begin at a multiple of 1,024 bytes.
        let fixed = 1024 + 2 * STAGES * 8 + 16 + held;
        let stage = STAGE_WEIGHTS + self.rows * INPUTS * 2;
        let stages = ((most - fixed) / stage).min(STAGES);
        (stages, fixed + stages * stage)
    }

    /// Divides the work among `most` clusters at most.
    pub(super) fn divide(
        self,
        weight: &CudaWeight,
        gated: bool,
        rows: usize,
        most: usize,
    ) -> Division {
        let outputs = weight.outputs.div_ceil(TILE) * TILE;
        let units = match gated {
            true => (outputs / 2).div_ceil(OUTPUTS / 2),
            false => outputs.div_ceil(OUTPUTS),
        };
        let row_tiles = rows.div_ceil(self.share_weights * self.rows);
        let tiles = row_tiles * units.div_ceil(self.share_rows);
        let groups = weight.groups();
        // What is left of the tiles when all clusters have as many is divided: by whole tiles, by halves
        // and so on of the only group, or by groups.
        let all = groups * SLICES;
        let grains: &[usize] = if groups == 1 { &[8, 4, 2, 1] } else { &[all, SLICES] };
        let (rounds, rest) = (tiles / most, tiles % most);
        let busy = |grain: &&usize| {
            let slices = rounds * all + (rest * all / **grain).div_ceil(most) * **grain;
            slices * most * IDLE <= tiles * all * (IDLE + 1)
        };
        let grain = *grains.iter().find(busy).unwrap_or(&grains[grains.len() - 1]);
        let clusters = if rounds > 0 { most } else { most.min(tiles * all / grain) };
        let whole = tiles / clusters * clusters;
        Division { clusters, grain, whole, parts: (tiles - whole) * (all / grain), row_tiles }
    }

    /// Pieces of sums that a thread block leaves in memory at most, and bytes of one.
    pub(super) fn pieces(self, weight: &CudaWeight) -> (usize, usize) {
        let pieces = match weight.groups() {
            // The slices of a divided tile but the first, and a part of another.
            1 => SLICES,
            groups => 2 * (groups - 1),
        };
        (pieces, OUTPUTS * self.rows * 4)
    }

    /// The first `rows` rows for the copy engine, in swizzled boxes of as many as a thread block fetches.
    pub(super) fn rows_of(self, input: &CudaRows, rows: usize) -> Result<TensorMap> {
        let parts = input.parts();
        let described = Described {
            kind: CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            swizzle: CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            from: parts.halves,
            sizes: [u64::from(parts.stride), rows as u64],
            strides: [2 * u64::from(parts.stride)],
            of_box: [INPUTS as u32, (self.rows / self.share_rows) as u32],
        };
        described.map()
    }

    /// The weights for the copy engine: words of a block, blocks of a tile, tiles of a half of the outputs,
    /// and halves, which are gates and ups where both are multiplied; all are one half elsewhere. A box is
    /// what a thread block fetches for a stage.
    pub(super) fn weights_of(self, weight: &CudaWeight, gated: bool) -> Result<TensorMap> {
        let halves = if gated { 2 } else { 1 };
        let tiles = weight.outputs.div_ceil(TILE) / halves;
        let blocks = weight.inputs.div_ceil(PAIR);
        let block = (TILE * PAIR * 2) as u64;
        let of_tile = blocks as u64 * block;
        // Tiles that a thread block fetches, of as many halves as they are of.
        let fetched = OUTPUTS / TILE / self.share_weights;
        let of_halves = if gated { halves / self.share_weights } else { 1 };
        let described = Described {
            kind: CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT32,
            swizzle: CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_NONE,
            from: weight.memory.at(0),
            sizes: [block / 4, blocks as u64, tiles as u64, halves as u64],
            strides: [block, of_tile, tiles as u64 * of_tile],
            of_box: [
                block as u32 / 4,
                (INPUTS / PAIR) as u32,
                (fetched / of_halves) as u32,
                of_halves as u32,
            ],
        };
        described.map()
    }
}

/// What is described to the copy engine: where it begins, its sizes, how many bytes it is from one to the
/// next of each but the first, and the box that is copied at a time.
struct Described<const DIMENSIONS: usize, const STRIDES: usize> {
    kind: CUtensorMapDataType,
    swizzle: CUtensorMapSwizzle,
    from: Address,
    sizes: [u64; DIMENSIONS],
    strides: [u64; STRIDES],
    of_box: [u32; DIMENSIONS],
}

impl<const DIMENSIONS: usize, const STRIDES: usize> Described<DIMENSIONS, STRIDES> {
    fn map(self) -> Result<TensorMap> {
        let mut map = TensorMap::default();
        // SAFETY: the map is as large and as aligned as the driver's; the sizes lie on this stack.
        unsafe {
            cuTensorMapEncodeTiled(
                (&raw mut map).cast(),
                self.kind,
                DIMENSIONS as u32,
                self.from as *mut std::ffi::c_void,
                self.sizes.as_ptr(),
                self.strides.as_ptr(),
                self.of_box.as_ptr(),
                [1; DIMENSIONS].as_ptr(),
                CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                self.swizzle,
                CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        }
        .result()
        .map_err(failed("describing rows or weights to the copy engine"))?;
        Ok(map)
    }
}
