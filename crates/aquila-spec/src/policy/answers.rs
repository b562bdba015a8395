//! How long answers are.

/// Answers after which half of them are forgotten, and the tokens of one before any was seen.
const ANSWERS: f64 = 64.0;
const FIRST_ANSWER: f64 = 128.0;

/// How long answers are of late.
#[derive(Debug, Clone)]
pub(super) struct Answers {
    tokens: f64,
    ended: f64,
}

impl Default for Answers {
    fn default() -> Self {
        Self { tokens: FIRST_ANSWER, ended: 1.0 }
    }
}

impl Answers {
    /// Tokens came.
    pub(super) fn grow(&mut self, tokens: usize) {
        self.tokens += tokens as f64;
    }

    /// One has ended.
    pub(super) fn end(&mut self) {
        self.ended += 1.0;
        if self.ended > ANSWERS {
            self.tokens *= 0.5;
            self.ended *= 0.5;
        }
    }

    /// The tokens of one, on average.
    pub(super) fn tokens(&self) -> f64 {
        self.tokens / self.ended
    }
}
