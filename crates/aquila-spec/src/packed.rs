//! Bytes that travel to another machine: little-endian, behind a version, read without trust.

use std::sync::Arc;

use aquila_compute::round::Candidates;
use aquila_compute::sampling::{Candidate, Weights};

use crate::bytes::{Reader, Writer};

/// Writes values one behind the other.
#[derive(Debug)]
pub struct Packer(Writer);

impl Packer {
    /// Behind this version.
    pub fn new(version: u8) -> Self {
        Self(Writer(vec![version]))
    }

    /// Adds a number.
    pub fn number(&mut self, value: u64) {
        self.0.u64(value);
    }

    /// Adds a list of bytes.
    pub fn bytes(&mut self, bytes: &[u8]) {
        self.0.bytes(bytes);
    }

    /// Adds a row of values, bit by bit.
    pub fn row(&mut self, values: &[f32]) {
        self.0.list(values, |writer, value| writer.u32(value.to_bits()));
    }

    /// Adds what a tree begins with.
    pub fn seed(&mut self, seed: Option<&Candidates>) {
        self.0.option(seed, |writer, Candidates { candidates, drawn_from }| {
            writer.list(candidates, |writer, Candidate { token, probability }| {
                writer.u32(*token);
                writer.u32(probability.to_bits());
            });
            writer.option(drawn_from.as_ref(), |writer, weights| {
                writer.list(&weights.tokens, |writer, (token, weight)| {
                    writer.u32(*token);
                    writer.u64(weight.to_bits());
                });
            });
        });
    }

    /// What was written.
    pub fn finish(self) -> Vec<u8> {
        self.0.0
    }
}

/// Reads what a [`Packer`] wrote; nothing where the bytes are not of that form.
#[derive(Debug)]
pub struct Unpacker<'a>(Reader<'a>);

impl<'a> Unpacker<'a> {
    /// What `read` makes of the values behind this version, if it reads all of them.
    pub fn read_all<T>(
        bytes: &'a [u8],
        version: u8,
        read: impl FnOnce(&mut Self) -> Option<T>,
    ) -> Option<T> {
        let mut unpacker = Self(Reader(bytes));
        if unpacker.0.u8()? != version {
            return None;
        }
        let value = read(&mut unpacker)?;
        unpacker.0.0.is_empty().then_some(value)
    }

    /// A number.
    pub fn number(&mut self) -> Option<u64> {
        self.0.u64()
    }

    /// A list of bytes.
    pub fn bytes(&mut self) -> Option<&'a [u8]> {
        self.0.bytes()
    }

    /// A row of values.
    pub fn row(&mut self) -> Option<Vec<f32>> {
        self.0.list(4, |reader| reader.u32().map(f32::from_bits))
    }

    /// What a tree begins with.
    pub fn seed(&mut self) -> Option<Option<Candidates>> {
        self.0.option(|reader| {
            let candidates = reader.list(8, |reader| {
                let (token, probability) = (reader.u32()?, f32::from_bits(reader.u32()?));
                Some(Candidate { token, probability })
            })?;
            let drawn_from = reader.option(|reader| {
                let token =
                    |reader: &mut Reader<'_>| Some((reader.u32()?, f64::from_bits(reader.u64()?)));
                // Sums of weights are exact, so this is the total that was summed up there.
                Some(Arc::new(Weights::new(reader.list(12, token)?)))
            })?;
            Some(Candidates { candidates, drawn_from })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seed(drawn: bool) -> Candidates {
        let weights = Weights::new(vec![(3, 0.5), (9, 0.25), (4000, 0.125)]);
        Candidates {
            candidates: vec![
                Candidate { token: 7, probability: 0.3 },
                Candidate { token: 4000, probability: f32::MIN_POSITIVE },
            ],
            drawn_from: drawn.then(|| Arc::new(weights)),
        }
    }

    fn packed(drawn: bool) -> Vec<u8> {
        let mut packer = Packer::new(3);
        packer.seed(None);
        packer.seed(Some(&seed(drawn)));
        packer.row(&[1.5, -0.0, f32::INFINITY]);
        packer.bytes(b"end");
        packer.finish()
    }

    #[test]
    fn what_was_packed_is_unpacked() {
        for drawn in [false, true] {
            let bytes = packed(drawn);
            let all = Unpacker::read_all(&bytes, 3, |unpacker| {
                assert_eq!(unpacker.seed(), Some(None));
                assert_eq!(unpacker.seed(), Some(Some(seed(drawn))));
                let row: Vec<u32> = unpacker.row()?.iter().map(|x| x.to_bits()).collect();
                assert_eq!(row, [1.5f32, -0.0, f32::INFINITY].map(f32::to_bits));
                unpacker.bytes()
            });
            assert_eq!(all, Some(&b"end"[..]));
        }
    }

    #[test]
    fn other_versions_and_cut_bytes_are_refused() {
        let bytes = packed(true);
        let read = |bytes, version| {
            Unpacker::read_all(bytes, version, |unpacker| {
                unpacker.seed()?;
                unpacker.seed()?;
                unpacker.row()?;
                unpacker.bytes().map(<[u8]>::to_vec)
            })
        };
        assert_eq!(read(&bytes, 3), Some(b"end".to_vec()));
        assert_eq!(read(&bytes, 2), None);
        for length in 0..bytes.len() {
            assert_eq!(read(&bytes[..length], 3), None, "{length} of {} bytes", bytes.len());
        }
        assert_eq!(read(&[&bytes[..], &[0]].concat(), 3), None, "a byte too many");
    }
}
