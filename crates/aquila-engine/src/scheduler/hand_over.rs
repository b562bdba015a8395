//! Requests whose prompt is processed here and whose answer is decoded by another engine.
//!
//! Such a request waits until the other engine has slots for it. Each of its chunks gives away the
//! rows that its round makes certain, the target's layer by layer while its pass runs, and the last
//! chunk what the draft goes on with as well; then it ends, with one token. The invariant: a row is
//! given away once, in the order of tokens in every layer, though the request be preempted in the
//! middle of its prompt.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use aquila_compute::round::{MOST_TOPK, RowWork};
use aquila_spec::DraftGroup;

use crate::executor::{Export, ScheduledBatch};
use crate::listener::{FinishReason, Token};
use crate::request::RequestId;
use crate::scheduler::Scheduler;
use crate::scheduler::request_state::{RequestState, Running};
use crate::scheduler::settle::Ending;
use crate::transfer::{Claim, HandOver, Prefilled};

/// What a request leaves to the engine that decodes it.
pub(crate) struct HandingOver {
    to: Arc<dyn HandOver>,
    /// How many rows of each group were given away, or are there already; none before the other
    /// engine has claimed it.
    sent: Option<Vec<usize>>,
    /// The prompt's tokens with log-probabilities.
    pub prompt: Vec<Token>,
}

impl HandingOver {
    pub fn new(to: Arc<dyn HandOver>) -> Self {
        Self { to, sent: None, prompt: Vec::new() }
    }

    pub fn is_claimed(&self) -> bool {
        self.sent.is_some()
    }

    /// Whether what its next chunk leaves may wait to be sent.
    pub fn has_room(&self) -> bool {
        self.to.has_room()
    }

    /// The request was given up.
    pub fn fail(self, reason: &FinishReason) {
        let early = "the request ended before its prompt was processed";
        self.to.failed(reason.failure().unwrap_or(early));
    }
}

impl Scheduler {
    /// The engine that is to decode a request that waits here has slots for it; false if no such
    /// request waits.
    pub fn claim(&mut self, id: RequestId, claim: Claim) -> bool {
        let Some(waiting) = self.waiting.get_by_id(id) else { return false };
        let RequestState { handing_over, params, .. } = &mut *waiting.state;
        let Some(handing_over) = handing_over.as_mut().filter(|h| !h.is_claimed()) else {
            return false;
        };
        handing_over.sent = Some(vec![claim.have.min(params.prompt); params.groups()]);
        let params = Arc::make_mut(params);
        params.set_seed(claim.seed);
        params.limits.candidates = claim.candidates.clamp(1, MOST_TOPK);
        true
    }

    /// Ends a request whose prompt is processed, and gives away what is left to give: `first` is
    /// what was chosen, `ending` how the request has ended by its own rules, if it has.
    pub(crate) fn hand_over(
        &mut self,
        index: usize,
        first: Vec<Token>,
        ending: Option<Ending>,
        packed: Option<Vec<u8>>,
    ) -> Ending {
        let state = &mut self.running[index].state;
        if let Some(HandingOver { to, prompt, .. }) = state.handing_over.take() {
            to.prefilled(Prefilled {
                tokens: first,
                ended: ending.as_ref().map(|ending| ending.reason.clone()),
                prompt,
                rows: state.rows.clone(),
                groups: state.groups().len(),
                cached_tokens: state.usage.cached_tokens,
                draft: packed,
            });
            self.stats.handed_over.fetch_add(1, Relaxed);
        }
        ending.unwrap_or(Ending { reason: FinishReason::Length, tokens: Vec::new() })
    }
}

/// Plans that the rows which a chunk makes certain are given away, if its request is decoded
/// elsewhere.
pub(crate) fn plan_exports(
    request: &mut Running,
    work: &RowWork,
    declared: &[DraftGroup],
    batch: &mut ScheduledBatch,
) {
    let RowWork::Prefill { rows, last, .. } = work else { return };
    let Running { state, sequence, .. } = request;
    let (groups, id, prompt) = (state.groups(), state.id(), state.params.prompt);
    let answers = state.remaining() > 0;
    let Some(HandingOver { to, sent: Some(sent), .. }) = &mut state.handing_over else { return };
    if !answers {
        return;
    }
    let known = prompt + usize::from(*last);
    for (at, (&group, sent)) in groups.iter().zip(sent).enumerate() {
        let end = match at.checked_sub(1) {
            None => rows.end,
            Some(draft) => declared[draft].certain_rows(known, rows.end, *last),
        };
        let rows: Range<usize> = *sent..end;
        if rows.is_empty() {
            continue;
        }
        let mut slots = Vec::new();
        sequence.extend_slots(group, rows.clone(), &mut slots);
        batch.exports.push(Export { to: to.clone(), group: at, rows, slots });
        *sent = end;
    }
    if *last {
        batch.pack.push(id);
    }
}
