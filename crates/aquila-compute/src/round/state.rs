//! The state of all running requests, and the steps of a round over it: the plain reference that
//! the CPU backend runs.
//!
//! What needs logits or stores is the backend's: it takes the queries, answers them and hands the
//! answers in. The rows of the passes are in `target.rs`, `recurrent.rs` and `layers.rs`.

use std::collections::VecDeque;
use std::ops::Range;

use super::paused_drafts::{Paused, TargetRows};
use super::row::{DraftTree, RoundRow, Work};
use super::sequence::{SequenceState, TakeOnce};
use super::{
    Batch, BatchRow, Candidates, DraftQuery, ExtendRows, Kept, PassRows, RequestOutput,
    StateBounds, Tree, TreeLimits, Verify, prune_to_rows,
};
use crate::ForwardPlan;
use crate::sampling::Choice;

/// The rows of all requests that hold KV, and the round that runs.
#[derive(Debug, Clone)]
pub struct RoundState {
    pub(super) bounds: StateBounds,
    /// By place.
    pub(super) sequences: Vec<Option<Box<SequenceState>>>,
    /// Of the round that runs: what is void has none.
    pub(super) rows: Vec<RoundRow>,
    /// How many rows its batch has, void ones included.
    batch_rows: usize,
    /// The number of the round.
    pub(super) round: u64,
    /// What bounds its trees.
    limits: TreeLimits,
    /// What was chosen at the outputs of the target's pass so far.
    pub(super) sampled: Vec<Choice>,
    pub(super) plan: ForwardPlan,
    /// The tokens between the bonus and each output of the target's pass, the node's own last.
    pub(super) paths: Vec<Vec<u32>>,
    /// The row of the round and the path of each output of a level of trees.
    pub(super) level: Vec<(usize, Vec<u32>)>,
    /// The passes in which resumed drafts process what they missed: the row of the round, where
    /// its hidden rows are, and how many tokens it then knows.
    catch_up: Vec<Vec<(usize, TargetRows, usize)>>,
    /// The rows whose drafts process what the round made certain, and whether that is all of their
    /// texts.
    next: Vec<(usize, bool)>,
    /// What a draft processes now.
    pub(super) extending: Vec<Extending>,
    resumes: bool,
    /// Where the rows of each of those begin, in the pass of each layer so far.
    pub(super) firsts: Vec<Vec<usize>>,
    pub(super) kept: Kept,
    /// Hidden rows that paused drafts will need, and where they go.
    parked: Vec<(u32, u32)>,
    /// What came of rounds, oldest first, until it is taken.
    outputs: VecDeque<Vec<Option<RequestOutput>>>,
}

/// A request some of whose tokens have become certain.
#[derive(Debug, Clone)]
pub(super) struct Extending {
    /// Which row of the round.
    pub row: usize,
    pub place: usize,
    /// The rows to run in each of the draft's groups.
    pub groups: Vec<Range<usize>>,
    pub target: TargetRows,
    /// Whether a tree is to begin behind the last row.
    pub seed: bool,
}

impl RoundState {
    /// With room for what `bounds` say.
    pub fn new(bounds: StateBounds) -> Self {
        Self {
            sequences: (0..bounds.places).map(|_| None).collect(),
            bounds,
            rows: Vec::new(),
            batch_rows: 0,
            round: 0,
            limits: TreeLimits::default(),
            sampled: Vec::new(),
            plan: ForwardPlan::default(),
            paths: Vec::new(),
            level: Vec::new(),
            catch_up: Vec::new(),
            next: Vec::new(),
            extending: Vec::new(),
            resumes: false,
            firsts: Vec::new(),
            kept: Kept::default(),
            parked: Vec::new(),
            outputs: VecDeque::new(),
        }
    }

    /// Begins a round. Requests that have ended are void in it.
    pub fn begin(&mut self, batch: Batch) {
        self.rows.clear();
        self.next.clear();
        self.extending.clear();
        self.kept.clear();
        self.parked.clear();
        for place in batch.departed {
            self.sequences[place] = None;
        }
        for admitted in batch.admitted {
            let place = admitted.place;
            let sequence = SequenceState::new(admitted, &self.bounds.groups);
            let before = self.sequences[place].replace(Box::new(sequence));
            assert!(before.is_none(), "the request at {place} never left");
        }
        for change in &batch.tables {
            let sequence = self.sequences[change.place].as_mut().expect("it was admitted");
            sequence.change_table(change.group, change.from, &batch.slots[change.slots.clone()]);
        }
        (self.round, self.limits) = (batch.round, batch.limits);
        self.batch_rows = batch.rows.len();
        for (index, BatchRow { place, work }) in batch.rows.iter().enumerate() {
            let sequence = self.sequences[*place].as_mut().expect("it was admitted");
            if sequence.ended {
                continue;
            }
            let mut row = RoundRow::new(index, *place, sequence, work);
            let drafts = self.bounds.drafts && sequence.params.drafts();
            if row.decodes() && drafts && sequence.paused.is_none() {
                let seed = sequence.seed.take("the draft's seed");
                row.seed = seed.filter(|_| row.shape.steps() > 0);
            }
            self.rows.push(row);
        }
        self.plan_catch_up();
    }

    /// Plans in which passes paused drafts that get a tree process what they missed: as much as is
    /// common after a round last, to leave the seeds, and what is before that in passes as large
    /// as those of prompts.
    fn plan_catch_up(&mut self) {
        self.catch_up.clear();
        let last = self.bounds.shape.steps() + 1;
        let mut resumed = Vec::new();
        let mut room = 0;
        for (at, row) in self.rows.iter().enumerate().filter(|(_, row)| row.shape.steps() > 0) {
            let sequence = self.sequences[row.place].as_ref().expect("it runs");
            let Some(paused) = &sequence.paused else { continue };
            let Some(target) = paused.rows(row.place, &self.bounds) else { continue };
            let tokens = sequence.tokens.len();
            resumed.push((at, target, tokens));
            let (mut known, goal) = (sequence.extended, tokens.saturating_sub(last));
            while known < goal {
                if room == 0 {
                    self.catch_up.push(Vec::new());
                    room = self.bounds.chunk;
                }
                let rows = room.min(goal - known);
                (known, room) = (known + rows, room - rows);
                self.catch_up.last_mut().expect("one was begun").push((at, target, known));
            }
        }
        if !resumed.is_empty() {
            self.catch_up.push(resumed);
        }
    }

    /// Says which tokens a draft processes next.
    pub fn begin_extend(&mut self, rows: ExtendRows) {
        self.extending.clear();
        self.firsts.clear();
        match rows {
            ExtendRows::CatchUp(at) => {
                self.resumes = true;
                let seeds = at + 1 == self.catch_up.len();
                for (row, target, tokens) in
                    self.catch_up.get_mut(at).map_or(vec![], std::mem::take)
                {
                    let sequence = self.sequence_mut(row);
                    if seeds {
                        sequence.paused = None;
                    }
                    self.extend_to(row, target, tokens, true, seeds);
                }
            }
            ExtendRows::Round => {
                self.resumes = false;
                for (row, whole) in std::mem::take(&mut self.next) {
                    let RoundRow { first_row, first_token, .. } = self.rows[row];
                    let target = TargetRows { row: first_row, token: first_token };
                    let sequence = self.sequence_mut(row);
                    let tokens = sequence.tokens.len();
                    let seed = whole && sequence.params.most_steps(tokens) > 0;
                    if !seed {
                        sequence.seed = TakeOnce::Full(None);
                    }
                    self.extend_to(row, target, tokens, whole, seed);
                    self.rows[row].output.known = tokens;
                }
            }
        }
    }

    fn sequence_mut(&mut self, row: usize) -> &mut SequenceState {
        self.sequences[self.rows[row].place].as_mut().expect("it runs")
    }

    /// Lets the draft of a row know `tokens` of its text.
    fn extend_to(
        &mut self,
        row: usize,
        target: TargetRows,
        tokens: usize,
        whole: bool,
        seed: bool,
    ) {
        let place = self.rows[row].place;
        let sequence = self.sequences[place].as_mut().expect("it runs");
        let groups = sequence.missing_rows(&self.bounds.groups, tokens, whole);
        for (at, rows) in groups.iter().enumerate() {
            sequence.rows[at + 1] += rows.len();
        }
        sequence.extended = tokens;
        self.extending.push(Extending { row, place, groups, target, seed });
    }

    /// What is asked about the last row of each request whose tree is to begin behind it, and how
    /// many candidates.
    pub fn seed_queries(&mut self) -> (Vec<DraftQuery<'_>>, usize) {
        for extending in self.extending.iter().filter(|extending| extending.seed) {
            self.sequences[extending.place].as_mut().expect("it runs").ask_for_draft(&[]);
        }
        let mut queries = Vec::new();
        let mut count = 1;
        for extending in self.extending.iter().filter(|extending| extending.seed) {
            let sequence = self.sequences[extending.place].as_ref().expect("it runs");
            queries.push(sequence.draft_query(&[], queries.len()));
            count = count.max(sequence.params.limits.candidates);
        }
        (queries, count)
    }

    /// Leaves what those trees begin with: of this round where drafts resumed for it, else of the
    /// next one.
    pub fn take_seeds(&mut self, seeds: Vec<Candidates>) {
        let wanted = self.extending.iter().filter(|extending| extending.seed);
        for (extending, seed) in wanted.zip(seeds) {
            if self.resumes {
                self.rows[extending.row].seed = Some(seed);
            } else {
                let sequence = self.sequences[extending.place].as_mut().expect("it runs");
                sequence.seed = TakeOnce::Full(Some(seed));
            }
        }
    }

    /// What the next tree of the request at `place` begins with, if it was left and not taken.
    pub fn seed(&self, place: usize) -> Option<&Candidates> {
        match &self.sequences[place].as_ref()?.seed {
            TakeOnce::Full(seed) => seed.as_ref(),
            TakeOnce::Empty => None,
        }
    }

    /// Leaves what the next tree of the request at `place` begins with.
    pub fn set_seed(&mut self, place: usize, seed: Option<Candidates>) {
        let sequence = self.sequences[place].as_mut().expect("it was admitted");
        sequence.seed = TakeOnce::Full(seed);
    }

    /// Starts the trees of all rows that decode: `given` ones are whole already.
    pub fn start_trees(&mut self, given: Vec<(usize, Tree)>) {
        for (place, tree) in given {
            let row = self.rows.iter_mut().find(|row| row.place == place && row.decodes());
            if let Some(row) = row {
                row.seed = None;
                row.work = Work::Verify { tree };
            }
        }
        for row in &mut self.rows {
            let sequence = self.sequences[row.place].as_mut().expect("it runs");
            if let Some(grammar) = &mut sequence.grammar {
                row.keep_to(grammar);
            }
            row.draft = row.seed.take().map(|seed| DraftTree::start(&seed, row.shape));
        }
    }

    /// What is asked about each row of the level of trees that was planned last, and how many
    /// candidates.
    pub fn level_queries(&mut self) -> (Vec<DraftQuery<'_>>, usize) {
        for (row, path) in &self.level {
            self.sequences[self.rows[*row].place].as_mut().expect("it runs").ask_for_draft(path);
        }
        let drafted = self.rows.iter().filter(|row| row.draft.is_some());
        let count = drafted.map(|row| row.shape.topk()).max().unwrap_or(1);
        let mut queries = Vec::with_capacity(self.level.len());
        for (output, (row, path)) in self.level.iter().enumerate() {
            let sequence = self.sequences[self.rows[*row].place].as_ref().expect("it runs");
            queries.push(sequence.draft_query(path, output));
        }
        (queries, count)
    }

    /// Grows the trees by what was proposed after each node of their beams.
    pub fn take_level(&mut self, proposed: Vec<Candidates>) {
        let mut proposed = proposed.into_iter();
        for draft in self.rows.iter_mut().filter_map(|row| row.draft.as_mut()) {
            if draft.builder.goes_on() {
                let nodes = draft.builder.beam().len();
                Candidates::grow(&mut draft.builder, proposed.by_ref().take(nodes).collect());
            }
        }
    }

    /// Ends the trees that were drafted: the best nodes of each. Answers which rows those are of.
    pub fn finish_trees(&mut self) -> Vec<usize> {
        let mut drafted = Vec::new();
        for (at, row) in self.rows.iter_mut().enumerate() {
            if let (Some(draft), Work::Verify { tree }) = (row.draft.take(), &mut row.work) {
                *tree = draft.builder.finish(tree.nodes()[0].token);
                drafted.push(at);
            }
        }
        drafted
    }

    /// Fills and prunes trees as the limits of the batch say.
    pub fn limit_trees(&mut self) {
        let TreeLimits { row_budget, fill } = self.limits;
        if fill {
            self.rows.iter_mut().for_each(RoundRow::fill_tree);
        }
        if let Some(budget) = row_budget {
            let Self { rows, sequences, .. } = self;
            let mut trees = Vec::with_capacity(rows.len());
            for row in rows {
                let params = &sequences[row.place].as_ref().expect("it runs").params;
                let drawn = params.limits.verify == Verify::Rejection;
                trees.extend(row.weighted(drawn));
            }
            prune_to_rows(&mut trees, budget);
        }
    }

    /// The number of a row's request, and its tree.
    pub fn tree(&self, row: usize) -> Option<(u64, &Tree)> {
        let RoundRow { place, work, .. } = self.rows.get(row)?;
        let Work::Verify { tree } = work else { return None };
        Some((self.sequences[*place].as_ref()?.params.id, tree))
    }

    /// Plans the rows of a pass.
    pub fn plan_rows(&mut self, pass: PassRows) -> &ForwardPlan {
        self.plan.clear();
        match pass {
            PassRows::Target => self.plan_target(),
            PassRows::RecurrentExtend { hidden } => self.plan_recurrent_extend(hidden),
            PassRows::RecurrentLevel { first } => self.plan_recurrent_level(first),
            PassRows::LayerExtend { layer, kept } => self.plan_layer_extend(layer, kept),
            PassRows::LayerLevel { depth, kept } => self.plan_layer_level(depth, kept),
        }
        &self.plan
    }

    /// Where a request's block table of a group is in plans that have one for each request; those
    /// of a draft's groups lie behind each other.
    pub(super) fn table_start(&self, group: usize, place: usize) -> u32 {
        let StateBounds { places, stride, .. } = self.bounds;
        ((group.saturating_sub(1) * places + place) * stride) as u32
    }

    /// What of the round's rows is kept, and where it belongs.
    pub fn kept(&self) -> &Kept {
        &self.kept
    }

    /// Decides which drafts process what the round made certain, and which are paused.
    pub fn publish(&mut self) {
        for (at, row) in self.rows.iter_mut().enumerate() {
            let sequence = self.sequences[row.place].as_mut().expect("it runs");
            row.output.known = sequence.extended;
            if !self.bounds.drafts || sequence.ended || !sequence.params.drafts() {
                continue;
            }
            if sequence.paused.is_none() && (!row.decodes() || row.shape.steps() > 0 || !row.pause)
            {
                let whole = !matches!(row.work, Work::Prefill { last: false, .. });
                self.next.push((at, whole));
            } else {
                let (token, place) = (row.first_token, row.place);
                let to = Paused::miss(&mut sequence.paused, token, place, &self.bounds);
                self.parked.extend(to.map(|to| (row.first_row as u32, to)));
            }
        }
    }

    /// Hidden rows of the target's pass that paused drafts will need, and where they go.
    pub fn parked(&self) -> &[(u32, u32)] {
        &self.parked
    }

    /// Keeps what came of each row of the batch until it is taken; nothing where the request had ended
    /// before.
    pub fn copy_outputs(&mut self) {
        let mut outputs: Vec<_> = (0..self.batch_rows).map(|_| None).collect();
        for row in &mut self.rows {
            outputs[row.index] = Some(std::mem::take(&mut row.output));
        }
        self.outputs.push_back(outputs);
    }

    /// What came of the oldest round of which that was kept and not taken yet.
    pub fn take_outputs(&mut self) -> Option<Vec<Option<RequestOutput>>> {
        self.outputs.pop_front()
    }
}
