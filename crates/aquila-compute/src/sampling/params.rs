//! The settings of a request that bear on the choice of a token.

/// Settings as the choice of a token needs them: already validated, nothing optional.
#[derive(Debug, Clone, PartialEq)]
pub struct Sampling {
    /// 0 (and anything below [`Sampling::GREEDY_BELOW`]) is greedy.
    pub temperature: f32,
    /// Keep the k most likely tokens; 0 keeps all.
    pub top_k: u32,
    /// Keep the fewest most likely tokens whose probabilities reach this; 1 keeps all.
    pub top_p: f32,
    /// Keep tokens at least this fraction as likely as the most likely one; 0 keeps all.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of tokens seen in prompt or output; 1 is off.
    pub repetition_penalty: f32,
    /// Subtracted once from tokens seen in the output.
    pub presence_penalty: f32,
    /// Subtracted for each time a token was seen in the output.
    pub frequency_penalty: f32,
    /// Added to the logits of these tokens.
    pub logit_bias: Vec<(u32, f32)>,
    /// The seed of the noise.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            seed: 0,
        }
    }
}

impl Sampling {
    /// Temperatures below this are greedy: quotients would leave the range of f32.
    pub const GREEDY_BELOW: f32 = 1e-5;

    /// Whether the choice is an argmax without noise or filter.
    pub fn is_greedy(&self) -> bool {
        self.temperature.is_nan() || self.temperature < Self::GREEDY_BELOW
    }

    /// Whether any penalty is on, so that a history must be kept.
    pub fn has_penalties(&self) -> bool {
        self.repetition_penalty != 1.0
            || self.presence_penalty != 0.0
            || self.frequency_penalty != 0.0
    }
}
