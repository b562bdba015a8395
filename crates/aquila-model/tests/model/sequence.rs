//! One token sequence through a decoder, in chunks and slots of the test's choice.

use std::path::PathBuf;

use aquila_compute::cpu::CpuBackend;
use aquila_compute::{AttentionSpan, Backend, ForwardPlan, KvDtype, PlanBounds, WeightFormat};
use aquila_model::{
    Capture, Checkpoint, Decoder, LoadFormat, Location, Places, Safetensors, Scratch, TensorSource,
};

pub fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// A shipped model: the source tree's archive, unpacked among the build outputs.
pub fn shipped(name: &str) -> Location {
    let places = Places {
        shipped: vec![concat!(env!("CARGO_MANIFEST_DIR"), "/../../models").into()],
        unpacked: Some(env!("CARGO_TARGET_TMPDIR").into()),
        hub: None,
    };
    places.resolve(name, None, &mut |_| {}).unwrap()
}

pub fn load(backend: &CpuBackend, name: &str, format: WeightFormat) -> Decoder<CpuBackend> {
    let checkpoint = Checkpoint::open(&Location::Folder(fixture(name)), LoadFormat::Auto).unwrap();
    let positions = checkpoint.spec().max_positions;
    Decoder::load(backend, &checkpoint, format, positions, &mut |_| {}).unwrap()
}

/// transformers' outputs for a fixture.
pub struct Golden {
    pub input_ids: Vec<u32>,
    pub greedy_ids: Vec<u32>,
    pub logits: Vec<f32>,
    pub last_hidden: Vec<f32>,
    /// The experts of each row in each layer, the likeliest first, where it was written down.
    pub routed_experts: Vec<u32>,
}

pub fn golden(name: &str) -> Golden {
    let file = Safetensors::open_file(&fixture(name).join("golden.safetensors")).unwrap();
    let ids = |tensor: &str| {
        let tensor = file.get(tensor).unwrap();
        let id = |b: &[u8]| i64::from_le_bytes(b.try_into().unwrap()) as u32;
        tensor.bytes().chunks_exact(8).map(id).collect()
    };
    Golden {
        routed_experts: file.info("routed_experts").map_or(vec![], |_| ids("routed_experts")),
        input_ids: ids("input_ids"),
        greedy_ids: ids("greedy_ids"),
        logits: file.get("logits").unwrap().to_f32().unwrap(),
        last_hidden: file.get("last_hidden").unwrap().to_f32().unwrap(),
    }
}

/// The rows `from..to` of a sequence whose token at index i lives in slot `slots[i]`; all rows
/// are outputs.
pub fn chunk(plan: &mut ForwardPlan, ids: &[u32], slots: &[u32], from: usize, to: usize) {
    let start = plan.add_table(slots[..to].iter().copied());
    for i in from..to {
        plan.outputs.push(plan.tokens.len() as u32);
        plan.tokens.push(ids[i]);
        plan.positions.push(i as u32);
        plan.writes.push(slots[i]);
        plan.spans.push(AttentionSpan { start, prefix: i as u32 + 1, tree_start: 0, tail: 0 });
    }
}

pub fn bounds(rows: usize, slots: usize) -> PlanBounds {
    PlanBounds { rows, outputs: rows, slots }
}

/// A request on a decoder: its slots, its keys and values, and what it has seen so far.
pub struct Sequence<'a> {
    pub backend: &'a CpuBackend,
    pub decoder: &'a Decoder<CpuBackend>,
    pub kv: Vec<<CpuBackend as Backend>::Kv>,
    pub scratch: Scratch<CpuBackend>,
    pub slots: Vec<u32>,
    pub done: usize,
}

impl<'a> Sequence<'a> {
    /// A request whose token at index i will live in slot `slots[i]`.
    pub fn new(
        backend: &'a CpuBackend,
        decoder: &'a Decoder<CpuBackend>,
        slots: Vec<u32>,
        dtype: KvDtype,
    ) -> Self {
        let room = slots.iter().max().map_or(1, |&s| s as usize + 1);
        let kv = decoder.kv(backend, room, dtype).unwrap();
        let scratch = decoder.scratch(backend, bounds(slots.len(), slots.len())).unwrap();
        Self { backend, decoder, kv, scratch, slots, done: 0 }
    }

    pub fn in_order(
        backend: &'a CpuBackend,
        decoder: &'a Decoder<CpuBackend>,
        room: usize,
    ) -> Self {
        Self::new(backend, decoder, (0..room as u32).collect(), KvDtype::F32)
    }

    /// Runs the sequence on to its first `to` tokens; answers the logits of the new rows.
    pub fn run(&mut self, ids: &[u32], to: usize) -> Vec<f32> {
        self.run_with(ids, to, None)
    }

    /// [`Sequence::run`], capturing hidden states.
    pub fn run_with(
        &mut self,
        ids: &[u32],
        to: usize,
        capture: Option<&mut Capture<CpuBackend>>,
    ) -> Vec<f32> {
        let mut plan = ForwardPlan::default();
        chunk(&mut plan, ids, &self.slots, self.done, to);
        let Self { backend, decoder, kv, scratch, .. } = self;
        let mut captures: Vec<_> = capture.into_iter().collect();
        decoder.forward(backend, &plan, kv, scratch, &mut captures).unwrap();
        let rows = to - self.done;
        self.done = to;
        self.backend.read(self.scratch.logits(), rows).unwrap()
    }
}

pub fn argmax(logits: &[f32]) -> u32 {
    let best = logits.iter().enumerate().rev().max_by(|a, b| a.1.total_cmp(b.1));
    best.unwrap().0 as u32
}
