//! The choice for one row of logits, in as few passes as the query allows.
//!
//! It answers what [`definition::choose`](super::definition::choose) answers, bit for bit.

use std::cell::RefCell;

use super::definition::{WEIGHTLESS, lowest_allowed, min_p_floor, scaled, weight};
use super::gumbel::{Leader, Race};
use super::top_k_top_p::{self, Nucleus, Row, nucleus_of};
use super::weight::{BLOCK, maxima, total, total_of};
use super::{Candidate, Choice, SampleQuery, Weights, noise, penalties};
use crate::{DraftIds, math};

/// Memory that choices of one thread share, so that none allocates.
#[derive(Default)]
struct Scratch {
    adjusted: Vec<f32>,
    maxima: Vec<f32>,
    spare: Vec<f32>,
    keys: Vec<u64>,
    near: Vec<Leader>,
    spread: Vec<f32>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// Chooses for one row; `logits` are that row's.
pub fn choose(logits: &[f32], query: &SampleQuery<'_>) -> Choice {
    SCRATCH.with_borrow_mut(|scratch| scratch.choose(logits, query))
}

impl Scratch {
    fn choose(&mut self, logits: &[f32], query: &SampleQuery<'_>) -> Choice {
        let Some(top) = query.top_logprobs else {
            let token = query.given.unwrap_or_else(|| self.token(logits, query, None));
            return Choice { token, logprob: None, top: Vec::new() };
        };
        let raw_max = maxima(logits, &mut self.maxima);
        let max = scaled(raw_max, 1.0);
        let row = Row { values: logits, maxima: &self.maxima, temperature: 1.0, max };
        let log_total = match max > f32::NEG_INFINITY {
            true => math::ln(total(logits, &self.maxima, 1.0, max)),
            false => 0.0,
        };
        let logprob = |l: f32| (f64::from(l - max) - log_total) as f32;
        row.most_likely(top, &mut self.spare, &mut self.keys);
        self.keys.sort_unstable();
        let top = self
            .keys
            .iter()
            .map(|&key| (top_k_top_p::token(key), logprob(top_k_top_p::logit(key))))
            .collect();

        let token = query.given.unwrap_or_else(|| self.token(logits, query, Some(raw_max)));
        let chosen = logits.get(token as usize).copied().unwrap_or(f32::NEG_INFINITY);
        let chosen = scaled(chosen, 1.0);
        let possible = chosen > f32::NEG_INFINITY;
        let logprob = if possible { logprob(chosen) } else { f32::NEG_INFINITY };
        Choice { token, logprob: Some(logprob), top }
    }

    /// The token alone; `raw_max` is the largest logit where `maxima` holds those of `logits`.
    fn token(&mut self, logits: &[f32], query: &SampleQuery<'_>, raw_max: Option<f32>) -> u32 {
        match self.prepare(logits, query, raw_max) {
            Field::Nothing => lowest_allowed(query, logits.len()),
            Field::Greedy(first, _) => first,
            Field::Row(race, max) => race.over_row(self.row(logits, query, max)).token,
            Field::Keys(race) => race.over_keys(&self.keys).token,
        }
    }

    /// What a draft offers, best first: see [`topk_candidates`].
    fn topk_candidates(
        &mut self,
        logits: &[f32],
        query: &SampleQuery<'_>,
        count: usize,
    ) -> Vec<Candidate> {
        let certain = |token: u32| vec![Candidate { token, probability: 1.0 }];
        let mut near = std::mem::take(&mut self.near);
        let offered = match self.prepare(logits, query, None) {
            Field::Nothing => Vec::new(),
            Field::Greedy(first, _) if count == 1 => certain(first),
            Field::Greedy(_, max) => self.most_likely(logits, query, max, count),
            Field::Row(race, max) => {
                let row = self.row(logits, query, max);
                let leader = race.over_row(row);
                if count == 1 {
                    certain(leader.token)
                } else {
                    race.near_in_row(row, leader, NEAR, &mut near);
                    best_of(&mut near, leader, count)
                }
            }
            Field::Keys(race) => {
                let leader = race.over_keys(&self.keys);
                if count == 1 {
                    certain(leader.token)
                } else {
                    race.near_in_keys(&self.keys, leader, NEAR, &mut near);
                    best_of(&mut near, leader, count)
                }
            }
        };
        self.near = near;
        offered
    }

    /// The distribution of which the token is a sample: see [`filtered_probs`].
    fn filtered_probs(&mut self, logits: &[f32], query: &SampleQuery<'_>) -> Weights {
        match self.prepare(logits, query, None) {
            Field::Nothing => Weights::certain(lowest_allowed(query, logits.len())),
            Field::Greedy(first, _) => Weights::certain(first),
            Field::Row(race, max) => {
                let row = self.row(logits, query, max);
                let mut tokens = Vec::new();
                for (block, &largest) in row.maxima.iter().enumerate() {
                    if scaled(largest, row.temperature) - max < WEIGHTLESS {
                        continue;
                    }
                    let start = block * BLOCK;
                    let values = &row.values[start..row.values.len().min(start + BLOCK)];
                    for (&l, token) in values.iter().zip(start as u32..) {
                        let z = scaled(l, row.temperature);
                        if z > f32::NEG_INFINITY && race.admits(z, token) {
                            tokens.push((token, weight(z - max)));
                        }
                    }
                }
                Weights::new(tokens)
            }
            Field::Keys(race) => {
                let kept =
                    self.keys.iter().map(|&key| (top_k_top_p::token(key), top_k_top_p::logit(key)));
                let kept = kept.filter(|&(token, z)| race.admits(z, token));
                Weights::new(kept.map(|(token, z)| (token, weight(z - race.max))).collect())
            }
        }
    }

    fn most_likely(
        &mut self,
        logits: &[f32],
        query: &SampleQuery<'_>,
        max: f32,
        count: usize,
    ) -> Vec<Candidate> {
        let mut keys = std::mem::take(&mut self.keys);
        let mut spare = std::mem::take(&mut self.spare);
        let row = Row { temperature: 1.0, ..self.row(logits, query, max) };
        let total = total(row.values, row.maxima, 1.0, max);
        row.most_likely(count, &mut spare, &mut keys);
        keys.sort_unstable();
        let candidate = |&key: &u64| Candidate {
            token: top_k_top_p::token(key),
            probability: (weight(top_k_top_p::logit(key) - max) / total) as f32,
        };
        let offered = keys.iter().map(candidate).collect();
        (self.keys, self.spare) = (keys, spare);
        offered
    }

    /// The row that [`Scratch::prepare`] left: adjusted where the query changes it.
    fn row<'a>(&'a self, logits: &'a [f32], query: &SampleQuery<'_>, max: f32) -> Row<'a> {
        let values = if penalties::is_needed(query) { self.adjusted.as_slice() } else { logits };
        Row { values, maxima: &self.maxima, temperature: query.sampling.temperature, max }
    }

    /// Adjusts and filters: what is left is in `keys`, or is a part of the row.
    fn prepare(&mut self, logits: &[f32], query: &SampleQuery<'_>, raw_max: Option<f32>) -> Field {
        let (values, raw_max) = match penalties::is_needed(query) {
            true => {
                penalties::adjust(logits, query, &mut self.adjusted);
                (self.adjusted.as_slice(), None)
            }
            false => (logits, raw_max),
        };
        let max = raw_max.unwrap_or_else(|| maxima(values, &mut self.maxima));
        if max == f32::NEG_INFINITY {
            return Field::Nothing;
        }
        let sampling = query.sampling;
        let first = first_of(values, &self.maxima, max);
        if sampling.is_greedy() {
            return Field::Greedy(first, scaled(max, 1.0));
        }

        let temperature = sampling.temperature;
        let max = scaled(max, temperature);
        if max == f32::NEG_INFINITY {
            return Field::Nothing;
        }
        let row = Row { values, maxima: &self.maxima, temperature, max };
        let floor = match sampling.min_p > 0.0 {
            true => min_p_floor(sampling.min_p),
            false => f64::NEG_INFINITY,
        };
        let key = noise::key(sampling.seed, query.choice, query.position);
        let race = Race { key, max, first, floor, limit: u64::MAX };

        let top_k = sampling.top_k as usize;
        let keeps_some = 0 < top_k && top_k < values.len();
        let top_p = f64::from(sampling.top_p);
        if keeps_some {
            row.most_likely(top_k, &mut self.spare, &mut self.keys);
            if top_p < 1.0 {
                let target = top_p * total_of(&self.keys, max);
                nucleus_of(&mut self.keys, max, target, 0.0);
            }
        } else if top_p < 1.0 {
            let target = top_p * total(values, &self.maxima, temperature, max);
            if let Nucleus::UpTo(limit) = row.nucleus(target, &mut self.keys) {
                return Field::Row(Race { limit, ..race }, max);
            }
        } else {
            return Field::Row(race, max);
        }
        // Logits that differ may have equal quotients, of which the lowest id comes first.
        let best = self.keys.iter().min().expect("the largest quotient is kept");
        Field::Keys(Race { first: top_k_top_p::token(*best), ..race })
    }
}

/// What is left of a row once it is adjusted and filtered.
enum Field {
    /// No token is possible.
    Nothing,
    /// A greedy query: the first of the most likely tokens, and its logit.
    Greedy(u32, f32),
    /// The tokens of the row that the race admits; the largest quotient.
    Row(Race, f32),
    /// The tokens in `keys`.
    Keys(Race),
}

/// Scores this far below the best one count for nothing: `e^-6` is a quarter of a percent.
pub(super) const NEAR: f64 = 6.0;

/// The best of those near the leader, with their shares among all that are near.
fn best_of(near: &mut [Leader], leader: Leader, count: usize) -> Vec<Candidate> {
    near.sort_unstable_by(|a, b| b.score.total_cmp(&a.score).then(a.token.cmp(&b.token)));
    let weight_of = |l: &Leader| weight((l.score - leader.score) as f32);
    let total: f64 = near.iter().map(weight_of).sum();
    let candidate =
        |l: &Leader| Candidate { token: l.token, probability: (weight_of(l) / total) as f32 };
    near.iter().take(count).map(candidate).collect()
}

/// What a draft offers after one row: up to `count` tokens, best first, with probabilities.
///
/// The draft's logits are treated as the target's would be: adjusted, filtered, and with the same
/// noise added, so that a draft which agrees with the target about logits agrees with it about the
/// token. Probabilities are shares of the softmax of what results; for a sampled request, of those
/// tokens whose scores are at most `NEAR` below the best. A single candidate is taken for certain.
///
/// Where the draft has a vocabulary of its own, tokens that it lacks are impossible.
pub fn topk_candidates(
    logits: &[f32],
    query: &SampleQuery<'_>,
    count: usize,
    ids: Option<DraftIds<'_>>,
) -> Vec<Candidate> {
    spread(logits, ids, |scratch, logits| scratch.topk_candidates(logits, query, count))
}

/// The distribution of which the token that [`choose`] answers is a sample: adjusted, filtered,
/// without noise; where the query is greedy, that token alone.
pub fn filtered_probs(
    logits: &[f32],
    query: &SampleQuery<'_>,
    ids: Option<DraftIds<'_>>,
) -> Weights {
    spread(logits, ids, |scratch, logits| scratch.filtered_probs(logits, query))
}

/// Does something with a row whose tokens are the target's: those that a draft lacks are
/// impossible.
fn spread<T>(
    logits: &[f32],
    ids: Option<DraftIds<'_>>,
    work: impl FnOnce(&mut Scratch, &[f32]) -> T,
) -> T {
    SCRATCH.with_borrow_mut(|scratch| {
        let Some(DraftIds { ids, vocabulary }) = ids else {
            return work(scratch, logits);
        };
        let mut spread = std::mem::take(&mut scratch.spread);
        spread.clear();
        spread.resize(vocabulary, f32::NEG_INFINITY);
        for (&id, &logit) in ids.iter().zip(logits) {
            spread[id as usize] = logit;
        }
        let done = work(scratch, &spread);
        scratch.spread = spread;
        done
    })
}

/// The first token whose value is `max`.
fn first_of(values: &[f32], maxima: &[f32], max: f32) -> u32 {
    let block = maxima.iter().position(|&m| m == max).expect("some block has the largest value");
    let within = values[block * BLOCK..].iter().position(|&x| x == max);
    (block * BLOCK + within.expect("the block has its largest value")) as u32
}
