//! Which tokens a request has seen, for penalties.

use std::collections::HashMap;

/// How often each token was seen in prompt and output.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct History {
    /// Per token: whether the prompt has it, and how often the output has it.
    counts: HashMap<u32, (bool, u32)>,
}

impl History {
    /// The history of a request that has only a prompt.
    pub fn of_prompt(prompt: &[u32]) -> Self {
        Self { counts: prompt.iter().map(|&token| (token, (true, 0))).collect() }
    }

    /// Counts one token of the output.
    pub fn push(&mut self, token: u32) {
        self.counts.entry(token).or_default().1 += 1;
    }

    /// Every token seen: (token, in the prompt, times in the output).
    pub fn iter(&self) -> impl Iterator<Item = (u32, bool, u32)> + '_ {
        self.counts.iter().map(|(&token, &(prompt, output))| (token, prompt, output))
    }

    /// What is known of one token: in the prompt, times in the output.
    pub fn get(&self, token: u32) -> (bool, u32) {
        self.counts.get(&token).copied().unwrap_or_default()
    }
}
