//! Sets of tokens: what a grammar allows next.

/// A set of tokens, a bit for each: token t is bit t % 32 of word t / 32.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TokenSet {
    words: Vec<u32>,
}

impl TokenSet {
    /// The tokens whose bits are set.
    pub fn from_words(words: Vec<u32>) -> Self {
        Self { words }
    }

    /// Whether `token` is in it.
    pub fn contains(&self, token: u32) -> bool {
        let word = self.words.get(token as usize / 32).copied().unwrap_or(0);
        word >> (token % 32) & 1 == 1
    }

    /// Its bits.
    pub fn words(&self) -> &[u32] {
        &self.words
    }

    /// The token of the lowest id.
    pub fn lowest(&self) -> Option<u32> {
        let at = self.words.iter().position(|&word| word != 0)?;
        Some(at as u32 * 32 + self.words[at].trailing_zeros())
    }

    /// Makes all other tokens of a row impossible.
    pub(crate) fn restrict(&self, logits: &mut [f32]) {
        for (at, chunk) in logits.chunks_mut(32).enumerate() {
            match self.words.get(at).copied().unwrap_or(0) {
                u32::MAX => {}
                0 => chunk.fill(f32::NEG_INFINITY),
                word => {
                    let forbidden = |(bit, _): &(usize, &mut f32)| word >> bit & 1 == 0;
                    let forbidden = chunk.iter_mut().enumerate().filter(forbidden);
                    forbidden.for_each(|(_, logit)| *logit = f32::NEG_INFINITY);
                }
            }
        }
    }
}

impl FromIterator<u32> for TokenSet {
    fn from_iter<T: IntoIterator<Item = u32>>(tokens: T) -> Self {
        let mut words = Vec::new();
        for token in tokens {
            let at = token as usize / 32;
            if words.len() <= at {
                words.resize(at + 1, 0);
            }
            words[at] |= 1 << (token % 32);
        }
        Self { words }
    }
}
