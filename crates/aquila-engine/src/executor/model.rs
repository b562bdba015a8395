//! The executor of a model: draft, verify, accept, compact, publish, extend.
//!
//! It knows of requests what the scheduler told it; what they have chosen is in the backend's
//! state, and is read once, at the end of a round. So the bounds of passes follow from the batch
//! alone, and the next round can be enqueued before this one is read.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use aquila_compute::Backend;
use aquila_compute::round::{
    Admitted, Batch, BatchRow, ExtendRows, Extent, RequestOutput, RequestParams, Returned, RowWork,
    Shape, TableChange, Tree, TreeLimits,
};
use aquila_spec::{DraftBound, DraftRequest};

use super::batch::{
    BatchOutput, CapturedPart, Executor, Import, Profile, RequestWork, ScheduledBatch,
};
use super::graphs::{GraphSettings, Graphs, PartKey};
use super::runner::Runner;
use super::stores::Takers;
use crate::config::EngineConfig;
use crate::error::{Result, RoundError};
use crate::request::RequestId;
use crate::times::Times;

/// Runs rounds on a model.
pub struct ModelExecutor<B: Backend> {
    runner: Runner<B>,
    config: EngineConfig,
    /// Places that no request has.
    places: Vec<usize>,
    held: HashMap<RequestId, Held>,
    /// The epochs of a round that was not enqueued as a whole, and of one that was not finished: the
    /// first does not fail the rounds before it, which may be unread.
    unenqueued: Option<u64>,
    unfinished: Option<u64>,
    graphs: Graphs<B::Graph>,
    /// The rounds that were enqueued and not finished, oldest first.
    enqueued: VecDeque<EnqueuedRound<B::Moment>>,
}

/// A round that was enqueued.
struct EnqueuedRound<M> {
    /// What is left of the batch: its numbers, what ran, and what goes to other engines.
    scheduled: ScheduledBatch,
    /// Why it was not enqueued as a whole.
    failed: Option<RoundError>,
    /// The moments between its steps; none where it has none.
    moments: Vec<M>,
    unpacked: Vec<bool>,
}

/// A request that holds KV.
struct Held {
    place: usize,
    params: Arc<RequestParams>,
    /// Rounds that its draft has missed since it was paused.
    missed: usize,
    /// Its text, for what drafts on the host.
    text: Option<Vec<u32>>,
    /// Whether its own rules have ended it: nothing is drafted for it on the host.
    ended: bool,
}

impl<B: Backend> Executor for ModelExecutor<B> {
    fn profile(&self) -> Profile {
        Profile {
            vocabulary: self.runner.vocabulary(),
            declaration: self.runner.declaration().cloned(),
            row_widths: self.runner.row_widths(),
            // Pretended acceptance does not look at what may be chosen.
            grammars: self.config.simulate.is_none(),
            kv: self.runner.kv_shapes(),
        }
    }

    fn begin_anew(&mut self) {
        if let Some(host) = self.runner.host() {
            host.begin_anew();
        }
    }

    fn captured(&self) -> Vec<CapturedPart> {
        self.graphs.captured().to_vec()
    }

    fn runs_ahead(&self, batch: &ScheduledBatch) -> bool {
        let ScheduledBatch { admitted, imports, unpack, exports, pack, .. } = batch;
        let local =
            imports.is_empty() && unpack.is_empty() && exports.is_empty() && pack.is_empty();
        let held = self.held.values().map(|held| &held.params);
        let mut all = held.chain(admitted.iter().map(|admission| &admission.params));
        self.runner.backend().defers()
            && local
            && !self.runner.drafts_on_host()
            && all.all(|params| params.grammar.is_none())
    }

    fn enqueue(&mut self, mut scheduled: ScheduledBatch) {
        let epoch = scheduled.epoch;
        let refused = [self.unenqueued, self.unfinished].contains(&Some(epoch));
        let batch = self.batch(&mut scheduled, refused);
        self.unenqueued = Some(epoch);
        let (mut unpacked, mut moments) = (Vec::new(), Vec::new());
        let outcome = self.runner.begin(batch).and_then(|()| {
            if !refused {
                self.import(&scheduled, &mut unpacked)?;
                if !scheduled.requests.is_empty() {
                    moments = self.round(&scheduled)?;
                }
            }
            Ok(())
        });
        let failed = match refused {
            true => Some(FAILED_BEFORE.into()),
            false => outcome.err().map(RoundError::from),
        };
        if failed.is_none() {
            self.unenqueued = None;
        }
        self.enqueued.push_back(EnqueuedRound { scheduled, failed, moments, unpacked });
    }

    fn finish(&mut self) -> BatchOutput {
        let round = self.enqueued.pop_front().expect("a round was enqueued");
        let EnqueuedRound { scheduled, failed, moments, unpacked } = round;
        let ScheduledBatch { number, epoch, .. } = scheduled;
        let before = self.unfinished.replace(epoch);
        let (mut times, mut packed) = (Times { rounds: 1, ..Times::default() }, Vec::new());
        // Its outputs are read in any case, so that those of the next round are the oldest.
        let outputs = match moments.is_empty() {
            true => Ok(Vec::new()),
            false => self.runner.outputs(),
        };
        let outcome = match failed {
            Some(why) => Err(why),
            None if before == Some(epoch) => Err(FAILED_BEFORE.into()),
            None => outputs
                .and_then(|outputs| {
                    times = self.times(&moments)?;
                    self.read(&scheduled.requests, &outputs);
                    self.export(&scheduled, &mut packed)?;
                    Ok(outputs)
                })
                .map_err(RoundError::from),
        };
        if outcome.is_ok() {
            self.unfinished = before;
        }
        BatchOutput { number, outcome, unpacked, packed, times }
    }
}

/// Why a round fails whose epoch has failed.
const FAILED_BEFORE: &str = "a round before it failed";

impl<B: Backend> ModelExecutor<B> {
    /// An executor over `runner`, which was made with the same settings.
    pub fn new(runner: Runner<B>, config: EngineConfig) -> Self {
        let places = (0..config.max_running_requests).rev().collect();
        let graphs = Graphs::new(GraphSettings::default(), config.shape, 0);
        let (held, enqueued) = (HashMap::new(), VecDeque::new());
        let (unenqueued, unfinished) = (None, None);
        Self { runner, config, places, held, unenqueued, unfinished, graphs, enqueued }
    }

    /// Captures parts of rounds as `settings` say, where the backend has graphs.
    pub fn with_graphs(self, settings: GraphSettings) -> Self {
        let EngineConfig { shape, max_running_requests, .. } = self.config;
        Self { graphs: Graphs::new(settings, shape, max_running_requests), ..self }
    }

    /// The batch size that a round is enqueued for, if parts of it may be captured: one in which
    /// all requests decode and no rows go elsewhere.
    fn captured_batch(&self, scheduled: &ScheduledBatch) -> Option<usize> {
        let decodes = |part: &RequestWork| matches!(part.work, RowWork::Decode { .. });
        let all = scheduled.exports.is_empty() && scheduled.requests.iter().all(decodes);
        self.graphs.batch(scheduled.requests.len()).filter(|_| all)
    }

    /// What the backend is told: who departed, who was admitted, and what runs unless the round is
    /// refused.
    fn batch(&mut self, scheduled: &mut ScheduledBatch, refused: bool) -> Batch {
        let mut batch = Batch {
            round: scheduled.number,
            bound: self.captured_batch(scheduled).unwrap_or(0),
            slots: std::mem::take(&mut scheduled.slots),
            limits: TreeLimits { row_budget: scheduled.row_budget, fill: scheduled.fill_trees },
            ..Batch::default()
        };
        for left in &scheduled.departed {
            let Some(held) = self.held.remove(&left.request) else { continue };
            self.places.push(held.place);
            batch.departed.push(held.place);
            if let (Some(host), Some(text)) = (self.runner.host(), held.text) {
                host.leave(left.request.0, &text[..left.tokens.min(text.len())]);
            }
        }
        let reads = self.runner.host().is_some();
        for admission in scheduled.admitted.drain(..) {
            let place = self.places.pop().expect("no more requests hold KV than may run");
            let held = Held {
                place,
                params: admission.params.clone(),
                missed: 0,
                text: reads.then(|| admission.tokens.clone()),
                ended: false,
            };
            let before = self.held.insert(RequestId(admission.params.id), held);
            assert!(before.is_none(), "request {} was admitted twice", admission.params.id);
            batch.admitted.push(Admitted {
                place,
                params: admission.params,
                tokens: admission.tokens,
                matched: admission.matched,
                complete: admission.complete,
                rounds: admission.rounds,
            });
        }
        let place = |request: RequestId| self.held[&request].place;
        batch.tables.extend(scheduled.tables.drain(..).map(|change| TableChange {
            place: place(change.request),
            group: change.group,
            from: change.from,
            slots: change.slots,
        }));
        if !refused {
            let row = |part: &RequestWork| BatchRow {
                place: place(part.request),
                work: part.work.clone(),
            };
            batch.rows.extend(scheduled.requests.iter().map(row));
        }
        batch
    }

    /// Writes the rows that came from another engine, and lets the algorithm take what that has
    /// packed.
    fn import(&mut self, scheduled: &ScheduledBatch, unpacked: &mut Vec<bool>) -> Result<()> {
        for Import { rows, slots } in &scheduled.imports {
            self.runner.write_rows(rows, slots)?;
        }
        for unpack in &scheduled.unpack {
            let Held { place, params, .. } = &self.held[&unpack.request];
            unpacked.push(self.runner.unpack(*place, params, unpack)?);
        }
        Ok(())
    }

    /// Gives rows of drafts to other engines, and packs what these need to go on drafting.
    fn export(&mut self, scheduled: &ScheduledBatch, packed: &mut Vec<Vec<u8>>) -> Result<()> {
        self.runner.give_draft_rows(&scheduled.exports)?;
        for request in &scheduled.pack {
            packed.push(self.runner.pack(self.held[request].place, request.0)?);
        }
        Ok(())
    }

    /// Enqueues the steps of a round, and answers the moments between them.
    fn round(&mut self, scheduled: &ScheduledBatch) -> Result<Vec<B::Moment>> {
        let plan = self.plan(scheduled);
        let mut moments = vec![self.runner.moment()?];
        for (at, &bound) in plan.catch_up.iter().enumerate() {
            self.runner.extend(ExtendRows::CatchUp(at), bound)?;
        }
        moments.push(self.runner.moment()?);
        let given = self.host_trees(&scheduled.requests)?;
        let Self { runner, graphs, .. } = self;
        runner.start_trees(given)?;
        // What the steps enqueue depends on nothing that comes after this.
        let round = runner.graph_key().filter(|_| plan.captured);
        let backend = runner.backend().clone();
        let key = round.clone().filter(|_| plan.draft.beam > 0);
        let key = key.map(|round| PartKey::draft(plan.draft, round));
        graphs.run(&*backend, key, || runner.draft(plan.draft))?;
        moments.push(runner.moment()?);
        runner.begin_pass(plan.takers);
        match round.clone() {
            None => {
                runner.verify(plan.target, &scheduled.exports)?;
                moments.push(runner.moment()?);
                runner.accept()?;
                moments.push(runner.moment()?);
                runner.compact()?;
            }
            // One graph: what is accepted and moved then counts as verification.
            Some(round) => {
                let key = PartKey::verify(plan.target, plan.takers, round);
                graphs.run(&*backend, Some(key), || {
                    runner.verify(plan.target, &[])?;
                    runner.accept()?;
                    runner.compact()
                })?;
                moments.push(runner.moment()?);
                moments.push(runner.moment()?);
            }
        }
        moments.push(runner.moment()?);
        if plan.extend.requests > 0 {
            let key = round.map(|round| PartKey::extend(plan.extend, round));
            graphs.run(&*backend, key, || runner.extend(ExtendRows::Round, plan.extend))?;
        }
        moments.push(runner.moment()?);
        runner.copy_outputs()?;
        Ok(moments)
    }

    /// How long the steps of a round took.
    fn times(&self, moments: &[B::Moment]) -> Result<Times> {
        let mut steps = [Duration::ZERO; 6];
        for (step, pair) in steps.iter_mut().zip(moments.windows(2)) {
            *step = self.runner.time_between(&pair[0], &pair[1])?;
        }
        let [catch_up, draft, verify, accept, commit, extend] = steps;
        let extend = catch_up + extend;
        Ok(Times { rounds: 1, draft, verify, accept, commit, extend, ..Times::default() })
    }

    /// Bounds on the passes of a round, by what the host knows of it.
    fn plan(&mut self, scheduled: &ScheduledBatch) -> RoundPlan {
        let mut plan = RoundPlan::default();
        let (mut trees, mut roots, mut widest) = (0, 0, 0);
        let (drafts, captures) = (self.runner.drafts_on_device(), self.runner.captures());
        let most_missed = if captures { self.config.parked_rows } else { usize::MAX };
        let last = self.config.shape.steps() + 1;
        let mut room = 0;
        let mut resumed = DraftBound::default();
        for part in &scheduled.requests {
            // One that has ended counts, too: of ends by grammars only the host knows.
            let held = self.held.get_mut(&part.request).expect("it was admitted");
            let drafts = drafts && held.params.drafts();
            plan.takers.draft |= drafts && captures && held.missed <= most_missed;
            let Returned { hidden_states, routed_experts } = held.params.returned;
            plan.takers.returned.hidden_states |= hidden_states;
            plan.takers.returned.routed_experts |= routed_experts;
            match &part.work {
                RowWork::Prefill { rows, outputs, .. } => {
                    plan.target.rows += rows.len();
                    plan.target.outputs += outputs.len();
                    if drafts {
                        plan.extend.rows += rows.len() + 1;
                        plan.extend.requests += 1;
                    }
                }
                RowWork::Decode { shape, pause, .. } => {
                    let shape = if held.params.drafts() { *shape } else { Shape::PLAIN };
                    trees += shape.nodes();
                    roots += 1;
                    if !drafts {
                        continue;
                    }
                    let steps = shape.steps();
                    if steps > 0 && held.missed > 0 && held.missed <= most_missed {
                        let mut before = held.missed.saturating_sub(last);
                        while before > 0 {
                            if room == 0 {
                                plan.catch_up.push(DraftBound::default());
                                room = self.config.chunked_prefill_size;
                            }
                            let rows = room.min(before);
                            (before, room) = (before - rows, room - rows);
                            let pass = plan.catch_up.last_mut().expect("one was begun");
                            pass.rows += rows;
                            pass.requests += 1;
                        }
                        resumed.rows += held.missed.min(last);
                        resumed.requests += 1;
                        held.missed = 0;
                    }
                    if held.missed > 0 || (steps == 0 && *pause) {
                        held.missed += 1;
                    } else {
                        plan.extend.rows += steps + 1;
                        plan.extend.requests += 1;
                    }
                    if steps > 0 {
                        plan.draft.steps = plan.draft.steps.max(steps);
                        plan.draft.beam += shape.topk();
                        widest = widest.max(shape.topk());
                        plan.draft.requests += 1;
                    }
                }
            }
        }
        if resumed.requests > 0 {
            plan.catch_up.push(resumed);
        }
        trees = trees.min(scheduled.row_budget.map_or(usize::MAX, |rows| rows.max(roots)));
        plan.target.rows += trees;
        plan.target.outputs += trees;
        if let Some(batch) = self.captured_batch(scheduled) {
            plan.captured = true;
            plan.target = self.graphs.pad_target(plan.target);
            if plan.draft.requests > 0 {
                plan.draft.beam = batch * widest;
                plan.draft.requests = batch;
            }
            if plan.extend.requests > 0 {
                plan.extend = self.graphs.pad_extend(plan.extend, batch);
            }
        }
        plan
    }

    /// The trees that the host drafts, by place.
    fn host_trees(&mut self, requests: &[RequestWork]) -> Result<Vec<(usize, Tree)>> {
        let mut trees = Vec::new();
        if self.runner.host().is_none() {
            return Ok(trees);
        }
        for part in requests {
            let RowWork::Decode { shape, .. } = part.work else { continue };
            let Some(Held { place, params, text: Some(tokens), ended: false, .. }) =
                self.held.get(&part.request)
            else {
                continue;
            };
            let shape = params.granted(shape, tokens.len());
            if shape.steps() == 0 {
                continue;
            }
            let request = DraftRequest { request: part.request.0, tokens, shape };
            let tree = self.runner.host_tree(&request)?;
            trees.extend(tree.map(|tree| (*place, tree)));
        }
        Ok(trees)
    }

    /// Notes what has ended, and lets what drafts on the host read what was accepted.
    fn read(&mut self, requests: &[RequestWork], outputs: &[Option<RequestOutput>]) {
        for (part, output) in requests.iter().zip(outputs) {
            let (Some(held), Some(output)) = (self.held.get_mut(&part.request), output) else {
                continue;
            };
            held.ended |= output.ended.is_some();
            let (Some(host), Some(text)) = (self.runner.host(), &mut held.text) else { continue };
            text.extend(output.tokens.iter().map(|choice| choice.token));
            if !held.ended && held.params.drafts() {
                host.read(part.request.0, text);
            }
        }
    }
}

/// Bounds on the passes of a round.
#[derive(Debug, Default)]
struct RoundPlan {
    /// The passes in which resumed drafts process what they missed.
    catch_up: Vec<DraftBound>,
    draft: DraftBound,
    target: Extent,
    /// Who takes rows of the target's pass.
    takers: Takers,
    extend: DraftBound,
    /// Whether parts of the round may be captured; bounds are those of graphs then.
    captured: bool,
}
