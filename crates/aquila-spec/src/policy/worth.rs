//! What a round is worth: expected tokens and seconds of every way to share nodes out.
//!
//! A candidate shape is a ladder: its nodes, likeliest first. A plan takes from each request's
//! ladder the nodes whose chance of being kept reaches a threshold, down to a number of steps; so
//! a sure request gets more nodes than an unsure one, under one budget. Requests that look alike
//! form a group and are weighed together.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

use super::{RequestView, RoundCosts, Survival};
use crate::Shape;

/// Chances below which nodes are left out; 0 leaves none out.
const THRESHOLDS: [f64; 12] = [0.0, 0.04, 0.08, 0.12, 0.17, 0.23, 0.3, 0.4, 0.5, 0.6, 0.7, 0.82];
const LEVELS: usize = 16;

/// Candidate shapes of one width, and the nodes of the largest, likeliest first.
#[derive(Debug, Clone)]
pub(super) struct Ladder {
    pub(super) largest: Shape,
    /// Steps that a plan may be limited to, ascending.
    steps: Vec<usize>,
    rungs: Vec<Rung>,
}

#[derive(Debug, Clone, Copy)]
struct Rung {
    depth: usize,
    chance: f64,
    /// Whether no likelier node is as deep.
    opens: bool,
}

/// A node that may become a rung.
struct Open {
    chance: f64,
    depth: usize,
}

impl PartialEq for Open {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}
impl Eq for Open {}
impl PartialOrd for Open {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Open {
    fn cmp(&self, other: &Self) -> Ordering {
        self.chance.total_cmp(&other.chance).then(other.depth.cmp(&self.depth))
    }
}

impl Ladder {
    /// One ladder for all chains, one for each tree.
    pub(super) fn all(candidates: &[Shape]) -> Vec<Self> {
        let drafts = || candidates.iter().filter(|shape| shape.steps() > 0);
        let chains = || drafts().filter(|shape| shape.is_chain());
        let mut steps: Vec<usize> = chains().map(Shape::steps).collect();
        steps.sort_unstable();
        steps.dedup();
        let mut all = Vec::new();
        if let Some(&largest) = chains().max_by_key(|shape| shape.steps()) {
            all.push(Self { largest, steps, rungs: Vec::new() });
        }
        for &largest in drafts().filter(|shape| !shape.is_chain()) {
            let steps = (1..=largest.steps()).collect();
            all.push(Self { largest, steps, rungs: Vec::new() });
        }
        all
    }

    /// Puts the nodes in order by what is known now.
    pub(super) fn climb(&mut self, survival: &Survival) {
        self.rungs.clear();
        let (topk, steps) = (self.largest.topk(), self.largest.steps().min(LEVELS));
        let mut open = BinaryHeap::new();
        let offer = |open: &mut BinaryHeap<Open>, depth: usize, chance: f64| {
            for rank in 0..topk {
                open.push(Open { chance: chance * survival.rate_of_rank(depth, rank), depth });
            }
        };
        offer(&mut open, 1, 1.0);
        let mut deepest = 0;
        while self.rungs.len() + 1 < self.largest.nodes() {
            let Some(Open { chance, depth }) = open.pop() else { break };
            self.rungs.push(Rung { depth, chance, opens: depth > deepest });
            deepest = deepest.max(depth);
            if depth < steps {
                offer(&mut open, depth + 1, chance);
            }
        }
    }
}

/// Requests that look alike.
#[derive(Debug, Clone, Copy)]
pub(super) struct Group {
    key: (i32, i32, usize),
    requests: usize,
    /// By depth from 1: how much likelier their nodes are kept than those of all requests.
    ratio: [f64; LEVELS + 1],
}

impl Group {
    /// So many requests instead of those there are.
    pub(super) fn repeat(&mut self, requests: usize) {
        self.requests = requests;
    }
}

/// Sorts the requests of a round into groups; `of` says the group of each.
pub(super) fn group(
    requests: &[RequestView],
    survival: &Survival,
    groups: &mut Vec<Group>,
    of: &mut Vec<usize>,
) {
    groups.clear();
    of.clear();
    // A quarter of a nat: finer differences than that are noise.
    let step = |factor: f64| (factor.ln() * 4.0).round() as i32;
    for request in requests {
        let key = (
            step(survival.factor(request.id)),
            step(survival.factor_of_confidence(request.confidence)),
            request.most_steps().min(LEVELS),
        );
        let at = groups.iter().position(|group| group.key == key).unwrap_or_else(|| {
            groups.push(Group { key, requests: 0, ratio: ratios(survival, key.0, key.1) });
            groups.len() - 1
        });
        groups[at].requests += 1;
        of.push(at);
    }
}

fn ratios(survival: &Survival, all: i32, first: i32) -> [f64; LEVELS + 1] {
    let mut ratio = [1.0; LEVELS + 1];
    let (all, first) = (f64::from(all) / 4.0, f64::from(first) / 4.0);
    for depth in 1..=LEVELS {
        let odds = if depth == 1 { all + first } else { all };
        let by = match odds == 0.0 {
            true => 1.0,
            false => survival.rate_by(depth, odds.exp()) / survival.rate(depth).max(1e-9),
        };
        ratio[depth] = ratio[depth - 1] * by;
    }
    ratio
}

/// A way to share nodes out.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Plan {
    /// The ladder; None is plain decoding.
    pub(super) ladder: Option<usize>,
    /// The most steps of any request.
    pub(super) steps: usize,
    pub(super) threshold: f64,
    /// Rows that are verified.
    pub(super) rows: usize,
    pub(super) tokens: f64,
    pub(super) seconds: f64,
}

impl Plan {
    pub(super) fn plain(batch: usize, seconds: f64) -> Self {
        let tokens = batch as f64;
        Self { ladder: None, steps: 0, threshold: 0.0, rows: batch, tokens, seconds }
    }

    pub(super) fn speed(&self) -> f64 {
        self.tokens / self.seconds
    }

    /// Whether it differs from another by nothing but who gets how many nodes.
    pub(super) fn is_like(&self, other: &Plan) -> bool {
        self.ladder == other.ladder && self.steps == other.steps
    }
}

/// The best plan of all, of those that draft, and of those that are like the one that is held.
#[derive(Debug, Clone, Copy)]
pub(super) struct Choice {
    pub(super) best: Plan,
    pub(super) drafting: Option<Plan>,
    pub(super) held: Option<Plan>,
}

/// Weighs all plans that cost up to `most_seconds`.
pub(super) fn weigh(
    (ladders, groups): (&[Ladder], &[Group]),
    costs: &RoundCosts,
    batch: usize,
    held: Plan,
    most_seconds: f64,
) -> Choice {
    let plain = Plan::plain(batch, costs.plain(batch));
    let mut choice =
        Choice { best: plain, drafting: None, held: held.is_like(&plain).then_some(plain) };
    let costs = costs.of_batch(batch);
    for (at, ladder) in ladders.iter().enumerate() {
        let sums = Sums::of(ladder, groups);
        let topk = ladder.largest.topk();
        // Where all requests look alike, a threshold on a chain is but a number of steps.
        let alike = groups.len() == 1 && ladder.largest.is_chain();
        let thresholds = if alike { 1 } else { THRESHOLDS.len() };
        for (j, &threshold) in THRESHOLDS.iter().enumerate().take(thresholds) {
            let (mut tokens, mut rows, mut draft) = (batch as f64, batch, 0.0);
            for level in 1..=LEVELS {
                let sum = sums.at(level, j);
                if sum.requests == 0 {
                    break;
                }
                draft += costs.level(sum.requests, level, topk);
                tokens += sum.chance;
                rows += sum.nodes;
                let last = level == LEVELS || sums.at(level + 1, j).requests == 0;
                let allowed = ladder.steps.iter().copied().find(|&steps| steps >= level);
                let Some(steps) = allowed.filter(|&steps| steps == level || last) else { continue };
                let seconds = costs.total(rows, level, topk, draft);
                if seconds > most_seconds {
                    continue;
                }
                let plan = Plan { ladder: Some(at), steps, threshold, rows, tokens, seconds };
                if plan.speed() > choice.best.speed() {
                    choice.best = plan;
                }
                let beats = |other: Option<Plan>| other.is_none_or(|o| plan.speed() > o.speed());
                if beats(choice.drafting) {
                    choice.drafting = Some(plan);
                }
                if plan.is_like(&held) && beats(choice.held) {
                    choice.held = Some(plan);
                }
            }
        }
    }
    choice
}

/// What a plan gives the requests of a group.
pub(super) fn share(ladder: &Ladder, group: &Group, plan: &Plan) -> Shape {
    let most = plan.steps.min(group.key.2);
    let (mut nodes, mut steps) = (1, 0);
    for rung in ladder.rungs.iter().filter(|rung| rung.depth <= most) {
        if chance(rung, group) >= plan.threshold {
            nodes += 1;
            steps = steps.max(rung.depth);
        }
    }
    let largest = ladder.largest;
    if steps == 0 || largest.is_chain() {
        return largest.capped(steps);
    }
    let tree = Shape::new(steps, largest.topk(), nodes);
    let tree = tree.expect("a ladder has no more nodes than its tree");
    let looked_up = largest.steps() > 1 && largest.draft_rows() == 0;
    if looked_up { tree.without_rows() } else { tree }
}

fn chance(rung: &Rung, group: &Group) -> f64 {
    (rung.chance * group.ratio[rung.depth]).min(1.0)
}

#[derive(Debug, Clone, Copy, Default)]
struct Sum {
    /// Requests with a node at the level.
    requests: usize,
    nodes: usize,
    chance: f64,
}

/// What each level holds at each threshold.
struct Sums([[Sum; THRESHOLDS.len()]; LEVELS + 2]);

impl Sums {
    fn of(ladder: &Ladder, groups: &[Group]) -> Self {
        let mut sums = Self([[Sum::default(); THRESHOLDS.len()]; LEVELS + 2]);
        for group in groups {
            for rung in ladder.rungs.iter().filter(|rung| rung.depth <= group.key.2) {
                let chance = chance(rung, group);
                let j = THRESHOLDS.iter().rposition(|&t| chance >= t).unwrap_or(0);
                let sum = &mut sums.0[rung.depth][j];
                sum.nodes += group.requests;
                sum.chance += chance * group.requests as f64;
                sum.requests += if rung.opens { group.requests } else { 0 };
            }
        }
        for level in &mut sums.0 {
            for j in (0..THRESHOLDS.len() - 1).rev() {
                let above = level[j + 1];
                level[j].requests += above.requests;
                level[j].nodes += above.nodes;
                level[j].chance += above.chance;
            }
        }
        sums
    }

    fn at(&self, level: usize, threshold: usize) -> Sum {
        self.0[level][threshold]
    }
}
