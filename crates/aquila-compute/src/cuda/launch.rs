//! Launches of kernels that give each value of some rows a thread.

use std::ops::Range;

use super::arguments;
use super::backend::CudaBackend;
use super::c_layout::Address;
use super::device::Memory;
use super::kernels::Kernel;
use super::plan::CudaPlan;
use super::rows::CudaRows;
use crate::Result;

/// Rows of a grid at most.
pub(super) const GRID_ROWS: usize = 65_535;
/// Threads of a block.
const THREADS: usize = 256;

impl CudaBackend {
    /// Copies `width` columns of `input`, from `from` on, into columns of `out`, from `to` on.
    pub(super) fn copy(
        &self,
        input: &CudaRows,
        from: usize,
        rows: usize,
        width: usize,
        out: &mut CudaRows,
        to: usize,
    ) -> Result<()> {
        input.hold("columns to copy", rows, from + width)?;
        out.hold("columns to copy into", rows, to + width)?;
        let arguments = arguments::Copy {
            input: input.parts(),
            out: out.parts(),
            from: from as u32,
            to: to as u32,
            width: width as u32,
        };
        let names = input.memory().chain(out.memory());
        // SAFETY: both sides hold these rows and columns.
        unsafe { self.by_value(&self.kernels.copy_columns, width, rows, &arguments, names) }
    }

    /// `out[i] = input[list[piece.start + i]]`, for as many as the plan counts, up to the piece's end.
    pub(super) fn gather(
        &self,
        input: &CudaRows,
        plan: &CudaPlan,
        count: Address,
        list: Address,
        piece: Range<usize>,
        out: &mut CudaRows,
    ) -> Result<()> {
        input.hold("rows to gather from", 1, out.width)?;
        out.hold("gathered rows", piece.len(), out.width)?;
        let arguments = arguments::Gather {
            count,
            list,
            input: input.parts(),
            out: out.parts(),
            rows: input.capacity as u32,
            first: piece.start as u32,
        };
        let names = plan.memory().into_iter().chain(input.memory()).chain(out.memory());
        // SAFETY: the result fits, and source rows are clamped in the kernel.
        unsafe { self.by_value(&self.kernels.gather, out.width, piece.len(), &arguments, names) }
    }

    /// Launches a kernel that gives each of `width` values of `rows` rows a thread.
    ///
    /// # Safety
    /// As [`Device::launch`].
    pub(super) unsafe fn by_value<'a, A: cudarc::driver::DeviceRepr>(
        &self,
        kernel: &Kernel,
        width: usize,
        rows: usize,
        arguments: &A,
        names: impl IntoIterator<Item = &'a Memory>,
    ) -> Result<()> {
        let names: Vec<_> = names.into_iter().collect();
        let grid = [width.div_ceil(THREADS), rows, 1];
        // SAFETY: the caller's promise.
        unsafe { self.device.launch(kernel, grid, THREADS as u32, 0, arguments, &names) }
    }
}
