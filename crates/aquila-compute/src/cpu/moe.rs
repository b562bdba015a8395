//! A mixture of experts: which experts each row goes to, and what they make of it.
//!
//! Rows are grouped by expert, so that the weights of an expert are read once for all its rows,
//! and all experts are one job of the pool, since there are many and a row goes to few. A task of
//! the projections back takes some outputs of all experts, one after the other: so the sum of a
//! row is formed in the order of experts, and by one thread.

use std::cell::RefCell;
use std::ops::Range;

use super::CpuBackend;
use super::int8::{Quantized, QuantizedRows};
use super::memory::Shared;
use super::product::{Finish, Product, finish_sums};
use super::rows::CpuRows;
use super::rowwise;
use super::share::{CHUNK, SMALL_PRODUCT, check};
use super::simd::LANES;
use super::weight::CpuWeight;
use crate::{Accumulate, Activation, Error, Result, WeightFormat, reference};

/// The experts of one layer.
pub struct CpuExperts {
    gate_up: Vec<CpuWeight>,
    down: Vec<CpuWeight>,
}

impl CpuExperts {
    /// Refuses experts that differ in shape or format.
    pub(super) fn new(gate_up: Vec<CpuWeight>, down: Vec<CpuWeight>) -> Result<Self> {
        let (Some(up), Some(back)) = (gate_up.first(), down.first()) else {
            return Err(Error::Tensor("a mixture needs at least one expert".into()));
        };
        let shape = |w: &CpuWeight| (w.inputs(), w.outputs(), w.format());
        let alike = |all: &[CpuWeight]| all.iter().all(|w| shape(w) == shape(&all[0]));
        check(gate_up.len() == down.len() && alike(&gate_up) && alike(&down), || {
            "the experts of a layer must have one shape and one format".into()
        })?;
        check(up.outputs() == 2 * back.inputs() && up.format() == back.format(), || {
            format!(
                "{} gates and ups in {:?} do not go with a projection of {} inputs in {:?}",
                up.outputs(),
                up.format(),
                back.inputs(),
                back.format()
            )
        })?;
        Ok(Self { gate_up, down })
    }

    /// How many experts there are.
    pub fn count(&self) -> usize {
        self.down.len()
    }

    fn format(&self) -> WeightFormat {
        self.down[0].format()
    }

    /// Width of the rows that experts read, of gates or ups, and of the rows that they make.
    fn widths(&self) -> (usize, usize, usize) {
        (self.gate_up[0].inputs(), self.down[0].inputs(), self.down[0].outputs())
    }
}

/// Which experts each row goes to, and their weights.
///
/// A row and one of its experts are a pair. Pairs are numbered expert by expert and, of one
/// expert, row by row.
#[derive(Default)]
pub struct CpuRouting {
    capacity: usize,
    per_token: usize,
    /// How many experts there are to choose from.
    experts: usize,
    /// Of each row one after the other, the likeliest expert first.
    chosen: Vec<(u32, f32)>,
    groups: Vec<Group>,
    /// Row and weight of each pair.
    pair_rows: Vec<u32>,
    pair_weights: Vec<f32>,
}

/// An expert that some rows go to.
struct Group {
    expert: usize,
    pairs: Range<usize>,
}

impl CpuRouting {
    pub(super) fn new(capacity: usize, per_token: usize) -> Self {
        let pairs = capacity * per_token;
        Self {
            capacity,
            per_token,
            chosen: Vec::with_capacity(pairs),
            pair_rows: Vec::with_capacity(pairs),
            pair_weights: Vec::with_capacity(pairs),
            ..Self::default()
        }
    }

    /// How many experts a row goes to.
    pub fn per_token(&self) -> usize {
        self.per_token
    }

    /// The experts of a row, the likeliest first, and their weights.
    pub fn row(&self, row: usize) -> &[(u32, f32)] {
        &self.chosen[row * self.per_token..(row + 1) * self.per_token]
    }

    /// How many rows were routed.
    pub(super) fn rows(&self) -> usize {
        self.chosen.len().checked_div(self.per_token).unwrap_or(0)
    }

    /// Numbers the pairs.
    fn group(&mut self) {
        let mut next = vec![0; self.experts + 1];
        self.chosen.iter().for_each(|&(id, _)| next[id as usize + 1] += 1);
        self.groups.clear();
        for expert in 0..self.experts {
            let pairs = next[expert]..next[expert] + next[expert + 1];
            next[expert + 1] = pairs.end;
            if !pairs.is_empty() {
                self.groups.push(Group { expert, pairs });
            }
        }
        self.pair_rows.resize(self.chosen.len(), 0);
        self.pair_weights.resize(self.chosen.len(), 0.0);
        for (index, &(id, weight)) in self.chosen.iter().enumerate() {
            let pair = &mut next[id as usize];
            self.pair_rows[*pair] = (index / self.per_token) as u32;
            self.pair_weights[*pair] = weight;
            *pair += 1;
        }
    }
}

/// What a task of experts needs for itself.
#[derive(Default)]
struct Scratch {
    /// Rows of one expert side by side, as they are or quantized.
    rows: Vec<f32>,
    quantized: QuantizedRows,
    /// Sums over experts.
    sums: Vec<f32>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// Rows that experts read.
#[derive(Clone, Copy)]
struct Inputs {
    at: *const f32,
    stride: usize,
    width: usize,
    /// The same, quantized, where the weights are.
    quantized: Option<Quantized>,
}

// SAFETY: tasks only read the rows.
unsafe impl Sync for Inputs {}

impl Inputs {
    fn skip_rows(self, rows: usize) -> Self {
        Self {
            at: self.at.wrapping_add(rows * self.stride),
            quantized: self.quantized.map(|quantized| quantized.skip_rows(rows)),
            ..self
        }
    }

    /// The rows that are named, in ascending order, side by side.
    ///
    /// # Safety
    /// There must be rows, and all that are named must be there.
    unsafe fn gather(self, rows: &[u32], scratch: &mut Scratch) -> Self {
        let (first, last) = (rows[0] as usize, rows[rows.len() - 1] as usize);
        if last - first + 1 == rows.len() {
            return self.skip_rows(first);
        }
        if let Some(quantized) = self.quantized {
            let to = scratch.quantized.prepare(rows.len(), self.width);
            for (place, &row) in rows.iter().enumerate() {
                // SAFETY: the caller vouches for the rows; room was made, for this task alone.
                unsafe { quantized.skip_rows(row as usize).copy_row(to.skip_rows(place)) }
            }
            return Self { quantized: Some(to), ..self };
        }
        scratch.rows.resize(rows.len() * self.stride, 0.0);
        for (to, &row) in scratch.rows.chunks_exact_mut(self.stride).zip(rows) {
            // SAFETY: the caller vouches for the rows.
            let from =
                unsafe { std::slice::from_raw_parts(self.skip_rows(row as usize).at, self.width) };
            to[..self.width].copy_from_slice(from);
        }
        Self { at: scratch.rows.as_ptr(), ..self }
    }
}

/// What an operation over experts is given.
pub(super) struct Mixture<'a> {
    pub experts: &'a CpuExperts,
    pub routing: &'a CpuRouting,
    pub rows: usize,
}

impl CpuBackend {
    /// [`crate::Backend::route`].
    pub(super) fn choose_experts(
        &self,
        logits: &CpuRows,
        rows: usize,
        normalize: bool,
        out: &mut CpuRouting,
    ) -> Result<()> {
        let (experts, per_token) = (logits.width(), out.per_token);
        check(per_token <= experts, || {
            format!("{per_token} of {experts} experts cannot be chosen")
        })?;
        assert!(rows <= logits.capacity() && rows <= out.capacity, "rows beyond the buffers");
        out.experts = experts;
        out.chosen.resize(rows * per_token, (0, 0.0));
        let (isa, chosen) = (self.isa, Shared::new(out.chosen.as_mut_ptr()));
        self.over_rows(rows, (8 + per_token) * experts, &|row| {
            let mut probabilities = vec![0.0; experts];
            // SAFETY: both have a value for each expert.
            unsafe {
                let to = probabilities.as_mut_ptr();
                rowwise::softmax(isa, logits.row(row).as_ptr(), experts, to);
            }
            let at = chosen.get().wrapping_add(row * per_token);
            // SAFETY: there is room for all rows, and each is written by one task.
            let chosen = unsafe { std::slice::from_raw_parts_mut(at, per_token) };
            reference::choose_experts(&probabilities, normalize, chosen);
        });
        out.group();
        Ok(())
    }

    /// [`crate::Backend::project_experts`].
    pub(super) fn run_experts(
        &self,
        mixture: &Mixture<'_>,
        activation: Activation,
        input: &CpuRows,
        (both, activated): (&mut CpuRows, &mut CpuRows),
        accumulate: Accumulate,
        out: &mut CpuRows,
    ) -> Result<()> {
        let &Mixture { experts, routing, rows } = mixture;
        let (inputs, width, outputs) = experts.widths();
        check(routing.experts == experts.count() && routing.rows() == rows, || {
            format!(
                "a routing of {} rows to {} experts is not one of {rows} rows to {}",
                routing.rows(),
                routing.experts,
                experts.count()
            )
        })?;
        check(input.width() >= inputs && out.width() >= outputs, || {
            format!(
                "experts of {inputs} inputs and {outputs} outputs do not fit rows of {} and {}",
                input.width(),
                out.width()
            )
        })?;
        check(both.width() == 2 * width && activated.width() == width, || {
            format!(
                "experts of {width} gates need rows of {} and {width}, not of {} and {}",
                2 * width,
                both.width(),
                activated.width()
            )
        })?;
        let pairs = rows * routing.per_token;
        assert!(rows <= input.capacity() && rows <= out.capacity(), "rows beyond the buffers");
        assert!(pairs <= both.capacity() && pairs <= activated.capacity(), "pairs beyond the rows");
        if pairs == 0 {
            return Ok(());
        }
        let mut quantized = self.scratch_of(experts.format());
        let mut quantized = quantized.as_deref_mut();
        let mut rows_of = |rows_of: &CpuRows, rows: usize, weight: &CpuWeight| {
            let from = (rows_of.as_ptr(), rows_of.stride());
            let nowhere = (std::ptr::null_mut(), 0);
            let read = Product::new(weight, from, rows, nowhere, Finish::Outputs(Accumulate::Set));
            Inputs {
                at: read.input,
                stride: read.input_stride,
                width: read.inputs,
                quantized: quantized.as_mut().map(|scratch| self.quantize(&read, scratch)),
            }
        };
        let from = rows_of(input, rows, &experts.gate_up[0]);
        if width.is_multiple_of(LANES) {
            let gated = Finish::Gated(width / LANES, activation);
            // SAFETY: sizes were checked above.
            unsafe { self.project_up(mixture, from, gated, activated) }
        } else {
            let whole = Finish::Outputs(Accumulate::Set);
            // SAFETY: sizes were checked above.
            unsafe { self.project_up(mixture, from, whole, both) }
            self.gate_rows(activation, both, pairs, activated)?;
        }
        let from = rows_of(activated, pairs, &experts.down[0]);
        // SAFETY: sizes were checked above.
        unsafe { self.project_down(mixture, from, accumulate, out) }
        Ok(())
    }

    /// The projections to gates and ups: `out` has a row for each pair.
    ///
    /// # Safety
    /// Rows of `from` and `out` must be there for all rows and pairs.
    unsafe fn project_up(
        &self,
        mixture: &Mixture<'_>,
        from: Inputs,
        finish: Finish,
        out: &mut CpuRows,
    ) {
        let &Mixture { experts, routing, .. } = mixture;
        let (stride, out) = (out.stride(), out.shared());
        let product = |group: &Group, from: Inputs| {
            let weight = &experts.gate_up[group.expert];
            let to = out.as_mut_ptr().wrapping_add(group.pairs.start * stride);
            Product::new(weight, (from.at, from.stride), group.pairs.len(), (to, stride), finish)
        };
        let panels = product(&routing.groups[0], from).panels();
        let share = (routing.groups.len() * panels).div_ceil(self.threads() * 12);
        let few = (CHUNK * panels / experts.gate_up[0].bytes()).max(1);
        let mut tasks = Vec::new();
        for (index, group) in routing.groups.iter().enumerate() {
            // A task gathers its rows first: the more they are, the more panels make up for it.
            let rows = group.pairs.len();
            let together = self.panels_together(&experts.gate_up[0], rows);
            let chunk = share.min(few * rows).next_multiple_of(together);
            tasks.extend((0..panels).step_by(chunk).map(|first| (index, first, chunk)));
        }
        self.over_tasks(tasks.len(), mixture, &|task| {
            let (index, first, chunk) = tasks[task];
            let (group, last) = (&routing.groups[index], (first + chunk).min(panels));
            let mut scratch = SCRATCH.take();
            // SAFETY: the caller vouches for the rows, and a group has one at least.
            let from =
                unsafe { from.gather(&routing.pair_rows[group.pairs.clone()], &mut scratch) };
            let mut product = product(group, from);
            if let (true, Some(next)) = (last == panels, routing.groups.get(index + 1)) {
                product.next = Some(experts.gate_up[next.expert].as_ptr());
            }
            // SAFETY: the caller vouches for the rows; tasks differ in pairs or panels.
            unsafe {
                self.project_panels(&product, experts.format(), from.quantized, first, last);
            }
            SCRATCH.set(scratch);
        });
    }

    /// The projections back, and their sums.
    ///
    /// # Safety
    /// Rows of `from` and `out` must be there for all pairs and rows.
    unsafe fn project_down(
        &self,
        mixture: &Mixture<'_>,
        from: Inputs,
        accumulate: Accumulate,
        out: &mut CpuRows,
    ) {
        let &Mixture { experts, routing, rows } = mixture;
        let (stride, out) = (out.stride(), out.shared());
        let panels = experts.down[0].panels();
        let most = routing.groups.iter().map(|group| group.pairs.len()).max().unwrap_or(1);
        let together = self.panels_together(&experts.down[0], most);
        let chunk = panels.div_ceil(self.threads() * 12).next_multiple_of(together);
        self.over_tasks(panels.div_ceil(chunk), mixture, &|task| {
            let (first, last) = (task * chunk, ((task + 1) * chunk).min(panels));
            let mut scratch = SCRATCH.take();
            let width = (last - first) * LANES;
            scratch.sums.clear();
            scratch.sums.resize(rows * width, 0.0);
            // Where the sums of the first panel of all would be.
            let sums = scratch.sums.as_mut_ptr().wrapping_sub(first * LANES);
            for (index, group) in routing.groups.iter().enumerate() {
                let from = from.skip_rows(group.pairs.start);
                let finish = Finish::Mixed {
                    rows: routing.pair_rows[group.pairs.start..].as_ptr(),
                    weights: routing.pair_weights[group.pairs.start..].as_ptr(),
                };
                let (weight, to) = (&experts.down[group.expert], (sums, width));
                let count = group.pairs.len();
                let mut product = Product::new(weight, (from.at, from.stride), count, to, finish);
                let next = routing.groups.get(index + 1);
                product.next = next.map(|next| {
                    let weight = &experts.down[next.expert];
                    weight.as_ptr().wrapping_add(first * weight.panel_bytes())
                });
                // SAFETY: the caller vouches for the rows; there are sums for all rows and these
                // panels, for this task alone.
                unsafe {
                    self.project_panels(&product, experts.format(), from.quantized, first, last);
                }
            }
            let to = (out.as_mut_ptr(), stride);
            let (weight, finish) = (&experts.down[0], Finish::Outputs(accumulate));
            let whole = Product::new(weight, (std::ptr::null(), 0), rows, to, finish);
            // SAFETY: as above; tasks differ in panels.
            unsafe {
                let sums = scratch.sums.as_ptr();
                finish_sums(self.isa, &whole, accumulate, first, last - first, sums);
            }
            SCRATCH.set(scratch);
        });
    }

    /// Shares out the tasks of a mixture, unless there is too little to do.
    fn over_tasks(&self, tasks: usize, mixture: &Mixture<'_>, task: &(dyn Fn(usize) + Sync)) {
        let &Mixture { experts, routing, rows } = mixture;
        let bytes = routing.groups.len() * experts.down[0].bytes();
        if bytes * rows.div_ceil(4) < SMALL_PRODUCT {
            (0..tasks).for_each(task);
        } else {
            self.pool.run(tasks, task);
        }
    }
}
