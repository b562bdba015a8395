//! The argmax of logits plus Gumbel noise, with few logarithms.
//!
//! The winner is the one that the definition names: tokens are passed over only where an upper
//! bound of their score is below the best score so far, with slack for every rounding on the way.

use super::definition::scaled;
use super::noise;
use super::top_k_top_p::{self, Row};
use super::weight::BLOCK;
use super::widest_vectors::{Work, widest};

/// The best token so far.
#[derive(Debug, Clone, Copy)]
pub struct Leader {
    /// Logit plus noise.
    pub score: f64,
    /// The token.
    pub token: u32,
}

/// What a race is run on.
#[derive(Debug, Clone, Copy)]
pub struct Race {
    /// The noise of this position.
    pub key: u64,
    /// The largest logit, and a token that has it.
    pub max: f32,
    /// See `max`.
    pub first: u32,
    /// How far below `max` a logit may be.
    pub floor: f64,
    /// The last key, in the order of preference, that takes part.
    pub limit: u64,
}

impl Race {
    /// The winner of a whole row.
    pub fn over_row(self, row: Row<'_>) -> Leader {
        widest(RowRace { race: self, row, within: None })
    }

    /// Every token of a row whose score is at most `margin` below that of `leader`.
    pub fn near_in_row(self, row: Row<'_>, leader: Leader, margin: f64, out: &mut Vec<Leader>) {
        out.clear();
        widest(RowRace { race: self, row, within: Some((leader, margin, out)) });
    }

    /// Every one of some tokens whose score is at most `margin` below that of `leader`.
    pub fn near_in_keys(self, keys: &[u64], leader: Leader, margin: f64, out: &mut Vec<Leader>) {
        out.clear();
        let lowest = Leader { score: leader.score - margin, ..leader };
        let reach = self.reach(lowest);
        for &key in keys {
            let (logit, token) = (top_k_top_p::logit(key), top_k_top_p::token(key));
            if bound(logit - self.max, noise::bits(self.key, token)) >= reach {
                out.extend(self.score(logit, token).filter(|found| found.score >= lowest.score));
            }
        }
    }

    /// The winner of some tokens.
    pub fn over_keys(self, keys: &[u64]) -> Leader {
        let mut leader = self.begin();
        let mut reach = self.reach(leader);
        for &key in keys {
            let (logit, token) = (top_k_top_p::logit(key), top_k_top_p::token(key));
            if bound(logit - self.max, noise::bits(self.key, token)) >= reach {
                self.enter(logit, token, &mut leader);
                reach = self.reach(leader);
            }
        }
        leader
    }

    fn begin(&self) -> Leader {
        let mut leader = Leader { score: f64::NEG_INFINITY, token: u32::MAX };
        self.enter(self.max, self.first, &mut leader);
        leader
    }

    /// Whether a token takes part.
    pub fn admits(&self, logit: f32, token: u32) -> bool {
        let below = f64::from(logit) - f64::from(self.max);
        below >= self.floor && top_k_top_p::key(logit, token) <= self.limit
    }

    /// Scores one token as the definition does, if it takes part.
    #[inline(never)]
    fn score(&self, logit: f32, token: u32) -> Option<Leader> {
        if !self.admits(logit, token) {
            return None;
        }
        Some(Leader { score: f64::from(logit) + noise::gumbel_of(self.key, token), token })
    }

    fn enter(&self, logit: f32, token: u32, leader: &mut Leader) {
        let Some(found) = self.score(logit, token) else { return };
        if found.score > leader.score || (found.score == leader.score && token < leader.token) {
            *leader = found;
        }
    }

    /// What a token's [`bound`] must reach for the token to be scored.
    #[inline(always)]
    fn reach(&self, leader: Leader) -> f32 {
        // Bounds are good to 1e-4; scores round to the neighbours of the largest logit in f64.
        let slack = 1e-3 + f64::from(self.max).abs() * 1e-15;
        (leader.score - f64::from(self.max) - slack) as f32
    }
}

/// Not less than logit plus noise, up to the slack of [`Race::reach`]; relative to the largest
/// logit, as `d` is.
///
/// With u the uniform number, noise is at most `-ln u`, and for a float `2^e (1 + m)` its
/// logarithm to base 2 is at least `e + m`, which is what its bits say as an integer.
#[inline(always)]
fn bound(d: f32, bits: u64) -> f32 {
    let u = ((bits >> 33) as i32) as f32 * (1.0 / 2_147_483_648.0);
    let log = (u.to_bits() as i32) as f32 * (1.0 / 8_388_608.0) - 127.0;
    d - log * std::f32::consts::LN_2
}

struct RowRace<'a> {
    race: Race,
    row: Row<'a>,
    /// Instead of looking for the winner: who won, how far below is near, and who is.
    within: Option<(Leader, f64, &'a mut Vec<Leader>)>,
}

impl Work for RowRace<'_> {
    type Out = Leader;

    #[inline(always)]
    fn run(self) -> Leader {
        let Self { race, row: Row { values, maxima, temperature, max }, mut within } = self;
        let mut leader = match &within {
            Some((winner, margin, _)) => Leader { score: winner.score - margin, ..*winner },
            None => race.begin(),
        };
        let mut reach = race.reach(leader);
        let mut bounds = [f32::NEG_INFINITY; BLOCK];
        let lowest = if race.limit == u64::MAX { f32::MIN } else { top_k_top_p::logit(race.limit) };
        for (b, &largest) in maxima.iter().enumerate() {
            let highest = scaled(largest, temperature);
            let d = highest - max;
            if d + noise::GUMBEL_HIGH < reach || highest < lowest || f64::from(d) < race.floor - 1.0
            {
                continue;
            }
            let start = b * BLOCK;
            let block = &values[start..values.len().min(start + BLOCK)];
            if let Ok(block) = <&[f32; BLOCK]>::try_from(block) {
                fill(&mut bounds, block, start, temperature, max, race.key);
            } else {
                bounds = [f32::NEG_INFINITY; BLOCK];
                fill(&mut bounds[..block.len()], block, start, temperature, max, race.key);
            }
            let near = bounds.iter().fold(false, |any, &x| any | (x >= reach));
            if !near {
                continue;
            }
            for (i, &l) in block.iter().enumerate() {
                if bounds[i] < reach {
                    continue;
                }
                let (z, token) = (scaled(l, temperature), (start + i) as u32);
                if let Some((_, _, near)) = &mut within {
                    near.extend(race.score(z, token).filter(|f| f.score >= leader.score));
                } else {
                    race.enter(z, token, &mut leader);
                    reach = race.reach(leader);
                }
            }
        }
        leader
    }
}

#[inline(always)]
fn fill(bounds: &mut [f32], block: &[f32], start: usize, temperature: f32, max: f32, key: u64) {
    for (i, (out, &l)) in bounds.iter_mut().zip(block).enumerate() {
        *out = bound(scaled(l, temperature) - max, noise::bits(key, (start + i) as u32));
    }
}
