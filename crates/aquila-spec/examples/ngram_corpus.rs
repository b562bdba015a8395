//! Builds a corpus of ten million tokens and says what it took, and what a draft from it takes.
//!
//! `cargo run --release -p aquila-spec --example ngram_corpus [TOKENS]`

use std::time::{Duration, Instant};

use aquila_spec::ngram::{Corpora, MatchType, Ngram, NgramScope, NgramSettings};

/// Tokens of a vocabulary.
const VOCABULARY: u64 = 32_000;
/// Drafts that are timed.
const DRAFTS: usize = 20_000;

/// A small generator of numbers, so that every run has the same text.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % limit
    }

    /// Few tokens are frequent and many are rare, as in texts.
    fn token(&mut self) -> u32 {
        let below = self.below(VOCABULARY) + 1;
        self.below(below) as u32
    }
}

/// New tokens, and every few dozen of them a piece of what came before.
fn text(tokens: usize) -> Vec<u32> {
    let mut numbers = Numbers(1);
    let mut text = Vec::with_capacity(tokens + 256);
    while text.len() < tokens {
        let new = 8 + numbers.below(56);
        text.extend((0..new).map(|_| numbers.token()));
        let length = (4 + numbers.below(124) as usize).min(text.len());
        let start = numbers.below((text.len() - length + 1) as u64) as usize;
        text.extend_from_within(start..start + length);
    }
    text.truncate(tokens);
    text
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let tokens = match std::env::args().nth(1) {
        Some(tokens) => tokens.parse()?,
        None => Corpora::MOST_TOKENS,
    };
    let text = text(tokens);
    let corpora = Corpora::new(tokens, VOCABULARY as usize);
    let start = Instant::now();
    let mut load = corpora.load("text")?;
    for chunk in text.chunks(4096) {
        load.push(chunk);
    }
    let corpus = load.finish()?;
    let took = start.elapsed().as_secs_f64();
    let per_token = corpus.bytes() as f64 / tokens as f64;
    println!(
        "{tokens} tokens in {took:.1} s, {} MiB ({per_token:.0} bytes a token)",
        corpus.bytes() >> 20
    );
    for match_type in [MatchType::Bfs, MatchType::Prob] {
        let scope = NgramScope::Request;
        let settings = NgramSettings { match_type, scope, ..NgramSettings::default() };
        let shape = settings.shape(NgramSettings::NODES)?;
        let mut ngram = Ngram::new(settings, corpora.clone())?;
        let mut numbers = Numbers(2);
        let mut times: Vec<Duration> = (0..DRAFTS as u64)
            .map(|request| {
                // A piece of the text behind tokens of its own, as a request would have it.
                let length = 1 + numbers.below(64) as usize;
                let at = numbers.below((tokens - length) as u64) as usize;
                let mut context: Vec<u32> = (0..64).map(|_| numbers.token()).collect();
                context.extend_from_slice(&text[at..at + length]);
                ngram.read(request, &context);
                let start = Instant::now();
                std::hint::black_box(ngram.tree(request, &context, shape));
                let took = start.elapsed();
                ngram.forget(request);
                took
            })
            .collect();
        times.sort_unstable();
        let at = |share: f64| times[(DRAFTS as f64 * share) as usize].as_secs_f64() * 1e6;
        println!("a draft by {match_type:?}: p50 {:.1} us, p99 {:.1} us", at(0.5), at(0.99));
    }
    Ok(())
}
