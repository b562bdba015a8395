//! A model that drafts and n-grams, together: the n-grams' tree where it promises more, the
//! model's where it does not.
//!
//! Its one invariant: the model knows every text, whoever drafts for it; it is asked for trees,
//! all at once, only where theirs are wanted. Looking n-grams up is nearly free, so they are asked
//! first.
//!
//! What n-grams promise is what they would have been right about so far: each token that becomes
//! certain is compared with what they said before it. What the model promises is how sure its seed
//! is. In the scope of a request nothing else counts, so the choice is a function of the request's
//! text; in the scope of the server, what is counted of all requests does too.

use std::collections::HashMap;

use aquila_compute::Backend;
use aquila_model::Result;

use crate::mixed_worth::{Hits, Known, first_rate};
use crate::ngram::{Guess, Ngram, NgramScope};
use crate::{Algorithm, Declaration, Drafting, Extending, Seed, Tree};

/// Candidates without which a seed does not say how sure it is: a single one is taken for certain.
const CANDIDATES: usize = 2;

/// How many trees each side of a mix drafted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Drafted {
    /// From n-grams.
    pub ngram: u64,
    /// By the model.
    pub model: u64,
}

/// A model that drafts, and n-grams where those promise more.
pub struct Mixed<B: Backend> {
    declaration: Declaration,
    model: Box<dyn Algorithm<B>>,
    ngram: Ngram,
    known: Known,
    requests: HashMap<u64, Course>,
    drafted: Drafted,
}

/// What is kept of a request.
#[derive(Default)]
struct Course {
    hits: Hits,
    /// In the scope of the server, what was said of the tokens to come.
    said: Option<Said>,
    drafted: Drafted,
}

/// What both sides said when a tree was drafted.
struct Said {
    /// The tokens that there were.
    tokens: usize,
    guesses: Vec<Guess>,
    /// The model's first draft, and how likely it seemed.
    first: Option<(u32, f32)>,
    /// The model's tree, where it drafted one.
    tree: Option<Tree>,
}

impl<B: Backend> Mixed<B> {
    /// Of `model` and `ngram`, under a name of its own.
    pub fn new(name: &'static str, model: Box<dyn Algorithm<B>>, ngram: Ngram) -> Self {
        let declaration = Declaration { name, ..model.declaration().clone() };
        let (known, drafted) = (Known::default(), Drafted::default());
        Self { declaration, model, ngram, known, requests: HashMap::new(), drafted }
    }

    /// How many trees each side has drafted.
    pub fn drafted(&self) -> Drafted {
        self.drafted
    }

    fn counts_all(&self) -> bool {
        self.ngram.settings().scope == NgramScope::Server
    }

    /// Reads what is new of a request, and counts what n-grams said of it.
    fn read(&mut self, request: u64, tokens: &[u32]) {
        let counts_all = self.counts_all();
        let Self { ngram, known, requests, .. } = self;
        let course = requests.entry(request).or_default();
        for at in ngram.tokens_read(request)..tokens.len() {
            if let Some(guess) = ngram.guess(request) {
                course.hits.count(&guess, tokens[at]);
                if counts_all {
                    known.count_guess(&guess, tokens[at]);
                }
            }
            ngram.read(request, &tokens[..=at]);
        }
        if let Some(said) = course.said.take_if(|said| said.tokens < tokens.len()) {
            said.count(&tokens[said.tokens..], known);
        }
    }

    /// The tree from n-grams, if it promises more than the model's would.
    fn tree_of_ngrams(&mut self, request: &Drafting<'_>) -> Option<Tree> {
        let Drafting { request: number, tokens, shape, seed, .. } = *request;
        self.read(number, tokens);
        let (tree, guesses) = self.ngram.tree_with_guesses(number, tokens, shape);
        let counts_all = self.counts_all();
        let course = self.requests.entry(number).or_default();
        let greedy = request.asking.sampling.is_greedy();
        let worth = self.known.of_ngrams(&course.hits, &guesses, shape, greedy);
        let better = tree.len() > 1 && worth >= self.known.of_model(&seed.offer, shape, greedy);
        let drafted = |of: &mut Drafted| if better { of.ngram += 1 } else { of.model += 1 };
        drafted(&mut course.drafted);
        drafted(&mut self.drafted);
        if counts_all {
            let likely = first_rate(&seed.offer, greedy);
            let first = seed.offer.candidates.first().map(|first| (first.token, likely));
            course.said = Some(Said { tokens: tokens.len(), guesses, first, tree: None });
        }
        better.then_some(tree)
    }
}

impl Said {
    /// Counts what was said of tokens that have become certain.
    fn count(&self, tokens: &[u32], known: &mut Known) {
        if let (Some((token, likely)), Some(&first)) = (self.first, tokens.first()) {
            known.count_first(likely, token == first);
        }
        for (guess, &token) in self.guesses.iter().zip(tokens) {
            // Those of texts were counted as the texts were read.
            if guess.corpus {
                known.count_guess(guess, token);
            }
            if guess.token != token {
                break;
            }
        }
        let Some(tree) = &self.tree else { return };
        let mut at = 0;
        for (depth, &token) in (1..).zip(tokens) {
            if tree.first_child(at).is_none() {
                break;
            }
            let right = tree.child(at, token);
            if depth > 1 {
                known.count_later(depth, right.is_some());
            }
            let Some(right) = right else { break };
            at = right;
        }
    }
}

impl<B: Backend> Algorithm<B> for Mixed<B> {
    fn declaration(&self) -> &Declaration {
        &self.declaration
    }

    fn draft(&mut self, backend: &B, requests: &[Drafting<'_>]) -> Result<Vec<Tree>> {
        let found: Vec<Option<Tree>> = requests.iter().map(|r| self.tree_of_ngrams(r)).collect();
        let wanted: Vec<Drafting<'_>> = requests
            .iter()
            .zip(&found)
            .filter(|(_, found)| found.is_none())
            .map(|(request, _)| request.clone())
            .collect();
        if wanted.is_empty() {
            return Ok(found.into_iter().flatten().collect());
        }
        let trees = self.model.draft(backend, &wanted)?;
        for (request, tree) in wanted.iter().zip(&trees) {
            let course = self.requests.get_mut(&request.request);
            if let Some(said) = course.and_then(|course| course.said.as_mut()) {
                said.tree = Some(tree.clone());
            }
        }
        let mut trees = trees.into_iter();
        Ok(found.into_iter().filter_map(|found| found.or_else(|| trees.next())).collect())
    }

    fn extend(
        &mut self,
        backend: &B,
        requests: &[Extending<'_>],
        hidden: Option<&B::Rows>,
    ) -> Result<Vec<Option<Seed>>> {
        for request in requests {
            self.read(request.request, request.tokens);
        }
        let mut requests = requests.to_vec();
        for (_, candidates) in requests.iter_mut().filter_map(|request| request.seed.as_mut()) {
            *candidates = (*candidates).max(CANDIDATES);
        }
        self.model.extend(backend, &requests, hidden)
    }

    fn begin_anew(&mut self) {
        self.model.begin_anew();
        Algorithm::<B>::begin_anew(&mut self.ngram);
        (self.known, self.drafted) = (Known::default(), Drafted::default());
        self.requests.clear();
    }

    fn leave(&mut self, request: u64, tokens: &[u32]) {
        self.model.leave(request, tokens);
        Algorithm::<B>::leave(&mut self.ngram, request, tokens);
        if let Some(course) = self.requests.remove(&request) {
            let Drafted { ngram, model } = course.drafted;
            let all = self.drafted;
            tracing::debug!(
                "request {request} leaves {}: {ngram} trees from n-grams, {model} by the model; \
                 of all requests {} and {}",
                self.declaration.name,
                all.ngram,
                all.model
            );
        }
    }
}
