//! Who hears the tokens of a request.

use std::num::NonZeroU8;

use aquila_compute::round::{HostRows, VerifiedTree};
use aquila_spec::SpecStats;

/// A token of an answer or of a prompt, with what was asked about it.
#[derive(Debug, Clone, PartialEq)]
pub struct Token {
    /// The token's id.
    pub id: u32,
    /// Its log-probability under the model alone, where asked for.
    pub logprob: Option<f32>,
    /// The most likely tokens at its place, best first, where asked for.
    pub top: Vec<(u32, f32)>,
    /// How deep in its round's tree it was drafted, where it was an accepted draft; none for the
    /// target's own choice: a bonus token, or any token of plain decoding.
    pub drafted: Option<NonZeroU8>,
}

/// What a listener says to the tokens that it was given.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// Go on.
    Continue,
    /// The text is complete with the first `kept` of these tokens.
    Stop {
        /// How many of the tokens belong to the answer.
        kept: usize,
    },
    /// Give the request up, for this reason.
    Abort(String),
}

/// Hears what becomes of one request, on the engine's thread: it must be quick and never block.
pub trait Listener: Send {
    /// The prompt's tokens with their log-probabilities; called once, if asked for, before any
    /// token of the answer. The first token has none.
    fn prompt(&mut self, tokens: Vec<Token>) {
        drop(tokens);
    }

    /// The tree that a round verified, if asked for; called before the tokens that the round
    /// yielded.
    fn tree(&mut self, tree: Box<VerifiedTree>) {
        drop(tree);
    }

    /// The next tokens of the answer, in order, at least one.
    fn tokens(&mut self, tokens: &[Token]) -> Verdict;

    /// The request has ended; nothing follows.
    fn finished(self: Box<Self>, outcome: Outcome);
}

/// What ended a text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StopCause {
    /// This end-of-text or stop token.
    Token(u32),
    /// The listener's verdict, as for a stop string.
    Listener,
    /// Its grammar, which allows nothing more.
    Grammar,
}

/// Why a request ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FinishReason {
    /// The text is complete.
    Stop(StopCause),
    /// The text is as long as it may become.
    Length,
    /// The request was given up; the text says why.
    Abort(String),
    /// What its grammar allows next cannot be found out; the text says why.
    GrammarFailed(String),
}

impl FinishReason {
    /// Why there is no whole answer, where there is none.
    pub fn failure(&self) -> Option<&str> {
        match self {
            FinishReason::Stop(_) | FinishReason::Length => None,
            FinishReason::Abort(why) | FinishReason::GrammarFailed(why) => Some(why),
        }
    }
}

/// What a request took.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens of the answer, the one that ended it included.
    pub completion_tokens: usize,
    /// Tokens of the prompt that were found in the prefix cache at first admission.
    pub cached_tokens: usize,
    /// How often the request lost its KV to others and was resumed.
    pub preemptions: usize,
    /// What came of drafting; all zero where nothing was drafted.
    pub spec: SpecStats,
}

/// Rows of the target that a request asked for: those of its tokens from `from` on, as far as
/// they were computed, each once and in its place whatever became of the request meanwhile.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TokenRows {
    /// The token of the first row.
    pub from: usize,
    /// Hidden states of the prompt's tokens, and of those of the answer but the last.
    pub hidden_states: HostRows<f32>,
    /// The experts of all tokens but the last, the layers of a row one after the other.
    pub routed_experts: HostRows<u32>,
}

impl TokenRows {
    /// Drops the rows of tokens beyond the first `prompt` and the `completion` after them.
    pub(crate) fn cut(&mut self, prompt: usize, completion: usize) {
        let last = (prompt + completion).saturating_sub(1);
        self.hidden_states.truncate(last.max(prompt).saturating_sub(self.from));
        self.routed_experts.truncate(last.saturating_sub(self.from));
    }
}

/// How a request ended.
#[derive(Debug, Clone, PartialEq)]
pub struct Outcome {
    /// Why.
    pub reason: FinishReason,
    /// What it took.
    pub usage: Usage,
    /// What it asked for beside tokens.
    pub rows: TokenRows,
}
