//! A model that drafts and n-grams, together: the n-grams' tree where they have been right, the
//! model's elsewhere.
//!
//! One rule, which looks at the n-grams alone: their tree is verified where guesses like its first
//! one (that rest on as long a match, and as certain a one) were right four times in five, counted
//! over this request's text. Its one invariant: the model processes every text, whichever side
//! drafts for it, and the choice is a function of the request's text and of what n-grams know, never
//! of tokens that a draft drew, which would change their distribution.

use std::collections::HashMap;

use crate::ngram::{Guess, Ngram};
use crate::{DraftRequest, HostProposer, Tree};

/// How often guesses must have been right.
const LEAST_RATE: f32 = 0.8;
/// Tokens of a match that is long.
const LONG: usize = 4;
/// How often guesses are taken to be right before any was counted: after a short match, after a
/// long one, and after a long one that nothing else ever followed; and the guesses that this counts
/// for.
const FIRST_RATES: [f32; 3] = [0.3, 0.5, 0.9];
const FIRST_WEIGHT: f32 = 4.0;
/// Guesses that are remembered.
const MEMORY: f32 = 50.0;

/// How many trees each side of a mix drafted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Drafted {
    /// From n-grams.
    pub ngram: u64,
    /// By the model.
    pub model: u64,
}

/// N-grams that draft where they have been right, and leave other requests to a model.
pub struct TrustedNgrams {
    ngram: Ngram,
    requests: HashMap<u64, Course>,
    drafted: Drafted,
}

/// What is kept of a request.
#[derive(Default)]
struct Course {
    /// Guesses of each class that were right, and all of them.
    guesses: [(f32, f32); FIRST_RATES.len()],
    drafted: Drafted,
}

impl Course {
    fn class(guess: &Guess) -> usize {
        match (guess.length >= LONG, guess.sole) {
            (false, _) => 0,
            (true, false) => 1,
            (true, true) => 2,
        }
    }

    fn count(&mut self, guess: &Guess, token: u32) {
        let (right, all) = &mut self.guesses[Self::class(guess)];
        let keep = 1.0 - 1.0 / MEMORY;
        *right = *right * keep + f32::from(u8::from(guess.token == token));
        *all = *all * keep + 1.0;
    }

    fn trusts(&self, guess: &Guess) -> bool {
        let class = Self::class(guess);
        let (right, all) = self.guesses[class];
        let expected = FIRST_WEIGHT * FIRST_RATES[class];
        right + expected >= LEAST_RATE * (all + FIRST_WEIGHT)
    }
}

impl TrustedNgrams {
    /// Of `ngram`.
    pub fn new(ngram: Ngram) -> Self {
        Self { ngram, requests: HashMap::new(), drafted: Drafted::default() }
    }

    /// How many trees each side has drafted.
    pub fn drafted(&self) -> Drafted {
        self.drafted
    }
}

impl HostProposer for TrustedNgrams {
    /// The tree from n-grams, where they have been right.
    fn draft(&mut self, request: &DraftRequest<'_>) -> Option<Tree> {
        let DraftRequest { request: number, tokens, shape } = *request;
        self.read(number, tokens);
        let (tree, first) = self.ngram.tree_with_guess(number, tokens, shape);
        let course = self.requests.entry(number).or_default();
        let trusted = tree.len() > 1 && first.is_some_and(|guess| course.trusts(&guess));
        for drafted in [&mut course.drafted, &mut self.drafted] {
            if trusted { drafted.ngram += 1 } else { drafted.model += 1 }
        }
        trusted.then_some(tree)
    }

    /// Reads what is new of a request, and counts which guesses were right.
    fn read(&mut self, request: u64, tokens: &[u32]) {
        let Self { ngram, requests, .. } = self;
        let course = requests.entry(request).or_default();
        for at in ngram.tokens_read(request)..tokens.len() {
            if let Some(guess) = ngram.guess(request) {
                course.count(&guess, tokens[at]);
            }
            ngram.read(request, &tokens[..=at]);
        }
    }

    fn begin_anew(&mut self) {
        self.ngram.begin_anew();
        self.drafted = Drafted::default();
        self.requests.clear();
    }

    fn leave(&mut self, request: u64, tokens: &[u32]) {
        self.ngram.leave(request, tokens);
        if let Some(course) = self.requests.remove(&request) {
            let Drafted { ngram, model } = course.drafted;
            let all = self.drafted;
            tracing::debug!(
                "request {request} leaves: {ngram} trees from n-grams, {model} by the model; \
                 of all requests {} and {}",
                all.ngram,
                all.model
            );
        }
    }
}
