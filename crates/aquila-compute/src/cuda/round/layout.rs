//! The rows of all running requests and the round that runs, and the arguments of the steps, field for
//! field as `kernels/state.cuh` has them: a test reads the structures there and compares their layouts.

use crate::cuda::arguments::{Plan, Rows};
use crate::cuda::c_layout::{Address, c_structures};

/// Groups that a place has room for: the target's and those of a draft.
pub(super) const MOST_GROUPS: usize = 1 + crate::round::MOST_DRAFT_GROUPS;

/// Of [`Row::ended`].
pub(super) const ENDED_BY_TOKEN: u32 = 1;
pub(super) const ENDED_BY_LENGTH: u32 = 2;

/// Of [`Sequence::seeded`]: nothing was left for a tree, or what it begins with.
pub(super) const SEEDED_WITH_NOTHING: u32 = 1;
pub(super) const SEEDED: u32 = 2;
/// Of [`AcceptArgs::simulate`].
pub(super) const SIMULATE_NOTHING: u32 = 0;
pub(super) const SIMULATE_LENGTH: u32 = 1;
pub(super) const SIMULATE_RATE: u32 = 2;

c_structures! {
    /// How tokens are chosen.
    Sampling {
        seed: u64,
        biases: Address,
        floor: f64,
        temperature: f32,
        top_p: f32,
        repetition: f32,
        presence: f32,
        frequency: f32,
        top_k: u32,
        greedy: u32,
        bias_count: u32,
    }

    /// A request's row of the state.
    Sequence {
        id: u64,
        rounds: u64,
        sampling: Sampling,
        draft: Sampling,
        stops: Address,
        history: Address,
        single: f64,
        accumulated: f64,
        stop_count: u32,
        choice: u32,
        prompt: u32,
        longest: u32,
        min_tokens: u32,
        verify: u32,
        drafts: u32,
        steps: u32,
        candidates: u32,
        logprobs: u32,
        prompt_logprobs: u32,
        tokens: u32,
        extended: u32,
        ended: u32,
        paused: u32,
        paused_token: u32,
        missed: u32,
        seeded: u32,
        seed_count: u32,
        seed_drawn: u32,
    }

    /// What the host tells of one request of a batch.
    Task {
        place: u32,
        decodes: u32,
        first: u32,
        end: u32,
        first_output: u32,
        end_output: u32,
        last: u32,
        steps: u32,
        topk: u32,
        nodes: u32,
        pause: u32,
        rate: f32,
    }

    /// What one request does in the round, and what comes of it.
    Row {
        task: Task,
        live: u32,
        seeded: u32,
        drafts: u32,
        pool: u32,
        beam: u32,
        slots: u32,
        tree: u32,
        first_row: u32,
        first_token: u32,
        first_output: u32,
        first_query: u32,
        next: u32,
        resumed: u32,
        before: u32,
        parked_row: u32,
        parked_token: u32,
        extends: u32,
        seeds: u32,
        target_row: u32,
        target_token: u32,
        park_to: u32,
        followed: u32,
        complete: u32,
        exceeded: u32,
        answered: u32,
        prompted: u32,
        proposed: u32,
        correct: u32,
        ended: u32,
        ended_token: u32,
        known: u32,
        depth: u32,
        refused: u32,
    }

    /// A node that a draft offered.
    Offered {
        token: u32,
        parent: u32,
        depth: u32,
        score: f32,
        slot: u32,
        row: u32,
        drawn: u32,
        kept: u32,
    }

    /// A node of a tree.
    Node {
        token: u32,
        parent: u32,
        depth: u32,
        score: f32,
        drawn: u32,
        kept: u32,
        worth: f32,
    }

    /// What is asked about one output of a pass.
    Query { row: u32, node: u32, given: u32, unused: u32 }

    /// What all rows of a round share.
    Round {
        number: u64,
        rows: u32,
        outputs: u32,
        count: u32,
        resumes: u32,
        budget: u32,
        unused: u32,
    }

    /// Where everything is.
    State {
        places: u32,
        groups: u32,
        tokens_stride: u32,
        table_stride: u32,
        drafts: u32,
        hidden: u32,
        first_parked: u32,
        parked_rows: u32,
        chunk: u32,
        pool: u32,
        nodes: u32,
        topk: u32,
        steps: u32,
        candidates: u32,
        record: u32,
        vocabulary: u32,
        lookahead: Address,
        prior: Address,
        round: Address,
        tasks: Address,
        records: Address,
        sequences: Address,
        committed: Address,
        tokens: Address,
        tables: Address,
        seed_tokens: Address,
        seed_probabilities: Address,
        offered: Address,
        beams: Address,
        trees: Address,
        extending: Address,
        layer_rows: Address,
        moves: Address,
        queries: Address,
        best: Address,
        raw_best: Address,
        limits: Address,
        leader_scores: Address,
        log_totals: Address,
        part_scores: Address,
        leaders: Address,
        part_tokens: Address,
        arrivals: Address,
        counts: Address,
        candidate_tokens: Address,
        candidate_probabilities: Address,
        maxima: Address,
        lists: Address,
        totals: Address,
        list_counts: Address,
        drawn: Address,
        drawn_totals: Address,
        rest: Address,
        masks: Address,
    }

    /// Arguments of the steps that need nothing else.
    StepArgs { state: State, pass: u32 }

    /// A request that comes.
    Admission { sequence: Sequence, place: u32, matched: u32, tokens_at: u32, complete: u32 }

    /// Arguments of `admit`.
    AdmitArgs { state: State, admissions: Address, words: Address }

    /// Arguments of `change_slots`.
    ChangeSlotsArgs { state: State, changes: Address, words: Address }

    /// Arguments of `start_trees`.
    StartArgs { state: State, given: Address, words: Address, given_count: u32 }

    /// Arguments of `build_trees`.
    BuildArgs { state: State, fill: u32, weigh: u32 }

    /// Arguments of `plan_*`.
    PlanArgs {
        state: State,
        plan: Plan,
        most_rows: u32,
        most_outputs: u32,
        first: u32,
        layer: u32,
        by_layer: u32,
        chained: u32,
        kept_rows: u32,
        kept_depth: u32,
    }

    /// Arguments of what chooses tokens.
    ChooseArgs {
        state: State,
        logits: Rows,
        ids: Address,
        logprobs: Address,
        top_counts: Address,
        tops: Address,
        size: u32,
        draft: u32,
        level: u32,
        most_tops: u32,
        first: u32,
        count: u32,
        ranks: u32,
    }

    /// Arguments of `accept`.
    AcceptArgs { state: State, rates: Address, mean: f64, simulate: u32 }

    /// Arguments of `compact_slots`.
    CompactSlotsArgs { state: State, keys: Address, values: Address, slots: u32, width: u32 }

    /// Arguments of `compact_rows` and `park_rows`.
    CompactRowsArgs { state: State, rows: Rows, capacity: u32 }

    /// Arguments of `keep_states`.
    KeepArgs {
        state: State,
        rows: Rows,
        layer: u32,
        kept_rows: u32,
        kept_depth: u32,
        capacity: u32,
    }
}

#[cfg(test)]
mod tests {
    use crate::cuda::c_layout::compare;

    #[test]
    fn the_state_lies_in_memory_as_the_kernels_read_it() {
        let own = include_str!("../kernels/state.cuh");
        let all = [include_str!("../kernels/arguments.cuh"), own].concat();
        compare(own, &all, super::layouts());
    }
}
