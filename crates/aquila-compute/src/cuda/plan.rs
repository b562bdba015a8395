//! Plans on the device.
//!
//! The one invariant: the parts of a plan lie at fixed places, so that a captured pass finds the
//! next plan where it found the last one. Block tables stay on the device, and a plan brings their
//! changes alone.

use super::arguments;
use super::copies::Mailbox;
use super::device::{Device, Memory};
use super::kernels::Kernel;
use crate::round::Extent;
use crate::{AttentionSpan, BlockTables, Error, ForwardPlan, PlanBounds, Result};

/// Words before the first part of a placed plan: rows, outputs, and room to keep 16-byte alignment.
const COUNTS: usize = 4;
/// Changes of block tables that travel at a time.
const CHANGES: usize = 1 << 14;

/// A plan on the device.
pub struct CudaPlan {
    mailbox: Mailbox,
    changes: Mailbox,
    tables: Memory,
    /// The block tables of the state that planned the rows, where one did.
    planned: Option<Memory>,
    bounds: PlanBounds,
    /// The block tables as the host knows them, to check plans against.
    host_tables: BlockTables,
    /// Rows of the plan placed last.
    pub(super) rows: usize,
    /// Requests that they are of, as far as the host knows.
    pub(super) requests: usize,
    /// Outputs of the plan placed last.
    pub(super) outputs: usize,
    /// Whether it says where its rows come from.
    pub(super) has_sources: bool,
    /// The longest span of the plan placed last.
    pub(super) longest: usize,
    /// One more than the largest slot, token and position of the plan placed last.
    pub(super) slots: usize,
    pub(super) tokens: usize,
    pub(super) positions: usize,
}

impl CudaPlan {
    pub(super) fn new(device: &Device, bounds: PlanBounds) -> Result<Self> {
        let words = COUNTS + 8 * bounds.rows + 2 * bounds.outputs + bounds.slots;
        Ok(Self {
            mailbox: Mailbox::new(device, "a plan", words)?,
            changes: Mailbox::new(device, "a plan", 2 * CHANGES.min(bounds.slots))?,
            tables: device.allocate("block tables", 4 * bounds.slots)?,
            planned: None,
            bounds,
            host_tables: BlockTables::default(),
            rows: 0,
            requests: 1,
            outputs: 0,
            has_sources: false,
            longest: 0,
            slots: 0,
            tokens: 0,
            positions: 0,
        })
    }

    /// The memory that the addresses of [`CudaPlan::parts`] lie in.
    pub(super) fn memory(&self) -> [&Memory; 2] {
        [&self.mailbox.memory, self.planned.as_ref().unwrap_or(&self.tables)]
    }

    pub(super) fn parts(&self) -> arguments::Plan {
        let PlanBounds { rows, outputs, .. } = self.bounds;
        let at = |word: usize| self.mailbox.memory.at(4 * word);
        arguments::Plan {
            counts: at(0),
            spans: at(COUNTS),
            tokens: at(COUNTS + 4 * rows),
            positions: at(COUNTS + 5 * rows),
            writes: at(COUNTS + 6 * rows),
            sources: at(COUNTS + 7 * rows),
            outputs: at(COUNTS + 8 * rows),
            destinations: at(COUNTS + 8 * rows + outputs),
            tables: self.memory()[1].at(0),
            tree_slots: at(COUNTS + 8 * rows + 2 * outputs),
        }
    }

    /// Refuses more rows or outputs than the plan has room for.
    pub(super) fn holds(&self, rows: usize, outputs: usize) -> Result<()> {
        if rows <= self.bounds.rows && outputs <= self.bounds.outputs {
            return Ok(());
        }
        let bounds = self.bounds;
        Err(Error::Tensor(format!(
            "a pass of {rows} rows and {outputs} outputs exceeds {bounds:?}"
        )))
    }

    /// Notes that a state plans the rows, which has these block tables; `bound` and `longest` are all
    /// that the host knows of them. Kernels keep within what they are given, whatever the rows say.
    pub(super) fn bound(
        &mut self,
        tables: &Memory,
        bound: Extent,
        requests: usize,
        has_sources: bool,
        longest: usize,
    ) {
        self.planned = Some(tables.clone());
        (self.rows, self.outputs, self.requests) = (bound.rows, bound.outputs, requests.max(1));
        (self.has_sources, self.longest) = (has_sources, longest);
        (self.slots, self.tokens, self.positions) = (0, 0, 0);
    }

    pub(super) fn place(
        &mut self,
        device: &Device,
        change_tables: &Kernel,
        host: &ForwardPlan,
    ) -> Result<()> {
        self.planned = None;
        self.host_tables.change(host);
        check(host, &self.host_tables, self.bounds)?;
        self.change_tables(device, change_tables, host)?;
        let PlanBounds { rows, outputs, .. } = self.bounds;
        let tree_slots = COUNTS + 8 * rows + 2 * outputs;
        self.mailbox.post(device, |words| {
            words[..2].copy_from_slice(&[host.rows() as u32, host.outputs.len() as u32]);
            for (out, span) in words[COUNTS..].chunks_exact_mut(4).zip(&host.spans) {
                out.copy_from_slice(&[span.start, span.prefix, span.tree_start, span.tail]);
            }
            let mut copy =
                |at: usize, list: &[u32]| words[at..][..list.len()].copy_from_slice(list);
            copy(COUNTS + 4 * rows, &host.tokens);
            copy(COUNTS + 5 * rows, &host.positions);
            copy(COUNTS + 6 * rows, &host.writes);
            copy(COUNTS + 7 * rows, &host.sources);
            copy(COUNTS + 8 * rows, &host.outputs);
            copy(COUNTS + 8 * rows + outputs, &host.destinations);
            copy(tree_slots, &host.tree_slots);
            if host.destinations.is_empty() {
                let destinations = &mut words[COUNTS + 8 * rows + outputs..][..host.outputs.len()];
                destinations.iter_mut().zip(0..).for_each(|(to, i)| *to = i);
            }
            tree_slots + host.tree_slots.len()
        })?;
        let end = |list: &[u32]| list.iter().max().map_or(0, |&most| most as usize + 1);
        (self.rows, self.outputs) = (host.rows(), host.outputs.len());
        let begin = |pair: &[AttentionSpan]| pair[0].start != pair[1].start;
        self.requests = 1 + host.spans.windows(2).filter(|pair| begin(pair)).count();
        self.has_sources = host.sources.len() == host.rows();
        self.longest = host.spans.iter().map(|span| span.len()).max().unwrap_or(0);
        self.slots = end(&host.writes).max(end(&host.tree_slots)).max(self.host_tables.bound());
        (self.tokens, self.positions) = (end(&host.tokens), end(&host.positions));
        Ok(())
    }

    /// Changes the block tables on the device.
    fn change_tables(
        &mut self,
        device: &Device,
        kernel: &Kernel,
        host: &ForwardPlan,
    ) -> Result<()> {
        let places = host.changes.iter().flat_map(|&(at, count)| at..at + count);
        let mut pairs = places.zip(host.slots.iter().copied()).peekable();
        while pairs.peek().is_some() {
            let mut count = 0;
            self.changes.post(device, |words| {
                for (out, (at, slot)) in words.chunks_exact_mut(2).zip(pairs.by_ref()) {
                    out.copy_from_slice(&[at, slot]);
                    count += 1;
                }
                2 * count
            })?;
            let arguments = arguments::Change {
                changes: self.changes.memory.at(0),
                tables: self.tables.at(0),
                count: count as u32,
                size: self.bounds.slots as u32,
            };
            let names = [&self.changes.memory, &self.tables];
            // SAFETY: the kernel looks at `count` pairs, and at places below `size` alone.
            unsafe {
                device.launch(kernel, [count.div_ceil(256), 1, 1], 256, 0, &arguments, &names)?;
            }
        }
        Ok(())
    }
}

/// Refuses a plan that does not fit or whose parts disagree; the kernels then need not look.
fn check(host: &ForwardPlan, tables: &BlockTables, bounds: PlanBounds) -> Result<()> {
    let rows = host.rows();
    let slots = tables.len() + host.tree_slots.len();
    if rows > bounds.rows || host.outputs.len() > bounds.outputs || slots > bounds.slots {
        return Err(Error::Tensor(format!(
            "a plan of {rows} rows, {} outputs and {slots} slots exceeds {bounds:?}",
            host.outputs.len()
        )));
    }
    let within =
        |start: u32, count: u32, list: &[u32]| start as usize + count as usize <= list.len();
    let sound = [host.positions.len(), host.writes.len(), host.spans.len()] == [rows; 3]
        && (host.sources.is_empty() || host.sources.len() == rows)
        && (host.destinations.is_empty() || host.destinations.len() == host.outputs.len())
        && host.outputs.iter().all(|&row| (row as usize) < rows)
        && host.spans.iter().all(|span| {
            !span.is_empty()
                && tables.hold(span)
                && within(span.tree_start, span.tail, &host.tree_slots)
        });
    if sound { Ok(()) } else { Err(Error::Tensor("a plan whose parts disagree".into())) }
}
