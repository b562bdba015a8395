//! Projections by tensor cores: which kernel runs, and how its work is divided.

use super::arguments;
use super::contract::{GROUP, PAIR, SLICES};
use super::device::{Device, Memory};
use super::kernels::{
    Kernel, MIDDLE_ROWS, MIDDLE_THREADS, TILES_THREADS, TensorProjections, Tiles,
};
use super::projection::{Projection, Projections, names};
use super::rows::CudaRows;
use super::tile_projection::TileShape;
use super::weight::TILE;
use crate::{Accumulate, Error, Result};

/// Rows that the kernels for few rows take at most.
pub(super) const SKINNY_ROWS: usize = 16;
/// Bytes of one stage of a warp's ring; `STAGE_BYTES` in `project_skinny.cu`.
const STAGE_BYTES: usize = 4096;
/// Stages beyond these do not make a ring faster.
const STAGES: usize = 4;
/// Outputs of one unit of `project_middle.cu`, and stages of its ring at most.
pub(super) const UNIT_OUTPUTS: usize = 64;
const VISITS: usize = 8;
/// Of each size of `MIDDLE_ROWS`: bytes of one stage, and buffers of a unit's sums.
const VISIT_BYTES: [usize; 3] = [16 << 10, 16 << 10, 8 << 10];
const BUFFERS: [usize; 3] = [4, 4, 2];
/// Rows and tiles of outputs of a thread block of `project_many.cu`, its stages, the blocks of inputs of
/// one, and its threads.
const MANY_ROWS: usize = 128;
const MANY_TILES: usize = 8;
const MANY_STAGES: usize = 6;
const MANY_BLOCKS: usize = 2;
const MANY_THREADS: u32 = 384;
/// Rows of the small tile of `project_wide.cu`, and outputs of both tiles.
const WIDE_ROWS: [usize; 2] = [64, 128];
const WIDE_OUTPUTS: [usize; 2] = [32, 128];
/// Stages of `project_wide.cu`, and bytes between rows of 32 inputs in them.
const WIDE_STAGES: usize = 4;
const ROW_BYTES: usize = 80;

/// A kernel that projects by tensor cores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProjectionKernel {
    /// `project_skinny.cu`.
    Skinny,
    /// `project_middle.cu`.
    Middle,
    /// `project_many.cu`.
    Many,
    /// `project_tiles.cu`.
    Tiles(TileShape),
    /// `project_wide.cu`.
    Wide,
}

use ProjectionKernel::{Many, Middle, Skinny, Wide};

const fn tiles(rows: usize, share_weights: usize, share_rows: usize) -> ProjectionKernel {
    ProjectionKernel::Tiles(TileShape { rows, share_weights, share_rows })
}

/// Projections for which one kernel is fastest at some number of rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProjectionClass {
    /// One group of inputs and up to [`FEW_OUTPUTS`] outputs.
    FewOutputs,
    /// One group of inputs and more outputs.
    ManyOutputs,
    /// Several groups of inputs.
    Groups,
}

/// Outputs up to which a projection has few.
pub const FEW_OUTPUTS: usize = 8192;

impl ProjectionClass {
    /// All of them, in the order of tables.
    pub const ALL: [Self; 3] = [Self::FewOutputs, Self::ManyOutputs, Self::Groups];

    /// The class of a projection.
    pub fn of(inputs: usize, outputs: usize) -> Self {
        match inputs.div_ceil(PAIR) {
            blocks if blocks > GROUP => Self::Groups,
            _ if outputs > FEW_OUTPUTS => Self::ManyOutputs,
            _ => Self::FewOutputs,
        }
    }

    /// Up to how many rows which kernel projects.
    fn fastest(self) -> &'static Fastest {
        FASTEST[self as usize]
    }
}

/// Up to how many rows which kernel is the fastest, in ascending order.
pub type Fastest = [(usize, ProjectionKernel)];

/// What projects, by class; a kernel that a device or a weight does not have is passed over.
/// `cuda_check compare` prints what it measures in this form, to be put here.
const FASTEST: [&Fastest; 3] = [WITHOUT_TILES; 3];

/// As measured without tiles, which have not been timed on a GPU yet.
const WITHOUT_TILES: &Fastest = &[(SKINNY_ROWS, Skinny), (384, Middle), (usize::MAX, Many)];

/// With tiles, as predicted; nothing of it has been measured, and nothing chooses by it yet.
pub const PREDICTED: [&Fastest; 3] = [
    &[
        (SKINNY_ROWS, Skinny),
        (64, tiles(64, 1, 2)),
        (128, tiles(128, 1, 2)),
        (512, tiles(128, 2, 2)),
        (usize::MAX, tiles(128, 2, 4)),
    ],
    &[
        (SKINNY_ROWS, Skinny),
        (64, tiles(64, 1, 2)),
        (128, tiles(128, 1, 4)),
        (256, tiles(128, 2, 2)),
        (usize::MAX, tiles(128, 2, 4)),
    ],
    &[
        (SKINNY_ROWS, Skinny),
        (64, tiles(64, 1, 2)),
        (128, tiles(128, 1, 2)),
        (512, tiles(128, 2, 1)),
        (usize::MAX, tiles(128, 2, 4)),
    ],
];

/// The shapes of tiles that project weights of a class.
pub(super) fn shapes_chosen(class: ProjectionClass) -> impl Iterator<Item = TileShape> {
    class.fastest().iter().filter_map(|(_, kernel)| match kernel {
        ProjectionKernel::Tiles(shape) => Some(*shape),
        _ => None,
    })
}

/// A launch in the making.
struct Launch<'a> {
    device: &'a Device,
    projection: &'a Projection<'a>,
    /// Whether gates and ups are multiplied.
    gated: bool,
    arguments: arguments::Project,
    names: Vec<&'a Memory>,
}

impl Projections {
    /// Projects by the kernel that is fastest for so many rows, or by the one that is preferred.
    pub(super) fn by_tensor_cores(
        &self,
        device: &Device,
        kernels: &TensorProjections,
        projection: &Projection<'_>,
        gated: bool,
        out: &mut CudaRows,
    ) -> Result<()> {
        let &Projection { weight, bias, input, norm, rows, accumulate } = projection;
        let kernel = self.kernel_of(kernels, projection, gated);
        // What is preferred may have been chosen after the weight was packed.
        if matches!(kernel, ProjectionKernel::Tiles(_)) {
            self.prepare(device, kernels, weight)?;
        }
        let partials = self.partials();
        let arguments = arguments::Project {
            input: input.parts(),
            out: out.parts(),
            weight: weight.memory.at(0),
            bias: bias.map_or(0, |bias| bias.memory.at(0)),
            norm: norm.map_or(0, |(norm, _)| norm.memory.at(0)),
            partial: partials.as_ref().map_or(0, |partials| partials.sums.at(0)),
            arrivals: partials.as_ref().map_or(0, |partials| partials.arrivals.at(0)),
            inputs: weight.inputs as u32,
            outputs: weight.outputs as u32,
            rows: rows as u32,
            add: u32::from(accumulate == Accumulate::Add),
            stages: 0,
            last_pass: 1,
            epsilon: norm.map_or(0.0, |(_, epsilon)| epsilon),
        };
        let mut names = names(projection, out);
        names.extend(partials.iter().flat_map(|partials| [&partials.sums, &partials.arrivals]));
        let launch = Launch { device, projection, gated, arguments, names };
        let gated = usize::from(gated);
        let grouped = usize::from(weight.groups() > 1);
        match (kernel, kernels) {
            (ProjectionKernel::Skinny, TensorProjections { skinny: Some(skinny), .. }) => {
                self.skinny(launch, &skinny[gated])
            }
            (ProjectionKernel::Middle, TensorProjections { middle: Some(middle), .. }) => {
                self.middle(launch, &middle.0[gated], middle.1, out)
            }
            (ProjectionKernel::Many, TensorProjections { many: Some(many), .. }) => {
                launch.many(&many[gated][grouped])
            }
            (ProjectionKernel::Tiles(shape), TensorProjections { tiles: Some(tiles), .. }) => {
                let of_shape = tiles.iter().find(|tiles| tiles.shape == shape);
                let of_shape = of_shape
                    .ok_or_else(|| Error::Device(format!("no kernel has tiles of {shape:?}")))?;
                self.tiles(launch, of_shape, &of_shape.kernels[gated])
            }
            (_, TensorProjections { wide, .. }) => {
                let size = usize::from(rows > WIDE_ROWS[0]);
                launch.wide(&wide[size][grouped], size)
            }
        }
    }

    /// Which kernel projects.
    fn kernel_of(
        &self,
        kernels: &TensorProjections,
        projection: &Projection<'_>,
        gated: bool,
    ) -> ProjectionKernel {
        let &Projection { weight, norm, rows, .. } = projection;
        let takes = |kernel: ProjectionKernel| match kernel {
            Skinny => kernels.skinny.is_some() && rows <= SKINNY_ROWS,
            // It alone norms what it projects.
            _ if norm.is_some() => false,
            Middle => kernels.middle.is_some(),
            Many => kernels.many.is_some(),
            ProjectionKernel::Tiles(_) => kernels.tiles.is_some() && TileShape::takes(weight),
            Wide => !gated,
        };
        let fastest = ProjectionClass::of(weight.inputs, weight.outputs).fastest();
        let chosen = fastest.iter().chain(WITHOUT_TILES).filter(|(most, _)| rows <= *most);
        let mut chosen = self.preferred.into_iter().chain(chosen.map(|(_, kernel)| *kernel));
        chosen.find(|&kernel| takes(kernel)).unwrap_or(Wide)
    }

    fn skinny(&self, mut launch: Launch<'_>, kernels: &[Kernel; 2]) -> Result<()> {
        let &Projection { weight, rows, .. } = launch.projection;
        let (tiles, groups) = (weight.outputs.div_ceil(TILE), weight.groups());
        let tokens = rows.div_ceil(8);
        let units = if launch.gated { tiles / 2 } else { tiles };
        let sums = 2 * SLICES * (if launch.gated { 2 } else { 1 }) * tokens * 128 * 4;
        let blocks = weight.inputs.div_ceil(PAIR).div_ceil(groups).min(GROUP);
        let fixed = sums + (SLICES * 8 + 2) * 8 + rows * (blocks * 2 * PAIR + 16);
        let stages = ((self.shared_bytes - fixed) / (SLICES * STAGE_BYTES)).min(STAGES);
        launch.arguments.stages = stages as u32;
        let shared = fixed + stages * SLICES * STAGE_BYTES;
        let columns = (self.multiprocessors / groups).clamp(1, units);
        launch.run(&kernels[tokens - 1], [columns * groups, 1, 1], 256, shared)
    }

    fn middle(
        &self,
        mut launch: Launch<'_>,
        kernels: &[Kernel; 3],
        clusters: usize,
        out: &CudaRows,
    ) -> Result<()> {
        let &Projection { weight, input, rows, .. } = launch.projection;
        let (tiles, groups) = (weight.outputs.div_ceil(TILE), weight.groups());
        for first in (0..rows).step_by(MIDDLE_ROWS[2]) {
            let count = MIDDLE_ROWS[2].min(rows - first);
            let size = MIDDLE_ROWS.iter().position(|&most| count <= most).unwrap_or(2);
            let of_row = BUFFERS[size] * UNIT_OUTPUTS * 4 + GROUP / SLICES * 2 * PAIR;
            let barriers = (4 * VISITS + 2 * BUFFERS[size] + 1) * 8;
            let fixed = MIDDLE_ROWS[size] * of_row + barriers;
            let stages = ((self.shared_bytes - fixed) / VISIT_BYTES[size]).min(VISITS);
            let shared = fixed + stages * VISIT_BYTES[size];
            let units = tiles.div_ceil(UNIT_OUTPUTS / TILE);
            let columns = (clusters / groups).clamp(1, units);
            let arguments = &mut launch.arguments;
            (arguments.input, arguments.out) = (input.parts_from(first), out.parts_from(first));
            (arguments.rows, arguments.stages) = (count as u32, stages as u32);
            arguments.last_pass = u32::from(first + count == rows);
            launch.run(
                &kernels[size],
                [columns * groups * SLICES, 1, 1],
                MIDDLE_THREADS,
                shared,
            )?;
        }
        Ok(())
    }

    fn tiles(&self, mut launch: Launch<'_>, tiles: &Tiles, kernel: &Kernel) -> Result<()> {
        let &Projection { weight, input, rows, .. } = launch.projection;
        let division = tiles.shape.divide(weight, launch.gated, rows, tiles.clusters);
        let (stages, shared) = tiles.shape.shared(weight, launch.gated, self.shared_bytes);
        launch.arguments.stages = stages as u32;
        launch.arguments.last_pass = u32::from(division.row_tiles == 1);
        let arguments = arguments::Tiles {
            rows: tiles.shape.rows_of(input, rows)?,
            weights: tiles.shape.weights_of(weight, launch.gated)?,
            project: launch.arguments,
            whole: division.whole as u32,
            parts: division.parts as u32,
            grain: division.grain as u32,
            pieces: tiles.shape.pieces(weight).0 as u32,
        };
        let grid = [division.clusters * tiles.shape.blocks(), 1, 1];
        let Launch { device, names, .. } = &launch;
        // SAFETY: as in `Launch::run`; the map is of the input's rows, and `prepare` made room for pieces.
        unsafe { device.launch(kernel, grid, TILES_THREADS, shared, &arguments, names) }
    }
}

impl Launch<'_> {
    fn run(
        &self,
        kernel: &Kernel,
        grid: [usize; 3],
        threads: u32,
        shared_bytes: usize,
    ) -> Result<()> {
        let Self { device, arguments, names, .. } = self;
        // SAFETY: `Projections::run` checked input, norm, bias and result; partial sums were made
        // room for when the weight was packed.
        unsafe { device.launch(kernel, grid, threads, shared_bytes, arguments, names) }
    }

    fn many(&self, kernel: &Kernel) -> Result<()> {
        let &Projection { weight, rows, .. } = self.projection;
        let tiles = weight.outputs.div_ceil(TILE);
        let units = match self.gated {
            true => (tiles / 2).div_ceil(MANY_TILES / 2),
            false => tiles.div_ceil(MANY_TILES),
        };
        let ups = if self.gated { MANY_ROWS * MANY_TILES / 2 * TILE * 4 } else { 0 };
        let stage = (MANY_TILES * TILE + MANY_ROWS) * MANY_BLOCKS * 2 * PAIR;
        let shared = MANY_STAGES * (stage + 2 * 8) + ups;
        // Thread blocks that read the same weights run at the same time.
        self.run(kernel, [rows.div_ceil(MANY_ROWS), units, 1], MANY_THREADS, shared)
    }

    fn wide(&self, kernel: &Kernel, size: usize) -> Result<()> {
        if self.gated {
            return Err(Error::Device("gates of many rows are not computed in one launch".into()));
        }
        let &Projection { weight, rows, .. } = self.projection;
        let (tile_rows, tile_outputs) = (WIDE_ROWS[size], WIDE_OUTPUTS[size]);
        let grid = [weight.outputs.div_ceil(tile_outputs), rows.div_ceil(tile_rows), 1];
        let shared = WIDE_STAGES * (tile_rows * ROW_BYTES + tile_outputs * 2 * PAIR);
        self.run(kernel, grid, 256, shared)
    }
}
