//! What is asked of the engine.

use std::sync::Arc;
use std::time::Instant;

use aquila_compute::round::{Grammar, Returned};
use aquila_compute::sampling::Sampling;
use aquila_kv::Namespace;

use crate::config::EngineConfig;
use crate::error::{PromptBound, ReturnedKind, SubmitError};
use crate::executor::Profile;
use crate::listener::{FinishReason, Listener, Outcome, TokenRows, Usage};
use crate::scheduler::Priorities;
use crate::transfer::Transfer;

/// A request's name within its engine; later requests have larger ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

impl std::fmt::Display for RequestId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// When an answer ends by itself.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Limits {
    /// Tokens of the answer; 0 only reads the prompt. Capped by the context.
    pub max_tokens: usize,
    /// Tokens before which no end token may be chosen.
    pub min_tokens: usize,
    /// Tokens that end the text: end-of-text (unless ignored) and the request's own.
    pub stop_ids: Vec<u32>,
}

/// Whether tokens may be drafted for a request. It never changes the answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Speculation {
    /// As the engine sees fit.
    #[default]
    Free,
    /// Not at all.
    Off,
    /// At most so many steps.
    Steps(usize),
}

/// One request for one answer.
pub struct Request {
    /// The prompt.
    pub prompt: Vec<u32>,
    /// How tokens are chosen. The seed counts only if `seeded`.
    pub sampling: Sampling,
    /// Whether `sampling.seed` was given; if not, the engine derives one.
    pub seeded: bool,
    /// Which of several answers to one prompt this is; each has noise of its own.
    pub choice: u32,
    /// Requests of one family share a prompt: they wait until the first has read it.
    pub family: Option<u64>,
    /// When the answer ends.
    pub limits: Limits,
    /// What the answer must be like.
    pub grammar: Option<Arc<dyn Grammar>>,
    /// How many of the most likely tokens to report with each token, if log-probabilities are
    /// wanted at all.
    pub logprobs: Option<usize>,
    /// The same for the tokens of the prompt.
    pub prompt_logprobs: Option<usize>,
    /// What of the rows of its tokens to report.
    pub returned: Returned,
    /// The first token whose rows are reported.
    pub returned_from: usize,
    /// Whether to report the trees that are verified for it.
    pub draft_trees: bool,
    /// Whose cached prefixes may be used.
    pub namespace: Namespace,
    /// Whether tokens may be drafted for it.
    pub speculation: Speculation,
    /// How important it is; what that means is the engine's ([`Priorities`](crate::Priorities)).
    /// It never changes the answer.
    pub priority: Option<i64>,
    /// When to give up.
    pub deadline: Option<Instant>,
    /// Which other engine has a part in it.
    pub transfer: Transfer,
    /// Who hears the tokens.
    pub listener: Box<dyn Listener>,
}

impl Request {
    /// A greedy request for at most `max_tokens` tokens.
    pub fn new(prompt: Vec<u32>, max_tokens: usize, listener: Box<dyn Listener>) -> Self {
        Self {
            prompt,
            sampling: Sampling::default(),
            seeded: false,
            choice: 0,
            family: None,
            limits: Limits { max_tokens, ..Limits::default() },
            grammar: None,
            logprobs: None,
            prompt_logprobs: None,
            returned: Returned::default(),
            returned_from: 0,
            draft_trees: false,
            namespace: Namespace::default(),
            speculation: Speculation::Free,
            priority: None,
            deadline: None,
            transfer: Transfer::None,
            listener,
        }
    }

    /// Ends it before it began.
    pub(crate) fn refuse(self, why: &str) {
        if let Transfer::HandOver(to) = &self.transfer {
            to.failed(why);
        }
        let usage = Usage { prompt_tokens: self.prompt.len(), ..Usage::default() };
        let reason = FinishReason::Abort(why.into());
        self.listener.finished(Outcome { reason, usage, rows: TokenRows::default() });
    }

    /// Refuses what no round could serve.
    pub(crate) fn check(
        &self,
        profile: &Profile,
        config: &EngineConfig,
        priorities: Priorities,
    ) -> Result<(), SubmitError> {
        let vocabulary = profile.vocabulary;
        if self.grammar.is_some() && !profile.grammars {
            return Err(SubmitError::NoGrammars);
        }
        if self.priority.is_some() && priorities == Priorities::Refused {
            return Err(SubmitError::NoPriorities);
        }
        if self.returned.hidden_states && !config.returned.hidden_states {
            return Err(SubmitError::NotReturned(ReturnedKind::HiddenStates));
        }
        if self.returned.routed_experts && !config.returned.routed_experts {
            return Err(SubmitError::NotReturned(ReturnedKind::RoutedExperts));
        }
        if self.prompt.is_empty() {
            return Err(SubmitError::EmptyPrompt);
        }
        let answer = usize::from(self.limits.max_tokens > 0);
        let limit = config.longest_sequence();
        let whole = limit == config.context_length;
        let bound = if whole { PromptBound::Context } else { PromptBound::Pool };
        if self.prompt.len() + answer > limit {
            return Err(SubmitError::PromptTooLong {
                tokens: self.prompt.len(),
                limit: limit.saturating_sub(answer),
                bound,
            });
        }
        let invalid = |place: String, id: u32| SubmitError::InvalidToken { place, id, vocabulary };
        if let Some(at) = self.prompt.iter().position(|&id| id as usize >= vocabulary) {
            return Err(invalid(format!("the prompt, at index {at},"), self.prompt[at]));
        }
        if let Some(&id) = self.limits.stop_ids.iter().find(|&&id| id as usize >= vocabulary) {
            return Err(invalid("the list of stop tokens".into(), id));
        }
        if let Some(&(id, _)) =
            self.sampling.logit_bias.iter().find(|&&(id, _)| id as usize >= vocabulary)
        {
            return Err(invalid("the logit bias".into(), id));
        }
        Ok(())
    }
}
