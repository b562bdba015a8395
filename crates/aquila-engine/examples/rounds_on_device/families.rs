//! The fixtures of all model families on a device: windows, experts, norms and biases, which the
//! shipped models do not have.

use std::sync::Arc;

use aquila_compute::cpu::{CpuBackend, IsaChoice};
use aquila_compute::cuda::CudaBackend;
use aquila_compute::round::Returned;
use aquila_compute::{Backend, KvDtype};
use aquila_engine::executor::GraphSettings;
use aquila_engine::{EngineConfig, Request, Scheduler};
use aquila_model::{Location, Safetensors, TensorSource};
use aquila_spec::{LoadOn, Opened, Shape};

use crate::support::answers::*;
use crate::support::shipped::{config, model_on};
use crate::support::{Numbers, fixture};
use crate::{CAPTURED, Device, PLAIN, graphs_of};

/// Those of a slow device come first.
const FAMILIES: [&str; 8] = [
    "gemma3",
    "qwen3-moe",
    "qwen3-moe-dense",
    "qwen3",
    "qwen2",
    "qwen2-yarn",
    "llama-bias",
    "llama3-rope",
];
/// How far a hidden state may be from that of transformers: in f32, and with bfloat16 inputs.
const CLOSE: [f32; 2] = [1e-3, 0.25];

fn has_experts(family: &str) -> bool {
    family.contains("moe")
}

/// Greedy, with the rows that the model can give.
fn with_states(request: &mut Request, _: usize) {
    request.limits.stop_ids.clear();
    request.returned.hidden_states = true;
}

fn with_experts(request: &mut Request, index: usize) {
    with_states(request, index);
    request.returned.routed_experts = true;
}

fn seeded_with_states(request: &mut Request, index: usize) {
    warm(request, index);
    with_states(request, index);
}

/// What transformers gave.
struct Golden {
    prompt: Vec<u32>,
    greedy: Vec<u32>,
    hidden: Vec<f32>,
    experts: Vec<u32>,
}

fn golden(family: &str) -> Golden {
    let file = Safetensors::open_file(&fixture(family).join("golden.safetensors")).unwrap();
    let ids = |tensor: &str| -> Vec<u32> {
        let tensor = file.get(tensor).unwrap();
        let id = |b: &[u8]| i64::from_le_bytes(b.try_into().unwrap()) as u32;
        tensor.bytes().chunks_exact(8).map(id).collect()
    };
    Golden {
        prompt: ids("input_ids"),
        greedy: ids("greedy_ids"),
        hidden: file.get("last_hidden").unwrap().to_f32().unwrap(),
        experts: file.info("routed_experts").map_or(vec![], |_| ids("routed_experts")),
    }
}

impl<B: Backend> Device<B>
where
    dyn Opened: LoadOn<B>,
{
    fn few_families(&self) -> &'static [&'static str] {
        if self.small { &FAMILIES[..3] } else { &FAMILIES }
    }

    /// An engine over a fixture, which is its own draft where the algorithm needs one.
    fn family(&self, family: &str, name: &str, shape: Shape, graphs: GraphSettings) -> Scheduler {
        let location = Location::Folder(fixture(family));
        let draft = (name == "STANDALONE").then(|| (family.to_owned(), location.clone()));
        let returned = Returned { hidden_states: true, routed_experts: has_experts(family) };
        let config = EngineConfig {
            context_length: 256,
            max_total_tokens: 4000,
            chunked_prefill_size: 48,
            kv_dtype: self.kv,
            returned,
            ..config(shape)
        };
        model_on(self.backend.clone(), &location, draft, name, config, graphs)
    }

    /// Prompts that repeat themselves, so that n-grams find something; with what follows, the longest
    /// of them cross every boundary of blocks of positions.
    fn repeated(&self) -> Vec<Vec<u32>> {
        let mut numbers = Numbers(5);
        let lengths = if self.small { &[3, 40][..] } else { &[1, 3, 10, 19, 30, 40] };
        lengths.iter().map(|&length| numbers.prompt(length).repeat(3)).collect()
    }

    /// Whether every family writes what transformers does, and speculation does not show in it.
    pub fn families(&self) -> bool {
        let mut sound = true;
        for &family in self.few_families() {
            sound &= self.equals_transformers(family) & self.hides_speculation(family);
        }
        sound
    }

    fn equals_transformers(&self, family: &str) -> bool {
        let Golden { prompt, greedy, hidden, experts } = golden(family);
        let change = if has_experts(family) { with_experts } else { with_states };
        let mut engine = self.family(family, PLAIN, Shape::PLAIN, GraphSettings::default());
        let got =
            answers(&mut engine, std::slice::from_ref(&prompt), greedy.len(), change).remove(0);
        let same = got.ids.iter().zip(&greedy).take_while(|(a, b)| a == b).count();
        // A row that goes to another expert is another row, so of those nothing is expected.
        let (width, of_row) = (hidden.len() / prompt.len(), experts.len() / prompt.len());
        let alike = |row: usize| {
            let row = row * of_row..(row + 1) * of_row;
            got.experts.get(row.clone()) == experts.get(row)
        };
        let states = got.states.iter().map(|&bits| f32::from_bits(bits));
        let pairs =
            states.zip(&hidden).enumerate().filter(|(at, _)| of_row == 0 || alike(at / width));
        let off = pairs.map(|(_, (a, b))| (a - b).abs()).fold(0.0, f32::max);
        let chosen = got.experts.iter().zip(&experts).filter(|(a, b)| a == b).count();
        println!(
            "{family}: {same} of {} golden ids; hidden states off by {off:.1e}; {chosen} of {} \
             choices of experts",
            greedy.len(),
            experts.len()
        );
        let exact = self.kv == KvDtype::F32;
        off < CLOSE[usize::from(!exact)]
            && (!exact || same == greedy.len() && chosen == experts.len())
    }

    /// Whether drafts from n-grams and from the model itself, in chains and in trees, launched and
    /// replayed, leave the answers of plain decoding, the rows that go with them included.
    fn hides_speculation(&self, family: &str) -> bool {
        let prompts = self.repeated();
        let change = if has_experts(family) { with_experts } else { with_states };
        let modes: [(&str, Change); 2] = [("greedy", change), ("seeded", seeded_with_states)];
        let of = |name: &str, shape: Shape, captured: &[usize], mode: usize| {
            // Where rounds do not overlap, each replay is compared with a launch, too.
            let graphs = GraphSettings { check: mode == 0, ..graphs_of(captured) };
            let mut engine = self.family(family, name, shape, graphs);
            if mode == 1 {
                engine = engine.overlapped().expect("a thread");
            }
            answers(&mut engine, &prompts, self.tokens(), modes[mode].1)
        };
        let plain = [0, 1].map(|mode| texts(&of(PLAIN, Shape::PLAIN, &[], mode)));
        let mut sound = true;
        for (name, shape) in [
            (PLAIN, Shape::PLAIN),
            ("NGRAM", shape(4, 2, 8)),
            ("STANDALONE", Shape::chain(3)),
            ("STANDALONE", shape(3, 3, 9)),
        ] {
            let (mut answered, mut differ, mut accepted) = (0, 0, 0);
            for (how, captured) in [("replayed", &CAPTURED[..]), ("launched", &[])] {
                for (mode, plain) in plain.iter().enumerate() {
                    let got = of(name, shape, captured, mode);
                    let wrong = texts(&got).iter().zip(plain).filter(|(a, b)| a != b).count();
                    if wrong > 0 {
                        println!("{family}, {name}, {shape}, {}, {how}: {wrong}", modes[mode].0);
                    }
                    answered += got.len();
                    differ += wrong;
                    accepted += got.iter().map(|answer| answer.spec.correct_drafts).sum::<u64>();
                }
            }
            println!(
                "{family}, {name}, {shape}: {differ} of {answered} answers differ from plain \
                 decoding, {accepted} drafts accepted"
            );
            sound &= differ == 0 && (name != "STANDALONE" || accepted > 0);
        }
        sound
    }
}

impl Device<CudaBackend> {
    /// Whether ids, log-probabilities, hidden states and experts of every family are those of the
    /// CPU, bit for bit.
    pub fn families_equal_cpu(&self) -> bool {
        let backend = Arc::new(CpuBackend::new(IsaChoice::Auto, 0).unwrap());
        let algorithms = self.algorithms.clone();
        let cpu = Device { backend, kv: self.kv, small: self.small, algorithms };
        let prompts = self.repeated();
        let mut sound = true;
        for &family in self.few_families() {
            let change = if has_experts(family) { with_experts } else { with_states };
            for (name, shape) in
                [(PLAIN, Shape::PLAIN), ("NGRAM", shape(4, 2, 8)), ("STANDALONE", shape(3, 3, 9))]
            {
                let of =
                    |mut engine: Scheduler| answers(&mut engine, &prompts, self.tokens(), change);
                let got = of(self.family(family, name, shape, GraphSettings::default()));
                let want = of(cpu.family(family, name, shape, GraphSettings::default()));
                let differ = got.iter().zip(&want).filter(|(a, b)| a != b).count();
                println!(
                    "{family}, {name}, {shape}: {differ} of {} answers are not the CPU's",
                    want.len()
                );
                sound &= differ == 0;
            }
        }
        sound
    }
}
