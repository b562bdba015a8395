//! What can go wrong with text, each said so that the reader knows what to change.

use std::path::PathBuf;

/// The result of this crate's operations.
pub type Result<T> = std::result::Result<T, Error>;

/// What can go wrong with text and tokens.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file that is there could not be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file is not JSON: truncated, or something else altogether.
    #[error("{} is not valid JSON: {source}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// Where and why.
        source: serde_json::Error,
    },
    /// `tokenizer.json` is JSON, but describes no tokenizer that can be built.
    #[error("{} describes no usable tokenizer: {reason}", path.display())]
    Tokenizer {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A key of a configuration file has a value of the wrong kind.
    #[error("{}: `{key}` {reason}", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// The key at fault.
        key: String,
        /// What it should be.
        reason: String,
    },
    /// The tokenizer failed on this text.
    #[error("the text cannot be tokenized: {reason}")]
    Encode {
        /// The tokenizer's reason.
        reason: String,
    },
    /// The tokenizer's decoder failed on these ids.
    #[error("the token ids cannot be decoded: {reason}")]
    Decode {
        /// The decoder's reason.
        reason: String,
    },
    /// A stop string is empty, and would stop before the first character.
    #[error("a stop string must not be empty")]
    EmptyStop,
    /// Stop strings of gigabytes.
    #[error("stop strings must have less than 4 GiB together")]
    LongStops,
    /// The chat template does not parse.
    #[error("the chat template of {origin} does not parse: {reason}")]
    TemplateSyntax {
        /// The file, and the template's name in it.
        origin: String,
        /// Where and why.
        reason: String,
    },
    /// The chat template called `raise_exception`: it refuses this conversation.
    #[error("the chat template refuses these messages: {message}")]
    TemplateRaised {
        /// The template's own words.
        message: String,
    },
    /// The chat template failed while rendering.
    #[error("the chat template of {origin} failed: {reason}")]
    TemplateFailed {
        /// The file, and the template's name in it.
        origin: String,
        /// Where and why.
        reason: String,
    },
    /// The checkpoint has several named templates, and none that fits this call.
    #[error("the checkpoint has chat templates {names:?} but none named `default`")]
    NoDefaultTemplate {
        /// The names that exist.
        names: Vec<String>,
    },
}
