//! Rounds of the shipped models on a device, without cargo and without the sources.
//!
//! `rounds_on_device cpu|cuda|cuda-plain [cpu-bits] [golden] [grid] [graphs] [replays] [grammars]
//! [transfer] [families] [tables] [small] [ALGORITHM]...`: by plain arithmetic what the CPU gives, acceptance
//! included; the ids of transformers; every algorithm, chains and trees, greedy, seeded and with
//! penalties, with and without graphs, against plain decoding on the same device, ids and
//! log-probabilities without tolerance; rounds that are replayed against those that are launched,
//! counts and histograms included, and the memory that each replay leaves against that which a launch
//! leaves; answers that keep to a grammar; the fixtures of all model families;
//! acceptance beside the tables of the code that trained the heads. `small`: a few short prompts, for a
//! slow device. Names of algorithms leave out the others.
//! `AQUILA_MODELS` names the folder of the archives, `AQUILA_FIXTURES` that of the tables. Exits with 1
//! where speculation shows or a table is more than 2 % off.

mod families;
mod replays;
#[path = "../../tests/engine/support/mod.rs"]
mod support;

use std::sync::Arc;
use std::time::Instant;

use aquila_compute::cpu::{CpuBackend, IsaChoice};
use aquila_compute::cuda::{Arithmetic, CudaBackend};
use aquila_compute::{Backend, KvDtype};
use aquila_engine::executor::GraphSettings;
use aquila_engine::{EngineConfig, EnginePair, Request, Scheduler};
use aquila_spec::{LoadOn, Opened, Shape, Verify};
use serde_json::Value;
use support::across::across;
use support::answers::*;
use support::parity::{Parity, keeps_to};
use support::shipped::{config, named_on};

const PLAIN: &str = "NONE";
const ALGORITHMS: [&str; 6] = ["EAGLE3", "EAGLE", "MTP", "STANDALONE", "NGRAM", "EAGLE3+NGRAM"];
const MODES: [(&str, Change); 3] = [("greedy", greedy), ("seeded", warm), ("penalties", penalized)];
/// What requests of the check of grammars are held to.
const GRAMMARS: [Parity; 3] = [
    Parity { length: usize::MAX, fails_at: None, guides_drafts: true },
    Parity { length: 14, fails_at: None, guides_drafts: true },
    Parity { length: usize::MAX, fails_at: Some(17), guides_drafts: false },
];
/// Batch sizes of which rounds are captured; batches between are padded.
const CAPTURED: [usize; 4] = [1, 3, 8, 16];

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let small = words.iter().any(|word| word == "small");
    let named = |name: &&str| words.iter().any(|word| word == name);
    let mut algorithms: Vec<&'static str> = ALGORITHMS.into_iter().filter(named).collect();
    let all = words.len() < 2 + usize::from(small) + algorithms.len();
    if algorithms.is_empty() {
        algorithms.extend(ALGORITHMS);
    }
    let asked = |word: &str| all || words.iter().any(|w| w == word);
    let cuda = |arithmetic| match CudaBackend::new(0, arithmetic) {
        Ok(backend) => Arc::new(backend),
        Err(error) => {
            println!("{error}");
            std::process::exit(2);
        }
    };
    let sound = match words.first().map(String::as_str) {
        Some("cpu") => {
            let backend = Arc::new(CpuBackend::new(IsaChoice::Auto, 0).unwrap());
            Device { backend, kv: KvDtype::F32, small, algorithms }.check(&asked)
        }
        Some("cuda") => {
            let backend = cuda(Arithmetic::Tensor);
            let device = Device { backend, kv: KvDtype::Bf16, small, algorithms };
            (!asked("replays") || device.replays()) & device.check(&asked)
        }
        Some("cuda-plain") => {
            let backend = cuda(Arithmetic::Plain);
            let device = Device { backend, kv: KvDtype::F32, small, algorithms };
            (!asked("cpu-bits") || device.equals_cpu())
                & (!asked("families") || device.families_equal_cpu())
                & (!asked("replays") || device.replays())
                & device.check(&asked)
        }
        _ => {
            println!(
                "rounds_on_device cpu|cuda|cuda-plain [cpu-bits] [golden] [grid] [graphs] [replays] \
                 [grammars] [transfer] [families] [tables] [small] [ALGORITHM]..."
            );
            false
        }
    };
    std::process::exit(i32::from(!sound));
}

/// Captures rounds of these batch sizes.
fn graphs_of(captured: &[usize]) -> GraphSettings {
    GraphSettings { batches: captured.to_vec(), check: false }
}

/// A backend, how it keeps keys and values, whether it gets little to do, and what drafts.
struct Device<B> {
    backend: Arc<B>,
    kv: KvDtype,
    small: bool,
    algorithms: Vec<&'static str>,
}

impl<B: Backend> Device<B>
where
    dyn Opened: LoadOn<B>,
{
    fn check(&self, asked: &dyn Fn(&str) -> bool) -> bool {
        println!("{}", self.backend.describe());
        let mut sound = true;
        for (word, part) in [
            ("golden", Self::golden as fn(&Self) -> bool),
            ("grid", Self::grid),
            ("graphs", Self::graphs),
            ("grammars", Self::grammars),
            ("transfer", Self::transfer),
            ("families", Self::families),
            ("tables", Self::tables),
        ] {
            if asked(word) {
                let began = Instant::now();
                sound &= part(self);
                println!("({word}: {:.1} s)", began.elapsed().as_secs_f64());
            }
        }
        sound
    }

    fn engine(&self, name: &str, config: EngineConfig) -> Scheduler {
        self.capturing(name, config, &[])
    }

    fn capturing(&self, name: &str, config: EngineConfig, captured: &[usize]) -> Scheduler {
        self.with_graphs(name, config, graphs_of(captured))
    }

    fn with_graphs(&self, name: &str, config: EngineConfig, graphs: GraphSettings) -> Scheduler {
        let config = EngineConfig { kv_dtype: self.kv, ..config };
        named_on(self.backend.clone(), name, config, graphs)
    }

    /// Tokens of each answer.
    fn tokens(&self) -> usize {
        if self.small { 10 } else { 32 }
    }

    /// Sixteen prompts: beginnings of those of the acceptance tables, of 1 to 121 tokens; or four
    /// short ones.
    fn prompts(&self) -> Vec<Vec<u32>> {
        let all = prompts();
        let beginning = |at: usize| {
            let ids = &all[at * all.len() / 16].1;
            ids[..ids.len().min(1 + 8 * at)].to_vec()
        };
        if self.small {
            (0..8).step_by(2).map(beginning).collect()
        } else {
            (0..16).map(beginning).collect()
        }
    }

    /// What the plain engine answers.
    fn plain(&self, prompts: &[Vec<u32>], tokens: usize, change: Change) -> Vec<Answer> {
        answers(&mut self.engine(PLAIN, config(Shape::PLAIN)), prompts, tokens, change)
    }

    /// Which answers are those of transformers; all must be where the arithmetic is the CPU's.
    fn golden(&self) -> bool {
        let golden = table("tiny-golden.json");
        let golden = golden.as_array().expect("a list");
        let ids = |entry: &Value, key: &str| -> Vec<u32> {
            let ids = entry[key].as_array().expect("ids").iter();
            ids.map(|id| id.as_u64().expect("an id") as u32).collect()
        };
        // The shortest ones come last.
        let few = if self.small { golden.len() - 2 } else { 0 };
        let golden = &golden[few..];
        let prompts: Vec<_> = golden.iter().map(|entry| ids(entry, "prompt_ids")).collect();
        let tokens = if self.small { 2 } else { 64 };
        let got = self.plain(&prompts, tokens, |request, _| request.limits.stop_ids = vec![0]);
        let mut equal = 0;
        for (at, (got, golden)) in got.iter().zip(golden).enumerate() {
            let mut want = ids(golden, "greedy_ids");
            want.truncate(tokens);
            if got.ids == want {
                equal += 1;
                continue;
            }
            let same = got.ids.iter().zip(&want).take_while(|(a, b)| a == b).count();
            println!(
                "golden {at} differs from token {same} of {}; the closest choice of its text is \
                 {} apart",
                want.len(),
                golden["min_top2_gap"]
            );
        }
        println!("golden ids: {equal} of {}", golden.len());
        equal == golden.len() || self.kv == KvDtype::Bf16
    }

    /// Whether speculation shows in any answer.
    fn grid(&self) -> bool {
        let prompts = self.prompts();
        let plain: Vec<Vec<Answer>> =
            MODES.iter().map(|&(_, change)| self.plain(&prompts, self.tokens(), change)).collect();
        println!("\n| algorithm | engines | answers | differ | tokens per verification |");
        println!("|---|---|---|---|---|");
        let mut sound = true;
        for &name in &self.algorithms {
            let steps = if name == "MTP" { 3 } else { 5 };
            let (mut engines, mut answered, mut differ) = (0, 0, 0);
            let (mut tokens, mut rounds) = (0, 0);
            for shape in [Shape::chain(3), shape(steps, 4, 16)] {
                // Pages, requests, prompt rows a round and tokens of the pool; the last is so small
                // that requests are preempted.
                for (page_size, batch, chunk, pool) in [
                    (1, 1, 64, 20_000),
                    (16, 1, 256, 20_000),
                    (1, 16, 100, 20_000),
                    (16, 16, 256, 20_000),
                    (1, 16, 128, 700),
                ]
                .into_iter()
                .skip(if self.small { 3 } else { 0 })
                {
                    // One engine after the other with and without overlap, two with graphs, two without.
                    let captured = if engines % 4 < 2 { &CAPTURED[..] } else { &[] };
                    let pool = if self.small { pool / 4 } else { pool };
                    let mut engine = self.capturing(
                        name,
                        EngineConfig {
                            page_size,
                            max_running_requests: batch,
                            chunked_prefill_size: chunk,
                            max_total_tokens: pool,
                            ..config(shape)
                        },
                        captured,
                    );
                    if engines % 2 == 1 {
                        engine = engine.overlapped().expect("a thread");
                    }
                    // What each mode leaves in the prefix cache, the next one finds.
                    for turn in 0..MODES.len() - usize::from(self.small) {
                        let mode = (engines + turn) % MODES.len();
                        let got = answers(&mut engine, &prompts, self.tokens(), MODES[mode].1);
                        let (ours, want) = (texts(&got), texts(&plain[mode]));
                        let wrong = ours.iter().zip(&want).filter(|(a, b)| a != b).count();
                        if wrong > 0 {
                            println!(
                                "{name}, {shape}, pages of {page_size}, batch {batch}, pool of \
                                 {pool}, {}: {wrong} answers differ",
                                MODES[mode].0
                            );
                        }
                        differ += wrong;
                        answered += got.len();
                        tokens += got.iter().map(|a| a.ids.len() as u64 - 1).sum::<u64>();
                        rounds += got.iter().map(|a| a.spec.verify_ct).sum::<u64>();
                    }
                    engines += 1;
                }
            }
            let each = tokens as f64 / rounds.max(1) as f64;
            println!("| {name} | {engines} | {answered} | {differ} | {each:.2} |");
            sound &= differ == 0 && rounds > 0;
        }
        sound
    }

    /// A chain and a tree of each algorithm, by number, and plain decoding.
    fn shapes(&self) -> Vec<(&'static str, usize, Shape)> {
        let of = |&name: &&'static str| [(name, 0, Shape::chain(3)), (name, 1, shape(3, 4, 12))];
        self.algorithms.iter().flat_map(of).chain([(PLAIN, 0, Shape::PLAIN)]).collect()
    }

    /// Whether a round that is replayed differs in anything from one that is launched.
    fn graphs(&self) -> bool {
        let prompts = self.prompts();
        let mut sound = true;
        for (name, at, shape) in self.shapes() {
            let (mode, change) = MODES[1 + at];
            let of = |captured: &[usize]| {
                let mut engine = self.capturing(name, config(shape), captured);
                answers(&mut engine, &prompts, self.tokens(), change)
            };
            let (got, want) = (of(&CAPTURED), of(&[]));
            let differ = got.iter().zip(&want).filter(|(a, b)| a != b).count();
            println!("graphs, {name}, {shape}, {mode}: {differ} of {} differ", want.len());
            sound &= differ == 0;
        }
        sound
    }

    /// Algorithms whose answers are held to grammars, their trees and verifications.
    fn held(&self) -> impl Iterator<Item = (&'static str, Shape, Verify)> {
        let held = [
            ("EAGLE3", Shape::chain(3), Verify::Match),
            ("EAGLE3", shape(5, 4, 16), Verify::Match),
            // Deeper than it has nodes.
            ("EAGLE3", shape(5, 4, 4), Verify::Match),
            ("MTP", shape(3, 4, 12), Verify::Match),
            ("NGRAM", shape(5, 4, 16), Verify::Match),
            ("STANDALONE", shape(3, 4, 12), Verify::Rejection),
        ];
        held.into_iter().filter(|(name, ..)| self.algorithms.contains(name))
    }

    /// Answers that are held to grammars, with overlap where there are drafts.
    fn held_answers(
        &self,
        name: &str,
        shape: Shape,
        verify: Verify,
        change: Change,
    ) -> Vec<Answer> {
        let mut engine = self.engine(name, EngineConfig { verify, ..config(shape) });
        if name != PLAIN {
            engine = engine.overlapped().expect("a thread");
        }
        let held = |request: &mut Request, at: usize| {
            change(request, at);
            request.grammar = Some(Arc::new(GRAMMARS[at % GRAMMARS.len()]));
        };
        answers(&mut engine, &self.prompts()[1..], 20, held)
    }

    /// Whether answers that keep to a grammar are those without drafts, and keep to it.
    fn grammars(&self) -> bool {
        let mut sound = true;
        let keep = |answers: &[Answer]| {
            let rules = answers.iter().zip(GRAMMARS.iter().cycle());
            rules.filter(|(answer, rule)| keeps_to(**rule, answer)).count()
        };
        for (mode, change) in [MODES[0], MODES[1]] {
            let want = self.held_answers(PLAIN, Shape::PLAIN, Verify::Match, change);
            sound &= keep(&want) == want.len();
            for (name, shape, verify) in self.held() {
                // What is drawn differs from what is chosen, unless one token alone is likely.
                let same = verify == Verify::Match || mode == "greedy";
                let got = self.held_answers(name, shape, verify, change);
                let (ours, theirs) = (texts(&got), texts(&want));
                let differ = ours.iter().zip(&theirs).filter(|(a, b)| same && a != b).count();
                let kept = keep(&got);
                let right: u64 = got.iter().map(|answer| answer.spec.correct_drafts).sum();
                println!(
                    "grammars, {name}, {shape}, {mode}, {verify}: {differ} of {} differ, {kept} keep \
                     to it, {right} drafts were right",
                    got.len()
                );
                sound &= differ == 0 && right > 0 && kept == got.len();
            }
        }
        sound
    }

    /// Whether two engines, one of which processes prompts, answer and draft as one does.
    fn transfer(&self) -> bool {
        let prompts = self.prompts();
        let mut sound = true;
        for (name, at, shape) in self.shapes() {
            let (mode, change) = MODES[at];
            let config = |page_size| EngineConfig { page_size, ..config(shape) };
            let want = answers(&mut self.engine(name, config(1)), &prompts, self.tokens(), change);
            let decode = self.engine(name, config(1)).overlapped().expect("a thread");
            let mut pair = EnginePair::new(self.engine(name, config(16)), decode);
            let got = across(&mut pair, &prompts, self.tokens(), change);
            let differ = got.iter().zip(&want).filter(|(a, b)| a != b).count();
            let counts = pair.decode.stats().snapshot();
            println!(
                "two engines, {name}, {shape}, {mode}: {differ} of {} answers differ, {} \
                 received, {} drafts rebuilt",
                got.len(),
                counts.received,
                counts.rebuilt_drafts
            );
            sound &= differ == 0 && counts.received == got.len() as u64;
            sound &= counts.rebuilt_drafts == 0;
        }
        sound
    }

    /// Acceptance beside the tables.
    fn tables(&self) -> bool {
        let (chains, trees) = (table("tiny-acceptance.json"), table("tiny-tree-acceptance.json"));
        let cpu = Arc::new(CpuBackend::new(IsaChoice::Auto, 0).unwrap());
        let cpu = Device { backend: cpu, kv: KvDtype::F32, small: false, algorithms: Vec::new() };
        println!(
            "\n| algorithm | shape | kind | ours | theirs | off by | texts that are the CPU's | of those: \
             ours | the CPU's | off by |"
        );
        println!("|---|---|---|---|---|---|---|---|---|---|");
        let mut worst: f64 = 0.0;
        for (name, key) in [("EAGLE3", "eagle3"), ("STANDALONE", "standalone")] {
            if !self.algorithms.contains(&name) {
                continue;
            }
            for (shape, row, table) in [
                (Shape::chain(3), "3", &chains),
                (Shape::chain(7), "7", &chains),
                (shape(5, 4, 16), "steps 5 topk 4 nodes 16", &trees),
            ] {
                let ours = accepted(shape, |config| self.engine(name, config));
                let on_cpu = accepted(shape, |config| cpu.engine(name, config));
                let same = |at: usize| ours[at].ids == on_cpu[at].ids;
                let (of_same, cpu_same) =
                    (acceptance_in(&ours, same), acceptance_in(&on_cpu, same));
                let count = (0..ours.len()).filter(|&at| same(at)).count();
                let off = |ours: f64, theirs: f64| 100.0 * (ours / theirs - 1.0);
                for (kind, length) in acceptance_in(&ours, |_| true) {
                    let theirs = table[key][&kind][row].as_f64().expect("the table has the row");
                    worst = worst.max(off(length, theirs).abs());
                    let same = of_same.get(&kind).zip(cpu_same.get(&kind)).map(|(ours, theirs)| {
                        format!("{ours:.3} | {theirs:.3} | {:+.1} %", off(*ours, *theirs))
                    });
                    println!(
                        "| {name} | {shape} | {kind} | {length:.3} | {theirs:.3} | {:+.1} % | {count} of \
                         {} | {} |",
                        off(length, theirs),
                        ours.len(),
                        same.unwrap_or_else(|| "| |".into()),
                    );
                }
            }
        }
        println!("the largest difference: {worst:.2} %");
        worst <= 2.0
    }
}

impl Device<CudaBackend> {
    /// Whether ids, log-probabilities and what came of every draft are those of the CPU, bit for bit.
    fn equals_cpu(&self) -> bool {
        let backend = Arc::new(CpuBackend::new(IsaChoice::Auto, 0).unwrap());
        let algorithms = self.algorithms.clone();
        let cpu = Device { backend, kv: self.kv, small: self.small, algorithms };
        let prompts = self.prompts();
        let few: Vec<Vec<u32>> = prompts.iter().skip(1).step_by(4).cloned().collect();
        let mut sound = true;
        let mut compare = |what: &str, got: Vec<Answer>, want: Vec<Answer>| {
            let differ = got.iter().zip(&want).filter(|(a, b)| a != b).count();
            let tokens: usize = want.iter().map(|answer| answer.ids.len()).sum();
            println!("{what}: {differ} of {} answers differ ({tokens} tokens)", want.len());
            sound &= differ == 0;
        };
        for (mode, change) in MODES {
            let got = self.plain(&prompts, self.tokens(), change);
            compare(&format!("plain, {mode}"), got, cpu.plain(&prompts, self.tokens(), change));
        }
        let verifications = [
            Verify::Match,
            Verify::TargetOnly { single: 0.6, accumulated: 0.9 },
            Verify::Rejection,
        ];
        for &name in &self.algorithms {
            let steps = if name == "MTP" { 3 } else { 5 };
            for (at, shape) in [Shape::chain(3), shape(steps, 4, 16)].into_iter().enumerate() {
                for (mode, change) in MODES {
                    let verify = verifications[if mode == "seeded" { 2 * at } else { 0 }];
                    let config = EngineConfig { verify, ..config(shape) };
                    let of = |engine: &mut Scheduler| answers(engine, &few, self.tokens(), change);
                    let got = of(&mut self.engine(name, config.clone()));
                    let want = of(&mut cpu.engine(name, config));
                    compare(&format!("{name}, {shape}, {mode}, {verify}"), got, want);
                }
            }
        }
        for (name, shape, verify) in self.held() {
            for (mode, change) in [MODES[0], MODES[1]] {
                let got = self.held_answers(name, shape, verify, change);
                let want = cpu.held_answers(name, shape, verify, change);
                compare(&format!("grammars, {name}, {shape}, {mode}, {verify}"), got, want);
            }
        }
        sound
    }
}
