//! Which kernel computes a projection. It changes the speed and never the bits.

use std::sync::{Mutex, PoisonError};

use super::arguments;
use super::contract::{PAIR, SLICES};
use super::device::{Device, Memory};
use super::kernels::{Kernels, MIDDLE_ROWS, TensorProjections, Tiles};
use super::memory::CudaVector;
use super::rows::CudaRows;
use super::tensor_projection::{
    ProjectionClass, ProjectionKernel, SKINNY_ROWS, UNIT_OUTPUTS, shapes_chosen,
};
use super::weight::{CudaWeight, Layout, TILE};
use crate::{Accumulate, Error, Result};

/// Rows at most that `project_skinny.cu` norms itself, unless a timing says otherwise. Every thread block
/// reads all of them as f32, so from twice as many on a norm of its own is expected to be as fast.
const NORMED_ROWS: usize = 4;
/// Rows at most that it can norm: those of a kernel for eight.
const MOST_NORMED_ROWS: usize = 8;

/// Sums of groups, or of parts of them, that wait for the others, and how many have arrived.
#[derive(Clone)]
pub(super) struct Partials {
    pub(super) sums: Memory,
    pub(super) arrivals: Memory,
}

/// What the projections of one device share.
pub(super) struct Projections {
    /// The kernel that projects all rows it can take, for checks and timings.
    pub(super) preferred: Option<ProjectionKernel>,
    /// Rows at most that are normed where they are projected.
    normed_rows: usize,
    pub(super) multiprocessors: usize,
    /// Bytes of shared memory that a thread block may have.
    pub(super) shared_bytes: usize,
    partials: Mutex<Option<Partials>>,
}

/// One projection of some rows.
pub(super) struct Projection<'a> {
    pub(super) weight: &'a CudaWeight,
    pub(super) bias: Option<&'a CudaVector>,
    pub(super) input: &'a CudaRows,
    /// Weight and epsilon of a norm of the input, where [`Projections::norms`] allows it.
    pub(super) norm: Option<(&'a CudaVector, f32)>,
    pub(super) rows: usize,
    pub(super) accumulate: Accumulate,
}

impl Projections {
    pub(super) fn new(multiprocessors: usize, shared_bytes: usize) -> Self {
        let (preferred, normed_rows) = (None, NORMED_ROWS);
        Self { preferred, normed_rows, multiprocessors, shared_bytes, partials: Mutex::default() }
    }

    /// Norms up to so many rows where they are projected, as far as that is possible.
    pub(super) fn norm_up_to(&mut self, rows: usize) {
        self.normed_rows = rows.min(MOST_NORMED_ROWS);
    }

    /// Makes room for the sums that a projection needs, so that no pass has to.
    pub(super) fn prepare(
        &self,
        device: &Device,
        kernels: &TensorProjections,
        weight: &CudaWeight,
    ) -> Result<()> {
        if weight.layout != Layout::Tiles {
            return Ok(());
        }
        let outputs = weight.outputs.next_multiple_of(UNIT_OUTPUTS);
        let of_groups = match weight.groups() {
            1 => 0,
            groups => groups * outputs * MIDDLE_ROWS[2] * 4,
        };
        // What a thread block leaves, and how many there are at most.
        let class = ProjectionClass::of(weight.inputs, weight.outputs);
        let used = |tiles: &&Tiles| {
            Some(ProjectionKernel::Tiles(tiles.shape)) == self.preferred
                || shapes_chosen(class).any(|shape| shape == tiles.shape)
        };
        let (mut of_tiles, mut blocks) = (0, 0);
        for tiles in kernels.tiles.iter().flatten().filter(used) {
            let (pieces, bytes) = tiles.shape.pieces(weight);
            let at_a_time = tiles.clusters * tiles.shape.blocks();
            of_tiles = of_tiles.max(pieces * bytes * at_a_time);
            blocks = blocks.max(at_a_time);
        }
        let bytes = of_groups.max(of_tiles);
        // One for each thread block that adds the sums of a column or a tile, a cluster's at the least.
        let arrivals = self.multiprocessors.max(SLICES).max(blocks);
        let mut partials = self.partials.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = |partials: &Partials| {
            partials.sums.bytes() >= bytes && partials.arrivals.bytes() >= 4 * arrivals
        };
        if bytes > 0 && !partials.as_ref().is_some_and(fits) {
            *partials = Some(Partials {
                sums: device.allocate_uncompared("sums of projections", bytes)?,
                arrivals: device.allocate("sums of projections", 4 * arrivals)?,
            });
        }
        Ok(())
    }

    /// Where sums wait for others.
    pub(super) fn partials(&self) -> Option<Partials> {
        self.partials.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Whether gates and ups can be multiplied where they are summed up.
    pub(super) fn gates(&self, kernels: &Kernels, weight: &CudaWeight, rows: usize) -> bool {
        let kernels = &kernels.project_tensor;
        weight.layout == Layout::Tiles
            && weight.outputs.is_multiple_of(2 * TILE)
            && (rows <= SKINNY_ROWS && kernels.skinny.is_some()
                || kernels.middle.is_some() && kernels.many.is_some())
    }

    /// Whether rows can be normed where they are projected.
    pub(super) fn norms(
        &self,
        kernels: &Kernels,
        weight: &CudaWeight,
        norm: &CudaVector,
        rows: usize,
    ) -> bool {
        weight.layout == Layout::Tiles
            && weight.groups() == 1
            && norm.len == weight.inputs
            && rows <= self.normed_rows
            && kernels.project_tensor.skinny.is_some()
    }

    /// Projects, and gates what comes out where asked to.
    pub(super) fn run(
        &self,
        device: &Device,
        kernels: &Kernels,
        projection: &Projection<'_>,
        gated: bool,
        out: &mut CudaRows,
    ) -> Result<()> {
        let &Projection { weight, bias, input, norm, rows, accumulate } = projection;
        let outputs = if gated { weight.outputs / 2 } else { weight.outputs };
        input.hold("a projection's input", rows, weight.inputs)?;
        out.hold("a projection's result", rows, outputs)?;
        if weight.inputs < input.width && !weight.inputs.is_multiple_of(PAIR) {
            return Err(Error::Tensor(format!(
                "a projection of {} inputs does not fit rows of {}",
                weight.inputs, input.width
            )));
        }
        if bias.is_some_and(|bias| bias.len < weight.outputs) {
            return Err(Error::Tensor(format!("a bias of less than {} values", weight.outputs)));
        }
        if norm.is_some_and(|(norm, _)| !self.norms(kernels, weight, norm, rows)) {
            return Err(Error::Tensor(format!("no kernel norms {rows} rows that it projects")));
        }
        if rows == 0 {
            return Ok(());
        }
        match weight.layout {
            Layout::Plain { bf16 } => {
                let arguments = arguments::PlainProject {
                    input: input.parts(),
                    out: out.parts(),
                    weight: weight.memory.at(0),
                    bias: bias.map_or(0, |bias| bias.memory.at(0)),
                    inputs: weight.inputs as u32,
                    outputs: weight.outputs as u32,
                    rows: rows as u32,
                    add: u32::from(accumulate == Accumulate::Add),
                };
                let grid = [weight.outputs.div_ceil(32), rows.div_ceil(8), 1];
                let names = names(projection, out);
                let kernel = kernels.project_plain.of(bf16);
                // SAFETY: input, bias and result were checked.
                unsafe { device.launch(kernel, grid, 256, 0, &arguments, &names) }
            }
            Layout::Tiles => {
                self.by_tensor_cores(device, &kernels.project_tensor, projection, gated, out)
            }
        }
    }
}

/// The memory that a projection names.
pub(super) fn names<'a>(projection: &Projection<'a>, out: &'a CudaRows) -> Vec<&'a Memory> {
    let rows = projection.input.memory().chain(out.memory());
    let vectors = [projection.bias, projection.norm.map(|(norm, _)| norm)];
    let vectors = vectors.into_iter().flatten().map(|vector| &vector.memory);
    rows.chain([&projection.weight.memory]).chain(vectors).collect()
}
