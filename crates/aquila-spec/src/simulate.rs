//! Acceptance that is simulated, to measure what a round costs with weights that mean nothing.

use aquila_compute::choose::noise;

use crate::{Accepted, Tree};

/// How a simulated length follows from the length asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SimulateMethod {
    /// The whole part always, and one more as often as the mean needs.
    #[default]
    MatchExpected,
    /// Each draft is right with the same probability, given that those before it were.
    Multinomial,
}

/// Simulated acceptance: tokens per round, the bonus included.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Simulate {
    /// The mean to be reached.
    pub length: f64,
    /// How.
    pub method: SimulateMethod,
}

impl Simulate {
    /// Keeps as many first children as the simulation says, and ends with the target's choice.
    /// `key` names the request, `round` its round: the same ones give the same length.
    pub fn accept(&self, tree: &Tree, chosen: &[u32], key: u64, round: u64) -> Accepted {
        let mut longest = vec![0];
        while let Some(child) = longest.last().and_then(|&at| tree.first_child(at)) {
            longest.push(child);
        }
        let drafts = longest.len() - 1;
        let draw = |which: u32| noise::uniform(noise::key(key, which, round as u32), 0);
        let correct = match self.method {
            SimulateMethod::MatchExpected => {
                let wanted = (self.length - 1.0).clamp(0.0, drafts as f64);
                wanted as usize + usize::from(draw(0) < wanted.fract())
            }
            SimulateMethod::Multinomial => {
                let rate = rate_of(self.length, drafts);
                (0..drafts).take_while(|&i| draw(i as u32) < rate).count()
            }
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
