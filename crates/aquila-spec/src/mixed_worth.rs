//! What the drafts of a mix are worth: how many tokens each side is expected to yield.
//!
//! Its one invariant: an estimate is a function of what was counted and of the guesses or the seed
//! at hand, never of a clock nor of tokens that a draft drew. So a mix that counts a request's own
//! text alone drafts alike in any company, and drafts that are drawn are not picked by what was
//! drawn, which would change their distribution.

use aquila_compute::math::powf;

use crate::ngram::Guess;
use crate::{Offer, Shape};

/// The longest match of each class of lengths but the last, which has no longest.
const LENGTHS: [usize; 7] = [1, 2, 3, 4, 6, 8, 12];
const CLASSES: usize = LENGTHS.len() + 1;
/// How often guesses of each length are right before anything was counted: where one token alone
/// ever followed, and where several did.
const SOLE: [f32; CLASSES] = [0.4, 0.55, 0.62, 0.72, 0.8, 0.86, 0.93, 0.96];
const SEVERAL: [f32; CLASSES] = [0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.65];
/// How often a model's next draft is right where the one before it was, until that was counted.
const LATER: f32 = 0.8;
/// The share of a model's misses that the other branches of a tree make up for.
const BRANCHES: f32 = 0.4;
/// A greedy choice is a draft's favourite more often than the draft gives it probability: by this
/// power of it.
const GREEDY: f64 = 0.6;
/// Where probabilities end that powers are taken of.
const LEAST_SURE: f32 = 1e-6;
/// What sampling leaves of the odds of n-grams. A model's draft is perturbed by the noise that the
/// target will meet; what others wrote is not.
const SAMPLED_ODDS: f32 = 0.5;
/// What a pass of the draft model costs, as a share of a round. A round that drafts from n-grams
/// saves all of them; so much less must its tree yield.
const PASS: f32 = 0.03;
/// How many guesses of its own outweigh what is known of all requests, and after how many what a
/// request knew is forgotten but for a third.
const PULL: f32 = 6.0;
const MEMORY: f32 = 50.0;
/// The same for what is known of all against what is assumed.
const PULL_OF_ALL: f32 = 20.0;
const MEMORY_OF_ALL: f32 = 1000.0;
const DEPTHS: usize = 8;

#[derive(Debug, Clone, Copy, Default)]
struct Tally {
    right: f32,
    trials: f32,
}

impl Tally {
    fn add(&mut self, right: bool, memory: f32) {
        let keep = 1.0 - 1.0 / memory;
        self.right = self.right * keep + f32::from(u8::from(right));
        self.trials = self.trials * keep + 1.0;
    }

    fn rate(&self, prior: f32, pull: f32) -> f32 {
        (self.right + pull * prior) / (self.trials + pull)
    }
}

/// How often guesses were right, by what they rest on.
#[derive(Debug, Clone, Default)]
pub(crate) struct Hits([Tally; 4 * CLASSES]);

fn class_of(guess: &Guess) -> usize {
    LENGTHS.partition_point(|&longest| longest < guess.length)
}

fn place_of(guess: &Guess) -> usize {
    let kind = 2 * usize::from(guess.corpus) + usize::from(guess.sole);
    kind * CLASSES + class_of(guess)
}

impl Hits {
    /// Counts a guess of one request.
    pub fn count(&mut self, guess: &Guess, token: u32) {
        self.0[place_of(guess)].add(guess.token == token, MEMORY);
    }
}

/// What is known of all requests, where they are counted together; else what is assumed.
#[derive(Debug, Default)]
pub(crate) struct Known {
    guesses: Hits,
    /// First drafts of the model, by how sure of them it seemed.
    firsts: [Tally; DEPTHS],
    /// Later ones, by depth.
    laters: [Tally; DEPTHS],
}

impl Known {
    /// Counts a guess.
    pub fn count_guess(&mut self, guess: &Guess, token: u32) {
        self.guesses.0[place_of(guess)].add(guess.token == token, MEMORY_OF_ALL);
    }

    /// Counts a model's first draft, which seemed as likely as `expected`.
    pub fn count_first(&mut self, expected: f32, right: bool) {
        self.firsts[eighth(expected)].add(right, MEMORY_OF_ALL);
    }

    /// Counts a model's draft of a depth above 1 whose parent was right.
    pub fn count_later(&mut self, depth: usize, right: bool) {
        self.laters[depth.min(DEPTHS - 1)].add(right, MEMORY_OF_ALL);
    }

    fn guess_rate(&self, own: &Hits, guess: &Guess, greedy: bool) -> f32 {
        let assumed = if guess.sole { SOLE } else { SEVERAL }[class_of(guess)];
        let place = place_of(guess);
        let of_all = self.guesses.0[place].rate(assumed, PULL_OF_ALL);
        let rate = own.0[place].rate(of_all, PULL);
        if greedy { rate } else { SAMPLED_ODDS * rate / (1.0 - rate + SAMPLED_ODDS * rate) }
    }

    /// What a round yields whose tree follows these guesses, in tokens, with what it saves.
    pub fn of_ngrams(&self, own: &Hits, guesses: &[Guess], shape: Shape, greedy: bool) -> f32 {
        let (mut alive, mut tokens) = (1.0, 1.0);
        for guess in guesses {
            alive *= self.guess_rate(own, guess, greedy);
            tokens += alive;
        }
        tokens * (1.0 + PASS * shape.steps().saturating_sub(1) as f32)
    }

    /// What a round yields whose tree the model drafts, in tokens.
    pub fn of_model(&self, offer: &Offer, shape: Shape, greedy: bool) -> f32 {
        let branches = if shape.is_chain() { 0.0 } else { BRANCHES };
        let first = first_rate(offer, greedy);
        let mut rate = self.firsts[eighth(first)].rate(first, PULL_OF_ALL);
        let (mut alive, mut tokens) = (1.0, 1.0);
        for depth in 1..=shape.steps() {
            alive *= rate + (1.0 - rate) * branches;
            tokens += alive;
            rate = self.laters[(depth + 1).min(DEPTHS - 1)].rate(LATER, PULL_OF_ALL);
        }
        tokens
    }
}

/// How likely the first token of an offer is the target's, as far as the offer itself says.
pub(crate) fn first_rate(offer: &Offer, greedy: bool) -> f32 {
    let sure = offer.candidates.first().map_or(0.0, |first| first.probability);
    let sure = sure.clamp(LEAST_SURE, 1.0);
    if greedy { powf(f64::from(sure), GREEDY) as f32 } else { sure }
}

fn eighth(rate: f32) -> usize {
    ((rate * DEPTHS as f32) as usize).min(DEPTHS - 1)
}
