//! Text in, text out, over an engine that knows only tokens.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use aquila_engine::{
    EngineHandle, FinishReason, Listener, Outcome, RequestId, StopCause, SubmitError, Token,
    TokenRows, Transfer, Usage, Verdict, VerifiedTree,
};

use aquila_spec::SpecStats;

use crate::checked_params::CheckedParams;
use crate::sampling_params::{ParamError, SamplingParams};
use crate::{
    CompiledGrammar, GrammarCompiler, GrammarSpec, StopMatcher, StopStrings, TextStream, Tokenizer,
};

/// What is asked for: a text, or its tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Prompt {
    /// A text, to be tokenized.
    Text(String),
    /// Token ids, taken as they are.
    Ids(Vec<u32>),
}

/// Why a prompt was not taken.
#[derive(Debug, thiserror::Error)]
pub enum GenerateError {
    /// A sampling setting that cannot be used.
    #[error(transparent)]
    Param(#[from] ParamError),
    /// Text for a model without a tokenizer.
    #[error(
        "the model has no tokenizer: give token ids instead of text, prompt_ids for prompt and \
         stop_token_ids for stop"
    )]
    NoTokenizer,
    /// Text that the tokenizer refused.
    #[error(transparent)]
    Text(#[from] crate::Error),
    /// A request that the engine refused.
    #[error(transparent)]
    Submit(#[from] SubmitError),
}

/// What came next of one answer.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Delta {
    /// The tokens that were chosen.
    pub tokens: Vec<Token>,
    /// The text that they made certain; it may lag behind the tokens. Empty without a tokenizer.
    pub text: String,
    /// The tree that the tokens come from, if it was asked for and a round verified one.
    pub tree: Option<Box<VerifiedTree>>,
}

/// How one answer ended.
#[derive(Debug, Clone, PartialEq)]
pub struct End {
    /// The rest of the text.
    pub text: String,
    /// Why it ended.
    pub reason: FinishReason,
    /// The stop string that ended it, if one did.
    pub stop: Option<String>,
    /// What it took.
    pub usage: Usage,
    /// Rows of its tokens, if they were asked for.
    pub rows: TokenRows,
}

/// Hears one answer, on the engine's thread: it must be quick and never block.
pub trait AnswerSink: Send {
    /// The prompt's tokens, if their log-probabilities were asked for.
    fn prompt(&mut self, tokens: Vec<Token>) {
        drop(tokens);
    }

    /// The next piece; false if nobody listens any more.
    fn delta(&mut self, delta: Delta) -> bool;

    /// The end.
    fn end(self: Box<Self>, end: End);
}

/// A model that answers texts with texts.
#[derive(Clone)]
pub struct Generator {
    engine: EngineHandle,
    tokenizer: Option<Tokenizer>,
    eos: Arc<[u32]>,
    defaults: Arc<SamplingParams>,
    families: Arc<AtomicU64>,
    /// Compiles grammars, from the first one on; or why it cannot.
    grammars: Arc<OnceLock<Result<GrammarCompiler, String>>>,
}

impl Generator {
    /// Over `engine`; `eos` are the model's end tokens, `defaults` what requests leave out.
    pub fn new(
        engine: EngineHandle,
        tokenizer: Option<Tokenizer>,
        eos: Vec<u32>,
        defaults: SamplingParams,
    ) -> Self {
        let families = Arc::new(AtomicU64::new(0));
        let grammars = Arc::default();
        let (eos, defaults) = (eos.into(), Arc::new(defaults));
        Self { engine, tokenizer, eos, defaults, families, grammars }
    }

    /// The engine below.
    pub fn engine(&self) -> &EngineHandle {
        &self.engine
    }

    /// The tokenizer, if the model has one.
    pub fn tokenizer(&self) -> Option<&Tokenizer> {
        self.tokenizer.as_ref()
    }

    /// Checks settings, with the defaults for what they leave out.
    pub fn check(&self, params: SamplingParams) -> Result<CheckedParams, GenerateError> {
        let params = params.or(&self.defaults);
        let mut checked = params.check(&self.eos)?;
        if let Some(spec) = params.grammar {
            checked.grammar = Some(self.compile(&spec)?);
        }
        if self.tokenizer.is_none() && !checked.stop.is_empty() {
            return Err(GenerateError::NoTokenizer);
        }
        Ok(checked)
    }

    /// Compiles a grammar, which may take long.
    pub fn compile(&self, spec: &GrammarSpec) -> Result<Arc<CompiledGrammar>, GenerateError> {
        let tokenizer = self.tokenizer.as_ref().ok_or(GenerateError::NoTokenizer)?;
        let logits = self.engine.vocabulary();
        let compiler =
            self.grammars.get_or_init(|| GrammarCompiler::new(tokenizer, logits, &self.eos));
        let compiled = compiler.as_ref().map_err(Clone::clone).and_then(|c| c.compile(spec));
        Ok(compiled.map_err(|why| ParamError { name: spec.name().into(), why })?)
    }

    /// The tokens of a prompt.
    pub fn tokens(&self, prompt: Prompt) -> Result<Vec<u32>, GenerateError> {
        match prompt {
            Prompt::Ids(ids) => Ok(ids),
            Prompt::Text(text) => {
                let tokenizer = self.tokenizer.as_ref().ok_or(GenerateError::NoTokenizer)?;
                Ok(tokenizer.encode(&text, true)?)
            }
        }
    }

    /// Asks for `params.n` answers; `sink` is called once for each, with its index. If one is
    /// refused, those before it are given up.
    pub fn submit(
        &self,
        prompt: Vec<u32>,
        params: &CheckedParams,
        deadline: Option<Instant>,
        sink: impl FnMut(u32) -> Box<dyn AnswerSink>,
    ) -> Result<Vec<RequestId>, GenerateError> {
        self.submit_across(prompt, params, deadline, sink, |_| Transfer::None)
    }

    /// The same for answers in which another engine has a part; `transfer` is called once for each
    /// as well.
    pub fn submit_across(
        &self,
        prompt: Vec<u32>,
        params: &CheckedParams,
        deadline: Option<Instant>,
        mut sink: impl FnMut(u32) -> Box<dyn AnswerSink>,
        mut transfer: impl FnMut(u32) -> Transfer,
    ) -> Result<Vec<RequestId>, GenerateError> {
        let family = (params.n > 1).then(|| self.families.fetch_add(1, Ordering::Relaxed));
        let mut ids = Vec::with_capacity(params.n as usize);
        for choice in 0..params.n {
            let listener = Box::new(TextListener {
                stream: self.tokenizer.as_ref().map(|tokenizer| {
                    let shown = params.shown_special_tokens.clone();
                    tokenizer.stream_showing(params.skip_special_tokens, shown)
                }),
                stops: params.stop.matcher(),
                stop_strings: params.stop.clone(),
                stop_ids: params.limits.stop_ids.clone(),
                min_tokens: params.limits.min_tokens,
                received: 0,
                stopped: None,
                tree: None,
                sink: sink(choice),
            });
            let mut request = params.request(prompt.clone(), choice, family, deadline, listener);
            request.transfer = transfer(choice);
            match self.engine.submit(request) {
                Ok(id) => ids.push(id),
                Err(error) => {
                    ids.into_iter().for_each(|id| self.engine.abort(id));
                    return Err(error.into());
                }
            }
        }
        Ok(ids)
    }
}

/// Turns tokens into text, and ends the request at a stop string.
struct TextListener {
    stream: Option<TextStream>,
    stops: StopMatcher,
    stop_strings: StopStrings,
    /// Sorted.
    stop_ids: Vec<u32>,
    min_tokens: usize,
    received: usize,
    stopped: Option<usize>,
    /// The tree that the next tokens come from.
    tree: Option<Box<VerifiedTree>>,
    sink: Box<dyn AnswerSink>,
}

impl TextListener {
    /// The text that one token makes certain; notes a stop string.
    fn push(&mut self, token: u32) -> crate::Result<String> {
        self.received += 1;
        // The token that ends a text is not part of it.
        if self.stop_ids.binary_search(&token).is_ok() {
            return Ok(String::new());
        }
        let Some(stream) = &mut self.stream else { return Ok(String::new()) };
        let text = stream.push(token)?;
        if self.received < self.min_tokens {
            return Ok(text);
        }
        let piece = self.stops.push(&text);
        self.stopped = piece.stopped;
        Ok(piece.emit)
    }
}

impl Listener for TextListener {
    fn prompt(&mut self, tokens: Vec<Token>) {
        self.sink.prompt(tokens);
    }

    fn tree(&mut self, tree: Box<VerifiedTree>) {
        self.tree = Some(tree);
    }

    fn tokens(&mut self, tokens: &[Token]) -> Verdict {
        let mut text = String::new();
        let mut kept = 0;
        for token in tokens {
            match self.push(token.id) {
                Ok(piece) => text.push_str(&piece),
                Err(error) => return Verdict::Abort(error.to_string()),
            }
            kept += 1;
            if self.stopped.is_some() {
                break;
            }
        }
        let tree = self.tree.take();
        let delta = Delta { tokens: tokens[..kept].to_vec(), text, tree };
        if !self.sink.delta(delta) {
            return Verdict::Abort("nobody listens any more".into());
        }
        if self.stopped.is_some() { Verdict::Stop { kept } } else { Verdict::Continue }
    }

    fn finished(mut self: Box<Self>, outcome: Outcome) {
        let mut text = String::new();
        if self.stopped.is_none() {
            if let Some(stream) = &mut self.stream {
                // What the decoder cannot finish is no text.
                let piece = self.stops.push(&stream.finish().unwrap_or_default());
                text = piece.emit;
                self.stopped = piece.stopped;
            }
            if self.stopped.is_none() {
                text.push_str(&self.stops.finish());
            }
        }
        let Outcome { mut reason, usage, rows } = outcome;
        if self.stopped.is_some() && reason == FinishReason::Length {
            // The last characters, which came with no token of their own, completed a stop string.
            reason = FinishReason::Stop(StopCause::Listener);
        }
        let stop = self.stopped.map(|index| self.stop_strings.strings()[index].clone());
        self.sink.end(End { text, reason, stop, usage, rows });
    }
}

/// What speculation did, under SGLang's names; none where nothing was verified.
pub fn spec_fields(spec: &SpecStats) -> Option<serde_json::Map<String, serde_json::Value>> {
    let fields = serde_json::json!({
        "spec_accept_length": spec.accept_length(),
        "spec_accept_rate": spec.accept_rate(),
        "spec_verify_ct": spec.verify_ct,
        "spec_num_correct_drafts": spec.correct_drafts,
        "spec_num_proposed_drafts": spec.proposed_drafts,
        "spec_correct_drafts_histogram": spec.histogram,
    });
    match fields {
        serde_json::Value::Object(fields) if spec.verify_ct > 0 => Some(fields),
        _ => None,
    }
}
