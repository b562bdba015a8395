//! The choice of tokens: which kernels of `choose.cu` and `verify.cu` a batch needs.

use super::layout::{ChooseArgs, State};
use super::state::{CudaState, LISTED, MAXIMA, MOST_PARTS};
use crate::cuda::arguments::Rows;
use crate::cuda::c_layout::Address;
use crate::cuda::device::{Device, Memory};
use crate::cuda::kernels::Kernels;
use crate::cuda::rows::CudaRows;
use crate::{DraftIds, Error, Result};

/// Words of shared memory for the tokens of a path: `MOST_PATH` in `choice.cuh`.
const PATH_WORDS: usize = 64;
/// Bytes of `Ranking` in `choose.cu`, and of the leaders that `near` sorts there.
const RANKING_BYTES: usize = 4096 * 8 + 24;
const LEADERS_BYTES: usize = LISTED * 16;
/// Likely tokens that can be told with a token: `LIST` in `choose.cu`.
const MOST_TOPS: usize = 4096;
/// Values of a row that a thread block takes at a time (`RUN` in `choice.cuh`), and that it should have
/// at least.
const RUN: usize = 1024;
const LEAST_PART: usize = 2048;
/// Thread blocks that keep a device busy with rows of logits.
const BUSY: usize = 512;

/// Bytes of shared memory for a question about `values` values of a row.
pub(super) fn question_bytes(values: usize) -> usize {
    4 * (PATH_WORDS + values.next_multiple_of(RUN) / 32)
}

/// Log-probabilities on the device.
#[derive(Default)]
pub(super) struct ReportedLogprobs {
    room: Option<LogprobRoom>,
}

pub(super) struct LogprobRoom {
    pub(super) logprobs: Memory,
    pub(super) top_counts: Memory,
    pub(super) tops: Memory,
    /// Likely tokens of each output.
    pub(super) most: usize,
}

/// Where log-probabilities go; nowhere where no request asked for any.
#[derive(Default)]
pub(super) struct LogprobAddresses {
    pub(super) logprobs: Address,
    pub(super) top_counts: Address,
    pub(super) tops: Address,
    pub(super) most: usize,
}

impl ReportedLogprobs {
    /// Makes room for `tops` likely tokens of each of `outputs` outputs.
    pub(super) fn prepare(&mut self, device: &Device, outputs: usize, tops: usize) -> Result<()> {
        if tops > MOST_TOPS {
            return Err(Error::Unavailable(format!(
                "{tops} likely tokens are not available on CUDA: {MOST_TOPS} at most"
            )));
        }
        let most = tops.max(1);
        if self.room.as_ref().is_some_and(|room| room.most >= most) {
            return Ok(());
        }
        self.room = Some(LogprobRoom {
            logprobs: device.allocate("log-probabilities", 4 * outputs)?,
            top_counts: device.allocate("log-probabilities", 4 * outputs)?,
            tops: device.allocate("log-probabilities", 8 * outputs * most)?,
            most,
        });
        Ok(())
    }

    pub(super) fn addresses(&self, asked: Option<usize>) -> LogprobAddresses {
        match (&self.room, asked) {
            (Some(room), Some(_)) => LogprobAddresses {
                logprobs: room.logprobs.at(0),
                top_counts: room.top_counts.at(0),
                tops: room.tops.at(0),
                most: room.most,
            },
            _ => LogprobAddresses::default(),
        }
    }

    pub(super) fn memory(&self) -> impl Iterator<Item = &Memory> {
        self.room.iter().flat_map(|room| [&room.logprobs, &room.top_counts, &room.tops])
    }

    /// Where they are, where there is room for them.
    pub(super) fn room(&self) -> Option<&LogprobRoom> {
        self.room.as_ref()
    }
}

/// Of which pass tokens are chosen.
#[derive(Clone, Copy, PartialEq)]
pub(in crate::cuda) enum TokensOf {
    Target,
    /// A draft's, after the nodes of a level.
    Level,
    /// A draft's, after the last certain token.
    Seeds,
}

impl CudaState {
    /// Answers the queries of the pass that was planned last from output `first` on, as many as there
    /// are logits.
    pub(in crate::cuda) fn choose(
        &mut self,
        device: &Device,
        kernels: &Kernels,
        tokens_of: TokensOf,
        logits: &CudaRows,
        first: usize,
        ids: Option<DraftIds<'_>>,
    ) -> Result<()> {
        let outputs = self.asked.saturating_sub(first).min(logits.capacity);
        if outputs > self.pieces {
            return Err(Error::Device(format!(
                "logits of {outputs} outputs, {} at a time",
                self.pieces
            )));
        }
        logits.hold("logits", outputs, logits.width)?;
        if outputs == 0 || self.round.rows.is_empty() {
            return Ok(());
        }
        let target = tokens_of == TokensOf::Target;
        self.send_masks(device, tokens_of)?;
        let tops = self.round.tops.filter(|_| target);
        let ids = self.draft_ids(device, ids)?;
        let size = logits.width;
        let reported = self.reported.addresses(tops);
        let chosen_by = self.round.choice_kernels(target);
        let arguments = ChooseArgs {
            state: self.of_piece(first),
            logits: rows_of_piece(logits, first),
            ids: ids.as_ref().map_or(0, |ids| ids.at(0)),
            logprobs: reported.logprobs,
            top_counts: reported.top_counts,
            tops: reported.tops,
            size: size as u32,
            draft: u32::from(!target),
            level: u32::from(tokens_of == TokensOf::Level),
            most_tops: reported.most as u32,
            first: first as u32,
            count: outputs as u32,
            ranks: u32::from(chosen_by.ranks),
        };
        let mut names = self.names();
        names.extend(logits.memory().chain(&ids));
        names.extend(self.reported.memory().chain(self.masks.memory()));
        let shared = (BUSY / outputs).min(size / LEAST_PART).clamp(1, MOST_PARTS);
        // The largest power of two of so many.
        let parts = 1 << shared.ilog2();
        let (by_part, by_output) = ([parts, outputs, 1], [outputs, 1, 1]);
        let (of_part, of_row) =
            (question_bytes(size.div_ceil(RUN * parts) * RUN), question_bytes(size));
        let steps = &kernels.steps;
        // SAFETY: the logits have `outputs` rows, the state has room for as many queries, and kernels
        // look at no more than there are.
        unsafe {
            device.launch(&steps.scan, by_part, 256, of_part, &arguments, &names)?;
            if chosen_by.ranks {
                let shared = RANKING_BYTES + of_row;
                device.launch(&steps.rank, by_part, 256, shared, &arguments, &names)?;
            }
            if chosen_by.samples {
                device.launch(&steps.race, by_part, 256, of_part, &arguments, &names)?;
            }
            if chosen_by.samples_several {
                let shared = LEADERS_BYTES + of_row;
                device.launch(&steps.near, by_part, 256, shared, &arguments, &names)?;
            }
            if chosen_by.draws {
                device.launch(&steps.draw, by_output, 512, of_row, &arguments, &names)?;
            }
            if chosen_by.reports {
                let grid = [outputs.div_ceil(128), 1, 1];
                device.launch(&steps.tell_logprobs, grid, 128, 0, &arguments, &names)?;
            }
            if target && self.round.by_probability {
                let grid = [self.round.bound, 1, 1];
                device.launch(&steps.follow_paths, grid, 512, of_row, &arguments, &names)?;
            }
        }
        Ok(())
    }

    /// The state for a piece: what lies by output there is moved back, so that the piece's first
    /// output is at its beginning.
    fn of_piece(&self, first: usize) -> State {
        let (parts, back) = (self.parts, |address, bytes| moved_back(address, first, bytes));
        State {
            arrivals: back(parts.arrivals, 4),
            maxima: back(parts.maxima, 16 * MAXIMA),
            lists: back(parts.lists, 16 * LISTED),
            totals: back(parts.totals, 16),
            list_counts: back(parts.list_counts, 8),
            ..parts
        }
    }

    /// Refuses more outputs than there is room for.
    pub(super) fn check_outputs(&self, outputs: usize) -> Result<()> {
        if outputs <= self.outputs {
            return Ok(());
        }
        Err(Error::Tensor(format!("{outputs} outputs, and there is room for {}", self.outputs)))
    }
}

/// An address less `first` times `bytes`: what is looked up from `first` on lies at `address`.
fn moved_back(address: Address, first: usize, bytes: usize) -> Address {
    address.wrapping_sub((first * bytes) as Address)
}

/// Rows whose first is that of output `first`.
fn rows_of_piece(logits: &CudaRows, first: usize) -> Rows {
    let parts = logits.parts();
    Rows { values: moved_back(parts.values, first, 4 * logits.stride), ..parts }
}
