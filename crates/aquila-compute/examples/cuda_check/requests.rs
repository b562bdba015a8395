//! Lives of random requests: what an engine would tell a round.

use std::sync::Arc;

use aquila_compute::round::{
    Admitted, Batch, BatchRow, DraftGroup, DraftLimits, RateSchedule, RequestOutput, RequestParams,
    Returned, RowWork, Shape, Simulate, SimulateMethod, TableChange, Tree, TreeLimits, TreeRows,
    Verify,
};
use aquila_compute::sampling::Sampling;

use crate::random::{Kind, Random};
use crate::rounds::random_shape;

/// Which draft a setting has.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Draft {
    None,
    Recurrent { lookahead: usize },
    Layers { layers: usize, chained: bool },
}

/// What stays for one life.
#[derive(Debug, Clone)]
pub struct Setting {
    pub seed: u64,
    pub places: usize,
    pub longest: usize,
    /// Slots of one request's table.
    pub table: usize,
    pub vocabulary: usize,
    pub ids: Option<Vec<u32>>,
    pub draft: Draft,
    pub shape: Shape,
    pub verify: Verify,
    pub hidden: bool,
    pub parked_rows: usize,
    pub chunk: usize,
    pub rounds: usize,
    /// Whether acceptance is simulated, and how.
    pub simulate: Option<Simulate>,
    pub kind: Logits,
}

/// What logits look like.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Logits {
    /// Nearly the same after every row, so that drafts are often right.
    Alike,
    /// Few different values.
    Ties,
    /// One value for all tokens.
    Flat,
    /// The likeliest tokens one behind the other.
    Sorted,
    /// Infinities, what is not a number, zeros of both signs.
    Odd,
}

impl Setting {
    /// What is random of life `life`.
    pub fn random(random: &mut Random, life: usize) -> Self {
        let draft = match random.below(5) {
            0 => Draft::None,
            1 => Draft::Layers { layers: 1 + random.below(4), chained: random.below(2) == 0 },
            _ => Draft::Recurrent { lookahead: random.below(2) },
        };
        let steps = match draft {
            Draft::Layers { layers, .. } => layers,
            _ => 6,
        };
        let shape = random_shape(random, steps);
        let draft = match draft {
            Draft::Layers { chained, .. } => Draft::Layers { layers: shape.steps(), chained },
            draft => draft,
        };
        let vocabulary = [7, 40, 300, 5000, 20_000][life % 5];
        // Rows that many thread blocks share, but few of them.
        let long = vocabulary > 5000;
        let some = random.below(3) == 0 && draft != Draft::None;
        let ids = some.then(|| (0..vocabulary as u32).filter(|_| random.below(3) > 0).collect());
        let longest = 24 + random.below(if long { 6 } else { 60 });
        Self {
            seed: random.next(),
            places: 1 + random.below(if long { 2 } else { 9 }),
            longest,
            table: longest + 4 * shape.nodes().max(shape.draft_rows()) + 80,
            vocabulary,
            ids: ids.filter(|ids: &Vec<u32>| !ids.is_empty()),
            draft,
            shape,
            verify: match random.below(4) {
                0 => Verify::Rejection,
                1 => Verify::TargetOnly {
                    single: [0.3, 1.0][random.below(2)],
                    accumulated: [0.5, 1.0][random.below(2)],
                },
                _ => Verify::Match,
            },
            hidden: draft != Draft::None && random.below(3) > 0,
            parked_rows: [0, 2, 64][random.below(3)],
            chunk: 1 + random.below(if long { 40 } else { 12 }),
            rounds: if long { 10 } else { 12 + random.below(30) },
            simulate: match random.below(8) {
                0 => Some(Simulate::Length {
                    mean: 1.0 + random.below(40) as f64 / 10.0,
                    method: SimulateMethod::MatchExpected,
                }),
                1 => Some(Simulate::Length { mean: 2.3, method: SimulateMethod::Multinomial }),
                2 => Some(Simulate::Rate(RateSchedule { rates: vec![(0.8, 3), (0.3, 2)] })),
                _ => None,
            },
            kind: match random.below(9) {
                0 => Logits::Ties,
                1 => Logits::Flat,
                2 => Logits::Sorted,
                3 => Logits::Odd,
                _ => Logits::Alike,
            },
        }
    }

    /// The KV groups of the draft.
    pub fn groups(&self) -> Vec<DraftGroup> {
        match self.draft {
            Draft::None => Vec::new(),
            Draft::Recurrent { lookahead } => {
                vec![DraftGroup { lookahead, tree: TreeRows::EveryLevel }]
            }
            Draft::Layers { layers, .. } => (0..layers)
                .map(|layer| DraftGroup { lookahead: 1 + layer, tree: TreeRows::Level(layer) })
                .collect(),
        }
    }

    /// Rows of the largest pass.
    pub fn rows(&self) -> usize {
        let level = self.shape.topk() * self.shape.steps();
        self.places * (self.longest + self.shape.nodes().max(level) + 8)
    }

    /// Outputs whose logits come at a time.
    pub fn piece(&self) -> usize {
        1 + self.seed as usize % self.outputs()
    }

    /// Outputs of the largest pass.
    pub fn outputs(&self) -> usize {
        self.places * (self.shape.nodes().max(self.longest) + 8)
    }

    /// Slots of each store.
    pub fn slots(&self) -> usize {
        self.places * self.table
    }
}

/// One round.
pub struct Script {
    pub number: usize,
    pub batch: Batch,
    pub catch_up: usize,
    pub given: Vec<(usize, Tree)>,
    seed: u64,
    kind: Logits,
}

impl Script {
    /// The logits of a pass.
    pub fn logits(&self, pass: usize, rows: usize, width: usize) -> Vec<f32> {
        let mut common = Random(self.seed);
        let mut random = Random(self.seed ^ (pass as u64 + 1).wrapping_mul(0x1234_5678_9abc));
        let base: Vec<f32> = (0..width).map(|_| 9.0 * common.value(Kind::Even)).collect();
        let mut values = Vec::with_capacity(rows * width);
        for _ in 0..rows {
            for (token, &base) in base.iter().enumerate() {
                let noise = random.value(Kind::Even);
                values.push(match self.kind {
                    Logits::Alike => base + 0.7 * noise,
                    Logits::Ties => (base + noise).round() / 2.0,
                    Logits::Flat => 0.25,
                    Logits::Sorted => (0.01 * noise - token as f32) * 9.0 / width as f32,
                    Logits::Odd => match random.below(12) {
                        0 => f32::NAN,
                        1 => f32::NEG_INFINITY,
                        2 if random.below(20) == 0 => f32::INFINITY,
                        3 => 0.0,
                        4 => -0.0,
                        5 => 1e38 * noise,
                        _ => base + noise,
                    },
                });
            }
        }
        values
    }
}

/// A request as its engine knows it.
struct Request {
    params: Arc<RequestParams>,
    tokens: usize,
    read: usize,
    goal: usize,
    ended: bool,
    missed: usize,
}

/// The requests of one life.
pub struct Life<'a> {
    setting: &'a Setting,
    requests: Vec<Option<Request>>,
    next: u64,
}

impl<'a> Life<'a> {
    pub fn new(setting: &'a Setting) -> Self {
        Self { setting, requests: (0..setting.places).map(|_| None).collect(), next: 0 }
    }

    fn params(&mut self, random: &mut Random, prompt: usize) -> RequestParams {
        let setting = self.setting;
        self.next += 1;
        let greedy = random.below(2) == 0;
        let vocabulary = setting.vocabulary;
        let token = |random: &mut Random| random.below(vocabulary) as u32;
        let penalties = random.below(3) == 0;
        // Of long rows, more than the device lists is to be kept and told.
        let (top_k, tops): (&[u32], &[usize]) = match vocabulary {
            5000.. => (&[0, 0, 0, 50, 600], &[3, 300]),
            _ => (&[0, 0, 1, 3, 50, 100_000], &[0, 1, 3, 20]),
        };
        let sampling = Sampling {
            temperature: if greedy { 0.0 } else { [0.1, 0.7, 1.0, 3.0][random.below(4)] },
            top_k: top_k[random.below(top_k.len())],
            top_p: [1.0, 1.0, 0.95, 0.9, 0.3, 0.0][random.below(6)],
            min_p: [0.0, 0.0, 0.05, 0.9, 1.0][random.below(5)],
            repetition_penalty: if penalties { [1.0, 1.3, 0.8][random.below(3)] } else { 1.0 },
            presence_penalty: if penalties { 0.5 } else { 0.0 },
            frequency_penalty: if penalties { [0.0, 0.4][random.below(2)] } else { 0.0 },
            logit_bias: match random.below(3) {
                0 => (0..random.below(6))
                    .map(|_| (token(random), random.value(Kind::Even)))
                    .collect(),
                _ => Vec::new(),
            },
            seed: random.next(),
        };
        let drafts = setting.draft != Draft::None || random.below(2) == 0;
        let mut limits = match drafts && random.below(8) > 0 {
            true => DraftLimits {
                shape: setting.shape,
                groups: setting.groups().len(),
                lookahead: 1,
                candidates: setting.shape.topk(),
                verify: setting.verify,
            },
            false => DraftLimits::NONE,
        };
        if greedy {
            limits.verify = Verify::Match;
        }
        let likely = || Sampling { temperature: 0.0, ..sampling.clone() };
        let told = |random: &mut Random| match random.below(4) {
            0 => Some(tops[random.below(tops.len())]),
            _ => None,
        };
        RequestParams {
            id: self.next,
            draft_sampling: matches!(limits.verify, Verify::TargetOnly { .. }).then(likely),
            choice: random.below(3) as u32,
            stop_ids: (0..random.below(3)).map(|_| token(random)).collect(),
            min_tokens: random.below(6),
            grammar: None,
            prompt,
            longest: setting.longest.min(prompt + 1 + random.below(30)),
            logprobs: told(random),
            prompt_logprobs: told(random),
            returned: Returned { hidden_states: random.below(4) == 0, routed_experts: false },
            draft_trees: random.below(3) == 0,
            limits,
            sampling,
        }
    }

    /// The next round.
    pub fn script(&mut self, random: &mut Random, number: usize) -> Script {
        let setting = self.setting;
        let mut batch = Batch { round: number as u64 + 5, ..Batch::default() };
        for place in 0..setting.places {
            let leaves = self.requests[place].as_ref().is_some_and(|request| {
                let often = if request.ended { 2 } else { 25 };
                random.below(often) == 0
            });
            if leaves {
                self.requests[place] = None;
                batch.departed.push(place);
            }
            if self.requests[place].is_none() && random.below(3) > 0 {
                self.admit(random, place, &mut batch);
            }
        }
        let mut given = Vec::new();
        let mut missed_most = 0;
        for place in 0..setting.places {
            let Some(request) = &mut self.requests[place] else { continue };
            let params = request.params.clone();
            if request.read < request.goal {
                let rows = (1 + random.below(setting.chunk)).min(request.goal - request.read);
                let rows = request.read..request.read + rows;
                let last = rows.end == request.goal;
                let fresh = request.tokens == params.prompt;
                let outputs = match (params.prompt_logprobs, last && fresh) {
                    (Some(_), _) if fresh => rows.clone(),
                    (_, true) => rows.end - 1..rows.end,
                    _ => rows.end..rows.end,
                };
                request.read = rows.end;
                let work = RowWork::Prefill { rows, outputs, last };
                batch.rows.push(BatchRow { place, work });
                continue;
            }
            let shape = match random.below(4) {
                0 => Shape::PLAIN,
                1 => setting.shape.capped(1 + random.below(setting.shape.steps())),
                _ => setting.shape,
            };
            let shape = if params.drafts() { shape } else { Shape::PLAIN };
            let pause = setting.draft != Draft::None && random.below(2) == 0;
            if shape == Shape::PLAIN && pause {
                request.missed += 1;
            }
            missed_most = missed_most.max(request.missed);
            let rate = random.below(100) as f32 / 99.0;
            batch.rows.push(BatchRow { place, work: RowWork::Decode { shape, rate, pause } });
            let granted = params.granted(shape, request.tokens);
            let drafted = setting.draft == Draft::None || random.below(6) == 0;
            if drafted && granted.steps() > 0 && params.limits.verify != Verify::Rejection {
                given.push((place, tree(random, granted, setting.vocabulary)));
            }
        }
        batch.limits = TreeLimits {
            row_budget: (random.below(3) == 0).then(|| random.below(3 * setting.places + 4)),
            fill: random.below(10) == 0,
        };
        // Steps may be enqueued for more rows than there are.
        batch.bound = random.below(setting.places + 1);
        Script {
            number,
            batch,
            // As many passes as all that was missed could need.
            catch_up: match setting.draft {
                Draft::None => 0,
                _ => (missed_most * setting.places).div_ceil(setting.chunk) + 2,
            },
            given,
            seed: random.next(),
            kind: setting.kind,
        }
    }

    fn admit(&mut self, random: &mut Random, place: usize, batch: &mut Batch) {
        let setting = self.setting;
        let prompt = 1 + random.below(setting.longest.min(20) - 2);
        let params = Arc::new(self.params(random, prompt));
        // Some go on after they were preempted.
        let answered = match random.below(4) {
            0 => random.below(params.longest - prompt),
            _ => 0,
        };
        let tokens: Vec<u32> =
            (0..prompt + answered).map(|_| random.below(setting.vocabulary) as u32).collect();
        let goal = if answered == 0 { prompt } else { tokens.len() - 1 };
        for group in 0..params.groups() {
            let first = batch.slots.len();
            let mut slots: Vec<u32> =
                (0..setting.table as u32).map(|i| (place * setting.table) as u32 + i).collect();
            for i in (1..slots.len()).rev() {
                slots.swap(i, random.below(i + 1));
            }
            batch.slots.extend(slots);
            let slots = first..batch.slots.len();
            batch.tables.push(TableChange { place, group, from: 0, slots });
        }
        self.requests[place] = Some(Request {
            params: params.clone(),
            tokens: tokens.len(),
            read: 0,
            goal,
            ended: false,
            missed: 0,
        });
        let rounds = random.below(5) as u64;
        batch.admitted.push(Admitted {
            place,
            params,
            tokens,
            matched: 0,
            complete: false,
            rounds,
        });
    }

    /// Takes what came of a round.
    pub fn hear(&mut self, script: &Script, outputs: &[Option<RequestOutput>]) {
        for (row, output) in script.batch.rows.iter().zip(outputs) {
            let (Some(request), Some(output)) = (&mut self.requests[row.place], output) else {
                continue;
            };
            request.tokens += output.tokens.len();
            request.ended |= output.ended.is_some();
        }
    }
}

/// A tree as the host would draft it.
fn tree(random: &mut Random, shape: Shape, vocabulary: usize) -> Tree {
    let mut tree = Tree::root(random.below(vocabulary) as u32);
    while tree.len() < shape.nodes() && random.below(12) > 0 {
        let parent = random.below(tree.len());
        let wide = tree.children(parent).count() >= shape.topk();
        if tree.nodes()[parent].depth < shape.steps() && !wide {
            let probability = random.below(100) as f32 / 99.0;
            tree.add(parent, random.below(vocabulary) as u32, probability);
        } else if random.below(20) == 0 {
            break;
        }
    }
    tree
}
