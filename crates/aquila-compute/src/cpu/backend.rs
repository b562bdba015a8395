//! The operations, for now by way of [`crate::reference`].

use half::bf16;

use super::{Isa, IsaChoice};
use crate::choose::{self, Ask, Choice};
use crate::shape::INT8_GROUP;
use crate::{
    Backend, Error, ForwardPlan, HeadShape, HostTensor, KvShape, PlanBounds, Result, RopeTable,
    Sink, WeightFormat, reference,
};

/// The CPU, with its kernels and threads.
pub struct CpuBackend {
    isa: Isa,
    threads: usize,
}

/// f32 rows in host memory.
pub struct CpuRows {
    width: usize,
    values: Vec<f32>,
}

impl CpuRows {
    /// The width of a row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// One row.
    pub fn row(&self, row: usize) -> &[f32] {
        &self.values[row * self.width..(row + 1) * self.width]
    }

    /// One row, to be written.
    pub fn row_mut(&mut self, row: usize) -> &mut [f32] {
        &mut self.values[row * self.width..(row + 1) * self.width]
    }
}

enum Values {
    Float(Vec<f32>),
    Int8(Vec<(Vec<i8>, f32)>),
}

/// A packed projection.
pub struct CpuWeight {
    inputs: usize,
    outputs: usize,
    values: Values,
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
        Ok(Self { isa: Isa::pick(isa)?, threads: if threads == 0 { cores } else { threads } })
    }

    /// The instruction set in use.
    pub fn isa(&self) -> Isa {
        self.isa
    }
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
        format!("cpu, {}, {} threads", self.isa, self.threads)
    }

    fn pack(&self, parts: &[HostTensor], format: WeightFormat) -> Result<CpuWeight> {
        let mut floats = Vec::new();
        let (mut outputs, mut inputs) = (0, 0);
        for part in parts {
            let (rows, columns) = part.matrix()?;
            outputs += rows;
            inputs = columns;
            let mut values = part.to_f32()?;
            if format == WeightFormat::Bf16 {
                values.iter_mut().for_each(|v| *v = bf16::from_f32(*v).to_f32());
            }
            floats.extend(values);
        }
        if floats.len() != inputs * outputs {
            return Err(Error::Tensor("projections joined must have equal inputs".into()));
        }
        let values = match format {
            WeightFormat::Bf16 | WeightFormat::F32 => Values::Float(floats),
            WeightFormat::Int8 => Values::Int8(
                floats
                    .chunks(inputs)
                    .flat_map(|row| row.chunks(INT8_GROUP).map(reference::quantize_weights))
                    .collect(),
            ),
        };
        Ok(CpuWeight { inputs, outputs, values })
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
        Ok(CpuRows { width, values: vec![0.0; capacity * width] })
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
        for row in 0..rows {
            let x = &input.row(row)[..weight.inputs];
            for n in 0..weight.outputs {
                let value = match &weight.values {
                    Values::Float(w) => {
                        reference::project(x, &w[n * weight.inputs..(n + 1) * weight.inputs])
                    }
                    Values::Int8(w) => {
                        let groups = weight.inputs.div_ceil(INT8_GROUP);
                        reference::project_int8(x, &w[n * groups..(n + 1) * groups])
                    }
                };
                reference::sink(value, bias.map(|b| b[n]), sink, &mut out.row_mut(row)[n]);
            }
        }
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
        Ok(rows_of.values[..rows * rows_of.width].to_vec())
    }
}
