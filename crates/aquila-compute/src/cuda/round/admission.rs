//! Requests that come, as the device keeps them.

use super::layout::{Sampling, Sequence};
use crate::cuda::device::{Device, Memory};
use crate::round::{Admitted, RequestParams, StateBounds, Verify};
use crate::{Result, sampling};

/// Lists that the row of a request names.
pub(super) struct Lists {
    _memory: Vec<Memory>,
}

impl Lists {
    /// The row of a request, and the lists that it names.
    pub(super) fn new(
        device: &Device,
        bounds: &StateBounds,
        admitted: &Admitted,
    ) -> Result<(Sequence, Self)> {
        let params = &*admitted.params;
        let mut memory = Vec::new();
        let mut list = |words: &[u32]| -> Result<u64> {
            if words.is_empty() {
                return Ok(0);
            }
            let made = device.allocate("lists of a request", 4 * words.len())?;
            device.write(&made, 0, words)?;
            let address = made.at(0);
            memory.push(made);
            Ok(address)
        };
        let pairs = |biases: &[(u32, f32)]| -> Vec<u32> {
            biases.iter().flat_map(|&(token, bias)| [token, bias.to_bits()]).collect()
        };
        let stops = list(&params.stop_ids)?;
        let biases = list(&pairs(&params.sampling.logit_bias))?;
        let target = sampling_of(&params.sampling, biases);
        let draft = match &params.draft_sampling {
            None => target,
            Some(sampling) => sampling_of(sampling, list(&pairs(&sampling.logit_bias))?),
        };
        let history = match params.sampling.has_penalties() {
            false => 0,
            true => {
                let made =
                    device.allocate("tokens that count for penalties", 4 * bounds.vocabulary)?;
                let address = made.at(0);
                memory.push(made);
                address
            }
        };
        let sequence = Sequence { stops, history, ..sequence(params, admitted, target, draft) };
        Ok((sequence, Self { _memory: memory }))
    }
}

/// The row of a request without the lists that it names.
fn sequence(
    params: &RequestParams,
    admitted: &Admitted,
    sampling: Sampling,
    draft: Sampling,
) -> Sequence {
    let (verify, single, accumulated) = match params.limits.verify {
        Verify::Match => (0, 0.0, 0.0),
        Verify::TargetOnly { single, accumulated } => (1, single, accumulated),
        Verify::Rejection => (2, 0.0, 0.0),
    };
    let number = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
    let told = |count: Option<usize>| count.map_or(0, |count| number(count) + 1);
    Sequence {
        id: params.id,
        rounds: admitted.rounds,
        sampling,
        draft,
        single,
        accumulated,
        stop_count: number(params.stop_ids.len()),
        choice: params.choice,
        prompt: number(params.prompt),
        longest: number(params.longest),
        min_tokens: number(params.min_tokens),
        verify,
        drafts: u32::from(params.drafts()),
        steps: number(params.limits.shape.steps()),
        candidates: number(params.limits.candidates),
        logprobs: told(params.logprobs),
        prompt_logprobs: told(params.prompt_logprobs),
        tokens: number(admitted.tokens.len()),
        // Until the draft of a complete one is told what its next tree begins with, that is nothing.
        extended: if admitted.complete { number(admitted.tokens.len()) } else { 0 },
        seeded: u32::from(admitted.complete),
        ..Sequence::default()
    }
}

fn sampling_of(sampling: &sampling::Sampling, biases: u64) -> Sampling {
    Sampling {
        seed: sampling.seed,
        biases,
        floor: match sampling.min_p > 0.0 {
            true => sampling::definition::min_p_floor(sampling.min_p),
            false => f64::NEG_INFINITY,
        },
        temperature: sampling.temperature,
        top_p: sampling.top_p,
        repetition: sampling.repetition_penalty,
        presence: sampling.presence_penalty,
        frequency: sampling.frequency_penalty,
        top_k: sampling.top_k,
        greedy: u32::from(sampling.is_greedy()),
        bias_count: sampling.logit_bias.len() as u32,
    }
}
