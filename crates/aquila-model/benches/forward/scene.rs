//! A model with the keys and values of some requests, ready for passes over
//! their last positions.

use aquila_compute::cpu::CpuBackend;
use aquila_compute::{AttentionSpan, Backend, ForwardPlan, KvDtype, PlanBounds, WeightFormat};
use aquila_model::{
    Checkpoint, Decoder, DenseSpec, FeedForward, LoadFormat, ModelSpec, Scratch, resolve,
};

/// What the rows of a pass are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Batch {
    /// The last positions of one request, as in verifying a draft.
    RowsOfOne,
    /// The last position of each request, as in plain decoding.
    OneRowOfEach,
}

/// A model on a backend, `requests` contexts of equal length in its store.
pub struct Scene<B: Backend> {
    pub format: WeightFormat,
    decoder: Decoder<B>,
    kv: Vec<B::Kv>,
    scratch: Scratch<B>,
    context: usize,
}

impl<B: Backend> Scene<B> {
    pub fn load(
        backend: &B,
        model: &str,
        format: WeightFormat,
        context: usize,
        requests: usize,
    ) -> Self {
        let location = resolve(model).unwrap_or_else(|e| panic!("{model}: {e}"));
        let checkpoint = Checkpoint::open(&location, LoadFormat::Auto)
            .unwrap_or_else(|e| panic!("{model}: {e}"));
        let decoder =
            Decoder::load(backend, &checkpoint, format, context, &mut |_| {}).expect("memory");
        let slots = requests * context;
        let kv = decoder.kv(backend, slots, KvDtype::F32).expect("memory");
        let bounds = PlanBounds { rows: context, outputs: context, slots };
        let scratch = decoder.scratch(backend, bounds).expect("memory");
        let mut scene = Self { format, decoder, kv, scratch, context };
        for request in 0..requests {
            let mut plan = ForwardPlan::default();
            scene.add(&mut plan, request, context);
            plan.outputs = vec![context as u32 - 1];
            scene.forward(backend, &plan);
        }
        scene
    }

    /// A pass of `rows` rows, all with logits.
    pub fn plan(&self, batch: Batch, rows: usize) -> ForwardPlan {
        let mut plan = ForwardPlan::default();
        match batch {
            Batch::RowsOfOne => self.add(&mut plan, 0, rows),
            Batch::OneRowOfEach => (0..rows).for_each(|request| self.add(&mut plan, request, 1)),
        }
        plan
    }

    fn add(&self, plan: &mut ForwardPlan, request: usize, rows: usize) {
        let first_slot = (request * self.context) as u32;
        let start = plan.add_table(first_slot..first_slot + self.context as u32);
        for position in (self.context - rows) as u32..self.context as u32 {
            plan.outputs.push(plan.tokens.len() as u32);
            let token = (position as usize * 7919 + request * 104_729 + 1) % self.spec().vocab_size;
            plan.tokens.push(token as u32);
            plan.positions.push(position);
            plan.writes.push(first_slot + position);
            plan.spans.push(AttentionSpan { start, prefix: position + 1, tree_start: 0, tail: 0 });
        }
    }

    pub fn forward(&mut self, backend: &B, plan: &ForwardPlan) {
        self.decoder
            .forward(backend, plan, &mut self.kv, &mut self.scratch, &mut [])
            .expect("the plan is within the bounds");
    }

    pub fn logits(&self) -> &B::Rows {
        self.scratch.logits()
    }

    pub fn spec(&self) -> &ModelSpec {
        self.decoder.spec()
    }

    /// Outputs and inputs of the projections of a pass, with how often each is used.
    pub fn projections(&self) -> [(&'static str, usize, usize, usize); 5] {
        let spec = self.spec();
        let (hidden, layers) = (spec.hidden_size, spec.layers.len());
        let heads = spec.first_attention().heads;
        let FeedForward::Dense(DenseSpec { width: inner, .. }) = spec.layers[0].ffn else {
            panic!("the bench has dense layers");
        };
        [
            ("qkv", heads.qkv_width(), hidden, layers),
            ("o", hidden, heads.q_width(), layers),
            ("gate and up", 2 * inner, hidden, layers),
            ("down", hidden, inner, layers),
            ("head", spec.vocab_size, hidden, 1),
        ]
    }

    /// Multiply-adds that one row costs in projections.
    pub fn weight_elements(&self) -> usize {
        self.projections().iter().map(|(_, outputs, inputs, times)| outputs * inputs * times).sum()
    }

    /// Bytes of packed weights that one pass reads.
    pub fn weight_bytes(&self) -> usize {
        let bytes = |&(_, outputs, inputs, times): &(_, usize, usize, usize)| {
            times * CpuBackend::packed_bytes(outputs, inputs, self.format)
        };
        self.projections().iter().map(bytes).sum()
    }
}
