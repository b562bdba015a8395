//! How operations are shared out to threads: in chunks large enough to be worth it.

use std::sync::{MutexGuard, PoisonError};

use super::CpuBackend;
use super::int8::{self, Quantized, QuantizedRows};
use super::matmul;
use super::product::{Finish, Product};
use super::rows::CpuRows;
use super::rowwise;
use super::weight::CpuWeight;
use crate::{Activation, Error, Result, WeightFormat};

/// Packed bytes below which one thread does all of a product.
pub(super) const SMALL_PRODUCT: usize = 128 << 10;

/// Packed bytes that a thread takes of a product at a time, at most, unless a tile is larger.
pub(super) const CHUNK: usize = 64 << 10;

/// Elements of a row-wise operation below which one thread does all of it.
const SMALL_ROWS: usize = 64 << 10;

/// An error that says what does not fit.
pub(super) fn check(fits: bool, otherwise: impl FnOnce() -> String) -> Result<()> {
    if fits { Ok(()) } else { Err(Error::Tensor(otherwise())) }
}

impl CpuBackend {
    /// Checks what a projection is given and runs it. Of a gated one, the weight's outputs are gates
    /// and as many ups, and the projection's own are half as many.
    pub(super) fn run_product(
        &self,
        weight: &CpuWeight,
        bias: Option<&Vec<f32>>,
        input: &CpuRows,
        rows: usize,
        finish: Finish,
        out: &mut CpuRows,
    ) -> Result<()> {
        if rows == 0 {
            return Ok(());
        }
        let gated = matches!(finish, Finish::Gated(..));
        let outputs = weight.outputs() / if gated { 2 } else { 1 };
        check(input.width() >= weight.inputs() && out.width() >= outputs, || {
            format!(
                "a projection of {} inputs and {outputs} outputs does not fit rows of {} and {}",
                weight.inputs(),
                input.width(),
                out.width()
            )
        })?;
        check(bias.is_none_or(|b| b.len() == weight.outputs()), || {
            format!("a bias must have the {} outputs of its projection", weight.outputs())
        })?;
        assert!(rows <= input.capacity() && rows <= out.capacity(), "rows beyond the buffers");
        let (from, to) =
            ((input.as_ptr(), input.stride()), (out.shared().as_mut_ptr(), out.stride()));
        let mut product = Product::new(weight, from, rows, to, finish);
        product.bias = bias.map_or(std::ptr::null(), |b| b.as_ptr());
        let mut scratch = self.scratch_of(weight.format());
        let quantized = scratch.as_mut().map(|scratch| self.quantize(&product, scratch));
        self.over_panels(weight, &product, &|first, last| {
            // SAFETY: sizes were checked above, rows were quantized where the weights are, and
            // chunks of panels are disjoint.
            unsafe { self.project_panels(&product, weight.format(), quantized, first, last) }
        });
        Ok(())
    }

    /// Room for quantized rows, where a format needs them.
    pub(super) fn scratch_of(&self, format: WeightFormat) -> Option<MutexGuard<'_, QuantizedRows>> {
        let needed = format == WeightFormat::Int8;
        needed.then(|| self.quantized.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Quantizes the rows that a product reads.
    pub(super) fn quantize(&self, product: &Product, scratch: &mut QuantizedRows) -> Quantized {
        let rows = product.rows;
        let quantized = scratch.prepare(rows, product.inputs);
        let chunk = rows.div_ceil(self.threads()).max(4);
        self.pool.run(rows.div_ceil(chunk), &|index| {
            let (first, last) = (index * chunk, ((index + 1) * chunk).min(rows));
            // SAFETY: the product was checked, room was made, and chunks of rows are disjoint.
            unsafe { int8::quantize_rows(self.isa.int8(), product, &quantized, first, last) }
        });
        quantized
    }

    /// Panels `first..last` of a product.
    ///
    /// # Safety
    /// As [`matmul::project_bf16`]; the product's rows must have been quantized where its weights
    /// are.
    pub(super) unsafe fn project_panels(
        &self,
        product: &Product,
        format: WeightFormat,
        quantized: Option<Quantized>,
        first: usize,
        last: usize,
    ) {
        // SAFETY: the caller vouches for the product.
        unsafe {
            match (format, quantized) {
                (WeightFormat::F32, _) => matmul::project_f32(self.isa, product, first, last),
                (WeightFormat::Bf16, _) => matmul::project_bf16(self.isa, product, first, last),
                (WeightFormat::Int8, Some(rows)) => {
                    int8::project_int8(self.isa, product, &rows, first, last);
                }
                (WeightFormat::Int8, None) => unreachable!("rows are quantized before a product"),
            }
        }
    }

    /// How many panels of a product belong together in a task.
    pub(super) fn panels_together(&self, weight: &CpuWeight, rows: usize) -> usize {
        match weight.format() {
            WeightFormat::Int8 => int8::panels_together(self.isa, rows),
            _ => matmul::panels_together(self.isa, rows, weight.panel_bytes()),
        }
    }

    /// Shares out the panels of a projection, or of its gates.
    fn over_panels(
        &self,
        weight: &CpuWeight,
        product: &Product,
        task: &(dyn Fn(usize, usize) + Sync),
    ) {
        let panels = product.panels();
        let small = weight.bytes() * product.rows.div_ceil(4) < SMALL_PRODUCT;
        if small || self.threads() == 1 {
            return task(0, panels);
        }
        // Some chunks per thread even out what the threads meet, small ones what is left in the
        // end; whole tiles waste none.
        let most = (CHUNK * panels / weight.bytes()).max(1);
        let together = self.panels_together(weight, product.rows);
        let chunk = panels.div_ceil(self.threads() * 12).min(most).next_multiple_of(together);
        self.pool.run(panels.div_ceil(chunk), &|index| {
            task(index * chunk, ((index + 1) * chunk).min(panels));
        });
    }

    /// Of rows that hold gates, then ups: `out = activation(gate) * up`.
    pub(super) fn gate_rows(
        &self,
        activation: Activation,
        gate_up: &CpuRows,
        rows: usize,
        out: &mut CpuRows,
    ) -> Result<()> {
        let width = out.width();
        check(gate_up.width() == 2 * width, || {
            format!("rows of {} do not hold gates and ups of width {width}", gate_up.width())
        })?;
        assert!(rows <= gate_up.capacity() && rows <= out.capacity(), "rows beyond the buffers");
        let (isa, shared) = (self.isa, out.shared());
        self.over_rows(rows, 8 * width, &|row| {
            let (gate, up) = gate_up.row(row).split_at(width);
            // SAFETY: all have `width` values, and each row is written by one task.
            unsafe {
                let out = shared.row_mut(row).as_mut_ptr();
                rowwise::gate(isa, activation, gate.as_ptr(), up.as_ptr(), width, out);
            }
        });
        Ok(())
    }

    /// Shares out rows of about `work` simple operations each.
    pub(super) fn over_rows(&self, rows: usize, work: usize, task: &(dyn Fn(usize) + Sync)) {
        if rows * work < SMALL_ROWS || rows == 1 {
            return (0..rows).for_each(task);
        }
        let chunk = rows.div_ceil(self.threads() * 4);
        self.pool.run(rows.div_ceil(chunk), &|index| {
            (index * chunk..((index + 1) * chunk).min(rows)).for_each(task);
        });
    }
}
