//! The operations of a forward pass, shared out to the pool's threads.

use std::sync::{Mutex, PoisonError};

use super::int8::{self, QuantizedRows};
use super::pool::Pool;
use super::project::{self, Product};
use super::rows::CpuRows;
use super::weight::CpuWeight;
use super::{Isa, IsaChoice};
use crate::choose::{self, Ask, Choice};
use crate::{
    Backend, Error, ForwardPlan, HeadShape, HostTensor, KvShape, PlanBounds, Result, RopeTable,
    Sink, WeightFormat, reference,
};

/// The CPU, with its kernels and threads.
pub struct CpuBackend {
    isa: Isa,
    pool: Pool,
    /// Kept between products; held for one at a time.
    quantized: Mutex<QuantizedRows>,
}

/// An embedding table, read where the checkpoint keeps it.
pub struct CpuTable {
    tensor: HostTensor,
    width: usize,
}

/// Keys and values of one group.
pub struct CpuKv {
    shape: KvShape,
    keys: Vec<f32>,
    values: Vec<f32>,
}

/// A plan in host memory.
pub struct CpuPlan {
    host: ForwardPlan,
}

impl CpuBackend {
    /// A backend of `threads` threads (0: one per core) on the instruction set chosen.
    pub fn new(isa: IsaChoice, threads: usize) -> Result<Self> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = if threads == 0 { cores } else { threads };
        let pool = Pool::new(threads)
            .map_err(|e| Error::Unavailable(format!("cannot start {threads} threads: {e}")))?;
        Ok(Self { isa: Isa::pick(isa)?, pool, quantized: Mutex::default() })
    }

    /// How many threads there are, the caller's included.
    pub fn threads(&self) -> usize {
        self.pool.threads()
    }

    fn project_int8(&self, weight: &CpuWeight, product: &Product) {
        let rows = product.rows;
        let mut scratch = self.quantized.lock().unwrap_or_else(PoisonError::into_inner);
        let quantized = scratch.prepare(rows, weight.inputs());
        let chunk = rows.div_ceil(self.threads()).max(8);
        self.pool.run(rows.div_ceil(chunk), &|index| {
            let (first, last) = (index * chunk, ((index + 1) * chunk).min(rows));
            // SAFETY: the product was checked, room was made, and chunks of rows are disjoint.
            unsafe { int8::quantize_rows(self.isa, product, &quantized, first, last) }
        });
        self.over_panels(weight, rows, int8::PANELS_TOGETHER, &|first, last| {
            // SAFETY: as above; chunks of panels are disjoint.
            unsafe { int8::project_int8(self.isa, product, &quantized, first, last) }
        });
    }

    /// Shares out the panels of a projection.
    fn over_panels(
        &self,
        weight: &CpuWeight,
        rows: usize,
        together: usize,
        task: &(dyn Fn(usize, usize) + Sync),
    ) {
        let panels = weight.panels();
        let small = weight.bytes() * rows.div_ceil(4) < SMALL_PRODUCT;
        if small || self.threads() == 1 {
            return task(0, panels);
        }
        // Some chunks per thread even out what the threads meet; whole tiles waste none.
        let chunk = panels.div_ceil(self.threads() * 12).next_multiple_of(together);
        self.pool.run(panels.div_ceil(chunk), &|index| {
            task(index * chunk, ((index + 1) * chunk).min(panels));
        });
    }

    /// Bytes that a projection takes once packed.
    pub fn packed_bytes(outputs: usize, inputs: usize, format: WeightFormat) -> usize {
        CpuWeight::packed_bytes(outputs, inputs, format)
    }

    /// The instruction set in use.
    pub fn isa(&self) -> Isa {
        self.isa
    }
}

/// Packed bytes below which a product is not worth waking anyone for.
const SMALL_PRODUCT: usize = 128 << 10;

fn check(fits: bool, otherwise: impl FnOnce() -> String) -> Result<()> {
    if fits { Ok(()) } else { Err(Error::Tensor(otherwise())) }
}

impl CpuKv {
    fn at(&self, layer: usize, slot: u32, head: usize) -> std::ops::Range<usize> {
        let row = (layer * self.shape.slots + slot as usize) * self.shape.kv_heads + head;
        row * self.shape.head_dim..(row + 1) * self.shape.head_dim
    }
}

impl Backend for CpuBackend {
    type Rows = CpuRows;
    type Weight = CpuWeight;
    type Vector = Vec<f32>;
    type Table = CpuTable;
    type Rope = RopeTable;
    type Kv = CpuKv;
    type Plan = CpuPlan;

    fn describe(&self) -> String {
        format!("cpu, {}, {} threads", self.isa, self.threads())
    }

    fn pack(&self, parts: &[HostTensor], format: WeightFormat) -> Result<CpuWeight> {
        CpuWeight::pack(parts, format, &self.pool)
    }

    fn vector(&self, parts: &[HostTensor]) -> Result<Vec<f32>> {
        let mut all = Vec::new();
        for part in parts {
            all.extend(part.to_f32()?);
        }
        Ok(all)
    }

    fn table(&self, tensor: &HostTensor) -> Result<CpuTable> {
        let (_, width) = tensor.matrix()?;
        Ok(CpuTable { tensor: tensor.clone(), width })
    }

    fn rope(&self, table: &RopeTable) -> Result<RopeTable> {
        Ok(table.clone())
    }

    fn kv(&self, shape: KvShape) -> Result<CpuKv> {
        let size = shape.layers * shape.slots * shape.kv_heads * shape.head_dim;
        Ok(CpuKv { shape, keys: vec![0.0; size], values: vec![0.0; size] })
    }

    fn rows(&self, capacity: usize, width: usize) -> Result<CpuRows> {
        CpuRows::new(capacity, width)
    }

    fn plan(&self, _bounds: PlanBounds) -> Result<CpuPlan> {
        Ok(CpuPlan { host: ForwardPlan::default() })
    }

    fn place(&self, host: &ForwardPlan, plan: &mut CpuPlan) -> Result<()> {
        plan.host.clone_from(host);
        Ok(())
    }

    fn embed(&self, table: &CpuTable, plan: &CpuPlan, out: &mut CpuRows) -> Result<()> {
        for (row, &token) in plan.host.tokens.iter().enumerate() {
            table.tensor.read_f32(token as usize * table.width, out.row_mut(row))?;
        }
        Ok(())
    }

    fn rms_norm(
        &self,
        input: &CpuRows,
        weight: &Vec<f32>,
        epsilon: f32,
        rows: usize,
        out: &mut CpuRows,
    ) -> Result<()> {
        for row in 0..rows {
            reference::rms_norm(input.row(row), weight, epsilon, out.row_mut(row));
        }
        Ok(())
    }

    fn project(
        &self,
        weight: &CpuWeight,
        bias: Option<&Vec<f32>>,
        input: &CpuRows,
        rows: usize,
        sink: Sink,
        out: &mut CpuRows,
    ) -> Result<()> {
        if rows == 0 {
            return Ok(());
        }
        check(input.width() >= weight.inputs() && out.width() >= weight.outputs(), || {
            format!(
                "a projection of {} inputs and {} outputs does not fit rows of {} and {}",
                weight.inputs(),
                weight.outputs(),
                input.width(),
                out.width()
            )
        })?;
        check(bias.is_none_or(|b| b.len() == weight.outputs()), || {
            format!("a bias must have the {} outputs of its projection", weight.outputs())
        })?;
        assert!(rows <= input.capacity() && rows <= out.capacity(), "rows beyond the buffers");
        let product = Product {
            weights: weight.as_ptr(),
            panel_bytes: weight.panel_bytes(),
            inputs: weight.inputs(),
            outputs: weight.outputs(),
            input: input.as_ptr(),
            input_stride: input.stride(),
            rows,
            out: out.shared().as_mut_ptr(),
            out_stride: out.stride(),
            bias: bias.map_or(std::ptr::null(), |b| b.as_ptr()),
            sink,
        };
        if weight.format() == WeightFormat::Int8 {
            self.project_int8(weight, &product);
            return Ok(());
        }
        let together = project::panels_together(self.isa, rows);
        self.over_panels(weight, rows, together, &|first, last| {
            // SAFETY: sizes were checked above, and chunks of panels are disjoint.
            unsafe {
                match weight.format() {
                    WeightFormat::F32 => project::project_f32(self.isa, &product, first, last),
                    _ => project::project_bf16(self.isa, &product, first, last),
                }
            }
        });
        Ok(())
    }

    fn write_kv(
        &self,
        qkv: &mut CpuRows,
        heads: HeadShape,
        norms: Option<(&Vec<f32>, &Vec<f32>, f32)>,
        rope: &RopeTable,
        plan: &CpuPlan,
        kv: &mut CpuKv,
        layer: usize,
    ) -> Result<()> {
        let d = heads.head_dim;
        for row in 0..plan.host.rows() {
            let position = plan.host.positions[row] as usize;
            let slot = plan.host.writes[row];
            let values = qkv.row_mut(row);
            for head in 0..heads.heads + heads.kv_heads {
                let part = &mut values[head * d..(head + 1) * d];
                if let Some((q, k, epsilon)) = norms {
                    let weight = if head < heads.heads { q } else { k };
                    let copy = part.to_vec();
                    reference::rms_norm(&copy, weight, epsilon, part);
                }
                reference::turn(part, rope, position);
            }
            for head in 0..heads.kv_heads {
                let at = kv.at(layer, slot, head);
                let k = (heads.heads + head) * d;
                let v = (heads.heads + heads.kv_heads + head) * d;
                for (i, at) in at.enumerate() {
                    kv.keys[at] = reference::stored(values[k + i], kv.shape.dtype);
                    kv.values[at] = reference::stored(values[v + i], kv.shape.dtype);
                }
            }
        }
        Ok(())
    }

    fn attend(
        &self,
        qkv: &CpuRows,
        heads: HeadShape,
        scale: f32,
        plan: &CpuPlan,
        kv: &CpuKv,
        layer: usize,
        out: &mut CpuRows,
    ) -> Result<()> {
        for row in 0..plan.host.rows() {
            reference::attend_row(
                &plan.host,
                row,
                qkv.row(row),
                heads,
                scale,
                |slot, head| &kv.keys[kv.at(layer, slot, head)],
                |slot, head| &kv.values[kv.at(layer, slot, head)],
                out.row_mut(row),
            );
        }
        Ok(())
    }

    fn swiglu(&self, gate_up: &CpuRows, rows: usize, out: &mut CpuRows) -> Result<()> {
        for row in 0..rows {
            reference::swiglu(gate_up.row(row), out.row_mut(row));
        }
        Ok(())
    }

    fn gather_outputs(&self, input: &CpuRows, plan: &CpuPlan, out: &mut CpuRows) -> Result<usize> {
        for (i, &row) in plan.host.outputs.iter().enumerate() {
            out.row_mut(i).copy_from_slice(input.row(row as usize));
        }
        Ok(plan.host.outputs.len())
    }

    fn move_slots(&self, kv: &mut CpuKv, moves: &[(u32, u32)]) -> Result<()> {
        for &(from, to) in moves {
            for layer in 0..kv.shape.layers {
                for head in 0..kv.shape.kv_heads {
                    let (from, to) = (kv.at(layer, from, head), kv.at(layer, to, head).start);
                    kv.keys.copy_within(from.clone(), to);
                    kv.values.copy_within(from, to);
                }
            }
        }
        Ok(())
    }

    fn choose(&self, logits: &CpuRows, asks: &[Ask<'_>]) -> Result<Vec<Choice>> {
        Ok(asks.iter().map(|ask| choose::choose(logits.row(ask.row), ask)).collect())
    }

    fn read(&self, rows_of: &CpuRows, rows: usize) -> Result<Vec<f32>> {
        Ok((0..rows).flat_map(|row| rows_of.row(row)).copied().collect())
    }
}
