//! An executor without a model: texts follow from their own tokens, and slots remember whose
//! row they hold, so that a row which was lost, moved or overwritten is noticed by who reads it.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use aquila_compute::round::{Ended, RequestOutput, RequestParams, RowWork};
use aquila_compute::sampling::Choice;
use aquila_engine::executor::{
    BatchOutput, Executor, Profile, RequestWork, RowWidths, ScheduledBatch,
};
use aquila_engine::{EngineConfig, EngineFailure, RequestId, Times};
use aquila_spec::{Declaration, HiddenStates};

use super::VOCABULARY;

/// Runs rounds that take `pause`.
pub struct Simulated {
    pub pause: Duration,
    /// Whether rows are written and read; without, only tokens are made.
    pub remembers: bool,
    /// The batch that panics, if one does.
    pub fails: Option<u64>,
    /// The first batch from which on the device is lost, if it is.
    pub loses: Option<u64>,
    drafts: bool,
    memory: Vec<u64>,
    rows: HashMap<RequestId, Row>,
    broken: Option<u64>,
    done: VecDeque<BatchOutput>,
}

struct Row {
    params: Arc<RequestParams>,
    /// What each token's row holds: all that it has seen.
    seen: Vec<u64>,
    table: Vec<u32>,
    committed: usize,
    ended: bool,
}

/// What a row holds that has seen `before` and its own token.
fn look(before: u64, token: u32) -> u64 {
    let mixed = (before ^ u64::from(token).wrapping_add(1)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed ^ (mixed >> 29)
}

fn next_token(seen: u64) -> u32 {
    ((seen >> 7) % u64::from(VOCABULARY)) as u32
}

impl Simulated {
    pub fn new(config: &EngineConfig) -> Self {
        Self {
            pause: Duration::ZERO,
            remembers: true,
            fails: None,
            loses: None,
            drafts: config.shape.steps() > 0,
            memory: vec![0; config.slots()],
            rows: HashMap::new(),
            broken: None,
            done: VecDeque::new(),
        }
    }

    fn part(&mut self, part: &RequestWork) -> Option<RequestOutput> {
        let row = self.rows.get_mut(&part.request).expect("a request that was admitted");
        if row.ended {
            return None;
        }
        let memory = &mut self.memory;
        let mut write = |table: &[u32], range: std::ops::Range<usize>, seen: &[u64]| {
            for (&slot, &seen) in table[range].iter().zip(seen) {
                memory[slot as usize] = seen;
            }
        };
        let mut output = RequestOutput::default();
        let known = row.seen.len();
        let wanted = match &part.work {
            RowWork::Prefill { rows, outputs, .. } => {
                assert_eq!(rows.start, row.committed, "chunks follow each other");
                if self.remembers {
                    write(&row.table, rows.clone(), &row.seen[rows.clone()]);
                }
                row.committed = rows.end;
                usize::from(!outputs.is_empty() && outputs.end == known)
            }
            RowWork::Decode { shape, .. } => {
                assert_eq!(row.committed + 1, known, "the bonus alone has no row");
                let shape = row.params.granted(*shape, known);
                let most = row.seen[known - 1] >> 40;
                output.proposed = shape.nodes() - 1;
                output.feedback.depth = shape.steps();
                output.correct = (most % (shape.steps() as u64 + 1)) as usize;
                if self.remembers {
                    let nodes = row.committed..row.committed + shape.nodes();
                    write(&row.table, nodes, &vec![u64::MAX; shape.nodes()]);
                }
                output.correct + 1
            }
        };
        for _ in 0..wanted {
            let seen = row.seen[row.seen.len() - 1];
            let id = next_token(seen);
            row.seen.push(look(seen, id));
            output.tokens.push(Choice { token: id, logprob: None, top: Vec::new() });
            if row.params.stop_ids.contains(&id) {
                output.ended = Some(Ended::Token(id));
            } else if row.seen.len() >= row.params.longest {
                output.ended = Some(Ended::Length);
            }
            if output.ended.is_some() {
                break;
            }
        }
        if matches!(part.work, RowWork::Decode { .. }) {
            let end = row.committed + output.tokens.len();
            if self.remembers {
                write(&row.table, row.committed..end, &row.seen[row.committed..end]);
            }
            row.committed = end;
        } else if row.committed == known && wanted == 0 && known >= row.params.longest {
            output.ended = Some(Ended::Length);
        }
        output.known = row.seen.len();
        row.ended = output.ended.is_some();
        if self.remembers {
            let held = row.table[..row.committed].iter().map(|&slot| self.memory[slot as usize]);
            assert!(
                held.eq(row.seen[..row.committed].iter().copied()),
                "a row of request {} is not its own",
                part.request
            );
        }
        Some(output)
    }
}

impl Executor for Simulated {
    fn profile(&self) -> Profile {
        let declaration = self.drafts.then(|| Declaration {
            name: "SIMULATED",
            hidden: HiddenStates::None,
            groups: Vec::new(),
        });
        let row_widths = RowWidths::default();
        Profile {
            vocabulary: VOCABULARY as usize,
            declaration,
            row_widths,
            grammars: false,
            kv: Vec::new(),
        }
    }

    /// A round runs when it is enqueued.
    fn enqueue(&mut self, batch: ScheduledBatch) {
        for left in &batch.departed {
            assert!(self.rows.remove(&left.request).is_some(), "who leaves was admitted");
        }
        for admission in batch.admitted {
            let mut before = 0;
            let see = |&token: &u32| {
                before = look(before, token);
                before
            };
            let seen = admission.tokens.iter().map(see).collect();
            let row = Row {
                params: admission.params.clone(),
                seen,
                table: Vec::new(),
                committed: admission.matched,
                ended: false,
            };
            let before = self.rows.insert(RequestId(admission.params.id), row);
            assert!(before.is_none(), "no request is admitted twice");
        }
        for change in &batch.tables {
            let table = &mut self.rows.get_mut(&change.request).expect("it was admitted").table;
            assert!(change.from <= table.len());
            table.truncate(change.from);
            table.extend_from_slice(&batch.slots[change.slots.clone()]);
        }
        let refused = self.broken == Some(batch.epoch);
        self.broken = Some(batch.epoch);
        if self.fails == Some(batch.number) {
            panic!("this round was told to fail");
        }
        std::thread::sleep(self.pause);
        let outcome = if self.loses.is_some_and(|loses| loses <= batch.number) {
            Err(EngineFailure::DeviceLost("it was told to be".into()).into())
        } else if refused {
            Err("a round before it failed".into())
        } else {
            Ok(batch.requests.iter().map(|part| self.part(part)).collect())
        };
        if outcome.is_ok() {
            self.broken = None;
        }
        let (unpacked, packed) = (Vec::new(), Vec::new());
        let (number, times) = (batch.number, Times::default());
        self.done.push_back(BatchOutput { number, outcome, unpacked, packed, times });
    }

    fn finish(&mut self) -> BatchOutput {
        self.done.pop_front().expect("a round was enqueued")
    }
}
