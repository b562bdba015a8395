//! From a token to its share of the text, as the tokenizer's decoder defines it.
//!
//! The invariant: a token's fragment depends on that token and on its place (first, or last) and
//! on no other token, so that a stream can be decoded without looking back. A decoder for which
//! this does not hold is `Whole`: its text appears when it is complete.

use tokenizers::decoders::DecoderWrapper;
use tokenizers::decoders::strip::Strip;
use tokenizers::tokenizer::Decoder;

use crate::{Error, Result};

/// A tokenizer's decoder, taken apart into what can be done token by token.
#[derive(Debug)]
pub(crate) struct Decoding {
    /// Steps that see one token at a time, whatever its place.
    each: Vec<DecoderWrapper>,
    joining: Joining,
    /// What is cut from the two ends of the whole text.
    strip: Option<Strip>,
}

#[derive(Debug)]
enum Joining {
    /// Tokens are text, one after the other.
    Plain,
    /// No decoder: tokens are words with a space between them.
    Spaced,
    /// Every character of a token stands for a byte.
    ByteLevel,
    /// Tokens are text, except `<0x0A>` and its like, which are a byte each.
    ByteFallback,
    /// The first token is treated differently (word-piece, metaspace).
    FirstDiffers(DecoderWrapper),
    /// The last token is treated differently (end-of-word suffixes).
    LastDiffers(DecoderWrapper),
    /// Tokens depend on each other: only the whole text can be decoded.
    Whole,
}

/// A token's share of the text.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Fragment {
    /// Characters.
    Text(String),
    /// Bytes of characters that may begin before this token and end after it.
    Bytes(Vec<u8>),
}

impl Fragment {
    pub(crate) fn into_bytes(self) -> Vec<u8> {
        match self {
            Fragment::Text(text) => text.into_bytes(),
            Fragment::Bytes(bytes) => bytes,
        }
    }
}

impl Decoding {
    pub(crate) fn new(decoder: Option<&DecoderWrapper>) -> Self {
        let Some(decoder) = decoder else {
            return Self { each: Vec::new(), joining: Joining::Spaced, strip: None };
        };
        let mut steps = Vec::new();
        flatten(decoder, &mut steps);
        Self::from_steps(&steps).unwrap_or(Self {
            each: Vec::new(),
            joining: Joining::Whole,
            strip: None,
        })
    }

    /// Recognizes `[each…] [joining] [fuse] [strip]`; anything else is not token by token.
    fn from_steps(steps: &[DecoderWrapper]) -> Option<Self> {
        let mut decoding = Self { each: Vec::new(), joining: Joining::Plain, strip: None };
        let mut joined = false;
        let mut fused = false;
        for step in steps {
            match step {
                DecoderWrapper::Replace(_) if !joined && !fused => decoding.each.push(step.clone()),
                DecoderWrapper::ByteLevel(_) if !joined && !fused => {
                    decoding.joining = Joining::ByteLevel;
                    (joined, fused) = (true, true);
                }
                DecoderWrapper::ByteFallback(_) if !joined && !fused => {
                    decoding.joining = Joining::ByteFallback;
                    joined = true;
                }
                DecoderWrapper::WordPiece(_) | DecoderWrapper::Metaspace(_)
                    if !joined && !fused =>
                {
                    decoding.joining = Joining::FirstDiffers(step.clone());
                    joined = true;
                }
                DecoderWrapper::BPE(_) if !joined && !fused => {
                    decoding.joining = Joining::LastDiffers(step.clone());
                    joined = true;
                }
                DecoderWrapper::Fuse(_) => fused = true,
                DecoderWrapper::Strip(strip) if fused && decoding.strip.is_none() => {
                    decoding.strip = Some(strip.clone());
                }
                _ => return None,
            }
        }
        Some(decoding)
    }

    pub(crate) fn is_byte_level(&self) -> bool {
        self.each.is_empty() && matches!(self.joining, Joining::ByteLevel)
    }

    pub(crate) fn is_whole(&self) -> bool {
        matches!(self.joining, Joining::Whole)
    }

    /// Whether a token's text can change when it turns out to be the last.
    pub(crate) fn last_differs(&self) -> bool {
        matches!(self.joining, Joining::LastDiffers(_))
    }

    pub(crate) fn strip(&self) -> Option<&Strip> {
        self.strip.as_ref()
    }

    /// How many U+FFFD stand for a malformed sequence of so many bytes.
    pub(crate) fn replacements(&self, malformed: usize) -> usize {
        if matches!(self.joining, Joining::ByteFallback) { malformed } else { 1 }
    }

    /// The fragment of `token`, given its place among the tokens that are decoded.
    pub(crate) fn fragment(&self, token: String, first: bool, last: bool) -> Result<Fragment> {
        let mut text = token;
        for step in &self.each {
            text = decode_at(step, vec![text], 0)?;
        }
        Ok(match &self.joining {
            Joining::Plain | Joining::Whole => Fragment::Text(text),
            Joining::Spaced if first => Fragment::Text(text),
            Joining::Spaced => Fragment::Text(format!(" {text}")),
            Joining::ByteLevel => Fragment::Bytes(byte_level(&text)),
            Joining::ByteFallback => match fallback_byte(&text) {
                Some(byte) => Fragment::Bytes(vec![byte]),
                None => Fragment::Text(text),
            },
            Joining::FirstDiffers(step) if first => Fragment::Text(decode_at(step, vec![text], 0)?),
            Joining::FirstDiffers(step) => {
                Fragment::Text(decode_at(step, vec![String::new(), text], 1)?)
            }
            Joining::LastDiffers(step) if last => Fragment::Text(decode_at(step, vec![text], 0)?),
            Joining::LastDiffers(step) => {
                Fragment::Text(decode_at(step, vec![text, String::new()], 0)?)
            }
        })
    }
}

fn flatten(decoder: &DecoderWrapper, steps: &mut Vec<DecoderWrapper>) {
    match decoder {
        DecoderWrapper::Sequence(sequence) => {
            sequence.get_decoders().iter().for_each(|inner| flatten(inner, steps));
        }
        step => steps.push(step.clone()),
    }
}

fn decode_at(step: &DecoderWrapper, tokens: Vec<String>, place: usize) -> Result<String> {
    let decoded = step.decode_chain(tokens).map_err(|e| Error::Decode { reason: e.to_string() })?;
    Ok(decoded.into_iter().nth(place).unwrap_or_default())
}

fn fallback_byte(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    if digits.len() == 2 { u8::from_str_radix(digits, 16).ok() } else { None }
}

/// The bytes that a byte-level token stands for; a token outside that alphabet is its own text.
fn byte_level(token: &str) -> Vec<u8> {
    token.chars().map(byte_of).collect::<Option<Vec<u8>>>().unwrap_or_else(|| token.into())
}

/// Byte-level alphabets show printable Latin-1 as itself, and the other 68 bytes, in order, as the
/// characters from U+0100.
fn byte_of(shown: char) -> Option<u8> {
    match shown as u32 {
        c @ (0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF) => Some(c as u8),
        c @ 0x100..=0x120 => Some((c - 0x100) as u8),
        c @ 0x121..=0x142 => Some((c - 0x121 + 0x7F) as u8),
        0x143 => Some(0xAD),
        _ => None,
    }
}
