//! Policies in virtual time: a workload that changes, played in a world with costs of its own.
//!
//! Whether a draft of a token is right depends on the token, its depth and its request alone, so
//! every policy meets the same text. Requests end after so many tokens and others take their
//! places; with a phase come new ones. Drafts process prompts, unless a policy does not want that.
//! A draft that was paused processes what it missed, and after too much cannot resume. A small
//! model and its draft share a cache, and find less of it after the other has run. Results come one
//! round late, and what a round took is known with noise only, from a machine that is faster for a
//! while now and then; time is counted as if it were not.

use aquila_spec::policy::{
    Adaptive, AdaptiveTable, Auto, AutoSettings, CostTable, Decision, Fixed, Policy, PromptRows,
    RequestOutcome, RequestView, RoundOutcome, RoundView, Setting, Timed, Timing,
};
use aquila_spec::{Shape, Tree, Weighted, prune_to_rows};

/// What things cost in a world: seconds measured over a finer grid than any policy is told.
#[derive(Debug, Clone)]
pub struct World {
    pub name: &'static str,
    batches: Vec<usize>,
    nodes: Vec<usize>,
    verify: Vec<Vec<f64>>,
    steps: Vec<usize>,
    draft: Vec<Vec<f64>>,
    draft_row: f64,
    /// How much model and draft disturb each other's cache.
    chill: f64,
}

impl World {
    fn read(name: &'static str, text: &str, chill: f64) -> Self {
        let file: serde_json::Value = serde_json::from_str(text).expect("the fixture is JSON");
        let axis = |key: &str| -> Vec<usize> {
            serde_json::from_value(file[key].clone()).expect("an axis of the fixture")
        };
        let draft: Vec<Vec<Vec<f64>>> =
            serde_json::from_value(file["draft"].clone()).expect("seconds by batch, steps, topk");
        Self {
            name,
            batches: axis("batches"),
            nodes: axis("nodes"),
            verify: serde_json::from_value(file["verify"].clone()).expect("seconds"),
            steps: axis("steps"),
            draft: draft.iter().map(|rows| rows.iter().map(|row| row[0]).collect()).collect(),
            draft_row: file["catch_up"].as_f64().unwrap_or(0.0),
            chill,
        }
    }

    /// Linear between the points of the grid; beyond the last, in proportion.
    fn at(axis: &[usize], value: f64, of: impl Fn(usize) -> f64) -> f64 {
        let last = axis.len() - 1;
        if value >= axis[last] as f64 {
            return of(last) * value / axis[last] as f64;
        }
        match axis.iter().position(|&point| point as f64 > value) {
            None | Some(0) => of(0),
            Some(high) => {
                let (from, to) = (axis[high - 1] as f64, axis[high] as f64);
                of(high - 1) + (of(high) - of(high - 1)) * (value - from) / (to - from)
            }
        }
    }

    pub fn verify(&self, batch: usize, rows: usize) -> f64 {
        let nodes = rows as f64 / batch as f64;
        Self::at(&self.batches, batch as f64, |b| {
            Self::at(&self.nodes, nodes, |n| self.verify[b][n])
        })
    }

    /// Seconds of drafting: what each level adds for the requests that have it.
    pub fn draft(&self, at_level: &[usize]) -> f64 {
        let all = |requests: usize, steps: usize| {
            let of = |b: usize| Self::at(&self.steps, steps as f64, |s| self.draft[b][s]);
            if steps == 0 { 0.0 } else { Self::at(&self.batches, requests as f64, of) }
        };
        let level = |(l, &n): (usize, &usize)| all(n, l + 1) - all(n, l);
        at_level.iter().enumerate().filter(|(_, n)| **n > 0).map(level).sum()
    }

    pub fn plain(&self, batch: usize) -> f64 {
        self.verify(batch, batch)
    }

    pub fn round(&self, batch: usize, rows: usize, at_level: &[usize]) -> f64 {
        self.verify(batch, rows) + self.draft(at_level)
    }

    /// What drafts take that missed so many rows each.
    pub fn resuming(&self, missed: impl Iterator<Item = usize>) -> f64 {
        let missed = missed.filter(|&rows| rows > 0);
        let (requests, rows) = missed.fold((0, 0), |(n, sum), rows| (n + 1, sum + rows));
        if requests == 0 { 0.0 } else { self.draft(&[requests]) + self.draft_row * rows as f64 }
    }

    /// What one draft takes to process a prompt, beside `others` that do so in the same pass.
    pub fn reading(&self, others: usize, tokens: usize) -> f64 {
        let pass = |requests: usize| if requests == 0 { 0.0 } else { self.draft(&[requests]) };
        pass(others + 1) - pass(others) + self.draft_row * (tokens - 1) as f64
    }

    /// Whether drafting hardly pays at best, and disturbs the cache of the model.
    pub fn is_marginal(&self) -> bool {
        self.chill >= 1.0
    }

    /// The same, but that drafting and verifying drafts take so many times as long.
    pub fn with_drafting(&self, times: f64) -> Self {
        let mut world = self.clone();
        world.verify.iter_mut().for_each(|row| row[1..].iter_mut().for_each(|s| *s *= times));
        world.draft.iter_mut().flatten().for_each(|s| *s *= times);
        world
    }

    /// The table that a policy is told, timed as an engine would.
    pub fn table(&self) -> CostTable {
        let largest = *self.batches.last().expect("a batch");
        let seconds = |timing| {
            Ok::<_, ()>(match timing {
                Timing::Round { batch, steps } => {
                    let rows = batch * (steps + 1);
                    let (verify, draft) =
                        (self.verify(batch, rows), self.draft(&vec![batch; steps]));
                    Some(Timed { rows, verify, draft })
                }
                Timing::DraftRow => {
                    Some(Timed { rows: 0, verify: 0.0, draft: self.reading(0, 64) / 64.0 })
                }
            })
        };
        CostTable::measure(self.name.into(), &[1, 8, largest], 7, seconds).expect("nothing fails")
    }
}

/// A stretch of one kind of text at one batch size.
#[derive(Debug, Clone, Copy)]
pub struct Phase {
    pub name: &'static str,
    pub batch: usize,
    /// How often a first draft is right in a request of the middle.
    pub first: f64,
    /// How much less often a draft is right for each level that it is deeper.
    pub fade: f64,
    /// How far the log-odds of the requests lie apart, each way.
    pub spread: f64,
    /// How long plain decoding takes for it, in rounds.
    pub rounds: usize,
}

impl Phase {
    /// How often a draft of this request is right at a depth where its parent was.
    fn rate(&self, request: usize, depth: usize) -> f64 {
        let place = match self.batch {
            1 => 0.0,
            batch => 2.0 * request as f64 / (batch - 1) as f64 - 1.0,
        };
        let rate = self.first * self.fade.powi(depth as i32 - 1);
        let odds = rate / (1.0 - rate) * (self.spread * place).exp();
        odds / (1.0 + odds)
    }

    /// Tokens that a request expects of a round with a chain of so many steps.
    fn expected(&self, request: usize, steps: usize) -> f64 {
        let (mut sum, mut chance) = (1.0, 1.0);
        for depth in 1..=steps {
            chance *= self.rate(request, depth);
            sum += chance;
        }
        sum
    }

    /// Expected tokens per second where every request has a chain of so many steps, and a draft
    /// that reads its prompt if it has any.
    pub fn speed(&self, world: &World, steps: usize) -> f64 {
        let tokens: f64 = (0..self.batch).map(|request| self.expected(request, steps)).sum();
        let levels = vec![self.batch; steps];
        let round = world.round(self.batch, self.batch * (steps + 1), &levels);
        let prompt = if steps == 0 { 0.0 } else { world.reading(0, PROMPT) / ANSWER as f64 };
        1.0 / (round / tokens + prompt)
    }
}

/// Easy code, hard prose, and what drafts cannot follow, at batch 1 → 8 → 32 → 1.
pub fn workload() -> Vec<Phase> {
    let code =
        |batch| Phase { name: "code", batch, first: 0.88, fade: 0.985, spread: 0.8, rounds: 6000 };
    let prose = |batch| Phase { name: "prose", first: 0.5, fade: 0.93, ..code(batch) };
    let noise = |batch| Phase { name: "noise", first: 0.08, fade: 0.9, ..code(batch) };
    vec![
        code(1),
        prose(1),
        noise(1),
        code(1),
        code(8),
        noise(8),
        prose(8),
        code(8),
        code(32),
        prose(32),
        noise(32),
        code(32),
        prose(1),
        code(1),
    ]
}

/// What happened in a round.
#[derive(Debug, Clone, Copy)]
pub struct Round {
    pub tokens: usize,
    /// Tokens that its shapes give on average.
    pub expected: f64,
    pub seconds: f64,
    /// The most steps of any request.
    pub steps: usize,
}

/// A phase as a policy played it.
#[derive(Debug, Clone)]
pub struct Played {
    pub rounds: Vec<Round>,
}

impl Played {
    pub fn seconds(&self) -> f64 {
        self.rounds.iter().map(|round| round.seconds).sum()
    }

    pub fn tokens(&self) -> usize {
        self.rounds.iter().map(|round| round.tokens).sum()
    }

    /// Expected tokens per second of the shapes chosen in some of its rounds.
    pub fn expected_speed(&self, rounds: std::ops::Range<usize>) -> f64 {
        let rounds =
            &self.rounds[rounds.start.min(self.rounds.len())..rounds.end.min(self.rounds.len())];
        let tokens: f64 = rounds.iter().map(|round| round.expected).sum();
        tokens / rounds.iter().map(|round| round.seconds).sum::<f64>()
    }

    pub fn speed(&self) -> f64 {
        self.tokens() as f64 / self.seconds()
    }

    /// The least tokens per second of so many rounds in a row.
    pub fn worst_window(&self, rounds: usize) -> f64 {
        let speed = |window: &[Round]| {
            let tokens: usize = window.iter().map(|round| round.tokens).sum();
            tokens as f64 / window.iter().map(|round| round.seconds).sum::<f64>()
        };
        self.rounds.windows(rounds).map(speed).fold(f64::INFINITY, f64::min)
    }

    /// Whether most of its last rounds drafted.
    pub fn ends_drafting(&self) -> bool {
        let last = &self.rounds[self.rounds.len().saturating_sub(40)..];
        last.iter().filter(|round| round.steps > 0).count() * 2 > last.len()
    }
}

/// A number in [0, 1) that depends on its arguments alone.
pub fn uniform(seed: u64, a: u64, b: u64) -> f64 {
    let mut x =
        seed ^ a.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ b.wrapping_mul(0xD1B5_4A32_D192_ED03);
    for _ in 0..2 {
        x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^= x >> 31;
    }
    (x >> 11) as f64 / (1_u64 << 53) as f64
}

/// Tokens of a prompt, and of an answer.
const PROMPT: usize = 50;
const ANSWER: usize = 200;
/// How long everything takes by turns: a machine is not always as fast as when it was measured.
const MACHINE: [f64; 2] = [1.0, 0.85];
/// Rows that a draft may miss and still return.
const PARKED: usize = 64;

/// What a round takes longer, in plain rounds, in the first rounds after its draft has run if it is
/// plain, or after its draft sat out if it drafts: where both live in one cache, each finds less of it
/// after the other. Measured beside EAGLE3 on `tiny`, where plain rounds after some that drafted took
/// 368, 352, 340, 334, 329, 325, 321, 319, 318, 315 us, and drafts after plain rounds 589, 582, 569,
/// 562, 563, 557 us; beside STANDALONE it was two fifths of that.
const CHILL: [f64; 8] = [0.17, 0.12, 0.08, 0.06, 0.045, 0.03, 0.02, 0.01];
const DRAFT_CHILL: [f64; 5] = [0.105, 0.08, 0.04, 0.02, 0.02];

/// How warm the caches are.
struct Chill {
    /// How much of it there is on this machine.
    share: f64,
    /// Whether the last rounds drafted, how many they were, and how many others were before them.
    drafts: bool,
    rounds: usize,
    before: usize,
}

impl Chill {
    fn new(world: &World) -> Self {
        Self { share: world.chill, drafts: false, rounds: 0, before: 0 }
    }

    /// What a round takes longer, in plain rounds.
    fn of(&mut self, drafts: bool) -> f64 {
        if drafts != self.drafts {
            *self = Self { drafts, rounds: 0, before: self.rounds, ..*self };
        }
        let chills = if drafts { &DRAFT_CHILL[..] } else { &CHILL[..] };
        let chill = chills.get(self.rounds).copied().unwrap_or(0.0);
        self.rounds += 1;
        // A round or two do not fill the caches.
        self.share * chill * (self.before as f64 / 4.0).min(1.0)
    }
}

/// A place in the batch, and who has it.
struct Seat {
    view: RequestView,
    left: usize,
    position: u64,
    admitted: bool,
}

/// Plays all phases, each until its tokens are there.
pub fn play(policy: &mut dyn Policy, phases: &[Phase], world: &World, seed: u64) -> Vec<Played> {
    let mut late: Option<(Setting, Vec<RequestOutcome<'static>>, f64)> = None;
    let mut ids = 0..;
    let mut enter = |left: usize, position: u64, admitted: bool| {
        let view = RequestView::new(ids.next().expect("there are always more"));
        let cap = (!admitted).then_some(0);
        Seat { view: RequestView { cap, ..view }, left, position, admitted }
    };
    let mut seats: Vec<Seat> = Vec::new();
    let mut count = 0;
    let mut chill = Chill::new(world);
    let mut played = Vec::new();
    for phase in phases {
        seats.drain(..).for_each(|seat| policy.leave(seat.view.id));
        // They end one after the other.
        let left = |at: usize| ANSWER * (at + 1) / phase.batch;
        let position = 1_000_000 * played.len() as u64;
        let mut read = 0;
        for at in 0..phase.batch {
            let admitted = policy.reads_prompt(phase.batch, PromptRows::of(PROMPT));
            read += usize::from(admitted);
            seats.push(enter(left(at), position, admitted));
        }
        let mut rounds = Vec::new();
        let mut left = phase.batch * phase.rounds;
        while left > 0 {
            let views: Vec<_> = seats.iter().map(|seat| seat.view).collect();
            let decision = policy.choose(&RoundView { requests: &views });
            if let Some((setting, requests, seconds)) = late.take() {
                let seconds = seconds * (0.95 + 0.1 * uniform(seed, 77, count));
                let seconds = Some(seconds * MACHINE[count as usize / 700 % 2]);
                policy.learn(&RoundOutcome { setting, requests: &requests, seconds });
            }
            count += 1;
            let mut outcomes = Vec::with_capacity(phase.batch);
            let (mut tokens, mut expected, mut levels) = (0, 0.0, Vec::new());
            let (mut missed, mut rows) = (Vec::new(), 0);
            let verified = verified(&decision);
            for (at, (seat, (&shape, &steps))) in
                seats.iter_mut().zip(decision.shapes.iter().zip(&verified)).enumerate()
            {
                let position = seat.position;
                let right = |&depth: &usize| {
                    uniform(seed, at as u64, position + depth as u64) < phase.rate(at, depth)
                };
                let correct = (1..=steps).take_while(right).count();
                seat.position += correct as u64 + 1;
                seat.left = seat.left.saturating_sub(correct + 1);
                tokens += correct + 1;
                expected += phase.expected(at, steps);
                rows += steps + 1;
                levels.resize(shape.steps().max(levels.len()), 0);
                levels[..shape.steps()].iter_mut().for_each(|n| *n += 1);
                outcomes.push(RequestOutcome::chain(seat.view.id, Shape::chain(steps), correct));
                if shape.steps() > 0 {
                    missed.push(seat.view.behind);
                }
                let paused = shape.steps() == 0 && decision.pause;
                seat.view.behind = if paused { seat.view.behind + 1 } else { 0 };
                seat.view.cap = (seat.view.behind > PARKED || !seat.admitted).then_some(0);
                if seat.left == 0 && tokens < left {
                    policy.leave(seat.view.id);
                    let admitted = policy.reads_prompt(phase.batch, PromptRows::of(PROMPT));
                    read += usize::from(admitted);
                    *seat = enter(ANSWER, seat.position, admitted);
                }
            }
            let drafts = !missed.is_empty() || read > 0;
            let seconds = chill.of(drafts) * world.plain(1)
                + world.round(phase.batch, rows, &levels)
                + world.resuming(missed.into_iter());
            late = Some((decision.setting, outcomes, seconds));
            let reading = |others| world.reading(others, PROMPT);
            let seconds = seconds + (0..std::mem::take(&mut read)).map(reading).sum::<f64>();
            rounds.push(Round { tokens, expected, seconds, steps: levels.len() });
            left = left.saturating_sub(tokens);
        }
        played.push(Played { rounds });
    }
    played
}

/// Steps of each request's chain that are verified.
fn verified(decision: &Decision) -> Vec<usize> {
    let chain = |shape: &Shape| {
        let mut tree = Tree::root(0);
        for parent in 0..shape.steps() {
            tree.add(parent, 0, 1.0);
        }
        tree
    };
    let mut trees: Vec<Tree> = decision.shapes.iter().map(chain).collect();
    if let Some(rows) = decision.rows {
        let weighted = trees.iter_mut().zip(&decision.weights);
        let mut weighted: Vec<_> =
            weighted.map(|(tree, &rate)| Weighted { tree, rate, drawn: false }).collect();
        prune_to_rows(&mut weighted, rows);
    }
    trees.iter().map(|tree| tree.len() - 1).collect()
}

/// The worlds that there are to race in.
pub fn worlds() -> [World; 4] {
    [
        World::read("a CPU", include_str!("../../fixtures/costs-cpu-bench.json"), 0.0),
        World::read("like an H200", include_str!("../../fixtures/costs-like-h200.json"), 0.0),
        World::read("a small model", include_str!("../../fixtures/costs-cpu-tiny.json"), 0.4),
        World::read(
            "a small model's head",
            include_str!("../../fixtures/costs-cpu-tiny-eagle3.json"),
            1.0,
        ),
    ]
}

/// Every policy in the race, by name; the last one is `auto`.
pub fn racers(world: &World) -> Vec<(String, Box<dyn Policy>)> {
    let mut all: Vec<(String, Box<dyn Policy>)> =
        vec![("plain".to_owned(), Box::new(Fixed::new(Shape::PLAIN)))];
    for steps in FIXED {
        all.push((format!("fixed {steps}"), Box::new(Fixed::new(Shape::chain(steps)))));
    }
    let adaptive = Adaptive::new(AdaptiveTable::default(), None, Vec::new());
    all.push(("adaptive".to_owned(), Box::new(adaptive.expect("the default table is one"))));
    all.push(("auto".to_owned(), Box::new(auto(world))));
    all
}

/// `auto` as it is by default, with chains of up to 7 steps.
pub fn auto(world: &World) -> Auto {
    Auto::new(AutoSettings::new(Shape::chain(7)), world.table())
}

/// The steps of the fixed policies.
pub const FIXED: [usize; 4] = [1, 3, 5, 7];
