//! Acceptance that is simulated, to measure what a round costs with weights that mean nothing.

use crate::sampling::noise;

use super::{Accepted, Tree};

/// How a simulated length follows from the length asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SimulateMethod {
    /// The whole part always, and one more as often as the mean needs.
    #[default]
    MatchExpected,
    /// Each draft is right with the same probability, given that those before it were.
    Multinomial,
}

/// Simulated acceptance.
#[derive(Debug, Clone, PartialEq)]
pub enum Simulate {
    /// Tokens per round on average, the bonus included.
    Length {
        /// The mean to be reached.
        mean: f64,
        /// How.
        method: SimulateMethod,
    },
    /// Each draft is right with the same probability, given that those before it were, whatever
    /// the shape of the tree.
    Rate(RateSchedule),
}

/// Rates that change with the rounds of the engine.
#[derive(Debug, Clone, PartialEq)]
pub struct RateSchedule {
    /// Each rate and the rounds that it lasts; after the last comes the first again.
    pub rates: Vec<(f64, u64)>,
}

impl RateSchedule {
    /// The rate of a round.
    pub fn at(&self, round: u64) -> f64 {
        let period = self.rates.iter().map(|(_, rounds)| rounds).sum::<u64>().max(1);
        let mut left = round % period;
        for &(rate, rounds) in &self.rates {
            if left < rounds {
                return rate;
            }
            left -= rounds;
        }
        0.0
    }
}

/// The round in which acceptance is simulated: the same values give the same length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SimulatedRound {
    /// The request's number.
    pub request: u64,
    /// How many of its trees were verified before.
    pub verified: u64,
    /// The number of the engine's round.
    pub round: u64,
}

impl Simulate {
    /// How likely each of the `drafts` drafts in a row is right, given that those before it were.
    pub fn rate(&self, drafts: usize, round: u64) -> f64 {
        match self {
            Simulate::Length { mean, .. } => rate_of(*mean, drafts),
            Simulate::Rate(schedule) => schedule.at(round),
        }
    }

    /// Keeps as many first children as the simulation says, and ends with the target's choice.
    pub fn accept(&self, tree: &Tree, chosen: &[u32], at: SimulatedRound) -> Accepted {
        let mut longest = vec![0];
        while let Some(child) = longest.last().and_then(|&at| tree.first_child(at)) {
            longest.push(child);
        }
        let drafts = longest.len() - 1;
        let draw =
            |which: u32| noise::uniform(noise::key(at.request, which, at.verified as u32), 0);
        let in_a_row = |rate: f64| (0..drafts).take_while(|&i| draw(i as u32) < rate).count();
        let correct = match self {
            Simulate::Length { mean, method: SimulateMethod::MatchExpected } => {
                let wanted = (mean - 1.0).clamp(0.0, drafts as f64);
                wanted as usize + usize::from(draw(0) < wanted.fract())
            }
            _ => in_a_row(self.rate(drafts, at.round)),
        };
        let path = longest[..=correct].to_vec();
        let mut tokens: Vec<u32> = path[1..].iter().map(|&at| tree.nodes()[at].token).collect();
        tokens.push(chosen[path[correct]]);
        Accepted { path, tokens }
    }
}

/// The rate r for which `1 + r + r^2 + … + r^drafts` is `length`.
fn rate_of(length: f64, drafts: usize) -> f64 {
    let sum = |r: f64| (0..=drafts).fold((0.0, 1.0), |(sum, power), _| (sum + power, power * r)).0;
    let (mut low, mut high) = (0.0, 1.0);
    for _ in 0..50 {
        let middle = (low + high) / 2.0;
        if sum(middle) < length { low = middle } else { high = middle }
    }
    (low + high) / 2.0
}
