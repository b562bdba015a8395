//! Policies in virtual time: a workload that changes, played over a table of costs.
//!
//! Whether a draft of a token is right depends on the token, its depth and its request alone, so
//! every policy meets the same text. Requests end after so many tokens and others take their
//! places; with a phase come new ones. Drafts read prompts, unless a policy does not admit that. A
//! draft that sat out takes in what it missed, and after too much cannot return. A small model and
//! its draft share a cache, and find less of it after the other has run. Results come one
//! round late, and what a round took is known with noise only, from a machine that is faster for a
//! while now and then; time is counted as if it were not.

use aquila_spec::Shape;
use aquila_spec::policy::{
    Adaptive, AdaptiveTable, Auto, AutoSettings, CostTable, Fixed, Policy, Reading, RequestOutcome,
    RequestView, RoundCosts, RoundOutcome, RoundView, Setting,
};

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
    pub fn speed(&self, costs: &RoundCosts, steps: usize) -> f64 {
        let tokens: f64 = (0..self.batch).map(|request| self.expected(request, steps)).sum();
        let levels = vec![self.batch; steps];
        let round = costs.round(self.batch, self.batch * (steps + 1), &levels, 1);
        let prompt = if steps == 0 {
            0.0
        } else {
            costs.reading(0, Reading::prompt(PROMPT)) / ANSWER as f64
        };
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
    fn new(table: &CostTable) -> Self {
        let of = |algorithm: &str| table.key.contains("tiny") && table.key.contains(algorithm);
        let share = if of("EAGLE3") { 1.0 } else { 0.0 } + if of("STANDALONE") { 0.4 } else { 0.0 };
        Self { share, drafts: false, rounds: 0, before: 0 }
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
pub fn play(
    policy: &mut dyn Policy,
    phases: &[Phase],
    costs: &RoundCosts,
    seed: u64,
) -> Vec<Played> {
    let mut late: Option<(Setting, Vec<RequestOutcome<'static>>, f64)> = None;
    let mut ids = 0..;
    let mut enter = |left: usize, position: u64, admitted: bool| {
        let view = RequestView::new(ids.next().expect("there are always more"));
        let cap = (!admitted).then_some(0);
        Seat { view: RequestView { cap, ..view }, left, position, admitted }
    };
    let mut seats: Vec<Seat> = Vec::new();
    let mut count = 0;
    let mut chill = Chill::new(costs.table());
    let mut played = Vec::new();
    for phase in phases {
        seats.drain(..).for_each(|seat| policy.leave(seat.view.id));
        // They end one after the other.
        let left = |at: usize| ANSWER * (at + 1) / phase.batch;
        let position = 1_000_000 * played.len() as u64;
        let mut read = 0;
        for at in 0..phase.batch {
            let admitted = policy.admits(phase.batch, Reading::prompt(PROMPT));
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
            let mut missed = Vec::new();
            for (at, (seat, &shape)) in seats.iter_mut().zip(&decision.shapes).enumerate() {
                let position = seat.position;
                let right = |&depth: &usize| {
                    uniform(seed, at as u64, position + depth as u64) < phase.rate(at, depth)
                };
                let correct = (1..=shape.steps()).take_while(right).count();
                seat.position += correct as u64 + 1;
                seat.left = seat.left.saturating_sub(correct + 1);
                tokens += correct + 1;
                expected += phase.expected(at, shape.steps());
                levels.resize(shape.steps().max(levels.len()), 0);
                levels[..shape.steps()].iter_mut().for_each(|n| *n += 1);
                let watched = decision.watch.contains(&at).then(|| right(&1));
                let outcome = RequestOutcome::chain(seat.view.id, shape, correct);
                outcomes.push(RequestOutcome { watched, ..outcome });
                if shape.steps() > 0 || watched.is_some() {
                    missed.push(seat.view.behind);
                }
                seat.view.behind = match (shape.steps(), watched) {
                    (0, None) => seat.view.behind + 1,
                    (0, Some(_)) => 1,
                    _ => 0,
                };
                seat.view.cap = (seat.view.behind > PARKED || !seat.admitted).then_some(0);
                if seat.left == 0 && tokens < left {
                    policy.leave(seat.view.id);
                    let admitted = policy.admits(phase.batch, Reading::prompt(PROMPT));
                    read += usize::from(admitted);
                    *seat = enter(ANSWER, seat.position, admitted);
                }
            }
            let drafts = !missed.is_empty() || read > 0;
            let seconds = chill.of(drafts) * costs.plain(1)
                + costs.round(phase.batch, decision.rows(), &levels, 1)
                + costs.returning(phase.batch, missed.into_iter());
            late = Some((decision.setting, outcomes, seconds));
            let reading = |others| costs.reading(others, Reading::prompt(PROMPT));
            let seconds = seconds + (0..std::mem::take(&mut read)).map(reading).sum::<f64>();
            rounds.push(Round { tokens, expected, seconds, steps: levels.len() });
            left = left.saturating_sub(tokens);
        }
        played.push(Played { rounds });
    }
    played
}

/// The tables that there are to race over.
pub fn tables() -> [(&'static str, CostTable); 4] {
    let read = |text| CostTable::from_json(text).expect("the fixture is a table");
    [
        ("a CPU", read(include_str!("../fixtures/costs-cpu-bench.json"))),
        ("like an H200", read(include_str!("../fixtures/costs-like-h200.json"))),
        ("a small model", read(include_str!("../fixtures/costs-cpu-tiny.json"))),
        ("a small model's head", read(include_str!("../fixtures/costs-cpu-tiny-eagle3.json"))),
    ]
}

/// Every policy in the race, by name; the last one is `auto`.
pub fn racers(table: &CostTable) -> Vec<(String, Box<dyn Policy>)> {
    let mut all: Vec<(String, Box<dyn Policy>)> =
        vec![("plain".to_owned(), Box::new(Fixed::new(Shape::PLAIN)))];
    for steps in FIXED {
        all.push((format!("fixed {steps}"), Box::new(Fixed::new(Shape::chain(steps)))));
    }
    let adaptive = Adaptive::new(AdaptiveTable::default(), None, Vec::new());
    all.push(("adaptive".to_owned(), Box::new(adaptive.expect("the default table is one"))));
    all.push(("auto".to_owned(), Box::new(Auto::new(AutoSettings::default(), table.clone()))));
    all
}

/// The steps of the fixed policies.
pub const FIXED: [usize; 4] = [1, 3, 5, 7];
