//! Bytes that travel to another machine: little-endian, behind a version, read without trust.

use std::sync::Arc;

use aquila_compute::round::Candidates;
use aquila_compute::sampling::{Candidate, Weights};

/// Writes values one behind the other.
#[derive(Debug)]
pub struct Packer(Vec<u8>);

impl Packer {
    /// Behind this version.
    pub fn new(version: u8) -> Self {
        Self(vec![version])
    }

    /// Adds a number.
    pub fn number(&mut self, value: u64) {
        self.0.extend(value.to_le_bytes());
    }

    /// Adds a list of bytes.
    pub fn bytes(&mut self, bytes: &[u8]) {
        self.number(bytes.len() as u64);
        self.0.extend(bytes);
    }

    /// Adds a row of values, bit by bit.
    pub fn row(&mut self, values: &[f32]) {
        self.number(values.len() as u64);
        self.0.extend(values.iter().flat_map(|value| value.to_le_bytes()));
    }

    /// Adds what a tree begins with.
    pub fn seed(&mut self, seed: Option<&Candidates>) {
        self.number(u64::from(seed.is_some()));
        let Some(Candidates { candidates, drawn_from }) = seed else { return };
        self.number(candidates.len() as u64);
        for Candidate { token, probability } in candidates {
            self.0.extend(token.to_le_bytes());
            self.0.extend(probability.to_le_bytes());
        }
        self.number(u64::from(drawn_from.is_some()));
        let Some(weights) = drawn_from else { return };
        self.number(weights.tokens.len() as u64);
        for (token, weight) in &weights.tokens {
            self.0.extend(token.to_le_bytes());
            self.0.extend(weight.to_le_bytes());
        }
    }

    /// What was written.
    pub fn finish(self) -> Vec<u8> {
        self.0
    }
}

/// Reads them; nothing where the bytes are not of that form.
#[derive(Debug)]
pub struct Unpacker<'a>(&'a [u8]);

impl<'a> Unpacker<'a> {
    /// Behind this version.
    pub fn new(bytes: &'a [u8], version: u8) -> Option<Self> {
        let (&first, rest) = bytes.split_first()?;
        (first == version).then_some(Self(rest))
    }

    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(taken)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.take(N)?.try_into().ok()
    }

    /// A number.
    pub fn number(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    /// A count of things that take `size` bytes each, all of which are there.
    fn count(&mut self, size: usize) -> Option<usize> {
        let count = usize::try_from(self.number()?).ok()?;
        (count.checked_mul(size)? <= self.0.len()).then_some(count)
    }

    fn flag(&mut self) -> Option<bool> {
        match self.number()? {
            0 => Some(false),
            1 => Some(true),
            _ => None,
        }
    }

    /// A list of bytes.
    pub fn bytes(&mut self) -> Option<&'a [u8]> {
        let count = self.count(1)?;
        self.take(count)
    }

    /// A row of values.
    pub fn row(&mut self) -> Option<Vec<f32>> {
        (0..self.count(4)?).map(|_| self.array().map(f32::from_le_bytes)).collect()
    }

    /// What a tree begins with.
    pub fn seed(&mut self) -> Option<Option<Candidates>> {
        if !self.flag()? {
            return Some(None);
        }
        let mut candidates = Vec::new();
        for _ in 0..self.count(8)? {
            let token = u32::from_le_bytes(self.array()?);
            let probability = f32::from_le_bytes(self.array()?);
            candidates.push(Candidate { token, probability });
        }
        let mut drawn_from = None;
        if self.flag()? {
            let mut tokens = Vec::new();
            for _ in 0..self.count(12)? {
                let token = u32::from_le_bytes(self.array()?);
                tokens.push((token, f64::from_le_bytes(self.array()?)));
            }
            // Sums of weights are exact, so this is the total that was summed up there.
            drawn_from = Some(Arc::new(Weights::new(tokens)));
        }
        Some(Some(Candidates { candidates, drawn_from }))
    }

    /// Whether nothing is left.
    pub fn finish(self) -> bool {
        self.0.is_empty()
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
            let mut unpacker = Unpacker::new(&bytes, 3).unwrap();
            assert_eq!(unpacker.seed(), Some(None));
            assert_eq!(unpacker.seed(), Some(Some(seed(drawn))));
            let row: Vec<u32> = unpacker.row().unwrap().iter().map(|x| x.to_bits()).collect();
            assert_eq!(row, [1.5f32, -0.0, f32::INFINITY].map(f32::to_bits));
            assert_eq!(unpacker.bytes(), Some(&b"end"[..]));
            assert!(unpacker.finish());
        }
    }

    #[test]
    fn other_versions_and_cut_bytes_are_refused() {
        let bytes = packed(true);
        assert!(Unpacker::new(&bytes, 2).is_none());
        assert!(Unpacker::new(&[], 3).is_none());
        for length in 1..bytes.len() {
            let read = || {
                let mut unpacker = Unpacker::new(&bytes[..length], 3)?;
                unpacker.seed()?;
                unpacker.seed()?;
                unpacker.row()?;
                unpacker.bytes()
            };
            assert_eq!(read(), None, "{length} of {} bytes", bytes.len());
        }
    }
}
