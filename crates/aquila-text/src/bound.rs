//! How many bytes of text one token can stand for, so that a text that is far too long is refused
//! by its size alone.
//!
//! The invariant: a bound is exact or absent. Where a tokenizer may drop text, or read any amount
//! of it as one token (a stripped space, a fused unknown), there is no bound.

use tokenizers::models::ModelWrapper;
use tokenizers::normalizers::{NormalizerWrapper, Replace};
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::tokenizer::{Model, NormalizedString, Normalizer, SplitDelimiterBehavior};

/// Bytes of text for each byte that NFC or NFD leaves, at most: `ΐ` has two bytes and may be
/// written with seven.
const COMPOSED: usize = 4;

/// The most bytes of a text that become one token, where there is such a bound.
pub(crate) fn bytes_per_token(tokenizer: &tokenizers::Tokenizer) -> Option<usize> {
    let normalizer = tokenizer.get_normalizer();
    let shrinks_by = normalizer.map_or(Some(1), shrinks_by)?;
    let pre_tokenizer = tokenizer.get_pre_tokenizer();
    if !pre_tokenizer.is_none_or(keeps_all) {
        return None;
    }
    let byte_level = normalizer.is_some_and(|n| matches!(n, NormalizerWrapper::ByteLevel(_)))
        || pre_tokenizer.is_some_and(maps_bytes);
    let model = tokenizer.get_model();
    if !covers_all(model, byte_level) {
        return None;
    }
    // A byte-level vocabulary writes each byte as one character.
    let size = |token: &String| if byte_level { token.chars().count() } else { token.len() };
    let longest = model.get_vocab().keys().map(size).max()?;
    let added = tokenizer.get_added_tokens_decoder();
    let mut longest_added = 0;
    for token in added.values() {
        if token.lstrip || token.rstrip {
            return None;
        }
        // One that is normalized is looked for as the normalizer writes it.
        let mut content = NormalizedString::from(token.content.as_str());
        if let Some(normalizer) = normalizer {
            normalizer.normalize(&mut content).ok()?;
        }
        longest_added = longest_added.max(token.content.len()).max(content.get().len());
    }
    Some(longest.max(longest_added) * shrinks_by)
}

/// Bytes that go in for each byte that comes out, at most; `None` where any number may vanish.
fn shrinks_by(normalizer: &NormalizerWrapper) -> Option<usize> {
    match normalizer {
        NormalizerWrapper::NFC(_) | NormalizerWrapper::NFD(_) => Some(COMPOSED),
        NormalizerWrapper::Prepend(_) | NormalizerWrapper::ByteLevel(_) => Some(1),
        NormalizerWrapper::Replace(replace) => replaces_by(replace),
        NormalizerWrapper::Sequence(all) => {
            all.as_ref().iter().try_fold(1, |factor: usize, one| Some(factor * shrinks_by(one)?))
        }
        _ => None,
    }
}

fn replaces_by(replace: &Replace) -> Option<usize> {
    // The pattern is not public, but it is written.
    let written = serde_json::to_value(replace).ok()?;
    let pattern = written.get("pattern")?.get("String")?.as_str()?;
    let content = Some(replace.content.len()).filter(|&bytes| bytes > 0)?;
    Some(pattern.len().div_ceil(content).max(1))
}

/// Whether all text reaches the model.
fn keeps_all(pre_tokenizer: &PreTokenizerWrapper) -> bool {
    let kept = |behavior| behavior != SplitDelimiterBehavior::Removed;
    match pre_tokenizer {
        PreTokenizerWrapper::ByteLevel(_)
        | PreTokenizerWrapper::Metaspace(_)
        | PreTokenizerWrapper::Digits(_) => true,
        PreTokenizerWrapper::Split(split) => kept(split.behavior),
        PreTokenizerWrapper::Punctuation(punctuation) => kept(punctuation.behavior),
        PreTokenizerWrapper::Sequence(all) => all.as_ref().iter().all(keeps_all),
        _ => false,
    }
}

fn maps_bytes(pre_tokenizer: &PreTokenizerWrapper) -> bool {
    match pre_tokenizer {
        PreTokenizerWrapper::ByteLevel(_) => true,
        PreTokenizerWrapper::Sequence(all) => all.as_ref().iter().any(maps_bytes),
        _ => false,
    }
}

/// Whether every byte of what reaches the model is in a token that spells it.
fn covers_all(model: &ModelWrapper, byte_level: bool) -> bool {
    let has = |token: String| model.token_to_id(&token).is_some();
    let has_bytes = || (0..=u8::MAX).all(|byte| has(format!("<0x{byte:02X}>")));
    match model {
        ModelWrapper::BPE(bpe) => {
            let unmarked = |mark: &Option<String>| mark.as_ref().is_none_or(String::is_empty);
            unmarked(&bpe.continuing_subword_prefix)
                && unmarked(&bpe.end_of_word_suffix)
                && (byte_level && ByteLevel::alphabet().into_iter().all(|c| has(c.to_string()))
                    || bpe.byte_fallback && has_bytes())
        }
        ModelWrapper::Unigram(unigram) => unigram.byte_fallback() && has_bytes(),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use tokenizers::normalizers::{NFC, NFD};

    use super::*;

    fn normalized(normalizer: &impl Normalizer, text: &str) -> String {
        let mut text = NormalizedString::from(text);
        normalizer.normalize(&mut text).unwrap();
        text.get().to_owned()
    }

    #[test]
    fn composing_shortens_no_text_more_than_four_times() {
        // The longest way to write each part of a decomposed character.
        let mut longest: HashMap<String, usize> = HashMap::new();
        for c in ('\0'..=char::MAX).filter(|c| !('\u{AC00}'..='\u{D7A3}').contains(c)) {
            let written = longest.entry(normalized(&NFD, &c.to_string())).or_default();
            *written = c.len_utf8().max(*written);
        }
        for c in '\0'..=char::MAX {
            let c = c.to_string();
            if normalized(&NFC, &c) != c {
                continue;
            }
            let parts = normalized(&NFD, &c);
            let bytes: usize = parts.chars().map(|part| longest[&part.to_string()]).sum();
            assert!(bytes <= COMPOSED * c.len(), "{c:?} may be written with {bytes} bytes");
        }
    }
}
