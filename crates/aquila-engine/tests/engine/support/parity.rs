//! A grammar that tells whether answers keep to it: parities, and a part that is given.

use aquila_compute::round::{Grammar, GrammarState};
use aquila_compute::sampling::TokenSet;
use aquila_engine::{FinishReason, StopCause};

use super::answers::Answer;

const VOCABULARY: u32 = 8192;
/// The places of an answer at which one token alone is allowed.
const FORCED: std::ops::Range<usize> = 9..16;

/// Even tokens at even places and odd ones at odd places, of which some are given.
#[derive(Debug, Clone, Copy)]
pub struct Parity {
    /// Tokens after which the answer is complete.
    pub length: usize,
    /// The place at which nobody knows what may come next.
    pub fails_at: Option<usize>,
    pub guides_drafts: bool,
}

impl Default for Parity {
    fn default() -> Self {
        Self { length: usize::MAX, fails_at: None, guides_drafts: true }
    }
}

impl Parity {
    fn allows(&self, place: usize, token: u32) -> bool {
        match FORCED.contains(&place) {
            true => token == forced(place),
            // End of text and the like are not words of the grammar.
            false => token > 3 && token as usize % 2 == place % 2,
        }
    }
}

fn forced(place: usize) -> u32 {
    300 + place as u32
}

#[derive(Debug)]
struct Written {
    rule: Parity,
    tokens: Vec<u32>,
    broken: bool,
}

impl Grammar for Parity {
    fn begin(&self) -> Box<dyn GrammarState> {
        Box::new(Written { rule: *self, tokens: Vec::new(), broken: false })
    }

    fn guides_drafts(&self) -> bool {
        self.guides_drafts
    }
}

impl GrammarState for Written {
    fn push(&mut self, token: u32) -> Result<bool, String> {
        assert!(!self.broken, "a state is not used once it has failed");
        let allowed = !self.is_complete() && self.rule.allows(self.tokens.len(), token);
        self.tokens.extend(allowed.then_some(token));
        Ok(allowed)
    }

    fn branch(&self) -> Box<dyn GrammarState> {
        assert!(!self.broken, "a state is not used once it has failed");
        Box::new(Written { rule: self.rule, tokens: self.tokens.clone(), broken: false })
    }

    fn allowed(&mut self) -> Result<TokenSet, String> {
        assert!(!self.broken && !self.is_complete());
        let place = self.tokens.len();
        if self.rule.fails_at == Some(place) {
            self.broken = true;
            return Err(format!("nobody knows what is allowed at {place}"));
        }
        Ok((0..VOCABULARY).filter(|&token| self.rule.allows(place, token)).collect())
    }

    fn is_complete(&self) -> bool {
        self.tokens.len() >= self.rule.length
    }

    fn forced(&mut self) -> Result<Vec<u32>, String> {
        let from = self.tokens.len();
        let end = if FORCED.contains(&from) { FORCED.end.min(self.rule.length) } else { from };
        Ok((from..end).map(forced).collect())
    }
}

pub fn keeps_to(rule: Parity, answer: &Answer) -> bool {
    let last_ends = matches!(answer.reason, Some(FinishReason::Stop(StopCause::Token(_))));
    let tokens = &answer.ids[..answer.ids.len() - usize::from(last_ends)];
    tokens.iter().enumerate().all(|(place, &token)| rule.allows(place, token))
}
