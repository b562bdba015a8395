//! The rows of all running requests and the round that runs, in device memory.
//!
//! The host keeps what never changes of a request and how long its text may be by now; what was
//! chosen is on the device, and the host reads it once, at the end of a round. So steps only enqueue.
//! Each step is a kernel or a few, and [`crate::round::RoundState`] defines what it does.

use std::sync::Arc;

use super::admission::Lists;
use super::choose::ReportedLogprobs;
use super::grammar::Masks;
use super::host_round::{HostRound, HostRow};
use super::layout::{Admission, MOST_GROUPS, Round, State, Task};
use super::outcome::CopiedRounds;
use super::state_sizes::Sizes;
use crate::cuda::copies::Mailbox;
use crate::cuda::device::{Device, Memory};
use crate::cuda::kernels::Kernels;
use crate::cuda::launch::GRID_ROWS;
use crate::round::{Batch, GrammarRow, GraphKey, Proposal, RequestParams, RowWork, StateBounds};
use crate::{DraftIds, Error, Result};

/// Thread blocks that share a row of logits at most.
pub(super) const MOST_PARTS: usize = 32;
/// Largest values and listed tokens of a row of `choose.cu`, both twice for each output.
pub(super) const MAXIMA: usize = 256;
pub(super) const LISTED: usize = 2048;
/// Nodes of a level of a tree that go on at most: `MOST_BEAM` of `trees.cu`.
const MOST_BEAM: usize = 256;
/// Positions of the shortest context that passes which may be captured are enqueued for; longer
/// ones come in powers of two.
const SHORTEST: usize = 1024;
/// Words that travel with a batch before more room is made for them.
const WORDS: usize = 1 << 14;

/// The rows of all running requests, and the round that runs.
pub struct CudaState {
    pub(super) bounds: StateBounds,
    pub(super) parts: State,
    memory: Vec<Memory>,
    /// The block tables of all groups, which plans read.
    tables: Memory,
    pub(super) records: Memory,
    pub(super) trees: Memory,
    pub(super) offered: Memory,
    pub(super) queries: Memory,
    /// Queries that there is room for, and those of the pass that was planned last at most.
    pub(super) outputs: usize,
    pub(super) asked: usize,
    /// Rows of logits that come at a time at most.
    pub(super) pieces: usize,
    /// The round and its tasks on their way.
    pub(super) tasks: Mailbox,
    /// What comes with a batch and is not there in every one: requests and slots.
    pub(super) updates: Option<Mailbox>,
    /// Trees that the host has drafted.
    pub(super) given: Option<Mailbox>,
    pub(super) rates: Mailbox,
    pub(super) sent_rates: Vec<f64>,
    /// The vocabulary of a draft that knows only some tokens: where the host has it, how many
    /// tokens there are, and a copy.
    ids: Option<(usize, usize, Memory)>,
    /// By place.
    pub(super) requests: Vec<Option<HostRequest>>,
    pub(super) round: HostRound,
    pub(super) reported: ReportedLogprobs,
    pub(super) masks: Masks,
    pub(super) copied: CopiedRounds,
    /// Requests that were admitted so far.
    admissions: u64,
}

/// A request that holds KV, as far as the host knows it.
pub(super) struct HostRequest {
    pub params: Arc<RequestParams>,
    /// Its number among all requests that were admitted.
    pub admission: u64,
    /// The tokens that it came with.
    pub sent: Arc<[u32]>,
    /// How many tokens its text had when it was last read, and how many the rounds that were not read
    /// yet have added at most.
    pub known: usize,
    pub unread: usize,
    /// The last token that the host has read.
    pub last: u32,
    pub grammar: Option<GrammarRow>,
    /// Lists on the device that its row names.
    _lists: Lists,
}

impl CudaState {
    /// Bytes that a state takes.
    pub(in crate::cuda) fn bytes(bounds: &StateBounds) -> usize {
        let sizes = Sizes::of(bounds);
        let mut bytes: usize = sizes.apart(bounds).iter().sum();
        let counted = sizes.parts(bounds, [0; 7], |more| {
            bytes += more;
            Ok(0)
        });
        counted.map_or(0, |_| bytes)
    }

    pub(in crate::cuda) fn new(device: &Device, bounds: StateBounds) -> Result<Self> {
        let StateBounds { places, shape, .. } = bounds;
        let (steps, topk) = (shape.steps(), shape.topk());
        let sizes = Sizes::of(&bounds);
        let Sizes { groups, outputs, pieces, .. } = sizes;
        if groups > MOST_GROUPS {
            return Err(Error::Tensor(format!("{groups} KV groups, {MOST_GROUPS} at most")));
        }
        if pieces > GRID_ROWS {
            return Err(Error::Tensor(format!(
                "{places} requests of {topk} nodes of a level each are {pieces} outputs, {GRID_ROWS} at most"
            )));
        }
        if topk > MOST_BEAM {
            return Err(Error::Tensor(format!("trees with a topk of {topk}, {MOST_BEAM} at most")));
        }
        let [tables, records, trees, offered, queries, lists, batch] = sizes.apart(&bounds);
        let tables = device.allocate("block tables", tables)?;
        let records = device.allocate("the rows of a round", records)?;
        let trees = device.allocate("draft trees", trees)?;
        let offered = device.allocate("draft trees", offered)?;
        let queries = device.allocate("the rows of a round", queries)?;
        // In an order that depends on that of threads.
        let lists = device.allocate_uncompared("likely tokens", lists)?;
        let tasks = Mailbox::new(device, "a batch", batch.div_ceil(4))?;
        let apart = [&tables, &records, &trees, &offered, &queries, &lists, &tasks.memory];
        let mut memory: Vec<Memory> = Vec::new();
        let addresses = apart.map(|made| made.at(0));
        let parts = sizes.parts(&bounds, addresses, |bytes| {
            let made = device.allocate("the rows of requests", bytes)?;
            let address = made.at(0);
            memory.push(made);
            Ok(address)
        })?;
        let lookahead: Vec<u32> = bounds.groups.iter().map(|g| g.lookahead as u32).collect();
        let prior: Vec<f32> = (0..topk.max(1)).map(Proposal::prior).collect();
        device.write(&memory[0], 0, &lookahead)?;
        device.write(&memory[1], 0, &prior)?;
        memory.extend(apart.map(Memory::clone));
        Ok(Self {
            parts,
            memory,
            tables,
            records,
            trees,
            offered,
            queries,
            outputs,
            asked: 0,
            pieces,
            tasks,
            updates: None,
            given: None,
            rates: Mailbox::new(device, "rates", 2 * (steps + 1))?,
            sent_rates: Vec::new(),
            ids: None,
            requests: (0..places).map(|_| None).collect(),
            round: HostRound::default(),
            reported: ReportedLogprobs::default(),
            masks: Masks::default(),
            copied: CopiedRounds::default(),
            admissions: 0,
            bounds,
        })
    }

    /// The memory that the addresses of the state lie in.
    pub(super) fn names(&self) -> Vec<&Memory> {
        self.memory.iter().collect()
    }

    /// A place for words on their way, large enough.
    pub(super) fn mailbox<'a>(
        device: &Device,
        mailbox: &'a mut Option<Mailbox>,
        words: usize,
    ) -> Result<&'a mut Mailbox> {
        if mailbox.as_ref().is_none_or(|made| made.words() < words) {
            let words = words.max(WORDS).next_power_of_two();
            *mailbox = Some(Mailbox::new(device, "a batch", words)?);
        }
        Ok(mailbox.as_mut().expect("it was made"))
    }

    /// Begins a round.
    pub(in crate::cuda) fn begin(
        &mut self,
        device: &Device,
        kernels: &Kernels,
        batch: Batch,
    ) -> Result<()> {
        let bound = batch.bound.max(batch.rows.len());
        if bound > self.bounds.places {
            return Err(Error::Device(format!(
                "a batch of {bound} for {} places",
                self.bounds.places
            )));
        }
        let (number, limits) = (batch.round, batch.limits);
        self.round = HostRound { number, bound, limits, ..HostRound::default() };
        for &place in &batch.departed {
            self.requests[place] = None;
        }
        self.announce(device, kernels, &batch)?;
        if batch.rows.is_empty() {
            return Ok(());
        }
        let mut tasks = Vec::with_capacity(batch.rows.len());
        for row in &batch.rows {
            let request = self.requests[row.place].as_mut();
            let request = request.ok_or_else(|| Error::Device("a row without a request".into()))?;
            self.round.take(&request.params, &row.work, request.known + request.unread);
            let (steps, nodes) = match &row.work {
                RowWork::Decode { shape, .. } => (Some(shape.steps()), shape.nodes()),
                RowWork::Prefill { .. } => (None, 0),
            };
            let (place, admission) = (row.place, request.admission);
            let host_row = HostRow { place, steps, nodes, admission };
            request.unread += host_row.most_tokens();
            self.round.rows.push(host_row);
            self.round.masked |= request.grammar.is_some();
            self.round.guided |= request.grammar.as_ref().is_some_and(GrammarRow::guides_drafts);
            tasks.push(task(row.place, &row.work));
        }
        if batch.bound > 0 {
            self.round.longest = self.round.longest.next_power_of_two().max(SHORTEST);
        }
        if let Some(tops) = self.round.tops {
            self.reported.prepare(device, self.outputs, tops)?;
        }
        self.send_rates(device)?;
        let budget = limits.row_budget.map_or(u32::MAX, |rows| rows.min(u32::MAX as usize) as u32);
        let rows = tasks.len() as u32;
        let round = Round { number, rows, budget, ..Round::default() };
        self.tasks.post(device, |words| {
            let mut at = 0;
            copy(words, &mut at, std::slice::from_ref(&round));
            copy(words, &mut at, &tasks);
            at
        })?;
        self.by_row(device, &kernels.steps.begin_rows)
    }

    /// Tells the device of requests that come and of slots.
    fn announce(&mut self, device: &Device, kernels: &Kernels, batch: &Batch) -> Result<()> {
        if batch.admitted.is_empty() && batch.tables.is_empty() {
            return Ok(());
        }
        let mut admissions = Vec::with_capacity(batch.admitted.len());
        let mut tokens_at = 0;
        for admitted in &batch.admitted {
            let (sequence, lists) = Lists::new(device, &self.bounds, admitted)?;
            if admitted.tokens.len() > self.parts.tokens_stride as usize {
                return Err(Error::Device("a text longer than was said at start".into()));
            }
            admissions.push(Admission {
                sequence,
                place: admitted.place as u32,
                matched: admitted.matched as u32,
                tokens_at,
                complete: u32::from(admitted.complete),
            });
            tokens_at += admitted.tokens.len() as u32;
            let (params, tokens) = (&admitted.params, admitted.tokens.len());
            let grammar = params.grammar.clone();
            let answer = admitted.tokens.get(params.prompt..).unwrap_or_default();
            self.admissions += 1;
            self.requests[admitted.place] = Some(HostRequest {
                params: params.clone(),
                admission: self.admissions,
                last: admitted.tokens.last().copied().unwrap_or_default(),
                grammar: grammar.map(|grammar| GrammarRow::new(grammar, answer)),
                sent: admitted.tokens.as_slice().into(),
                known: tokens,
                unread: 0,
                _lists: lists,
            });
        }
        let State { places, table_stride, .. } = self.parts;
        // What is beyond a table's end is beyond what the request can use of its pages.
        let changes: Vec<[u32; 4]> = batch
            .tables
            .iter()
            .map(|change| {
                let from = (change.from as u32).min(table_stride);
                let count = (change.slots.len() as u32).min(table_stride - from);
                let table = (change.group as u32 * places + change.place as u32) * table_stride;
                [table + from, count, tokens_at + change.slots.start as u32, 0]
            })
            .collect();
        let heads = size_of_val(&*admissions) / 4 + 4 * changes.len();
        let words = heads + tokens_at as usize + batch.slots.len();
        let mailbox = Self::mailbox(device, &mut self.updates, words)?;
        mailbox.post(device, |words| {
            let mut at = 0;
            copy(words, &mut at, &admissions);
            copy(words, &mut at, &changes);
            batch.admitted.iter().for_each(|admitted| copy(words, &mut at, &admitted.tokens));
            copy(words, &mut at, &batch.slots);
            at
        })?;
        let memory = mailbox.memory.clone();
        let (at_changes, at_words) = (size_of_val(&*admissions), 4 * heads);
        let mut names = self.names();
        names.push(&memory);
        let admit = super::layout::AdmitArgs {
            state: self.parts,
            admissions: memory.at(0),
            words: memory.at(at_words),
        };
        let change = super::layout::ChangeSlotsArgs {
            state: self.parts,
            changes: memory.at(at_changes),
            words: memory.at(at_words),
        };
        let steps = &kernels.steps;
        // SAFETY: places are below those of the state, and changes were cut at their tables.
        unsafe {
            device.launch(&steps.admit, [admissions.len(), 1, 1], 256, 0, &admit, &names)?;
            device.launch(&steps.change_slots, [changes.len(), 1, 1], 256, 0, &change, &names)
        }
    }

    /// What the launches of the round depend on, beside the bounds of passes; none where the host has
    /// a part in it.
    pub(in crate::cuda) fn graph_key(&self) -> Option<GraphKey> {
        // Every field, so that a new one is not forgotten; those that are left out are not about
        // launches, or are on the device.
        let HostRound {
            rows: _,
            passed: _,
            masked,
            guided: _,
            number: _,
            bound,
            limits,
            longest: _,
            topk,
            branches,
            pauses,
            // Which kernels they need is below.
            target: _,
            draft: _,
            by_probability,
            tops,
            told_trees: _,
        } = &self.round;
        let key = || {
            GraphKey(vec![
                *bound as u64,
                self.longest() as u64,
                *topk as u64,
                u64::from(*branches),
                u64::from(*pauses),
                self.round.choice_kernels(true).bits(),
                self.round.choice_kernels(false).bits(),
                u64::from(*by_probability),
                u64::from(limits.fill),
                u64::from(limits.row_budget.is_some()),
                // Room for log-probabilities may move as it grows.
                self.reported.addresses(*tops).logprobs,
            ])
        };
        (!masked).then(key)
    }

    /// The block tables that plans of this state read.
    pub(super) fn tables(&self) -> &Memory {
        &self.tables
    }

    /// The tokens of a draft's vocabulary on the device; none where it knows all.
    pub(super) fn draft_ids(
        &mut self,
        device: &Device,
        ids: Option<DraftIds<'_>>,
    ) -> Result<Option<Memory>> {
        let Some(DraftIds { ids, .. }) = ids else { return Ok(None) };
        if let Some((at, count, memory)) = &self.ids
            && (*at, *count) == (ids.as_ptr() as usize, ids.len())
        {
            return Ok(Some(memory.clone()));
        }
        let memory = device.allocate("a draft's vocabulary", 4 * ids.len())?;
        device.write(&memory, 0, ids)?;
        self.ids = Some((ids.as_ptr() as usize, ids.len(), memory.clone()));
        Ok(Some(memory))
    }

    /// How long contexts of a pass may be.
    pub(super) fn longest(&self) -> usize {
        self.round.longest.min(self.parts.table_stride as usize)
    }
}

/// What the device is told of one row.
fn task(place: usize, work: &RowWork) -> Task {
    let place = place as u32;
    match work {
        RowWork::Prefill { rows, outputs, last } => Task {
            place,
            first: rows.start as u32,
            end: rows.end as u32,
            first_output: outputs.start as u32,
            end_output: outputs.end as u32,
            last: u32::from(*last),
            topk: 1,
            nodes: 1,
            ..Task::default()
        },
        RowWork::Decode { shape, rate, pause } => Task {
            place,
            decodes: 1,
            steps: shape.steps() as u32,
            topk: shape.topk() as u32,
            nodes: shape.nodes() as u32,
            pause: u32::from(*pause),
            rate: *rate,
            ..Task::default()
        },
    }
}

/// Copies plain structures to word `at` and moves it behind them.
pub(super) fn copy<T: Copy>(words: &mut [u32], at: &mut usize, values: &[T]) {
    let bytes = size_of_val(values);
    assert!(
        bytes.is_multiple_of(4) && *at + bytes / 4 <= words.len(),
        "words stay in their mailbox"
    );
    // SAFETY: plain structures of numbers without padding, and the range was checked.
    unsafe {
        let to = words.as_mut_ptr().add(*at).cast::<u8>();
        std::ptr::copy_nonoverlapping(values.as_ptr().cast::<u8>(), to, bytes);
    }
    *at += bytes / 4;
}
