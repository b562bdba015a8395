//! What came of a round: tokens are handed out, their rows committed, and requests that have ended
//! depart.
//!
//! A round may come back after a request of it has ended or was given up; its part is then void
//! and nothing of it leaves the engine.

use std::collections::HashMap;
use std::num::NonZeroU8;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use aquila_compute::round::{Ended, RequestOutput, RowWork};
use aquila_compute::sampling::Choice;
use aquila_spec::policy::{RequestOutcome, RoundOutcome, Setting};

use crate::error::{Failure, RoundError};
use crate::listener::{FinishReason, StopCause, Token};
use crate::request::RequestId;
use crate::scheduler::Scheduler;
use crate::scheduler::output_processor::{OutputProcessor, Reply, kept, reason_of, take_back};
use crate::scheduler::receive::Receiving;
use crate::scheduler::request_state::{LastRound, PendingTokens, RequestState, Running, TARGET};
use crate::times::Times;

/// A round on its way, as the scheduler planned it.
pub(crate) struct InFlightBatch {
    pub number: u64,
    pub epoch: u64,
    pub began: Instant,
    pub parts: Vec<InFlightRow>,
    /// Requests whose rows it writes, or whose drafts it unpacks.
    pub importing: Vec<RequestId>,
    /// Those of them whose drafts it unpacks, and requests whose drafts it packs.
    pub unpacking: Vec<RequestId>,
    pub packing: Vec<RequestId>,
    /// What its trees were decided with.
    pub setting: Setting,
    /// Tokens that were expected of it.
    pub expected: Option<f64>,
}

/// One request's part of such a round.
pub(crate) struct InFlightRow {
    pub request: RequestId,
    pub work: RowWork,
    pub pending: PendingTokens,
}

impl InFlightBatch {
    /// Whether it has no row of a prompt.
    fn only_decodes(&self) -> bool {
        self.parts.iter().all(|part| matches!(part.work, RowWork::Decode { .. }))
    }
}

impl Scheduler {
    /// Waits for the oldest round on its way and settles it; false if it had no parts.
    pub(crate) fn settle_oldest(&mut self) -> bool {
        let Some(in_flight) = self.in_flight.pop_front() else { return false };
        let done = self.executor.receive(in_flight.number);
        let replies = self.outputs.replies();
        self.follow_listeners(replies);
        match done.outcome {
            Ok(outputs) => {
                self.learn(&in_flight, &outputs, &done.times);
                self.settle(&in_flight, outputs, done.packed);
                self.settle_unpacked(&in_flight.unpacking, &done.unpacked);
            }
            Err(RoundError::Failed(why)) => {
                self.learn(&in_flight, &[], &done.times);
                self.fail(&in_flight, Failure::Round(why));
            }
            Err(RoundError::Fatal(failure)) => {
                self.fail_for_good(failure);
                self.drop_in_flight();
            }
        }
        self.last_times = done.times;
        let waited_since = in_flight.began.max(self.settled);
        self.settled = Instant::now();
        match self.in_flight.is_empty() {
            true => self.stats.awaited.end(),
            false => self.stats.awaited.begin(self.settled),
        }
        if in_flight.parts.is_empty() {
            return false;
        }
        self.stats.rounds.fetch_add(1, Relaxed);
        if in_flight.only_decodes() {
            // The steps of a round may have begun before the one before it was settled.
            let whole = (self.settled - waited_since).max(done.times.steps());
            self.stats.add_times(&Times { whole, rounds: 1, ..done.times });
        }
        true
    }

    /// Tells the policy what came of a round: of those of its requests that were not void.
    fn learn(
        &mut self,
        in_flight: &InFlightBatch,
        outputs: &[Option<RequestOutput>],
        times: &Times,
    ) {
        if self.profile.declaration.is_none() || in_flight.setting.batch == 0 {
            return;
        }
        let mut requests = Vec::with_capacity(in_flight.parts.len());
        // As in `settle`, requests keep their order.
        let mut running = self.running.iter();
        for (part, output) in in_flight.parts.iter().zip(outputs) {
            let mut behind = running.clone();
            if !behind.any(|request| request.state.id() == part.request) {
                continue;
            }
            running = behind;
            let (&RowWork::Decode { shape, .. }, Some(output)) = (&part.work, output) else {
                continue;
            };
            requests.push(RequestOutcome {
                id: part.request.0,
                shape: shape.within(output.feedback.depth, output.proposed + 1),
                correct: output.correct,
                ranks: &output.feedback.ranks,
                refused: output.feedback.refused,
            });
        }
        let seconds = times.steps().as_secs_f64();
        let seconds = (in_flight.only_decodes() && !requests.is_empty()).then_some(seconds);
        let outcome = RoundOutcome { setting: in_flight.setting, requests: &requests, seconds };
        self.drafting.learn(&outcome);
        if tracing::enabled!(target: "aquila_engine::policy", tracing::Level::DEBUG) {
            let Setting { batch, slot, shape, .. } = in_flight.setting;
            let kept =
                |r: &RequestOutcome<'_>| format!("{}:{}/{}", r.id, r.shape.steps(), r.correct);
            let kept = requests.iter().map(kept).collect::<Vec<_>>().join(" ");
            let steps = shape.steps();
            tracing::debug!(
                target: "aquila_engine::policy",
                "round {}: batch {batch}, slot {slot}, steps {steps}; kept {kept}",
                in_flight.number
            );
        }
        let tokens: usize = requests.iter().map(|request| request.correct + 1).sum();
        let policy = &self.drafting;
        self.stats.change_drafting(|state| {
            state.policy = policy.state();
            state.setting = Some(in_flight.setting);
            if let Some(expected) = in_flight.expected.filter(|_| tokens > 0) {
                state.rounds += 1;
                state.expected_tokens += expected;
                state.real_tokens += tokens as u64;
            }
        });
    }

    /// Fails the requests of a round and of those behind it: what it left of their KV is not to
    /// be trusted.
    fn fail(&mut self, in_flight: &InFlightBatch, failure: Failure) {
        if in_flight.epoch != self.epoch {
            // The round that took it along has failed its requests already.
            return;
        }
        self.epoch += 1;
        let mut names: Vec<RequestId> = Vec::new();
        for in_flight in [in_flight].into_iter().chain(&self.in_flight) {
            names.extend(in_flight.parts.iter().map(|part| part.request));
            names.extend(&in_flight.importing);
        }
        let is_received = |receiving: &Receiving| names.contains(&receiving.state.id());
        while let Some(at) = self.receiving.iter().position(is_received) {
            let state = self.receiving.remove(at).discard(&mut self.cache);
            self.finish(state, FinishReason::Abort(failure.to_string()));
        }
        let lost = |request: &mut Running| names.contains(&request.state.id());
        let lost: Vec<Running> = self.running.extract_if(.., lost).collect();
        tracing::error!(%failure, requests = lost.len(), "a round failed");
        self.stats.failed_rounds.fetch_add(1, Relaxed);
        for request in lost {
            self.leave(&request);
            let state = request.discard(&mut self.cache);
            self.finish(state, FinishReason::Abort(failure.to_string()));
        }
    }

    fn settle(
        &mut self,
        in_flight: &InFlightBatch,
        outputs: Vec<Option<RequestOutput>>,
        packed: Vec<Vec<u8>>,
    ) {
        let mut packed: HashMap<RequestId, Vec<u8>> =
            in_flight.packing.iter().copied().zip(packed).collect();
        // Requests keep their order while a round is on its way, so each is found behind the last.
        let mut index = 0;
        for (part, output) in in_flight.parts.iter().zip(outputs) {
            let found = self.running[index..].iter().position(|r| r.state.id() == part.request);
            let (Some(found), Some(output)) = (found, output) else { continue };
            index += found;
            let request = &mut self.running[index];
            request.pending.least -= part.pending.least;
            request.pending.most -= part.pending.most;
            let known = output.known;
            let ending = match &part.work {
                RowWork::Prefill { rows, last, .. } => {
                    let hands_over = *last && request.state.handing_over.is_some();
                    let choices = if hands_over { output.tokens.clone() } else { Vec::new() };
                    let ending = self.settle_chunk(index, rows.len(), *last, output);
                    if hands_over {
                        if ending.is_none() {
                            self.keep_draft_rows(index, &part.work, known);
                        }
                        let first = choices.into_iter().map(token_of).collect();
                        let packed = packed.remove(&part.request);
                        Some(self.hand_over(index, first, ending, packed))
                    } else {
                        ending
                    }
                }
                RowWork::Decode { .. } => self.settle_tree(index, output),
            };
            match ending {
                Some(Ending { reason, tokens }) => {
                    let request = self.running.remove(index);
                    self.end_with(request, reason, tokens);
                }
                None => {
                    self.keep_draft_rows(index, &part.work, known);
                    index += 1;
                }
            }
        }
        let replies = self.outputs.round_ends();
        self.follow_listeners(replies);
    }

    /// Ends the requests whose listeners said so. What the last settled round brought beyond that
    /// is taken back; what rounds behind it bring is void.
    pub(crate) fn follow_listeners(&mut self, replies: Vec<Reply>) {
        for Reply { request: id, verdict } in replies {
            let shorten = |state: &mut RequestState| {
                let LastRound { tokens, drafts } = state.last_round;
                let dropped = tokens - kept(&verdict, tokens);
                state.tokens.truncate(state.tokens.len() - dropped);
                take_back(&mut state.usage, dropped, tokens, drafts);
            };
            let at = self.running.iter().position(|request| request.state.id() == id);
            let received = self.receiving.iter().position(|r| r.state.id() == id);
            if let Some(at) = received {
                let mut state = self.receiving.remove(at).discard(&mut self.cache);
                shorten(&mut state);
                let reason = reason_of(verdict).expect("a reply ends its request");
                self.finish(state, reason);
            } else if let Some(at) = at {
                let mut request = self.running.remove(at);
                shorten(&mut request.state);
                let reason = reason_of(verdict).expect("a reply ends its request");
                self.end(request, reason);
            } else if let Some(mut waiting) = self.waiting.take_by_id(id) {
                // It was preempted meanwhile.
                shorten(&mut waiting.state);
                let reason = reason_of(verdict).expect("a reply ends its request");
                self.finish(waiting.state, reason);
            }
        }
    }

    /// Commits the rows of a chunk; at the end of a fresh prompt, hands the first token out.
    fn settle_chunk(
        &mut self,
        index: usize,
        rows: usize,
        last: bool,
        mut output: RequestOutput,
    ) -> Option<Ending> {
        let Running { state, sequence, .. } = &mut self.running[index];
        state.keep_rows(sequence.committed(TARGET), rows, &mut output);
        self.cache.commit(sequence, TARGET, rows);
        self.stats.prompt_tokens.fetch_add(rows as u64, Relaxed);
        state.prompt_tokens.extend(output.prompt.drain(..).map(token_of));
        if !last {
            return None;
        }
        if state.is_fresh() && state.params.prompt_logprobs.is_some() {
            let id = state.tokens[0];
            let first = Token { id, logprob: None, top: Vec::new(), drafted: None };
            let mut tokens = std::mem::take(&mut state.prompt_tokens);
            tokens.insert(0, first);
            if let Some(handing_over) = &mut state.handing_over {
                handing_over.prompt = tokens.clone();
            }
            self.outputs.prompt(state.id(), tokens);
        }
        state.last_round = LastRound::default();
        if output.tokens.is_empty() {
            return output
                .ended
                .map(|ended| Ending { reason: reason_of_end(ended), tokens: Vec::new() });
        }
        hand_out(&mut self.outputs, state, output)
    }

    /// Hands out what is accepted of a tree and commits its rows.
    fn settle_tree(&mut self, index: usize, mut output: RequestOutput) -> Option<Ending> {
        let Running { state, sequence, .. } = &mut self.running[index];
        let tokens = output.tokens.len();
        state.keep_rows(sequence.committed(TARGET), tokens, &mut output);
        state.last_round = LastRound::default();
        if state.speculates {
            let correct = tokens.min(output.correct);
            state.usage.spec.round(output.proposed, correct);
            self.report.drafted.round(output.proposed, correct);
            state.last_round.drafts = Some((output.proposed, correct));
        }
        self.cache.commit(sequence, TARGET, tokens);
        hand_out(&mut self.outputs, state, output)
    }

    /// Commits the rows that the draft of a request has made; offers a prompt that is read to the
    /// prefix cache.
    fn keep_draft_rows(&mut self, index: usize, work: &RowWork, known: usize) {
        let Running { state, sequence, told, .. } = &mut self.running[index];
        let declared = self.profile.declaration.as_ref().map_or(&[][..], |d| &d.groups);
        let read = sequence.committed(TARGET);
        let whole = !matches!(work, RowWork::Prefill { last: false, .. });
        for (&group, draft) in state.groups()[1..].iter().zip(declared) {
            let end = draft.certain_rows(known, read, whole);
            let rows = end - sequence.committed(group);
            self.cache.commit(sequence, group, rows);
        }
        if matches!(work, RowWork::Prefill { last: true, .. }) {
            self.cache.publish(sequence, &state.tokens);
            // Slots of committed rows may be others now.
            told.iter_mut().flatten().for_each(|told| *told = 0);
        }
    }
}

/// How a request ends by its own rules, with the tokens that its listener has not heard.
pub(crate) struct Ending {
    pub reason: FinishReason,
    pub tokens: Vec<Token>,
}

/// Adds tokens to a text and gives them to its listener, unless they are its last.
fn hand_out(
    outputs: &mut OutputProcessor,
    state: &mut RequestState,
    output: RequestOutput,
) -> Option<Ending> {
    let RequestOutput { tokens, correct, ended, tree, .. } = output;
    let mut tokens: Vec<Token> = tokens.into_iter().map(token_of).collect();
    for (depth, token) in (1..).zip(tokens.iter_mut().take(correct)) {
        token.drafted = NonZeroU8::new(depth);
    }
    if let Some(tree) = tree {
        outputs.tree(state.id(), tree);
    }
    state.tokens.extend(tokens.iter().map(|token| token.id));
    state.usage.completion_tokens += tokens.len();
    state.last_round.tokens = tokens.len();
    match ended {
        Some(ended) => Some(Ending { reason: reason_of_end(ended), tokens }),
        None => {
            outputs.tokens(state.id(), tokens);
            None
        }
    }
}

fn token_of(choice: Choice) -> Token {
    Token { id: choice.token, logprob: choice.logprob, top: choice.top, drafted: None }
}

fn reason_of_end(ended: Ended) -> FinishReason {
    match ended {
        Ended::Token(id) => FinishReason::Stop(StopCause::Token(id)),
        Ended::Length => FinishReason::Length,
        Ended::Grammar => FinishReason::Stop(StopCause::Grammar),
        Ended::GrammarFailed(why) => {
            FinishReason::GrammarFailed(format!("what the grammar allows next is unknown: {why}"))
        }
    }
}
