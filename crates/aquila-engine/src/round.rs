//! One round: which rows of which requests run, and what is asked about their logits.
//!
//! A part covers the tokens `rows` of one request: a chunk of a prefill, or the bonus of a request
//! that decodes (a tree of one node). Its outputs are the rows whose logits say something.

use std::ops::Range;

use aquila_compute::choose::Ask;
use aquila_compute::{ForwardPlan, Sight};

use crate::life::{Phase, Running, TARGET};

/// What one request does in a round.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Part {
    /// Which of the running requests.
    pub index: usize,
    /// The tokens whose rows are computed.
    pub rows: Range<usize>,
    /// The tokens whose rows' logits are asked about; they end where `rows` end.
    pub outputs: Range<usize>,
}

/// The plan of one round.
#[derive(Default)]
pub(crate) struct RoundPlan {
    pub parts: Vec<Part>,
    pub forward: ForwardPlan,
}

/// What may still be put into a round.
pub(crate) struct Room {
    pub prefill_rows: usize,
    pub outputs: usize,
}

impl RoundPlan {
    /// Plans the next round of `running`, whose slots are reserved: a row for every request that
    /// decodes, and prefill rows as far as there is room, first come first.
    pub fn fill(&mut self, running: &[Running], mut room: Room) {
        self.parts.clear();
        self.forward.clear();
        let decoding = running.iter().filter(|r| r.phase == Phase::Decoding).count();
        room.outputs -= decoding;
        for (index, request) in running.iter().enumerate() {
            let done = request.sequence.committed(TARGET);
            let part = match request.phase {
                Phase::Decoding => Part { index, rows: done..done + 1, outputs: done..done + 1 },
                Phase::Prefilling { goal } => {
                    let seat = &request.seat;
                    let all = seat.is_fresh() && seat.request.prompt_logprobs.is_some();
                    let mut rows = (goal - done).min(room.prefill_rows);
                    if all {
                        rows = rows.min(room.outputs);
                    }
                    let ends = done + rows == goal;
                    let chooses = ends && seat.is_fresh() && seat.remaining() > 0;
                    if rows == 0 || (chooses && room.outputs == 0) {
                        continue;
                    }
                    // The last row of a prompt says nothing if no answer is wanted.
                    let last = if chooses || !ends { done + rows } else { done + rows - 1 };
                    let outputs = match (all, chooses) {
                        (true, _) => done..last,
                        (false, true) => last - 1..last,
                        (false, false) => last..last,
                    };
                    room.prefill_rows -= rows;
                    room.outputs -= outputs.len();
                    Part { index, rows: done..done + rows, outputs }
                }
            };
            self.add(part, request);
        }
    }

    fn add(&mut self, part: Part, request: &Running) {
        let plan = &mut self.forward;
        let start = plan.slots.len();
        request.sequence.extend_slots(TARGET, 0..part.rows.end, &mut plan.slots);
        for token in part.rows.clone() {
            if part.outputs.contains(&token) {
                plan.outputs.push(plan.tokens.len() as u32);
            }
            plan.tokens.push(request.seat.tokens[token]);
            plan.positions.push(token as u32);
            plan.writes.push(plan.slots[start + token]);
            plan.sights.push(Sight {
                start: start as u32,
                prefix: token as u32 + 1,
                tail_start: 0,
                tail: 0,
            });
        }
        self.parts.push(part);
    }

    /// What is asked about the logits, in the order of the plan's outputs.
    pub fn asks<'a>(&self, running: &'a [Running]) -> Vec<Ask<'a>> {
        let mut asks = Vec::with_capacity(self.forward.outputs.len());
        for part in &self.parts {
            let seat = &running[part.index].seat;
            for token in part.outputs.clone() {
                let given = seat.tokens.get(token + 1).copied();
                asks.push(Ask {
                    row: asks.len(),
                    sampling: &seat.request.sampling,
                    history: &seat.history,
                    path: &[],
                    position: token as u32 + 1,
                    choice: seat.request.choice,
                    banned: seat.banned(),
                    top_logprobs: if given.is_some() {
                        seat.request.prompt_logprobs
                    } else {
                        seat.request.logprobs
                    },
                    given,
                });
            }
        }
        asks
    }
}
