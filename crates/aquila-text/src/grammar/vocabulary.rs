//! A model's tokens as grammars see them: by their bytes.

use llguidance::toktrie::{INVALID_TOKEN, TokRxInfo, TokTrie, TokenId, TokenizerEnv};

use crate::Tokenizer;

/// The tokens of a model.
pub(super) struct Vocabulary {
    trie: TokTrie,
    tokenizer: Tokenizer,
    /// Whether the tokenizer cuts a part of a text as it would within the text.
    canonical: bool,
}

impl Vocabulary {
    /// Of a model of so many logits that ends texts with one of `eos`.
    pub fn new(tokenizer: &Tokenizer, logits: usize, eos: &[u32]) -> Result<Self, String> {
        if tokenizer.decoding().is_whole() {
            return Err("the model's tokens have no texts of their own".into());
        }
        let bytes = |id: u32| match tokenizer.is_special(id) {
            true => {
                let name = tokenizer.token(id).unwrap_or_default();
                Ok([&[TokTrie::SPECIAL_TOKEN_MARKER], name.as_bytes()].concat())
            }
            false => tokenizer.token_bytes(id).map(Option::unwrap_or_default),
        };
        let tokens = (0..logits as u32).map(bytes).collect::<crate::Result<Vec<_>>>();
        let tokens = tokens.map_err(|e| e.to_string())?;
        let first = eos.first().copied().unwrap_or(INVALID_TOKEN);
        let mut trie = TokTrie::from(&TokRxInfo::new(logits as u32, first), &tokens);
        if !eos.is_empty() {
            trie = trie.with_eos_tokens(eos);
        }
        let alone = tokenizer.encode("a", false).map_err(|e| e.to_string())?;
        let canonical = tokenizer.decoding().is_byte_level() && trie.decode(&alone) == b"a";
        Ok(Self { trie, tokenizer: tokenizer.clone(), canonical })
    }
}

impl TokenizerEnv for Vocabulary {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        let tokens = self.trie.tokenize_with_greedy_fallback(bytes, |text| {
            self.tokenizer.encode(text, false).unwrap_or_default()
        });
        // A text that names a special token is not that token.
        match self.trie.decode_raw(&tokens) == bytes {
            true => tokens,
            false => self.trie.greedy_tokenize(bytes),
        }
    }

    fn tokenize_is_canonical(&self) -> bool {
        self.canonical
    }
}
