//! The choice for one row of logits, in as few passes as the ask allows.
//!
//! It answers what [`definition::choose`](super::definition::choose) answers, bit for bit.

use std::cell::RefCell;

use super::definition::{lowest_allowed, min_p_floor, scaled};
use super::keep::{self, Nucleus, Row, nucleus_of};
use super::race::Race;
use super::weight::{BLOCK, maxima, total, total_of};
use super::{Ask, Choice, adjust, noise};
use crate::math;

/// Memory that choices of one thread share, so that none allocates.
#[derive(Default)]
struct Scratch {
    adjusted: Vec<f32>,
    maxima: Vec<f32>,
    spare: Vec<f32>,
    keys: Vec<u64>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// Chooses for one row; `logits` are that row's.
pub fn choose(logits: &[f32], ask: &Ask<'_>) -> Choice {
    SCRATCH.with_borrow_mut(|scratch| scratch.choose(logits, ask))
}

impl Scratch {
    fn choose(&mut self, logits: &[f32], ask: &Ask<'_>) -> Choice {
        let Some(top) = ask.top_logprobs else {
            let token = ask.given.unwrap_or_else(|| self.token(logits, ask, None));
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
        let top =
            self.keys.iter().map(|&key| (keep::token(key), logprob(keep::logit(key)))).collect();

        let token = ask.given.unwrap_or_else(|| self.token(logits, ask, Some(raw_max)));
        let chosen = logits.get(token as usize).copied().unwrap_or(f32::NEG_INFINITY);
        let chosen = scaled(chosen, 1.0);
        let possible = chosen > f32::NEG_INFINITY;
        let logprob = if possible { logprob(chosen) } else { f32::NEG_INFINITY };
        Choice { token, logprob: Some(logprob), top }
    }

    /// The token alone; `raw_max` is the largest logit where `maxima` holds those of `logits`.
    fn token(&mut self, logits: &[f32], ask: &Ask<'_>, raw_max: Option<f32>) -> u32 {
        let (values, raw_max) = match adjust::is_needed(ask) {
            true => {
                adjust::adjust(logits, ask, &mut self.adjusted);
                (self.adjusted.as_slice(), None)
            }
            false => (logits, raw_max),
        };
        let max = raw_max.unwrap_or_else(|| maxima(values, &mut self.maxima));
        if max == f32::NEG_INFINITY {
            return lowest_allowed(ask.banned, logits.len());
        }
        let sampling = ask.sampling;
        let first = first_of(values, &self.maxima, max);
        if sampling.is_greedy() {
            return first;
        }

        let temperature = sampling.temperature;
        let max = scaled(max, temperature);
        if max == f32::NEG_INFINITY {
            return lowest_allowed(ask.banned, logits.len());
        }
        let row = Row { values, maxima: &self.maxima, temperature, max };
        let floor = match sampling.min_p > 0.0 {
            true => min_p_floor(sampling.min_p),
            false => f64::NEG_INFINITY,
        };
        let key = noise::key(sampling.seed, ask.choice, ask.position);
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
                return Race { limit, ..race }.over_row(row);
            }
        } else {
            return race.over_row(row);
        }
        // Logits that differ may have equal quotients, of which the lowest id comes first.
        let best = self.keys.iter().min().expect("the largest quotient is kept");
        Race { first: keep::token(*best), ..race }.over_keys(&self.keys)
    }
}

/// The first token whose value is `max`.
fn first_of(values: &[f32], maxima: &[f32], max: f32) -> u32 {
    let block = maxima.iter().position(|&m| m == max).expect("some block has the largest value");
    let within = values[block * BLOCK..].iter().position(|&x| x == max);
    (block * BLOCK + within.expect("the block has its largest value")) as u32
}
