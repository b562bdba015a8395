//! What all handlers share.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use aquila_text::{GenerateError, Generator, Prompt, Tokenizer, ToolCallFormat};
use tokio::sync::Semaphore;

use crate::active_requests::ActiveRequests;
use crate::grammars::GrammarStore;
use crate::identifier::Identifiers;
use crate::intake::{Intake, Received};
use crate::metrics::Metrics;
use crate::refusal::Refusal;
use crate::returned::ReturnedRoom;
use crate::settings::{Settings, ToolCalls};

/// The app as handlers share it.
pub(crate) type Shared = Arc<App>;

/// What all handlers share.
pub(crate) struct App {
    pub generator: Generator,
    pub settings: Settings,
    /// Whether it listens to this machine alone.
    pub is_local: bool,
    pub active_requests: Arc<ActiveRequests>,
    pub metrics: Arc<Metrics>,
    pub traces: std::sync::OnceLock<Arc<crate::traces::Traces>>,
    pub identifiers: Identifiers,
    pub intake: Intake,
    pub longest_text: LongestText,
    /// How the model writes calls of tools.
    pub tool_calls: ToolCallFormat,
    pub returned_room: ReturnedRoom,
    /// One probe of the engine runs at a time.
    pub probe: crate::routes::Probe,
    /// One corpus is loaded at a time.
    pub corpus_turn: Arc<Semaphore>,
    pub grammars: Arc<GrammarStore>,
    /// When the server was started, in seconds of Unix time.
    pub started: u64,
    draining: AtomicBool,
}

impl App {
    pub fn new(generator: Generator, settings: Settings, is_local: bool) -> Self {
        let limits = &settings.limits;
        Self {
            intake: Intake::new(limits.bodies_bytes.max(limits.body_bytes)),
            tool_calls: ToolCalls::of(&generator, &settings).format,
            longest_text: LongestText::of(&generator, limits.prompt_tokens),
            returned_room: ReturnedRoom::new(limits.returned_bytes),
            probe: Default::default(),
            corpus_turn: Arc::new(Semaphore::new(1)),
            grammars: Arc::new(GrammarStore::new(limits.grammar_bytes)),
            generator,
            settings,
            is_local,
            active_requests: Arc::default(),
            metrics: Arc::default(),
            traces: Default::default(),
            identifiers: Identifiers::default(),
            started: unix_time(),
            draining: AtomicBool::new(false),
        }
    }

    /// Takes no more requests from now on.
    pub fn drain(&self) {
        self.draining.store(true, Ordering::Release);
    }

    /// Whether no more requests are taken.
    fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Acquire)
    }

    /// Refuses whatever comes to a server whose engine has failed, or that takes no more requests.
    pub fn check_serving(&self) -> Result<(), Refusal> {
        match self.generator.engine().failure() {
            Some(failure) => Err(Refusal::engine_failed(failure)),
            None if self.is_draining() => Err(Refusal::shutting_down()),
            None => Ok(()),
        }
    }

    /// Refuses models that are not served here; none named is the one that is.
    pub fn check_model(&self, name: Option<&str>) -> Result<(), Refusal> {
        match name {
            Some(name) if !self.settings.model.answers_to(name) => {
                Err(Refusal::unknown_model(name, &self.settings.model.served_name))
            }
            _ => Ok(()),
        }
    }

    /// The tokenizer, or a refusal of `param`, which needs one.
    pub fn tokenizer(&self, param: &str) -> Result<&Tokenizer, Refusal> {
        let missing = || Refusal::of(GenerateError::NoTokenizer, param);
        self.generator.tokenizer().ok_or_else(missing)
    }

    /// The tokens of prompts, which came in `body` as `param`.
    pub async fn tokens(
        &self,
        body: &Arc<Received>,
        prompts: Vec<Prompt>,
        param: &'static str,
    ) -> Result<Vec<Vec<u32>>, Refusal> {
        for prompt in &prompts {
            match prompt {
                Prompt::Text(text) => self.longest_text.check(text, param)?,
                Prompt::Ids(ids) => self.longest_text.check_ids(ids, param)?,
            }
        }
        let (generator, longest) = (self.generator.clone(), self.longest_text);
        let encode = move |_: &[u8]| {
            let tokens = prompts.into_iter().map(|prompt| match (prompt, generator.tokenizer()) {
                (Prompt::Ids(ids), _) => Ok(ids),
                (Prompt::Text(text), Some(tokenizer)) => {
                    longest.encode(tokenizer, &text, true, param)
                }
                (Prompt::Text(_), None) => Err(Refusal::of(GenerateError::NoTokenizer, param)),
            });
            tokens.collect::<Result<Vec<_>, _>>()
        };
        body.work(encode).await
    }
}

/// The longest text that the context could hold, by its bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LongestText {
    /// Tokens of the longest prompt.
    tokens: usize,
    /// Bytes that no text of so many tokens exceeds, where the tokenizer says.
    pub bytes: Option<usize>,
}

/// What bounds a prompt, for whoever sent it.
const BOUNDS: &str = "context length, KV pool and limit on prompts";

impl LongestText {
    pub fn of(generator: &Generator, limit: Option<usize>) -> Self {
        let longest = generator.engine().config().longest_sequence();
        let tokens = limit.unwrap_or(longest).min(longest);
        let bytes = generator.tokenizer().and_then(|tokenizer| tokenizer.most_bytes(tokens));
        Self { tokens, bytes }
    }

    /// The tokens of a text, which came as `param`; refuses it where it has too many.
    pub fn encode(
        &self,
        tokenizer: &Tokenizer,
        text: &str,
        add_special: bool,
        param: &str,
    ) -> Result<Vec<u32>, Refusal> {
        self.check(text, param)?;
        let tokens = tokenizer.encode_up_to(text, add_special, self.tokens);
        let tokens = tokens.map_err(|error| Refusal::param(param, error))?;
        tokens.ok_or_else(|| {
            let why = format!(
                "the prompt has more than {} tokens, which is what fits ({BOUNDS})",
                self.tokens
            );
            Refusal::too_long(param, why)
        })
    }

    /// Refuses token ids, which came as `param`, that are too many.
    pub fn check_ids(&self, ids: &[u32], param: &str) -> Result<(), Refusal> {
        if ids.len() <= self.tokens {
            return Ok(());
        }
        let why = format!(
            "the prompt has {} tokens, but at most {} fit ({BOUNDS})",
            ids.len(),
            self.tokens
        );
        Err(Refusal::too_long(param, why))
    }

    /// Refuses a text, which came as `param`, that is certainly too long; nothing is tokenized
    /// for that.
    pub fn check(&self, text: &str, param: &str) -> Result<(), Refusal> {
        match self.bytes {
            Some(most) if text.len() > most => {
                let (tokens, bytes) = (self.tokens, text.len());
                let why = format!(
                    "the text of {bytes} bytes has more than {tokens} tokens, which is what fits \
                     ({BOUNDS}): so many are at most {most} bytes"
                );
                Err(Refusal::too_long(param, why))
            }
            _ => Ok(()),
        }
    }
}

/// Seconds since 1970.
pub(crate) fn unix_time() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}
