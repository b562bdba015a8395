//! What all handlers share.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use aquila_text::{GenerateError, Generator, Prompt, Tokenizer};

use crate::identifier::Identifiers;
use crate::metrics::Metrics;
use crate::refusal::Refusal;
use crate::settings::Settings;
use crate::under_way::UnderWay;

/// Bytes of text from which tokenizing leaves the threads that serve sockets.
const LONG_TEXT: usize = 16 << 10;

/// The app as handlers share it.
pub(crate) type Shared = Arc<App>;

/// What all handlers share.
pub(crate) struct App {
    pub generator: Generator,
    pub settings: Settings,
    pub under_way: Arc<UnderWay>,
    pub metrics: Arc<Metrics>,
    pub identifiers: Identifiers,
    /// When the server was started, in seconds of Unix time.
    pub started: u64,
    draining: AtomicBool,
}

impl App {
    pub fn new(generator: Generator, settings: Settings) -> Self {
        Self {
            generator,
            settings,
            under_way: Arc::default(),
            metrics: Arc::default(),
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
    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Acquire)
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

    /// The tokens of prompts, which came as `param`.
    pub async fn tokens(
        &self,
        prompts: Vec<Prompt>,
        param: &'static str,
    ) -> Result<Vec<Vec<u32>>, Refusal> {
        let size: usize = prompts.iter().map(text_bytes).sum();
        let generator = self.generator.clone();
        let encode = move || -> Result<Vec<Vec<u32>>, Refusal> {
            let tokens = prompts.into_iter().map(|prompt| generator.tokens(prompt));
            tokens.collect::<Result<_, _>>().map_err(|error| Refusal::of(error, param))
        };
        off_thread(size, encode).await
    }
}

/// Runs `work` over a text of `size` bytes where it keeps nobody waiting.
pub(crate) async fn off_thread<T: Send + 'static>(
    size: usize,
    work: impl FnOnce() -> Result<T, Refusal> + Send + 'static,
) -> Result<T, Refusal> {
    if size < LONG_TEXT {
        return work();
    }
    let lost = |_| Refusal::failed("the text could not be tokenized");
    tokio::task::spawn_blocking(work).await.map_err(lost)?
}

fn text_bytes(prompt: &Prompt) -> usize {
    match prompt {
        Prompt::Text(text) => text.len(),
        Prompt::Ids(_) => 0,
    }
}

/// Seconds since 1970.
pub(crate) fn unix_time() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}
