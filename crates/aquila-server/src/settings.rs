//! What a server is told at start.

use std::sync::Arc;
use std::time::Duration;

use aquila_spec::ngram::Corpora;
use aquila_text::{Generator, ReasoningFormat, ToolCallFormat};

use crate::corpus_file::CorpusFolder;
use crate::cors::AllowedOrigins;
use crate::disaggregation::Role;
use crate::keys::Keys;
use crate::tls::Tls;

/// What clients may use up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Connections; past it, the one that has waited longest for its client is closed.
    pub connections: usize,
    /// Bytes of a request's body.
    pub body_bytes: usize,
    /// Bytes of all long bodies together that are read, parsed or tokenized; one body always fits.
    pub bodies_bytes: usize,
    /// Tokens of a prompt; the context bounds it in any case.
    pub prompt_tokens: Option<usize>,
    /// From a request's arrival to its last token.
    pub request_time: Option<Duration>,
    /// For a handshake, for all headers of a request, and for a connection between two requests.
    pub header_time: Duration,
    /// For the body of a request.
    pub body_time: Duration,
    /// For a client that takes none of what is sent to it.
    pub stall_time: Duration,
    /// AnswerStream of one answer that wait for its client; one more gives the answer up.
    pub unread_pieces: usize,
    /// Bytes that hidden states, routed experts and log-probabilities of all answers together may
    /// take until they are sent.
    pub returned_bytes: usize,
    /// Bytes that compiled grammars of all requests together may take, with those that are kept for
    /// later requests.
    pub grammar_bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 4096,
            body_bytes: 8 << 20,
            bodies_bytes: 32 << 20,
            prompt_tokens: None,
            request_time: Some(Duration::from_secs(3600)),
            header_time: Duration::from_secs(75),
            body_time: Duration::from_secs(60),
            stall_time: Duration::from_secs(30),
            unread_pieces: 1024,
            returned_bytes: 1 << 30,
            grammar_bytes: 1 << 30,
        }
    }
}

/// What the server says about its model.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ModelCard {
    /// The name that clients use.
    pub served_name: String,
    /// What the model was loaded from: a folder, a hub id, the name of a shipped model.
    pub path: String,
    /// The `model_type` of its config.
    pub model_type: String,
    /// The `architectures` of its config.
    pub architectures: Vec<String>,
}

impl ModelCard {
    /// Whether a request for `name` is for this model: by its served name, its path, or one of
    /// the names that stand for "whatever is there" (SGLang's default, and what its router writes
    /// where a client names none).
    pub fn answers_to(&self, name: &str) -> bool {
        name == self.served_name || name == self.path || matches!(name, "" | "default" | "unknown")
    }
}

/// A server's settings.
#[derive(Debug, Clone)]
pub struct Settings {
    /// What clients must show, if anything.
    pub keys: Keys,
    /// Certificate and key, where clients speak TLS.
    pub tls: Option<Tls>,
    /// Whose pages may ask from within a browser.
    pub allowed_origins: AllowedOrigins,
    /// Where a span of each request is sent, if anywhere.
    pub traces: Option<crate::TraceEndpoint>,
    /// Whether browsers get the web page at `/`.
    pub web_page: bool,
    /// The model.
    pub model: ModelCard,
    /// Tokens of an answer where a request does not say; each API has its own default else.
    pub default_max_tokens: Option<usize>,
    /// What clients may use up.
    pub limits: Limits,
    /// Why rounds overlap, or why not.
    pub overlap_reason: String,
    /// What the model runs on, in words.
    pub device: String,
    /// The batch sizes that were captured as CUDA graphs.
    pub captured_batches: Vec<usize>,
    /// This server's part in requests that two workers serve, if it has one.
    pub role: Option<Role>,
    /// The corpora that clients may change, where drafts come from them.
    pub corpora: Option<Arc<Corpora>>,
    /// How the model writes calls of tools, where a flag says so.
    pub tool_calls: Option<ToolCallFormat>,
    /// How it writes reasoning, where reasoning is told from answers.
    pub reasoning: Option<ReasoningFormat>,
    /// The folder that clients may add files from as corpora.
    pub corpus_folder: Option<CorpusFolder>,
}

/// How a model writes calls of tools, and why that is thought.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ToolCalls {
    /// The format.
    pub format: ToolCallFormat,
    /// What says so.
    pub reason: &'static str,
}

impl ToolCalls {
    /// What a flag says, or the chat template, or the family.
    pub fn of(generator: &Generator, settings: &Settings) -> Self {
        let template = generator.tokenizer().and_then(|tokenizer| tokenizer.chat_template());
        let shown = template.and_then(ToolCallFormat::of_template);
        let family = ToolCallFormat::of_model_type(&settings.model.model_type);
        let found = [
            (settings.tool_calls, "as the flag says"),
            (shown, "as the chat template shows"),
            (family, "as models of its family write them"),
        ];
        let found = found.into_iter().find_map(|(format, reason)| Some((format?, reason)));
        let (format, reason) =
            found.unwrap_or((ToolCallFormat::Hermes, "since nothing shows another format"));
        Self { format, reason }
    }
}
