//! What a head of multi-token prediction does with the embedding of its first row.
//!
//! The row at position 0 takes the second token of a text. Some engines give it zeros instead, for
//! some models; a head does best with what it was trained with, and only its publisher knows.

/// What stands for the embedding at position 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum FirstEmbedding {
    /// As the engines do that agree for its model, else as SGLang does.
    #[default]
    Auto,
    /// The embedding.
    Keep,
    /// Zeros.
    Zero,
}

impl FirstEmbedding {
    /// Whether it is zeros in a head of this architecture, and why.
    pub(super) fn zeroed(self, architecture: &str) -> (bool, &'static str) {
        let asked = "as asked for";
        match self {
            Self::Keep => (false, asked),
            Self::Zero => (true, asked),
            Self::Auto if architecture.starts_with("MiMo") => {
                (true, "as SGLang and vLLM do for MiMo")
            }
            Self::Auto if architecture.starts_with("Qwen") => {
                (false, "as SGLang and vLLM do for Qwen")
            }
            Self::Auto => (false, "as SGLang does; vLLM takes zeros for most models"),
        }
    }
}
