//! What a request asks of every round, from what was submitted.

use aquila_compute::round::{DraftLimits, RequestParams, Shape, Verify};
use aquila_compute::sampling::Sampling;

use crate::request::{Request, RequestId, Speculation};

/// What `request` asks; `longest` and `limits` are the engine's.
pub(crate) fn params_of(
    id: RequestId,
    request: &Request,
    longest: usize,
    mut limits: DraftLimits,
) -> RequestParams {
    limits.shape = match request.speculation {
        Speculation::Free => limits.shape,
        Speculation::Off => Shape::PLAIN,
        Speculation::Steps(steps) => limits.shape.capped(steps),
    };
    // The target's choice without noise is the only one: nothing is left to probability.
    if limits.shape == Shape::PLAIN || request.sampling.is_greedy() {
        limits.verify = Verify::Match;
    }
    let likely = || Sampling { temperature: 0.0, ..request.sampling.clone() };
    let prompt = request.prompt.len();
    RequestParams {
        id: id.0,
        sampling: request.sampling.clone(),
        draft_sampling: matches!(limits.verify, Verify::TargetOnly { .. }).then(likely),
        choice: request.choice,
        stop_ids: request.limits.stop_ids.clone(),
        min_tokens: request.limits.min_tokens,
        grammar: request.grammar.clone(),
        prompt,
        longest: longest.min(prompt.saturating_add(request.limits.max_tokens)),
        logprobs: request.logprobs,
        prompt_logprobs: request.prompt_logprobs,
        returned: request.returned,
        draft_trees: request.draft_trees,
        limits,
    }
}
