//! What the backend keeps on the device: rows, weights, tables, keys and values, plans.
//!
//! The one invariant: a thing is made once, at one address, and never moves.

use half::bf16;

use super::arguments;
use super::device::{Device, Mailbox, Memory};
use super::kernels::PROJECT_ROWS;
use crate::{
    BlockTables, DType, Error, ForwardPlan, HostTensor, KvDtype, KvShape, PlanBounds, Result,
    RopeTable, WeightFormat,
};

/// Values that one 16-byte load of bfloat16 weights brings; rows begin at multiples of it.
const ALIGN: usize = 8;
/// Weights converted and sent at a time.
const PIECE: usize = 1 << 24;
/// Pairs of slots that one launch moves.
pub(super) const MOVES: usize = 1024;

/// f32 rows on the device.
pub struct CudaRows {
    pub(super) memory: Memory,
    pub(super) capacity: usize,
    pub(super) width: usize,
    pub(super) stride: usize,
}

impl CudaRows {
    pub(super) fn new(device: &Device, capacity: usize, width: usize) -> Result<Self> {
        let stride = width.next_multiple_of(ALIGN);
        // A projection reads whole groups of rows, whether or not all of them are in use.
        let rows = capacity.next_multiple_of(PROJECT_ROWS);
        let memory = device.allocate("rows", rows * stride * 4)?;
        Ok(Self { memory, capacity, width, stride })
    }

    /// Refuses what does not fit in the rows.
    pub(super) fn hold(&self, what: &str, rows: usize, width: usize) -> Result<()> {
        if rows <= self.capacity && width <= self.width {
            return Ok(());
        }
        Err(Error::Tensor(format!(
            "{what}: {rows} rows of {width} do not fit in {} rows of {}",
            self.capacity, self.width
        )))
    }
}

/// A projection on the device: outputs one after the other, each with its inputs side by side.
pub struct CudaWeight {
    pub(super) memory: Memory,
    pub(super) inputs: usize,
    pub(super) outputs: usize,
    pub(super) stride: usize,
    pub(super) bf16: bool,
}

impl CudaWeight {
    pub(super) fn new(device: &Device, parts: &[HostTensor], format: WeightFormat) -> Result<Self> {
        let bf16 = match format {
            WeightFormat::Bf16 => true,
            WeightFormat::F32 => false,
            WeightFormat::Int8 => {
                return Err(Error::Unavailable(
                    "int8 weights are not available on CUDA yet; choose bfloat16".into(),
                ));
            }
        };
        let (mut outputs, mut inputs) = (0, None);
        for part in parts {
            let (rows, columns) = part.matrix()?;
            if *inputs.get_or_insert(columns) != columns {
                return Err(Error::Tensor(format!(
                    "tensor {}: projections joined must have equal inputs",
                    part.name()
                )));
            }
            outputs += rows;
        }
        let inputs = inputs.unwrap_or(0);
        let stride = inputs.next_multiple_of(ALIGN);
        let size = if bf16 { 2 } else { 4 };
        let memory = device.allocate("weights", outputs * stride * size)?;
        let weight = Self { memory, inputs, outputs, stride, bf16 };
        let mut row = 0;
        for part in parts {
            weight.send(device, part, row * stride * size)?;
            row += part.matrix()?.0;
        }
        Ok(weight)
    }

    /// Sends one matrix to byte `offset`, as it is where it already has the form kept.
    fn send(&self, device: &Device, part: &HostTensor, offset: usize) -> Result<()> {
        let kept = if self.bf16 { DType::Bf16 } else { DType::F32 };
        if part.dtype() == kept && self.stride == self.inputs {
            return device.write(&self.memory, offset, part.bytes());
        }
        let (rows, _) = part.matrix()?;
        let size = if self.bf16 { 2 } else { 4 };
        let step = (PIECE / self.stride.max(1)).max(1);
        let mut values = vec![0.0f32; self.inputs];
        for first in (0..rows).step_by(step) {
            let count = step.min(rows - first);
            let mut bytes = vec![0u8; count * self.stride * size];
            for (i, out) in bytes.chunks_exact_mut(self.stride * size).enumerate() {
                part.read_f32((first + i) * self.inputs, &mut values)?;
                for (out, &value) in out.chunks_exact_mut(size).zip(&values) {
                    if self.bf16 {
                        out.copy_from_slice(&bf16::from_f32(value).to_le_bytes());
                    } else {
                        out.copy_from_slice(&value.to_le_bytes());
                    }
                }
            }
            device.write(&self.memory, offset + first * self.stride * size, &bytes)?;
        }
        Ok(())
    }
}

/// A vector of f32 on the device.
pub struct CudaVector {
    pub(super) memory: Memory,
    pub(super) len: usize,
}

impl CudaVector {
    pub(super) fn new(device: &Device, parts: &[HostTensor]) -> Result<Self> {
        let mut values = Vec::new();
        for part in parts {
            values.extend(part.to_f32()?);
        }
        let memory = device.allocate("a vector", values.len() * 4)?;
        device.write(&memory, 0, &values)?;
        Ok(Self { memory, len: values.len() })
    }
}

/// An embedding table on the device: bfloat16 as it comes, anything else as f32.
pub struct CudaTable {
    pub(super) memory: Memory,
    pub(super) tokens: usize,
    pub(super) width: usize,
    pub(super) bf16: bool,
}

impl CudaTable {
    pub(super) fn new(device: &Device, tensor: &HostTensor) -> Result<Self> {
        let (tokens, width) = tensor.matrix()?;
        let bf16 = tensor.dtype() == DType::Bf16;
        let size = if bf16 { 2 } else { 4 };
        let memory = device.allocate("an embedding table", tokens * width * size)?;
        if bf16 {
            device.write(&memory, 0, tensor.bytes())?;
        } else {
            let mut values = vec![0.0f32; PIECE.min(tensor.len())];
            for start in (0..tensor.len()).step_by(PIECE) {
                let values = &mut values[..PIECE.min(tensor.len() - start)];
                tensor.read_f32(start, values)?;
                device.write(&memory, start * 4, values)?;
            }
        }
        Ok(Self { memory, tokens, width, bf16 })
    }
}

/// Cosines and sines on the device.
pub struct CudaRope {
    pub(super) cos: Memory,
    pub(super) sin: Memory,
    pub(super) half: usize,
    pub(super) positions: usize,
}

impl CudaRope {
    pub(super) fn new(device: &Device, table: &RopeTable) -> Result<Self> {
        let cos = device.allocate("a rope table", table.cos.len() * 4)?;
        let sin = device.allocate("a rope table", table.sin.len() * 4)?;
        device.write(&cos, 0, &table.cos)?;
        device.write(&sin, 0, &table.sin)?;
        Ok(Self { cos, sin, half: table.half, positions: table.positions() })
    }
}

/// Keys and values of one group on the device: layer, then slot, then head.
pub struct CudaKv {
    pub(super) keys: Memory,
    pub(super) values: Memory,
    pub(super) shape: KvShape,
    pub(super) moves: Mailbox,
}

impl CudaKv {
    pub(super) fn new(device: &Device, shape: KvShape) -> Result<Self> {
        if !shape.head_dim.is_multiple_of(ALIGN) {
            return Err(Error::Unavailable(format!(
                "heads of width {} are not available on CUDA: a multiple of {ALIGN} is needed",
                shape.head_dim
            )));
        }
        let bytes = shape.bytes_per_slot() / 2 * shape.slots;
        Ok(Self {
            keys: device.allocate("keys", bytes)?,
            values: device.allocate("values", bytes)?,
            shape,
            moves: Mailbox::new(device, "moves", 2 * MOVES)?,
        })
    }

    /// Where the keys and the values of `layer` begin, in bytes.
    pub(super) fn layer(&self, layer: usize) -> Result<usize> {
        if layer >= self.shape.layers {
            return Err(Error::Tensor(format!(
                "layer {layer} of a group of {} layers",
                self.shape.layers
            )));
        }
        Ok(layer * self.shape.bytes_per_slot() / (2 * self.shape.layers) * self.shape.slots)
    }

    pub(super) fn bf16(&self) -> bool {
        self.shape.dtype == KvDtype::Bf16
    }
}

/// Words before the first part of a placed plan: rows, outputs, and room to keep 16-byte alignment.
const COUNTS: usize = 4;

/// A plan on the device. Its parts lie at fixed places, so that a captured pass finds the next plan
/// where it found the last one; block tables and tree_slots share the end, so that one copy moves no more
/// than there is.
pub struct CudaPlan {
    mailbox: Mailbox,
    bounds: PlanBounds,
    /// The block tables, of which a whole copy goes to the device with every plan.
    tables: BlockTables,
    /// Rows of the plan placed last.
    pub(super) rows: usize,
    /// Outputs of the plan placed last.
    pub(super) outputs: usize,
}

impl CudaPlan {
    pub(super) fn new(device: &Device, bounds: PlanBounds) -> Result<Self> {
        let words = COUNTS + 8 * bounds.rows + bounds.outputs + bounds.slots;
        let mailbox = Mailbox::new(device, "a plan", words)?;
        Ok(Self { mailbox, bounds, tables: BlockTables::default(), rows: 0, outputs: 0 })
    }

    /// The memory that the addresses of [`CudaPlan::parts`] lie in.
    pub(super) fn memory(&self) -> &Memory {
        &self.mailbox.memory
    }

    pub(super) fn parts(&self) -> arguments::Plan {
        let PlanBounds { rows, outputs, .. } = self.bounds;
        let at = |word: usize| self.mailbox.memory.at(4 * word);
        arguments::Plan {
            counts: at(0),
            spans: at(COUNTS),
            tokens: at(COUNTS + 4 * rows),
            positions: at(COUNTS + 5 * rows),
            writes: at(COUNTS + 6 * rows),
            sources: at(COUNTS + 7 * rows),
            outputs: at(COUNTS + 8 * rows),
            slots: at(COUNTS + 8 * rows + outputs),
        }
    }

    pub(super) fn place(&mut self, device: &Device, host: &ForwardPlan) -> Result<()> {
        self.tables.change(host);
        check(host, &self.tables, self.bounds)?;
        let tables = self.tables.slots();
        let PlanBounds { rows, outputs, .. } = self.bounds;
        let lists = COUNTS + 8 * rows + outputs;
        let tree_slots = tables.len() as u32;
        self.mailbox.post(device, |words| {
            words[..2].copy_from_slice(&[host.rows() as u32, host.outputs.len() as u32]);
            for (out, span) in words[COUNTS..].chunks_exact_mut(4).zip(&host.spans) {
                let tree_start = tree_slots + span.tree_start;
                out.copy_from_slice(&[span.start, span.prefix, tree_start, span.tail]);
            }
            let mut copy =
                |at: usize, list: &[u32]| words[at..][..list.len()].copy_from_slice(list);
            copy(COUNTS + 4 * rows, &host.tokens);
            copy(COUNTS + 5 * rows, &host.positions);
            copy(COUNTS + 6 * rows, &host.writes);
            copy(COUNTS + 7 * rows, &host.sources);
            copy(COUNTS + 8 * rows, &host.outputs);
            copy(lists, tables);
            copy(lists + tables.len(), &host.tree_slots);
            lists + tables.len() + host.tree_slots.len()
        })?;
        (self.rows, self.outputs) = (host.rows(), host.outputs.len());
        Ok(())
    }
}

/// Refuses a plan that does not fit or whose parts disagree; the kernels then need not look.
fn check(host: &ForwardPlan, tables: &BlockTables, bounds: PlanBounds) -> Result<()> {
    let rows = host.rows();
    let slots = tables.len() + host.tree_slots.len();
    if rows > bounds.rows || host.outputs.len() > bounds.outputs || slots > bounds.slots {
        return Err(Error::Tensor(format!(
            "a plan of {rows} rows, {} outputs and {slots} slots exceeds {bounds:?}",
            host.outputs.len()
        )));
    }
    let within =
        |start: u32, count: u32, list: &[u32]| start as usize + count as usize <= list.len();
    let sound = [host.positions.len(), host.writes.len(), host.spans.len()] == [rows; 3]
        && (host.sources.is_empty() || host.sources.len() == rows)
        && host.outputs.iter().all(|&row| (row as usize) < rows)
        && host.spans.iter().all(|span| {
            !span.is_empty()
                && tables.hold(span)
                && within(span.tree_start, span.tail, &host.tree_slots)
        });
    if sound { Ok(()) } else { Err(Error::Tensor("a plan whose parts disagree".into())) }
}
