//! What the host knows of the round that runs: which kernels it needs.

use crate::round::{RequestParams, RowWork, TreeLimits, Verify};

/// What the host knows of one row of the round that runs.
#[derive(Clone, Copy)]
pub(super) struct HostRow {
    pub place: usize,
    /// The steps of its tree at most, where it decodes.
    pub steps: Option<usize>,
    /// The nodes of that tree at most.
    pub nodes: usize,
    /// Which admission to its place it is of.
    pub admission: u64,
}

impl HostRow {
    /// Tokens that the round adds to its text at most.
    pub fn most_tokens(&self) -> usize {
        self.steps.unwrap_or(0) + 1
    }
}

/// The round that runs, as far as the host knows it.
#[derive(Default)]
pub(super) struct HostRound {
    pub rows: Vec<HostRow>,
    /// Rows of the target's pass at most.
    pub passed: usize,
    /// Whether some have a grammar, and whether drafts keep to it.
    pub masked: bool,
    pub guided: bool,
    /// Rows that the steps are enqueued for.
    pub bound: usize,
    pub limits: TreeLimits,
    pub number: u64,
    /// The longest context of a row at most.
    pub longest: usize,
    /// The widest tree.
    pub topk: usize,
    /// Whether a tree may have branches.
    pub branches: bool,
    /// Whether a draft may be paused after the round.
    pub pauses: bool,
    /// What requests of the round need of the choice of tokens.
    pub target: Needs,
    pub draft: Needs,
    /// Whether some have trees that are verified by probability.
    pub by_probability: bool,
    /// Likely tokens that are told with a token at most; none where no log-probabilities are.
    pub tops: Option<usize>,
    /// Whether some get the trees that are verified for them.
    pub told_trees: bool,
}

/// Which parts of the choice of tokens requests need.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Needs {
    pub greedy: bool,
    pub sampled: bool,
    pub filtered: bool,
    pub drawn: bool,
}

impl HostRound {
    /// Takes note of what one request needs.
    pub fn take(&mut self, params: &RequestParams, work: &RowWork, tokens: usize) {
        self.target.take(&params.sampling);
        let asked = match work {
            RowWork::Prefill { rows, outputs, .. } => {
                self.passed += rows.len();
                self.longest = self.longest.max(rows.end + 1);
                params.logprobs.max(params.prompt_logprobs).filter(|_| !outputs.is_empty())
            }
            RowWork::Decode { shape, pause, .. } => {
                self.passed += shape.nodes();
                self.longest = self.longest.max(tokens + shape.steps() + 1);
                self.topk = self.topk.max(shape.topk());
                self.branches |= shape.topk() > 1;
                self.pauses |= *pause || shape.steps() == 0;
                self.by_probability |= params.limits.verify != Verify::Match;
                self.told_trees |= params.draft_trees;
                params.logprobs
            }
        };
        if params.drafts() {
            self.topk = self.topk.max(params.limits.candidates);
            self.draft.take(params.draft_sampling.as_ref().unwrap_or(&params.sampling));
            self.draft.drawn |= params.limits.verify == Verify::Rejection;
        }
        self.tops = self.tops.max(asked);
    }
}

/// The kernels that answer the queries of a pass, beside the one that every pass has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ChoiceKernels {
    /// That which ranks the likeliest tokens.
    pub ranks: bool,
    /// That which samples, and that which finds the next best samples.
    pub samples: bool,
    pub samples_several: bool,
    /// That which draws from the draft's distribution.
    pub draws: bool,
    /// That which tells log-probabilities.
    pub reports: bool,
}

impl ChoiceKernels {
    /// As a number that differs where a launch does.
    pub fn bits(self) -> u64 {
        let Self { ranks, samples, samples_several, draws, reports } = self;
        let bits = [ranks, samples, samples_several, draws, reports];
        bits.iter().fold(0, |all, &bit| all << 1 | u64::from(bit))
    }
}

impl HostRound {
    /// The kernels that answer the queries of the target's pass, or of a draft's.
    pub fn choice_kernels(&self, target: bool) -> ChoiceKernels {
        let Needs { greedy, sampled, filtered, drawn } =
            if target { self.target } else { self.draft };
        let several = !target && self.topk > 1;
        let reports = target && self.tops.is_some();
        ChoiceKernels {
            ranks: filtered || (greedy && several) || reports,
            samples: sampled,
            samples_several: sampled && several,
            draws: drawn && !target,
            reports,
        }
    }
}

impl Needs {
    fn take(&mut self, sampling: &crate::sampling::Sampling) {
        let sampled = !sampling.is_greedy();
        self.greedy |= !sampled;
        self.sampled |= sampled;
        self.filtered |= sampled && (sampling.top_k > 0 || sampling.top_p < 1.0);
    }
}
