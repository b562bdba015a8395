//! One decoder layer with random weights, over any backend.

use aquila_compute::{
    Accumulate, Activation, AttentionParams, Backend, DType, ForwardPlan, HeadShape, HostTensor,
    KvDtype, KvShape, PlanBounds, Result, RopeTable, WeightFormat,
};
use half::bf16;

/// Tokens of the embedding tables.
pub const TOKENS: u32 = 512;
/// Slots of the key and value store.
pub const SLOTS: usize = 2048;
/// Rows of one pass at most.
pub const ROWS: usize = 80;
const EPSILON: f32 = 1e-5;

/// A layer's sizes and forms.
#[derive(Clone, Copy)]
pub struct Shape {
    pub name: &'static str,
    pub hidden: usize,
    pub heads: HeadShape,
    pub ffn: usize,
    pub half: usize,
    /// Whether there are biases and norms of query and key heads.
    pub extras: bool,
    pub format: WeightFormat,
    pub kv: KvDtype,
}

/// Small, fast and good enough for weights: splitmix64.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    fn value(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    /// A bfloat16 tensor of values around `center`, up to `spread` away.
    pub fn tensor(&mut self, shape: &[usize], center: f32, spread: f32) -> Result<HostTensor> {
        let count: usize = shape.iter().product();
        let mut bytes = Vec::with_capacity(2 * count);
        for _ in 0..count {
            bytes.extend(bf16::from_f32(center + spread * self.value()).to_le_bytes());
        }
        HostTensor::new("random", DType::Bf16, shape.to_vec(), bytes.into())
    }
}

/// The weights before a backend packs them.
pub struct Tensors {
    pub shape: Shape,
    table: HostTensor,
    /// Rows of queries, keys and values out of nowhere, to fill a context without running it.
    contexts: HostTensor,
    norms: [HostTensor; 2],
    head_norms: [HostTensor; 2],
    pub qkv: [HostTensor; 3],
    bias: [HostTensor; 3],
    pub o: HostTensor,
    pub gate_up: [HostTensor; 2],
    pub down: HostTensor,
}

impl Tensors {
    pub fn random(shape: Shape, seed: u64) -> Result<Self> {
        let mut random = Random(seed);
        let Shape { hidden, heads, ffn, .. } = shape;
        let (q, kv) = (heads.q_width(), heads.kv_width());
        let spread = |inputs: usize| (3.0 / inputs as f32).sqrt();
        let mut matrix = |outputs, inputs| random.tensor(&[outputs, inputs], 0.0, spread(inputs));
        let qkv = [matrix(q, hidden)?, matrix(kv, hidden)?, matrix(kv, hidden)?];
        let (o, down) = (matrix(hidden, q)?, matrix(hidden, ffn)?);
        let gate_up = [matrix(ffn, hidden)?, matrix(ffn, hidden)?];
        let mut vector = |width| random.tensor(&[width], 1.0, 0.5);
        let norms = [vector(hidden)?, vector(hidden)?];
        let head_norms = [vector(heads.head_dim)?, vector(heads.head_dim)?];
        let mut bias = |width| random.tensor(&[width], 0.0, 0.5);
        let bias = [bias(q)?, bias(kv)?, bias(kv)?];
        let table = random.tensor(&[TOKENS as usize, hidden], 0.0, 1.0)?;
        let contexts = random.tensor(&[TOKENS as usize, heads.qkv_width()], 0.0, 1.5)?;
        Ok(Self { shape, table, contexts, norms, head_norms, qkv, bias, o, gate_up, down })
    }

    /// Bytes that one pass reads of the projections.
    pub fn bytes(&self) -> usize {
        self.qkv.iter().chain(&self.gate_up).chain([&self.o, &self.down]).map(|t| 2 * t.len()).sum()
    }
}

/// A layer as a backend keeps it, with the buffers of a pass.
pub struct Layer<B: Backend> {
    shape: Shape,
    table: B::Table,
    contexts: B::Table,
    norms: [B::Vector; 2],
    head_norms: Option<[B::Vector; 2]>,
    qkv: B::Weight,
    bias: Option<B::Vector>,
    o: B::Weight,
    gate_up: B::Weight,
    down: B::Weight,
    rope: B::Rope,
    pub plan: B::Plan,
    pub kv: B::Kv,
    pub rows: Buffers<B>,
}

/// Rows that a pass works on, made once.
pub struct Buffers<B: Backend> {
    pub hidden: B::Rows,
    normed: B::Rows,
    qkv: B::Rows,
    attended: B::Rows,
    gate_up: B::Rows,
    gated: B::Rows,
    pub outputs: B::Rows,
}

impl<B: Backend> Layer<B> {
    pub fn new(b: &B, t: &Tensors) -> Result<Self> {
        let Shape { hidden, heads, ffn, half, extras, format, kv, .. } = t.shape;
        let frequencies: Vec<f64> =
            (0..half).map(|i| 10_000f64.powf(-(i as f64) / half as f64)).collect();
        let [norm_1, norm_2] = &t.norms;
        let [query_norm, key_norm] = &t.head_norms;
        let one = |tensor: &HostTensor| b.vector(std::slice::from_ref(tensor));
        Ok(Self {
            shape: t.shape,
            table: b.table(&t.table)?,
            contexts: b.table(&t.contexts)?,
            norms: [one(norm_1)?, one(norm_2)?],
            head_norms: if extras { Some([one(query_norm)?, one(key_norm)?]) } else { None },
            qkv: b.pack(&t.qkv, format)?,
            bias: if extras { Some(b.vector(&t.bias)?) } else { None },
            o: b.pack(std::slice::from_ref(&t.o), format)?,
            gate_up: b.pack(&t.gate_up, format)?,
            down: b.pack(std::slice::from_ref(&t.down), format)?,
            rope: b.rope(&RopeTable::new(SLOTS, &frequencies, 1.0))?,
            plan: b.plan(PlanBounds { rows: ROWS, outputs: ROWS, slots: 2 * SLOTS })?,
            // The layer under test is the second of two, so that a wrong offset is seen.
            kv: b.kv(KvShape {
                layers: 2,
                slots: SLOTS,
                kv_heads: heads.kv_heads,
                head_dim: heads.head_dim,
                dtype: kv,
            })?,
            rows: Buffers {
                hidden: b.rows(ROWS, hidden)?,
                normed: b.rows(ROWS, hidden)?,
                qkv: b.rows(ROWS, heads.qkv_width())?,
                attended: b.rows(ROWS, heads.q_width())?,
                gate_up: b.rows(ROWS, 2 * ffn)?,
                gated: b.rows(ROWS, ffn)?,
                outputs: b.rows(ROWS, hidden)?,
            },
        })
    }

    /// Writes keys and values of `plan`'s rows without running the layer for them.
    pub fn fill(&mut self, b: &B, plan: &ForwardPlan) -> Result<()> {
        b.place(plan, &mut self.plan)?;
        b.embed(&self.contexts, 1.0, &self.plan, &mut self.rows.qkv)?;
        let (qkv, kv) = (&mut self.rows.qkv, &mut self.kv);
        b.write_kv(qkv, self.shape.heads, None, &self.rope, &self.plan, kv, 1)
    }

    /// Places `plan`, runs the layer and reads the rows, then the outputs.
    pub fn run(&mut self, b: &B, plan: &ForwardPlan) -> Result<Vec<f32>> {
        b.place(plan, &mut self.plan)?;
        layer(b, self, plan.rows())?;
        self.read(b, plan)
    }

    /// Reads the rows of a pass, then its outputs.
    pub fn read(&self, b: &B, plan: &ForwardPlan) -> Result<Vec<f32>> {
        let mut values = b.read(&self.rows.hidden, plan.rows())?;
        values.extend(b.read(&self.rows.outputs, plan.outputs.len())?);
        Ok(values)
    }
}

/// One decoder layer over the placed plan, from tokens to gathered outputs. The same code for every
/// backend, eager or captured.
pub fn layer<B: Backend>(b: &B, layer: &mut Layer<B>, rows: usize) -> Result<()> {
    let Layer { shape, plan, kv, rows: buffers, .. } = layer;
    let Buffers { hidden, normed, qkv, attended, gate_up, gated, outputs } = buffers;
    let scale = 1.0 / (shape.heads.head_dim as f32).sqrt();
    let params = AttentionParams { heads: shape.heads, scale, window: None };
    let norms = layer.head_norms.as_ref().map(|[query, key]| (query, key, EPSILON));

    b.embed(&layer.table, 1.0, plan, hidden)?;
    b.rms_norm(hidden, &layer.norms[0], EPSILON, rows, normed)?;
    b.project(&layer.qkv, layer.bias.as_ref(), normed, rows, Accumulate::Set, qkv)?;
    b.write_kv(qkv, shape.heads, norms, &layer.rope, plan, kv, 1)?;
    b.attend(qkv, params, plan, kv, 1, attended)?;
    b.project(&layer.o, None, attended, rows, Accumulate::Add, hidden)?;
    b.rms_norm(hidden, &layer.norms[1], EPSILON, rows, normed)?;
    b.project(&layer.gate_up, None, normed, rows, Accumulate::Set, gate_up)?;
    b.gate(Activation::Silu, gate_up, rows, gated)?;
    b.project(&layer.down, None, gated, rows, Accumulate::Add, hidden)?;
    b.gather_outputs(hidden, plan, outputs)?;
    Ok(())
}
