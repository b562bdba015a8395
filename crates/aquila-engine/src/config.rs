//! What an engine is told at start.

use aquila_compute::round::{DraftGroup, Returned, StateBounds};
use aquila_compute::{KvDtype, PlanBounds, WeightFormat};
use aquila_model::ModelSpec;
use aquila_spec::{Allowance, Shape, Simulate, Verify};

/// Settings that no engine can work with.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// Nothing where there must be something.
    #[error("{0} must be at least 1")]
    Zero(&'static str),
    /// A KV pool that holds no page.
    #[error("a KV pool of {tokens} tokens holds no page of {page_size}")]
    NoPage {
        /// Tokens of the pool.
        tokens: usize,
        /// Slots of a page.
        page_size: usize,
    },
    /// A KV pool whose slots cannot be numbered.
    #[error("a KV pool of {0} tokens is too large")]
    Pool(usize),
    /// A policy for trees that were not reserved for.
    #[error("the policy may choose {chosen}, and the engine has room for {room}")]
    Trees {
        /// The largest tree of the policy.
        chosen: Shape,
        /// The largest tree of the engine.
        room: Shape,
    },
}

/// Settings of an engine, complete and checked by [`EngineConfig::check`].
#[derive(Debug, Clone, PartialEq)]
pub struct EngineConfig {
    /// Slots of one KV page.
    pub page_size: usize,
    /// Slots of the KV pool, a multiple of the page size.
    pub max_total_tokens: usize,
    /// Requests that may hold KV at a time.
    pub max_running_requests: usize,
    /// Requests that may wait; one more is refused.
    pub max_queued_requests: usize,
    /// Prompt rows of one round.
    pub chunked_prefill_size: usize,
    /// Tokens of one sequence, prompt and output together.
    pub context_length: usize,
    /// Whether finished prompts and outputs are kept for requests that begin alike.
    pub prefix_cache: bool,
    /// How keys and values are kept.
    pub kv_dtype: KvDtype,
    /// What the seeds of requests without one derive from.
    pub random_seed: u64,
    /// The largest tree that is drafted and verified.
    pub shape: Shape,
    /// Hidden rows of the target that are kept for a request while its draft sits out. A draft
    /// that takes hidden rows and has missed more than these cannot return.
    pub parked_rows: usize,
    /// How the drafts of sampled requests are verified.
    pub verify: Verify,
    /// Acceptance that is only pretended, to measure what rounds cost.
    pub simulate: Option<Simulate>,
    /// What requests may get of the target's rows, beside tokens.
    pub returned: Returned,
}

/// Rows whose logits one round may ask for beyond one per running request.
const PROMPT_LOGPROB_ROWS: usize = 64;
/// Rows of logits that come at a time at most, where tokens are chosen from each row alone: more would
/// not make the projection faster.
const LOGIT_ROWS: usize = 512;

impl EngineConfig {
    /// Refuses settings that no engine can work with.
    pub fn check(&self) -> Result<(), ConfigError> {
        let at_least_one = [
            ("page_size", self.page_size),
            ("max_running_requests", self.max_running_requests),
            ("chunked_prefill_size", self.chunked_prefill_size),
            ("context_length", self.context_length),
        ];
        if let Some((name, _)) = at_least_one.into_iter().find(|&(_, value)| value == 0) {
            return Err(ConfigError::Zero(name));
        }
        let (tokens, page_size) = (self.max_total_tokens, self.page_size);
        if tokens < page_size {
            return Err(ConfigError::NoPage { tokens, page_size });
        }
        if tokens > u32::MAX as usize / 2 {
            return Err(ConfigError::Pool(tokens));
        }
        Ok(())
    }

    /// Rows of the largest forward pass.
    pub fn max_rows(&self) -> usize {
        self.chunked_prefill_size + self.max_running_requests * self.shape.nodes()
    }

    /// Hidden rows of the target that are there for a draft: those of a pass, then parked ones.
    pub fn hidden_rows(&self) -> usize {
        self.max_rows() + self.max_running_requests * self.parked_rows
    }

    /// Bytes of the target's rows that are kept for requests, until a round is read. Those that a
    /// draft takes as well are counted for both.
    pub fn returned_bytes(&self, spec: &ModelSpec) -> u64 {
        let Returned { hidden_states, routed_experts } = self.returned;
        let hidden = if hidden_states { spec.hidden_size } else { 0 };
        let experts = if routed_experts { spec.experts_per_token().unwrap_or(0) } else { 0 };
        4 * self.max_rows() as u64 * (hidden + experts * spec.layers.len()) as u64
    }

    /// Outputs of the largest forward pass.
    pub fn max_outputs(&self) -> usize {
        self.max_running_requests * self.shape.nodes() + PROMPT_LOGPROB_ROWS
    }

    /// Outputs of the target whose logits come at a time.
    pub fn logit_rows(&self) -> usize {
        self.max_outputs().min(LOGIT_ROWS)
    }

    /// The largest plan of a draft's pass.
    pub fn draft_bounds(&self) -> PlanBounds {
        let running = self.max_running_requests;
        let level = self.shape.topk().max(self.shape.steps() + 2);
        PlanBounds {
            rows: self.chunked_prefill_size + running * level,
            outputs: running * self.shape.topk(),
            slots: running * (self.longest_sequence() + 1 + level * (self.shape.steps() + 1)),
        }
    }

    /// What a draft may use, its weights kept as `format`.
    pub fn allowance(&self, format: WeightFormat) -> Allowance {
        Allowance {
            format,
            kv_dtype: self.kv_dtype,
            slots: self.slots(),
            positions: self.context_length,
            bounds: self.draft_bounds(),
            target_rows: self.hidden_rows(),
            requests: self.max_running_requests,
            shape: self.shape,
        }
    }

    /// The largest plan of a forward pass.
    pub fn bounds(&self) -> PlanBounds {
        PlanBounds {
            rows: self.max_rows(),
            outputs: self.max_outputs(),
            slots: self.max_running_requests
                * (self.longest_sequence() + self.shape.nodes() * (self.shape.steps() + 1)),
        }
    }

    /// What the state of rounds has room for, with these groups of a draft; whether there is a draft
    /// on the backend, and one of hidden rows, is left to say.
    pub fn state_bounds(&self, groups: Vec<DraftGroup>, vocabulary: usize) -> StateBounds {
        StateBounds {
            places: self.max_running_requests,
            stride: self.longest_sequence(),
            drafts: false,
            groups,
            hidden: false,
            first_parked: self.max_rows(),
            parked_rows: self.parked_rows,
            chunk: self.chunked_prefill_size,
            shape: self.shape,
            verify: self.verify,
            vocabulary,
            outputs: self.max_outputs(),
            logits: self.logit_rows(),
            simulate: self.simulate.clone(),
        }
    }

    /// Whole pages of the pool.
    pub fn pages(&self) -> usize {
        self.max_total_tokens / self.page_size
    }

    /// Slots of the pool.
    pub fn slots(&self) -> usize {
        self.pages() * self.page_size
    }

    /// Tokens that the longest possible sequence may have: its last tree must fit beside it.
    pub fn longest_sequence(&self) -> usize {
        let pool = self.slots();
        let tree =
            self.shape.nodes().saturating_sub(2).max(self.shape.draft_rows().saturating_sub(1));
        self.context_length.min(pool.saturating_sub(tree))
    }
}
