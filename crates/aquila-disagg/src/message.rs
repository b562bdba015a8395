//! What two workers say to each other.
//!
//! A message is a header (mark, version, kind, length of the payload), a payload, and the checksum of
//! kind and payload. The checksum comes last, so that it is computed while bytes are on their way.
//! The one invariant: whatever bytes come, reading them gives a message or nothing, and takes no
//! more memory than they do.

use aquila_compute::round::HostRows;
use aquila_engine::{Claim, FinishReason, KvRows, Prefilled, StopCause, Token, TokenRows};

use crate::error::{Error, Result};
use crate::identity::Identity;
use crate::link::LARGE;
use aquila_spec::bytes::{Reader, Writer};

/// The version of the protocol: another one is refused.
pub(crate) const VERSION: u8 = 3;
const MARK: [u8; 2] = *b"AQ";
/// Bytes of a header, of a checksum, and of what stands before the bytes of rows.
pub(crate) const HEADER: usize = 8;
pub(crate) const CHECKSUM: usize = 4;
const BEFORE_ROWS: usize = 6 * 8;
/// The kind of messages that have rows.
pub(crate) const ROWS: u8 = 7;

/// A number that is drawn for one connection, so that a proof is good for that one alone.
pub(crate) type Nonce = [u8; 16];

/// What one worker says to the other.
#[derive(Debug, Clone, PartialEq)]
pub enum Message {
    /// A decode worker begins.
    Hello {
        /// Its nonce.
        nonce: Nonce,
    },
    /// The prefill worker's answer.
    Welcome {
        /// Its nonce.
        nonce: Nonce,
        /// That it knows the secret; empty where it has none.
        proof: Vec<u8>,
    },
    /// What the decode worker is.
    Join {
        /// That it knows the secret; empty where it has none.
        proof: Vec<u8>,
        /// What must be equal on both.
        identity: Identity,
    },
    /// The prefill worker takes it.
    Ready {
        /// What must be equal on both.
        identity: Identity,
    },
    /// It does not, for this reason; the connection ends.
    Refused(String),
    /// The decode worker has slots for the request of a room.
    Claim {
        /// The room.
        room: u64,
        /// What it says of it.
        claim: Claim,
    },
    /// There is nothing to say yet.
    Wait,
    /// Rows of the request of the room that was claimed.
    Rows(KvRows),
    /// Some of what the request asked for of the rows of its prompt's tokens.
    Returned(TokenRows),
    /// The end of its prompt; the connection is free for another room.
    Prefilled(Box<Prefilled>),
    /// The request was given up; the connection is free for another room.
    Failed(String),
}

/// What a header says of the payload behind it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) kind: u8,
    pub(crate) length: usize,
}

impl Header {
    /// Reads a header.
    ///
    /// # Errors
    /// What is wrong with it.
    pub(crate) fn read(bytes: &[u8; HEADER]) -> std::result::Result<Self, &'static str> {
        let [m0, m1, version, kind, length @ ..] = *bytes;
        if [m0, m1] != MARK {
            return Err("a message does not begin as one");
        }
        if version != VERSION {
            return Err("its version is another one");
        }
        let length = u32::from_le_bytes(length) as usize;
        if kind == ROWS && length < BEFORE_ROWS {
            return Err("a message is too short");
        }
        Ok(Self { kind, length })
    }

    /// Bytes of the payload before those of rows.
    pub(crate) fn before_rows(&self) -> usize {
        if self.kind == ROWS { BEFORE_ROWS } else { self.length }
    }
}

/// A message as bytes but for its checksum: header and values, then the bytes of rows, which are not
/// copied.
pub(crate) struct Encoded<'a> {
    pub(crate) head: Vec<u8>,
    pub(crate) rows: &'a [u8],
}

impl Encoded<'_> {
    /// The payload before the bytes of rows.
    pub(crate) fn values(&self) -> &[u8] {
        &self.head[HEADER..]
    }
}

/// A frame of a transport's own: of another kind than messages are.
pub(crate) fn frame(kind: u8, payload: &[u8]) -> Result<Encoded<'static>> {
    let mut head = [&[0; HEADER], payload].concat();
    write_header(&mut head, kind, 0)?;
    Ok(Encoded { head, rows: &[] })
}

/// What a message of rows has before their bytes, and what a transport has put behind it.
pub(crate) fn split_rows(values: &[u8]) -> Option<(&[u8], Reader<'_>)> {
    let (values, rest) = values.split_at_checked(BEFORE_ROWS)?;
    Some((values, Reader(rest)))
}

/// Writes the header of what is in `head` and of so many bytes of rows, unless nobody would take it.
fn write_header(head: &mut [u8], kind: u8, rows: usize) -> Result<()> {
    let bytes = head.len() - HEADER + rows;
    let length = u32::try_from(bytes).ok().filter(|_| bytes <= LARGE);
    let Some(length) = length else { return Err(Error::TooLong { bytes }) };
    head[..2].copy_from_slice(&MARK);
    head[2..4].copy_from_slice(&[VERSION, kind]);
    head[4..HEADER].copy_from_slice(&length.to_le_bytes());
    Ok(())
}

impl Message {
    /// As bytes.
    ///
    /// # Errors
    /// If it is longer than a message may be.
    pub(crate) fn encode(&self) -> Result<Encoded<'_>> {
        let mut head = Writer(vec![0; HEADER]);
        let mut rows: &[u8] = &[];
        let kind = match self {
            Self::Hello { nonce } => {
                head.0.extend(nonce);
                0
            }
            Self::Welcome { nonce, proof } => {
                head.0.extend(nonce);
                head.bytes(proof);
                1
            }
            Self::Join { proof, identity } => {
                head.bytes(proof);
                identity.write(&mut head);
                2
            }
            Self::Ready { identity } => {
                identity.write(&mut head);
                3
            }
            Self::Refused(why) => {
                head.text(why);
                4
            }
            Self::Claim { room, claim: Claim { have, seed, candidates } } => {
                head.u64(*room);
                head.size(*have);
                head.u64(*seed);
                head.size(*candidates);
                5
            }
            Self::Wait => 6,
            Self::Rows(piece) => {
                for number in [
                    piece.group,
                    piece.store,
                    piece.layers.start,
                    piece.layers.end,
                    piece.rows.start,
                    piece.rows.end,
                ] {
                    head.size(number);
                }
                rows = &piece.bytes;
                ROWS
            }
            Self::Prefilled(prefilled) => {
                write_prefilled(&mut head, prefilled);
                8
            }
            Self::Failed(why) => {
                head.text(why);
                9
            }
            Self::Returned(rows) => {
                write_returned(&mut head, rows);
                10
            }
        };
        write_header(&mut head.0, kind, rows.len())?;
        Ok(Encoded { head: head.0, rows })
    }

    /// Reads a message of this kind, whose checksum was right; none if it is not of its form.
    pub(crate) fn read(kind: u8, values: &[u8], rows: Vec<u8>) -> Option<Self> {
        let mut reader = Reader(values);
        let message = match kind {
            0 => Self::Hello { nonce: reader.array()? },
            1 => Self::Welcome { nonce: reader.array()?, proof: reader.bytes()?.to_vec() },
            2 => {
                let proof = reader.bytes()?.to_vec();
                Self::Join { proof, identity: Identity::read(&mut reader)? }
            }
            3 => Self::Ready { identity: Identity::read(&mut reader)? },
            4 => Self::Refused(reader.text()?),
            5 => {
                let room = reader.u64()?;
                let (have, seed, candidates) = (reader.size()?, reader.u64()?, reader.size()?);
                Self::Claim { room, claim: Claim { have, seed, candidates } }
            }
            6 => Self::Wait,
            ROWS => {
                let mut number = || reader.size();
                let (group, store) = (number()?, number()?);
                let (layers, of_rows) = (number()?..number()?, number()?..number()?);
                Self::Rows(KvRows { group, store, layers, rows: of_rows, bytes: rows })
            }
            8 => Self::Prefilled(Box::new(read_prefilled(&mut reader)?)),
            9 => Self::Failed(reader.text()?),
            10 => Self::Returned(read_returned(&mut reader)?),
            _ => return None,
        };
        reader.0.is_empty().then_some(message)
    }
}

fn write_prefilled(writer: &mut Writer, prefilled: &Prefilled) {
    let Prefilled { tokens, ended, prompt, rows, groups, cached_tokens, draft } = prefilled;
    writer.list(tokens, write_token);
    writer.option(ended.as_ref(), |writer, reason| match reason {
        FinishReason::Stop(StopCause::Token(id)) => {
            writer.u8(0);
            writer.u32(*id);
        }
        FinishReason::Stop(StopCause::Listener) => writer.u8(1),
        FinishReason::Length => writer.u8(2),
        FinishReason::Abort(why) => {
            writer.u8(3);
            writer.text(why);
        }
        FinishReason::Stop(StopCause::Grammar) => writer.u8(4),
        FinishReason::GrammarFailed(why) => {
            writer.u8(5);
            writer.text(why);
        }
    });
    writer.list(prompt, write_token);
    write_returned(writer, rows);
    writer.size(*groups);
    writer.size(*cached_tokens);
    writer.option(draft.as_deref(), Writer::bytes);
}

fn read_prefilled(reader: &mut Reader<'_>) -> Option<Prefilled> {
    Some(Prefilled {
        tokens: reader.list(6, read_token)?,
        ended: reader.option(|reader| {
            Some(match reader.u8()? {
                0 => FinishReason::Stop(StopCause::Token(reader.u32()?)),
                1 => FinishReason::Stop(StopCause::Listener),
                2 => FinishReason::Length,
                3 => FinishReason::Abort(reader.text()?),
                4 => FinishReason::Stop(StopCause::Grammar),
                5 => FinishReason::GrammarFailed(reader.text()?),
                _ => return None,
            })
        })?,
        prompt: reader.list(6, read_token)?,
        rows: read_returned(reader)?,
        groups: reader.size()?,
        cached_tokens: reader.size()?,
        draft: reader.option(|reader| reader.bytes().map(<[u8]>::to_vec))?,
    })
}

fn write_returned(writer: &mut Writer, rows: &TokenRows) {
    let TokenRows { from, hidden_states, routed_experts } = rows;
    writer.size(*from);
    writer.size(hidden_states.width);
    writer.list(&hidden_states.values, |writer, value| writer.u32(value.to_bits()));
    writer.size(routed_experts.width);
    writer.list(&routed_experts.values, |writer, &value| writer.u32(value));
}

fn read_returned(reader: &mut Reader<'_>) -> Option<TokenRows> {
    Some(TokenRows {
        from: reader.size()?,
        hidden_states: HostRows {
            width: reader.size()?,
            values: reader.list(4, |reader| reader.u32().map(f32::from_bits))?,
        },
        routed_experts: HostRows { width: reader.size()?, values: reader.list(4, Reader::u32)? },
    })
}

fn write_token(writer: &mut Writer, token: &Token) {
    writer.u32(token.id);
    writer.option(token.logprob, |writer, logprob| writer.u32(logprob.to_bits()));
    writer.list(&token.top, |writer, (id, logprob)| {
        writer.u32(*id);
        writer.u32(logprob.to_bits());
    });
}

fn read_token(reader: &mut Reader<'_>) -> Option<Token> {
    Some(Token {
        id: reader.u32()?,
        logprob: reader.option(|reader| reader.u32().map(f32::from_bits))?,
        top: reader.list(8, |reader| Some((reader.u32()?, f32::from_bits(reader.u32()?))))?,
        // What is handed over was chosen at the end of a prompt.
        drafted: None,
    })
}
