//! Long texts, tokenized piece by piece, so that one that is too long is found out early and
//! takes little memory.
//!
//! The invariant: the tokens of the pieces are those of the whole text. A text is cut between an
//! ASCII letter or digit and a space, and only for tokenizers that never look across such a place.

use tokenizers::normalizers::NormalizerWrapper;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::tokenizer::SplitDelimiterBehavior;

/// Bytes from which a text is cut.
pub(crate) const PIECE: usize = 64 << 10;

/// Patterns of words none of which reads a space after a letter or digit, or beyond it: those of
/// Qwen 2 and 3, and of Llama 3. GPT-2's, which is none of a `Split`, is another.
const PATTERNS: [&str; 2] = [
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
];

/// Whether texts may be cut for this tokenizer.
pub(crate) fn may_be_cut(tokenizer: &tokenizers::Tokenizer) -> bool {
    // A space composes with nothing before it.
    let normalizes = tokenizer.get_normalizer();
    let normalizes = normalizes.is_some_and(|n| !matches!(n, NormalizerWrapper::NFC(_)));
    let splits = match tokenizer.get_pre_tokenizer() {
        Some(PreTokenizerWrapper::ByteLevel(bytes)) => bytes.use_regex,
        Some(PreTokenizerWrapper::Sequence(all)) => match all.as_ref() {
            [PreTokenizerWrapper::Split(split), PreTokenizerWrapper::ByteLevel(bytes)] => {
                splits_before_spaces(split) && !bytes.use_regex
            }
            _ => false,
        },
        _ => false,
    };
    let added = tokenizer.get_added_tokens_decoder();
    let added_in_one_piece = added.values().all(|token| {
        let looks_around = token.lstrip || token.rstrip || token.single_word;
        let content = token.content.as_bytes();
        !looks_around && (1..content.len()).all(|at| !is_cut(content, at))
    });
    !normalizes && splits && added_in_one_piece
}

fn splits_before_spaces(split: &Split) -> bool {
    matches!(&split.pattern, SplitPattern::Regex(pattern) if PATTERNS.contains(&pattern.as_str()))
        && split.behavior == SplitDelimiterBehavior::Isolated
        && !split.invert
}

/// Whether a text may be cut before its byte `at`.
fn is_cut(text: &[u8], at: usize) -> bool {
    text[at] == b' ' && text[at - 1].is_ascii_alphanumeric()
}

/// A text in pieces of at most [`PIECE`] bytes, longer where it cannot be cut.
pub(crate) fn pieces(mut text: &str) -> impl Iterator<Item = &str> {
    std::iter::from_fn(move || {
        let bytes = text.as_bytes();
        let end = if bytes.len() <= PIECE {
            bytes.len()
        } else {
            let before = (1..=PIECE).rev().find(|&at| is_cut(bytes, at));
            let behind = || (PIECE + 1..bytes.len()).find(|&at| is_cut(bytes, at));
            before.or_else(behind).unwrap_or(bytes.len())
        };
        let (piece, rest) = text.split_at(end);
        text = rest;
        (!piece.is_empty()).then_some(piece)
    })
}
