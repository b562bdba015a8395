//! What came of a round: tokens are handed out, their rows committed, and who has ended leaves.
//!
//! A round may come back after a request of it has ended or was given up; its part is then void
//! and nothing of it leaves the engine.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use aquila_compute::round::RowWork;
use aquila_spec::policy::{RequestOutcome, RoundOutcome, Setting};

use crate::engine::Scheduler;
use crate::error::Failure;
use crate::lanes::Yield;
use crate::life::{Coming, LastRound, Running, Seat, TARGET};
use crate::listener::{FinishReason, Token};
use crate::output_processor::{OutputProcessor, Reply, kept, reason_of, take_back};
use crate::request::RequestId;
use crate::times::Times;

/// A round on its way, as the host lane planned it.
pub(crate) struct Flight {
    pub number: u64,
    pub era: u64,
    pub began: Instant,
    pub parts: Vec<Planned>,
    /// What its trees were decided with.
    pub setting: Setting,
    /// Tokens that were expected of it.
    pub expected: Option<f64>,
}

/// One request's part of such a round.
pub(crate) struct Planned {
    pub request: RequestId,
    pub task: RowWork,
    pub coming: Coming,
}

impl Flight {
    /// Whether nobody reads a prompt in it.
    fn only_decodes(&self) -> bool {
        self.parts.iter().all(|part| matches!(part.task, RowWork::Decode { .. }))
    }
}

impl Scheduler {
    /// Waits for the oldest round on its way and settles it; false if it had no parts.
    pub(crate) fn settle_oldest(&mut self) -> bool {
        let Some(flight) = self.flights.pop_front() else { return false };
        let done = self.lanes.receive(flight.number);
        let replies = self.outputs.replies();
        self.follow_listeners(replies);
        match done.outcome {
            Ok(yields) => {
                self.learn(&flight, &yields, &done.times);
                self.settle(&flight, yields);
            }
            Err(why) => {
                self.learn(&flight, &[], &done.times);
                self.fail(&flight, Failure::Round(why));
            }
        }
        self.last_times = done.times;
        let waited_since = flight.began.max(self.settled);
        self.settled = Instant::now();
        if flight.parts.is_empty() {
            return false;
        }
        self.stats.rounds.fetch_add(1, Relaxed);
        if flight.only_decodes() {
            let whole = self.settled - waited_since;
            self.stats.add_times(&Times { whole, rounds: 1, ..done.times });
        }
        true
    }

    /// Tells the policy what came of a round: of those of its requests that were not void.
    fn learn(&mut self, flight: &Flight, yields: &[Option<Yield>], times: &Times) {
        if self.profile.declaration.is_none() || flight.setting.batch == 0 {
            return;
        }
        let mut requests = Vec::with_capacity(flight.parts.len());
        for (part, yielded) in flight.parts.iter().zip(yields) {
            let (&RowWork::Decode { shape, .. }, Some(yielded)) = (&part.task, yielded) else {
                continue;
            };
            requests.push(RequestOutcome {
                id: part.request.0,
                shape: shape.within(yielded.lesson.depth, yielded.proposed + 1),
                correct: yielded.correct,
                ranks: &yielded.lesson.ranks,
                refused: yielded.lesson.refused,
            });
        }
        let seconds = times.steps().as_secs_f64();
        let seconds = (flight.only_decodes() && !requests.is_empty()).then_some(seconds);
        let outcome = RoundOutcome { setting: flight.setting, requests: &requests, seconds };
        self.drafting.learn(&outcome);
        if tracing::enabled!(target: "aquila_engine::policy", tracing::Level::DEBUG) {
            let Setting { batch, slot, shape, .. } = flight.setting;
            let kept =
                |r: &RequestOutcome<'_>| format!("{}:{}/{}", r.id, r.shape.steps(), r.correct);
            let kept = requests.iter().map(kept).collect::<Vec<_>>().join(" ");
            let steps = shape.steps();
            tracing::debug!(
                target: "aquila_engine::policy",
                "round {}: batch {batch}, slot {slot}, steps {steps}; kept {kept}",
                flight.number
            );
        }
        let tokens: usize = requests.iter().map(|request| request.correct + 1).sum();
        let policy = &self.drafting;
        self.stats.change_drafting(|state| {
            state.policy = policy.state();
            state.setting = Some(flight.setting);
            if let Some(expected) = flight.expected.filter(|_| tokens > 0) {
                state.rounds += 1;
                state.expected_tokens += expected;
                state.real_tokens += tokens as u64;
            }
        });
    }

    /// Fails the requests of a round and of those behind it: what it left of their KV is not to
    /// be trusted.
    fn fail(&mut self, flight: &Flight, failure: Failure) {
        if flight.era != self.era {
            // The round that took it along has failed its requests already.
            return;
        }
        self.era += 1;
        let behind = self.flights.iter().flat_map(|flight| &flight.parts);
        let lost: Vec<RequestId> =
            flight.parts.iter().chain(behind).map(|part| part.request).collect();
        let lost = |request: &mut Running| lost.contains(&request.seat.id());
        let lost: Vec<Running> = self.running.extract_if(.., lost).collect();
        tracing::error!(%failure, requests = lost.len(), "a round failed");
        self.stats.failed_rounds.fetch_add(1, Relaxed);
        for request in lost {
            self.leave(&request);
            let seat = request.discard(&mut self.cache);
            self.finish(seat, FinishReason::Abort(failure.to_string()));
        }
    }

    fn settle(&mut self, flight: &Flight, yields: Vec<Option<Yield>>) {
        // Requests keep their order while a round is on its way, so each is found behind the last.
        let mut index = 0;
        for (part, yielded) in flight.parts.iter().zip(yields) {
            let found = self.running[index..].iter().position(|r| r.seat.id() == part.request);
            let (Some(found), Some(yielded)) = (found, yielded) else { continue };
            index += found;
            let request = &mut self.running[index];
            request.coming.least -= part.coming.least;
            request.coming.most -= part.coming.most;
            let known = yielded.known;
            let ending = match &part.task {
                RowWork::Prefill { rows, last, .. } => {
                    self.settle_chunk(index, rows.len(), *last, yielded)
                }
                RowWork::Decode { .. } => self.settle_tree(index, yielded),
            };
            match ending {
                Some(Ending { reason, tokens }) => {
                    let request = self.running.remove(index);
                    self.end_with(request, reason, tokens);
                }
                None => {
                    self.keep_draft_rows(index, &part.task, known);
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
            let shorten = |seat: &mut Seat| {
                let LastRound { tokens, drafts } = seat.last_round;
                let dropped = tokens - kept(&verdict, tokens);
                seat.tokens.truncate(seat.tokens.len() - dropped);
                take_back(&mut seat.usage, dropped, tokens, drafts);
            };
            let at = self.running.iter().position(|request| request.seat.id() == id);
            if let Some(at) = at {
                let mut request = self.running.remove(at);
                shorten(&mut request.seat);
                let reason = reason_of(verdict).expect("a reply ends its request");
                self.end(request, reason);
            } else if let Some(mut waiting) = self.waiting.take_by_id(id) {
                // It was preempted meanwhile.
                shorten(&mut waiting.seat);
                let reason = reason_of(verdict).expect("a reply ends its request");
                self.finish(waiting.seat, reason);
            }
        }
    }

    /// Commits the rows of a chunk; at the end of a fresh prompt, hands the first token out.
    fn settle_chunk(
        &mut self,
        index: usize,
        rows: usize,
        last: bool,
        yielded: Yield,
    ) -> Option<Ending> {
        let Running { seat, sequence, .. } = &mut self.running[index];
        self.cache.commit(sequence, TARGET, rows);
        self.stats.prompt_tokens.fetch_add(rows as u64, Relaxed);
        seat.prompt_tokens.extend(yielded.prompt);
        if !last {
            return None;
        }
        if seat.is_fresh() && seat.params.prompt_logprobs.is_some() {
            let first = Token { id: seat.tokens[0], logprob: None, top: Vec::new() };
            let mut tokens = std::mem::take(&mut seat.prompt_tokens);
            tokens.insert(0, first);
            self.outputs.prompt(seat.id(), tokens);
        }
        seat.last_round = LastRound::default();
        if yielded.tokens.is_empty() {
            return yielded.ended.map(|reason| Ending { reason, tokens: Vec::new() });
        }
        hand_out(&mut self.outputs, seat, yielded.tokens, yielded.ended)
    }

    /// Hands out what is accepted of a tree and commits its rows.
    fn settle_tree(&mut self, index: usize, yielded: Yield) -> Option<Ending> {
        let Running { seat, sequence, .. } = &mut self.running[index];
        let tokens = yielded.tokens.len();
        seat.last_round = LastRound::default();
        if seat.speculates {
            let correct = tokens.min(yielded.correct);
            seat.usage.spec.round(yielded.proposed, correct);
            self.report.drafted.round(yielded.proposed, correct);
            seat.last_round.drafts = Some((yielded.proposed, correct));
        }
        self.cache.commit(sequence, TARGET, tokens);
        hand_out(&mut self.outputs, seat, yielded.tokens, yielded.ended)
    }

    /// Commits the rows that the draft of a request has made; offers a prompt that is read to the
    /// prefix cache.
    fn keep_draft_rows(&mut self, index: usize, task: &RowWork, known: usize) {
        let Running { seat, sequence, told, .. } = &mut self.running[index];
        let declared = self.profile.declaration.as_ref().map_or(&[][..], |d| &d.groups);
        let read = sequence.committed(TARGET);
        let whole = !matches!(task, RowWork::Prefill { last: false, .. });
        for (&group, draft) in seat.groups()[1..].iter().zip(declared) {
            let end = draft.certain_rows(known, read, whole);
            let rows = end - sequence.committed(group);
            self.cache.commit(sequence, group, rows);
        }
        if matches!(task, RowWork::Prefill { last: true, .. }) {
            self.cache.publish(sequence, &seat.tokens);
            // Slots of committed rows may be others now.
            told.iter_mut().flatten().for_each(|told| *told = 0);
        }
    }
}

/// How a request ends by its own rules, with the tokens that its listener has not heard.
struct Ending {
    reason: FinishReason,
    tokens: Vec<Token>,
}

/// Adds tokens to a text and gives them to its listener, unless they are its last.
fn hand_out(
    outputs: &mut OutputProcessor,
    seat: &mut Seat,
    tokens: Vec<Token>,
    ended: Option<FinishReason>,
) -> Option<Ending> {
    seat.tokens.extend(tokens.iter().map(|token| token.id));
    seat.usage.completion_tokens += tokens.len();
    seat.last_round.tokens = tokens.len();
    match ended {
        Some(reason) => Some(Ending { reason, tokens }),
        None => {
            outputs.tokens(seat.id(), tokens);
            None
        }
    }
}
