//! Sampling settings that were checked, and the requests that they make.

use std::sync::Arc;
use std::time::Instant;

use aquila_compute::round::Grammar;
use aquila_compute::sampling::Sampling;
use aquila_engine::{Limits, Request, Returned, Speculation};

use crate::{ParamError, SamplingParams, StopStrings};

/// The most answers to one prompt.
const MAX_N: u32 = 128;
/// The most tokens reported at each place.
const MAX_TOP_LOGPROBS: usize = 100;
/// The most stop strings, and bytes of all of them.
const MOST_STOPS: (usize, usize) = (256, 16 << 10);
/// The most entries of a list of token ids: each token of an answer is compared with them.
const MOST_TOKEN_IDS: usize = 4096;
/// Tokens of an answer where nothing says how many.
const DEFAULT_MAX_TOKENS: usize = 128;

/// Settings that were checked: what the engine needs, and what stays with the text.
#[derive(Debug, Clone)]
pub struct CheckedParams {
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Whether a seed was given.
    pub seeded: bool,
    /// When the answer ends.
    pub limits: Limits,
    /// Strings that end the text.
    pub stop: StopStrings,
    /// How many answers.
    pub n: u32,
    /// Log-probabilities of the answer: how many of the most likely tokens, if at all.
    pub logprobs: Option<usize>,
    /// Log-probabilities of the prompt: how many of the most likely tokens, if at all.
    pub prompt_logprobs: Option<usize>,
    /// What of the rows of its tokens to report; callers set it from the request itself.
    pub returned: Returned,
    /// The first token whose rows are reported; callers set it from the request itself.
    pub returned_from: usize,
    /// Whether to report the trees that are verified; callers set it from the request itself.
    pub draft_trees: bool,
    /// Whether tokens may be drafted; callers set it from the request itself.
    pub speculation: Speculation,
    /// How important the answer is; callers set it from the request itself.
    pub priority: Option<i64>,
    /// Whether special tokens are no part of the text.
    pub skip_special_tokens: bool,
    /// Special tokens that are part of it all the same; callers set them.
    pub shown_special_tokens: Vec<u32>,
    /// What the answer must be like.
    pub grammar: Option<Arc<dyn Grammar>>,
}

impl SamplingParams {
    /// Checks every setting and fills in what is missing; `eos` are the model's end tokens.
    pub fn check(&self, eos: &[u32]) -> Result<CheckedParams, ParamError> {
        let number = |name, value: Option<f32>, usual, fits: fn(f32) -> bool, expected| {
            let value = value.unwrap_or(usual);
            match fits(value) {
                true => Ok(value),
                false => Err(error(name, format!("must be {expected}, found {value}"))),
            }
        };
        let top_k = self.top_k.unwrap_or(0);
        if !(-1..=i64::from(u32::MAX)).contains(&top_k) {
            return Err(error("top_k", format!("must be at least -1, found {top_k}")));
        }
        let n = self.n.unwrap_or(1);
        if !(1..=MAX_N).contains(&n) {
            return Err(error("n", format!("must be from 1 to {MAX_N}, found {n}")));
        }
        let top = checked_top(self.top_logprobs.unwrap_or(0))?;
        let max_tokens = self.max_tokens.unwrap_or(DEFAULT_MAX_TOKENS);
        let min_tokens = self.min_tokens.unwrap_or(0);
        if min_tokens > max_tokens {
            let why = format!("must be at most max_tokens ({max_tokens}), found {min_tokens}");
            return Err(error("min_tokens", why));
        }
        let entries = [
            ("stop_token_ids", self.stop_token_ids.as_ref().map_or(0, Vec::len)),
            ("logit_bias", self.logit_bias.as_ref().map_or(0, Vec::len)),
        ];
        if let Some((name, count)) = entries.into_iter().find(|(_, n)| *n > MOST_TOKEN_IDS) {
            let why = format!("must have at most {MOST_TOKEN_IDS} tokens, found {count}");
            return Err(error(name, why));
        }
        let bias = self.logit_bias.clone().unwrap_or_default();
        if let Some((id, value)) = bias.iter().find(|(_, value)| !value.is_finite()) {
            let why = format!("must be finite numbers, but token {id} has {value}");
            return Err(error("logit_bias", why));
        }
        let (count, bytes) = self
            .stop
            .iter()
            .flatten()
            .fold((0, 0), |(count, bytes), stop| (count + 1, bytes + stop.len()));
        if count > MOST_STOPS.0 || bytes > MOST_STOPS.1 {
            let why = format!(
                "must have at most {} strings of {} bytes together, found {count} of {bytes}",
                MOST_STOPS.0, MOST_STOPS.1
            );
            return Err(error("stop", why));
        }
        let stop = StopStrings::new(self.stop.clone().unwrap_or_default())
            .map_err(|e| error("stop", e.to_string()))?;
        let mut stop_ids = self.stop_token_ids.clone().unwrap_or_default();
        if !self.ignore_eos.unwrap_or(false) {
            stop_ids.extend(eos);
        }
        stop_ids.sort_unstable();
        stop_ids.dedup();
        let additive =
            |name, value| number(name, value, 0.0, |x| (-2.0..=2.0).contains(&x), "from -2 to 2");
        let sampling = Sampling {
            temperature: number(
                "temperature",
                self.temperature,
                1.0,
                |t| t.is_finite() && t >= 0.0,
                "a number from 0 up",
            )?,
            top_k: top_k.max(0) as u32,
            top_p: number(
                "top_p",
                self.top_p,
                1.0,
                |p| p > 0.0 && p <= 1.0,
                "above 0 and at most 1",
            )?,
            min_p: number("min_p", self.min_p, 0.0, |p| (0.0..=1.0).contains(&p), "from 0 to 1")?,
            repetition_penalty: number(
                "repetition_penalty",
                self.repetition_penalty,
                1.0,
                |x| x.is_finite() && x > 0.0,
                "above 0",
            )?,
            presence_penalty: additive("presence_penalty", self.presence_penalty)?,
            frequency_penalty: additive("frequency_penalty", self.frequency_penalty)?,
            logit_bias: bias,
            seed: self.seed.unwrap_or(0),
        };
        Ok(CheckedParams {
            sampling,
            seeded: self.seed.is_some(),
            limits: Limits { max_tokens, min_tokens, stop_ids },
            stop,
            n,
            logprobs: (self.logprobs.unwrap_or(false) || top > 0).then_some(top),
            prompt_logprobs: self.prompt_logprobs.unwrap_or(false).then_some(top),
            returned: Returned::default(),
            returned_from: 0,
            draft_trees: false,
            speculation: Speculation::Free,
            priority: None,
            skip_special_tokens: true,
            shown_special_tokens: Vec::new(),
            grammar: None,
        })
    }
}

impl CheckedParams {
    /// Sets whether log-probabilities of the answer are reported, with how many of the most likely
    /// tokens, and whether those of the prompt are.
    pub fn set_logprobs(&mut self, top: Option<usize>, prompt: bool) -> Result<(), ParamError> {
        self.logprobs = top.map(checked_top).transpose()?;
        self.prompt_logprobs = prompt.then_some(self.logprobs.unwrap_or(0));
        Ok(())
    }

    /// The request for one of the `n` answers.
    pub fn request(
        &self,
        prompt: Vec<u32>,
        choice: u32,
        family: Option<u64>,
        deadline: Option<Instant>,
        listener: Box<dyn aquila_engine::Listener>,
    ) -> Request {
        Request {
            sampling: self.sampling.clone(),
            seeded: self.seeded,
            choice,
            family,
            limits: self.limits.clone(),
            grammar: self.grammar.clone(),
            logprobs: self.logprobs,
            // One answer reports on the prompt that all of them share.
            prompt_logprobs: self.prompt_logprobs.filter(|_| choice == 0),
            returned: self.returned,
            returned_from: self.returned_from,
            draft_trees: self.draft_trees,
            speculation: self.speculation,
            priority: self.priority,
            deadline,
            ..Request::new(prompt, 0, listener)
        }
    }
}

fn checked_top(top: usize) -> Result<usize, ParamError> {
    if top <= MAX_TOP_LOGPROBS {
        return Ok(top);
    }
    Err(error("top_logprobs", format!("must be at most {MAX_TOP_LOGPROBS}, found {top}")))
}

fn error(name: &str, why: String) -> ParamError {
    ParamError { name: name.into(), why }
}
