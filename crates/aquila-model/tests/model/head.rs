//! The EAGLE-3 head that ships with `tiny`: its numbers are those of its definition, and its bits
//! do not depend on chunks.

use aquila_compute::cpu::{CpuBackend, IsaChoice};
use aquila_compute::{AttentionSpan, Backend, ForwardPlan, KvDtype, WeightFormat};
use aquila_model::RecurrentHead as _;
use aquila_model::{
    Capture, Checkpoint, Decoder, Eagle3Head, HeadCheckpoint, HeadScratch, Hidden, LoadFormat,
    Location, TensorSource, memory,
};
use proptest::prelude::*;
use serde_json::Value;

use crate::sequence::{Sequence, bounds, chunk, fixture, shipped};

pub const POSITIONS: usize = 1024;

/// A target and the head that drafts for it.
pub struct Pair {
    pub backend: CpuBackend,
    pub target: Decoder<CpuBackend>,
    pub checkpoint: HeadCheckpoint,
    pub head: Eagle3Head<CpuBackend>,
}

impl Pair {
    pub fn tiny() -> Self {
        // Tests run side by side, so each keeps to one core.
        let backend = CpuBackend::new(IsaChoice::Auto, 1).unwrap();
        let target = Checkpoint::open(&shipped("tiny"), LoadFormat::Auto).unwrap();
        Self::load(backend, &target, &shipped("tiny-eagle3"))
    }

    pub fn load(backend: CpuBackend, target: &Checkpoint, head: &Location) -> Self {
        let checkpoint = HeadCheckpoint::open(head, LoadFormat::Auto, target.spec()).unwrap();
        Self::of(backend, target, checkpoint)
    }

    pub fn of(backend: CpuBackend, target: &Checkpoint, checkpoint: HeadCheckpoint) -> Self {
        let format = WeightFormat::Bf16;
        let target = Decoder::load(&backend, target, format, POSITIONS, &mut |_| {}).unwrap();
        let head =
            Eagle3Head::load_for(&backend, &checkpoint, format, &target, &mut |_| {}).unwrap();
        Self { backend, target, checkpoint, head }
    }

    /// The hidden states of a whole text, as the head wants them.
    pub fn capture(&self, ids: &[u32]) -> Capture<CpuBackend> {
        let boundaries = self.head.boundaries();
        let mut capture = self.target.capture(&self.backend, boundaries, ids.len()).unwrap();
        let mut sequence = Sequence::in_order(&self.backend, &self.target, ids.len());
        sequence.run_with(ids, ids.len(), Some(&mut capture));
        capture
    }

    pub fn drafting(&self, rows: usize, slots: usize) -> Drafting<'_> {
        let kv = self.head.kv(&self.backend, slots, KvDtype::F32).unwrap();
        let scratch = self.head.scratch(&self.backend, bounds(rows, 64 * slots)).unwrap();
        Drafting { pair: self, kv, scratch }
    }
}

/// The head's keys, values and buffers for one text; the row of position p lives in slot p.
pub struct Drafting<'a> {
    pub pair: &'a Pair,
    pub kv: Vec<<CpuBackend as Backend>::Kv>,
    pub scratch: HeadScratch<CpuBackend>,
}

impl Drafting<'_> {
    /// Rows `from..to` over a text: row p takes token p + 1 and the hidden state of p. All are
    /// outputs; answers their logits.
    pub fn extend(
        &mut self,
        ids: &[u32],
        captured: &Capture<CpuBackend>,
        from: usize,
        to: usize,
    ) -> Vec<f32> {
        let slots: Vec<u32> = (0..to as u32).collect();
        let mut plan = ForwardPlan::default();
        chunk(&mut plan, &ids[1..], &slots, from, to);
        plan.sources.extend(from as u32..to as u32);
        let Pair { backend, head, .. } = self.pair;
        head.extend(backend, &plan, Some(captured.rows()), &mut self.kv, &mut self.scratch)
            .unwrap();
        backend.read(self.scratch.logits(), to - from).unwrap()
    }

    /// Answers the logits of all rows of the plan.
    pub fn expand(&mut self, mut plan: ForwardPlan, from: Hidden) -> Vec<f32> {
        plan.outputs = (0..plan.rows() as u32).collect();
        let Pair { backend, head, .. } = self.pair;
        head.expand(backend, &plan, from, &mut self.kv, &mut self.scratch).unwrap();
        backend.read(self.scratch.logits(), plan.rows()).unwrap()
    }
}

/// A row of an expanding plan: it sees `prefix` rows of the text, then `tail`, which ends with
/// its own slot.
pub fn node(plan: &mut ForwardPlan, token: u32, source: u32, prefix: usize, tail: &[u32]) {
    let start = plan.add_table(0..prefix as u32);
    let tree_start = plan.tree_slots.len() as u32;
    plan.tree_slots.extend(tail);
    plan.tokens.push(token);
    plan.sources.push(source);
    plan.positions.push((prefix + tail.len() - 1) as u32);
    plan.writes.push(*tail.last().unwrap());
    let (prefix, tail) = (prefix as u32, tail.len() as u32);
    plan.spans.push(AttentionSpan { start, prefix, tree_start, tail });
}

/// A text of `tiny`.
fn text() -> Vec<u32> {
    let file = std::fs::read(fixture("tiny-golden.json")).unwrap();
    let list: Vec<Value> = serde_json::from_slice(&file).unwrap();
    let ids = list[0]["prompt_ids"].as_array().unwrap();
    ids.iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// The head once more, row by row in f64, as its publishers describe it.
struct Definition<'a> {
    tensors: &'a dyn TensorSource,
    table: Vec<f32>,
    keys: Vec<Vec<f64>>,
    values: Vec<Vec<f64>>,
}

const HIDDEN: usize = 384;
const HEAD_DIM: usize = 64;
/// Query heads that share one key and value head.
const GROUP: usize = 3;

impl Definition<'_> {
    fn tensor(&self, name: &str) -> Vec<f64> {
        self.tensors.get(name).unwrap().to_f32().unwrap().into_iter().map(f64::from).collect()
    }

    fn times(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let dot = |row: &[f64]| row.iter().zip(x).map(|(w, x)| w * x).sum();
        self.tensor(&format!("{name}.weight")).chunks(x.len()).map(dot).collect()
    }

    fn norm(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
        let weight = self.tensor(&format!("{name}.weight"));
        x.iter().zip(weight).map(|(x, w)| x / (mean + 1e-5).sqrt() * w).collect()
    }

    fn turned(mut x: Vec<f64>, position: usize) -> Vec<f64> {
        for head in x.chunks_mut(HEAD_DIM) {
            let half = HEAD_DIM / 2;
            for i in 0..half {
                let angle = position as f64 * 1e4f64.powf(-(i as f64) / half as f64);
                let (a, b) = (head[i], head[i + half]);
                head[i] = a * angle.cos() - b * angle.sin();
                head[i + half] = b * angle.cos() + a * angle.sin();
            }
        }
        x
    }

    /// Adds a row that sees the rows of `seen`, then itself; answers its hidden state.
    fn row(&mut self, token: u32, hidden: &[f64], position: usize, seen: &[usize]) -> Vec<f64> {
        let embedding = &self.table[token as usize * HIDDEN..][..HIDDEN];
        let embedding: Vec<f64> = embedding.iter().copied().map(f64::from).collect();
        let mut input = self.norm("midlayer.input_layernorm", &embedding);
        input.extend(self.norm("midlayer.hidden_norm", hidden));
        let q = Self::turned(self.times("midlayer.self_attn.q_proj", &input), position);
        let k = Self::turned(self.times("midlayer.self_attn.k_proj", &input), position);
        self.keys.push(k);
        self.values.push(self.times("midlayer.self_attn.v_proj", &input));
        let seen: Vec<usize> = seen.iter().copied().chain([self.keys.len() - 1]).collect();
        let mut attended = Vec::new();
        for (h, q) in q.chunks(HEAD_DIM).enumerate() {
            let part = h / GROUP * HEAD_DIM..(h / GROUP + 1) * HEAD_DIM;
            let score = |&row: &usize| {
                let k = &self.keys[row][part.clone()];
                (q.iter().zip(k).map(|(q, k)| q * k).sum::<f64>() / 8.0).exp()
            };
            let scores: Vec<f64> = seen.iter().map(score).collect();
            let total: f64 = scores.iter().sum();
            attended.extend(part.clone().map(|i| {
                let weigh = |(row, s): (&usize, &f64)| self.values[*row][i] * s / total;
                seen.iter().zip(&scores).map(weigh).sum::<f64>()
            }));
        }
        let add = |a: &[f64], b: Vec<f64>| a.iter().zip(b).map(|(a, b)| a + b).collect::<Vec<_>>();
        let x = add(hidden, self.times("midlayer.self_attn.o_proj", &attended));
        let normed = self.norm("midlayer.post_attention_layernorm", &x);
        let gate = self.times("midlayer.mlp.gate_proj", &normed);
        let up = self.times("midlayer.mlp.up_proj", &normed);
        let inner: Vec<f64> =
            gate.iter().zip(up).map(|(g, up)| g / (1.0 + (-g).exp()) * up).collect();
        add(&x, self.times("midlayer.mlp.down_proj", &inner))
    }

    fn logits(&self, x: &[f64]) -> Vec<f64> {
        self.times("lm_head", &self.norm("norm", x))
    }
}

#[track_caller]
fn assert_near(ours: &[f32], defined: &[f64], what: &str) {
    assert_eq!(ours.len(), defined.len());
    let largest = defined.iter().fold(0f64, |m, x| m.max(x.abs()));
    for (i, (&o, &d)) in ours.iter().zip(defined).enumerate() {
        let off = (f64::from(o) - d).abs();
        assert!(off < 1e-4 * largest, "{what}, element {i}: {o} is off by {off}");
    }
}

#[test]
fn extending_and_expanding_compute_what_the_head_is_defined_as() {
    let pair = Pair::tiny();
    let (ids, rows) = (text(), 10);
    let captured = pair.capture(&ids[..rows]);
    let features = pair.backend.read(captured.rows(), rows).unwrap();
    let target = Checkpoint::open(&shipped("tiny"), LoadFormat::Auto).unwrap();
    let table = target.tensors().get("model.embed_tokens.weight").unwrap().to_f32().unwrap();
    let tensors = pair.checkpoint.tensors();
    let mut definition = Definition { tensors, table, keys: Vec::new(), values: Vec::new() };

    let mut drafting = pair.drafting(rows, 32);
    let logits = drafting.extend(&ids, &captured, 0, rows);
    let mut states = Vec::new();
    for (p, feature) in features.chunks(3 * HIDDEN).enumerate() {
        let feature: Vec<f64> = feature.iter().copied().map(f64::from).collect();
        let hidden = definition.times("fc", &feature);
        let seen: Vec<usize> = (0..p).collect();
        states.push(definition.row(ids[p + 1], &hidden, p, &seen));
        let width = logits.len() / rows;
        let defined = definition.logits(&states[p]);
        assert_near(&logits[p * width..][..width], &defined, &format!("row {p}"));
    }

    // With ten rows extended the nodes of depth 1 run at 10: two siblings, then a child of the
    // second, which sees its parent and not its parent's sibling.
    let seen: Vec<usize> = (0..rows).collect();
    let mut plan = ForwardPlan::default();
    node(&mut plan, 17, rows as u32 - 1, rows, &[20]);
    node(&mut plan, 99, rows as u32 - 1, rows, &[21]);
    let logits = drafting.expand(plan, Hidden::Seeds);
    let first = definition.row(17, &states[rows - 1], rows, &seen);
    let second = definition.row(99, &states[rows - 1], rows, &seen);
    let defined = [definition.logits(&first), definition.logits(&second)].concat();
    assert_near(&logits, &defined, "depth 1");
    let left = pair.backend.read(drafting.scratch.last(), 2).unwrap();
    assert_near(&left, &[first, second.clone()].concat(), "what depth 1 leaves");

    let mut plan = ForwardPlan::default();
    node(&mut plan, 5, 1, rows, &[21, 22]);
    let logits = drafting.expand(plan, Hidden::Last);
    let seen: Vec<usize> = seen.into_iter().chain([rows + 1]).collect();
    let third = definition.row(5, &second, rows + 1, &seen);
    assert_near(&logits, &definition.logits(&third), "depth 2");

    // Seeds survive what came after them.
    let mut plan = ForwardPlan::default();
    node(&mut plan, 7, rows as u32 - 2, rows - 1, &[23]);
    let logits = drafting.expand(plan, Hidden::Seeds);
    let seen: Vec<usize> = (0..rows - 1).collect();
    let fourth = definition.row(7, &states[rows - 2], rows - 1, &seen);
    assert_near(&logits, &definition.logits(&fourth), "from an earlier seed");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn extending_in_any_chunks_gives_the_same_bits(
        sizes in prop::collection::vec(1usize..30, 1..20),
    ) {
        let pair = Pair::tiny();
        let ids = &text()[..90];
        let captured = pair.capture(&ids[..89]);
        let whole = pair.drafting(89, 89).extend(ids, &captured, 0, 89);
        let mut drafting = pair.drafting(89, 89);
        let (mut ours, mut done) = (Vec::new(), 0);
        for size in sizes.iter().cycle() {
            let to = (done + size).min(89);
            ours.extend(drafting.extend(ids, &captured, done, to));
            done = to;
            if done == 89 {
                break;
            }
        }
        prop_assert!(bits(&ours) == bits(&whole));
    }
}

#[test]
fn capturing_takes_the_stream_at_a_boundary_and_changes_nothing() {
    let pair = Pair::tiny();
    let (backend, target, ids) = (&pair.backend, &pair.target, &text()[..40]);
    let mut plain = Sequence::in_order(backend, target, 40);
    let logits = plain.run(ids, 40);
    let mut capture = target.capture(backend, &[6, 0], 40).unwrap();
    let mut sequence = Sequence::in_order(backend, target, 40);
    assert_eq!(bits(&sequence.run_with(ids, 40, Some(&mut capture))), bits(&logits));

    // What the head of the target reads is the last layer's output, normed.
    let target_checkpoint = Checkpoint::open(&shipped("tiny"), LoadFormat::Auto).unwrap();
    let norm = target_checkpoint.tensors().get("model.norm.weight").unwrap().to_f32().unwrap();
    let rows = backend.read(capture.rows(), 40).unwrap();
    let hidden = backend.read(sequence.scratch.hidden(), 40).unwrap();
    let table = target_checkpoint.tensors().get("model.embed_tokens.weight").unwrap();
    let table = table.to_f32().unwrap();
    for ((row, hidden), &id) in rows.chunks(2 * HIDDEN).zip(hidden.chunks(HIDDEN)).zip(ids) {
        // Before the first layer the stream is the token's embedding.
        assert_eq!(row[HIDDEN..], table[id as usize * HIDDEN..][..HIDDEN]);
        let x = &row[..HIDDEN];
        let mean = x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / HIDDEN as f64;
        let defined: Vec<f64> = x
            .iter()
            .zip(&norm)
            .map(|(&x, &w)| f64::from(x) / (mean + 1e-5).sqrt() * f64::from(w))
            .collect();
        assert_near(hidden, &defined, "the last layer");
    }

    // In chunks, each pass leaves its own rows from the first on.
    let mut chunked = Sequence::in_order(backend, target, 40);
    chunked.run_with(ids, 33, Some(&mut capture));
    chunked.run_with(ids, 40, Some(&mut capture));
    let tail = backend.read(capture.rows(), 7).unwrap();
    assert_eq!(bits(&tail), bits(&rows[33 * 2 * HIDDEN..]));
}

#[test]
fn an_impossible_capture_is_refused_with_its_number() {
    let pair = Pair::tiny();
    let refused =
        |at: &[usize]| pair.target.capture(&pair.backend, at, 4).err().unwrap().to_string();
    assert!(refused(&[1, 7]).contains("capture at boundary 7 of a model of 6 layers"));
    assert!(refused(&[]).contains("capture at no boundary"));
    let mut capture = pair.target.capture(&pair.backend, &[2], 4).unwrap();
    let mut sequence = Sequence::in_order(&pair.backend, &pair.target, 8);
    let mut plan = ForwardPlan::default();
    chunk(&mut plan, &text(), &[0, 1, 2, 3, 4], 0, 5);
    let Sequence { kv, scratch, .. } = &mut sequence;
    let run = pair.target.forward(&pair.backend, &plan, kv, scratch, &mut [&mut capture]);
    assert!(run.unwrap_err().to_string().contains("5 rows, and 4 can be captured"));
}

#[test]
fn rows_without_a_hidden_state_are_refused() {
    let pair = Pair::tiny();
    let ids = text();
    let captured = pair.capture(&ids[..4]);
    let mut drafting = pair.drafting(8, 16);
    drafting.extend(&ids, &captured, 0, 4);
    let Drafting { kv, scratch, .. } = &mut drafting;
    let mut refused = |source: Option<u32>, from| {
        let mut plan = ForwardPlan::default();
        node(&mut plan, 1, 0, 4, &[5]);
        plan.sources = source.into_iter().collect();
        let run = pair.head.expand(&pair.backend, &plan, from, kv, scratch);
        run.unwrap_err().to_string()
    };
    assert!(refused(Some(999), Hidden::Seeds).contains("source 999 of"));
    assert!(refused(Some(999), Hidden::Last).contains("source 999 of"));
    assert!(refused(None, Hidden::Seeds).contains("0 sources for 1 rows"));
    // An idle round runs nothing and is no error.
    let idle = ForwardPlan::default();
    pair.head.expand(&pair.backend, &idle, Hidden::Seeds, kv, scratch).unwrap();
    pair.head.extend(&pair.backend, &idle, Some(captured.rows()), kv, scratch).unwrap();
}

#[test]
fn a_head_takes_the_memory_told_and_no_table() {
    let pair = Pair::tiny();
    let spec = pair.head.spec();
    // The file holds bfloat16; the four norms are kept as float32.
    assert_eq!(pair.checkpoint.tensor_bytes(), 2 * spec.parameters());
    let want = pair.checkpoint.tensor_bytes() + 2 * 4 * HIDDEN as u64;
    assert_eq!(spec.weight_bytes(WeightFormat::Bf16), want);
    assert!(spec.weight_bytes(WeightFormat::Int8) < want);
    let shape = pair.head.kv_shapes(7, KvDtype::F32)[0];
    assert_eq!((shape.layers, shape.slots), (1, 7));
    assert_eq!(spec.kv_bytes_per_token(KvDtype::F32), shape.bytes_per_slot() as u64);
    assert_eq!(memory::capture_bytes(pair.target.spec(), 3, 10), 4 * 10 * 3 * 384);
}

#[test]
fn presets_have_heads_with_random_weights() {
    for (name, boundaries, draft) in
        [("bench", [2, 8, 13], 16_000), ("llama-3.1-8b", [2, 16, 29], 32_000)]
    {
        let location = Location::Preset(name.into());
        let target = Checkpoint::open(&location, LoadFormat::Auto).unwrap();
        let location = Location::Preset(format!("{name}-eagle3"));
        let head = HeadCheckpoint::open(&location, LoadFormat::Auto, target.spec()).unwrap();
        assert_eq!(head.boundaries(), boundaries);
        assert_eq!(head.spec().draft_vocab_size, draft);
        assert!(Checkpoint::open(&location, LoadFormat::Auto).is_err());
    }
}
