//! A product of rows with packed weights, whatever their format: what it reads and writes, how its
//! rows are tiled, and what becomes of its sums.

use std::cell::RefCell;

use super::isa::Detected;
use super::rowwise::gated;
use super::simd::{LANES, Lanes, kernel};
use super::weight::CpuWeight;
use crate::{Accumulate, Activation};

/// What a projection reads and writes. Pointers are valid for `rows` rows.
#[derive(Clone, Copy)]
pub(super) struct Product {
    pub weights: *const u8,
    pub panel_bytes: usize,
    pub inputs: usize,
    pub outputs: usize,
    pub input: *const f32,
    pub input_stride: usize,
    pub rows: usize,
    pub out: *mut f32,
    pub out_stride: usize,
    pub bias: *const f32,
    /// The weights that are wanted after those of the last panel, if not those behind it.
    pub next: Option<*const u8>,
    pub finish: Finish,
}

/// What becomes of the sums of a product.
#[derive(Clone, Copy)]
pub(super) enum Finish {
    /// The sums are the outputs.
    Outputs(Accumulate),
    /// So many panels are gates, as many behind them are ups, and the outputs are what gates let
    /// through.
    Gated(usize, Activation),
    /// Times the weight of their row they are added to the output of another row, the one that is
    /// named for it. Outputs come in whole panels.
    Mixed { rows: *const u32, weights: *const f32 },
}

// SAFETY: tasks read what is named and weighed.
unsafe impl Sync for Finish {}

impl Product {
    /// The product of `rows` rows with a weight. Rows of input and output come with their strides.
    pub(super) fn new(
        weight: &CpuWeight,
        (input, input_stride): (*const f32, usize),
        rows: usize,
        (out, out_stride): (*mut f32, usize),
        finish: Finish,
    ) -> Self {
        Self {
            weights: weight.as_ptr(),
            panel_bytes: weight.panel_bytes(),
            inputs: weight.inputs(),
            outputs: weight.outputs(),
            input,
            input_stride,
            rows,
            out,
            out_stride,
            bias: std::ptr::null(),
            next: None,
            finish,
        }
    }

    /// How many panels there are, of a gated product panels of gates.
    pub(super) fn panels(&self) -> usize {
        match self.finish {
            Finish::Gated(gates, _) => gates,
            _ => self.outputs.div_ceil(LANES),
        }
    }
}

// SAFETY: tasks read the inputs and write outputs of different panels.
unsafe impl Sync for Product {}

/// How a product's rows are tiled.
#[derive(Clone, Copy)]
pub(super) struct Tiling {
    pub tiles: usize,
    /// Rows of the largest tile; no other has fewer by more than one.
    largest: usize,
    /// Panels of a tile.
    pub panels: usize,
}

impl Tiling {
    /// Tiles for `rows` rows, given the panels of a tile of one row, of two, and so on.
    pub(super) fn of(panels: &[usize], rows: usize) -> Self {
        let tiles = rows.div_ceil(panels.len());
        let largest = rows.div_ceil(tiles);
        Self { tiles, largest, panels: panels[largest - 1] }
    }

    /// Rows of one tile; the larger ones come first.
    pub(super) fn rows(&self, tile: usize, of: usize) -> usize {
        self.largest - usize::from(tile >= of - (self.largest - 1) * self.tiles)
    }
}

thread_local! {
    /// Sums carried from one block of inputs to the next.
    static CARRY: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Goes over panels `first..last`, `together` at a time and the last ones one by one, and puts the
/// sums that `sum` makes of each group where they belong. A gated product's panels are those of
/// its gates, each with its ups.
///
/// # Safety
/// The product's pointers must be valid for its sizes.
pub(super) unsafe fn over_groups(
    isa: Detected,
    p: &Product,
    together: usize,
    first: usize,
    last: usize,
    sum: impl Fn((usize, usize), usize, &mut [f32]),
) {
    let mut carry = CARRY.take();
    let most = p.rows * together * LANES;
    carry.resize(carry.len().max(2 * most), 0.0);
    let (sums, of_ups) = carry.split_at_mut(most);
    let mut panel = first;
    while panel < last {
        let panels = if panel + together <= last { together } else { 1 };
        let size = p.rows * panels * LANES;
        let (sums, of_ups) = (&mut sums[..size], &mut of_ups[..size]);
        let width = panels * p.panel_bytes;
        let next = match p.next {
            Some(next) if panel + panels == last => {
                next.addr().wrapping_sub(p.weights.addr() + panel * p.panel_bytes)
            }
            _ => width,
        };
        // SAFETY: the caller vouches for the product; the carry holds the sums of these panels.
        unsafe {
            match p.finish {
                Finish::Outputs(accumulate) => {
                    sum((panel, panels), next, sums);
                    finish_sums(isa, p, accumulate, panel, panels, sums.as_ptr());
                }
                Finish::Gated(gates, activation) => {
                    let apart = gates * p.panel_bytes;
                    sum((panel, panels), apart, sums);
                    sum((panel + gates, panels), next.wrapping_sub(apart), of_ups);
                    let (sums, of_ups) = (sums.as_ptr(), of_ups.as_ptr());
                    finish_gated(isa, p, (gates, activation), panel, panels, sums, of_ups);
                }
                Finish::Mixed { rows, weights } => {
                    sum((panel, panels), next, sums);
                    mix_sums(isa, p, (rows, weights), panel, panels, sums.as_ptr());
                }
            }
        }
        panel += panels;
    }
    CARRY.set(carry);
}

/// Puts 16 outputs of one row where they belong.
#[inline(always)]
unsafe fn finish<L: Lanes>(
    l: L,
    p: &Product,
    accumulate: Accumulate,
    row: usize,
    panel: usize,
    sum: L::F,
) {
    // SAFETY: the row and the panel's outputs are within the product.
    unsafe {
        let column = panel * LANES;
        let width = (p.outputs - column).min(LANES);
        let out = p.out.add(row * p.out_stride + column);
        let mut value = sum;
        if width == LANES {
            if !p.bias.is_null() {
                value = l.add(value, l.load(p.bias.add(column)));
            }
            if accumulate == Accumulate::Add {
                value = l.add(l.load(out), value);
            }
            l.store(out, value);
        } else {
            if !p.bias.is_null() {
                value = l.add(value, l.load_first(p.bias.add(column), width));
            }
            if accumulate == Accumulate::Add {
                value = l.add(l.load_first(out, width), value);
            }
            l.store_first(out, width, value);
        }
    }
}

#[inline(always)]
unsafe fn finish_all<L: Lanes>(
    l: L,
    p: &Product,
    accumulate: Accumulate,
    panel: usize,
    panels: usize,
    sums: *const f32,
) {
    for row in 0..p.rows {
        for n in 0..panels {
            // SAFETY: the caller vouches for the product and the sums.
            unsafe {
                let sum = l.load(sums.add((row * panels + n) * LANES));
                finish(l, p, accumulate, row, panel + n, sum);
            }
        }
    }
}

kernel! {
    /// Puts the sums of `panels` panels, all rows, where they belong.
    ///
    /// # Safety
    /// As [`super::matmul::project_bf16`], with sums for all rows and these panels.
    pub(super) fn finish_sums(
        p: &Product,
        accumulate: Accumulate,
        panel: usize,
        panels: usize,
        sums: *const f32,
    ) = finish_all
}

#[inline(always)]
unsafe fn mix_all<L: Lanes>(
    l: L,
    p: &Product,
    (rows, weights): (*const u32, *const f32),
    panel: usize,
    panels: usize,
    sums: *const f32,
) {
    for row in 0..p.rows {
        // SAFETY: the caller vouches for the product and the sums.
        unsafe {
            let weight = l.splat(*weights.add(row));
            let out = p.out.wrapping_add(*rows.add(row) as usize * p.out_stride + panel * LANES);
            for n in 0..panels {
                let sum = l.load(sums.add((row * panels + n) * LANES));
                let to = out.wrapping_add(n * LANES);
                l.store(to, l.fma(weight, sum, l.load(to)));
            }
        }
    }
}

kernel! {
    /// Adds the sums of `panels` panels, times the weight of their row, to the rows that are named
    /// for them.
    ///
    /// # Safety
    /// As [`finish_sums`]; the outputs of the rows that are named must be valid.
    fn mix_sums(
        p: &Product,
        named: (*const u32, *const f32),
        panel: usize,
        panels: usize,
        sums: *const f32,
    ) = mix_all
}

/// The value of a sum of one output, of a panel that is full.
#[inline(always)]
unsafe fn biased<L: Lanes>(l: L, p: &Product, panel: usize, sum: *const f32) -> L::F {
    // SAFETY: the caller says that the panel is within the product and the sums are there.
    unsafe {
        let sum = l.load(sum);
        if p.bias.is_null() { sum } else { l.add(sum, l.load(p.bias.add(panel * LANES))) }
    }
}

#[inline(always)]
unsafe fn gate_all<L: Lanes>(
    l: L,
    p: &Product,
    (apart, activation): (usize, Activation),
    panel: usize,
    panels: usize,
    gates: *const f32,
    ups: *const f32,
) {
    for row in 0..p.rows {
        for n in 0..panels {
            let (at, column) = ((row * panels + n) * LANES, (panel + n) * LANES);
            // SAFETY: the caller vouches for the product and the sums.
            unsafe {
                let gate = biased(l, p, panel + n, gates.add(at));
                let up = biased(l, p, panel + n + apart, ups.add(at));
                l.store(p.out.add(row * p.out_stride + column), gated(l, activation, gate, up));
            }
        }
    }
}

kernel! {
    /// Puts what gates let through of the ups where it belongs, `panels` panels, all rows.
    ///
    /// # Safety
    /// As [`super::matmul::project_bf16`], with sums for all rows and these panels of gates and of ups, which
    /// are full.
    fn finish_gated(
        p: &Product,
        gated: (usize, Activation),
        panel: usize,
        panels: usize,
        gates: *const f32,
        ups: *const f32,
    ) = gate_all
}
