//! Products of rows with packed f32 and bf16 weights.
//!
//! A tile is some rows by some panels whose sums stay in registers while the inputs go by in
//! order. Each (row, output) has one sum of its own, so a tile's shape changes the speed and
//! nothing else. When rows need several tiles, inputs go by in blocks: a block of weights is
//! fetched from memory once and serves all tiles from the cache, while they ask for the next.

use std::cell::RefCell;
use std::marker::PhantomData;

use super::isa::Detected;
use super::rowwise::gated;
use super::simd::{LANES, Lanes, Portable, Tile, kernel, tiles, unroll};
use super::weight::{CpuWeight, LINE};
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

/// Lines ahead of those in use that are asked for when weights are read once, over all panels.
/// They go to the second-level cache, which measured faster than the first.
const AHEAD: usize = 256;
/// The same where memory is all that is waited for and the machine follows long streams by
/// itself: asking far ahead of it measured slower.
const AHEAD_IN_STREAMS: usize = 64;
/// Lines of a panel from which on it is such a stream.
const STREAM: usize = 513;
/// Lines of one block of inputs when weights are read by several tiles.
const BLOCK_LINES: usize = 128;

/// How the values of a panel line are laid out.
trait Stored {
    /// Inputs in one line.
    const INPUTS: usize;

    /// Input `which` of the line, for all 16 outputs.
    ///
    /// # Safety
    /// The line must be readable.
    unsafe fn read<L: Lanes>(l: L, line: *const u8, which: usize) -> L::F;
}

struct Bf16;
struct F32;

impl Stored for Bf16 {
    const INPUTS: usize = 2;

    #[inline(always)]
    unsafe fn read<L: Lanes>(l: L, line: *const u8, which: usize) -> L::F {
        // SAFETY: vouched for by the caller.
        unsafe { if which == 0 { l.load_low(line.cast()) } else { l.load_high(line.cast()) } }
    }
}

impl Stored for F32 {
    const INPUTS: usize = 1;

    #[inline(always)]
    unsafe fn read<L: Lanes>(l: L, line: *const u8, _which: usize) -> L::F {
        // SAFETY: vouched for by the caller.
        unsafe { l.load(line.cast()) }
    }
}

/// One tile's share of one block of inputs.
struct FloatTile<'a, S> {
    product: &'a Product,
    panel: usize,
    row: usize,
    /// First input and number of inputs of the block.
    from: usize,
    inputs: usize,
    /// Sums of earlier blocks, 16 for each panel, a row after the other.
    sums: *mut f32,
    /// Per panel, how far ahead of the line in use to ask for another.
    ahead: [usize; MAX_PANELS],
    stored: PhantomData<S>,
}

const MAX_PANELS: usize = 8;

impl<L: Lanes, S: Stored> Tile<L> for FloatTile<'_, S> {
    #[inline(always)]
    unsafe fn sum<const R: usize, const P: usize>(&self, l: L) {
        // SAFETY: the caller vouches for the product; the tile lies within it.
        unsafe {
            let p = self.product;
            let mut sums = [[l.splat(0.0); P]; R];
            unroll!(r < R {
                unroll!(n < P {
                    sums[r][n] = l.load(self.sums.add((r * P + n) * LANES));
                });
            });
            let mut w = p.weights.add(self.panel * p.panel_bytes + self.from / S::INPUTS * LINE);
            // One pointer for three rows: the other two are a scaled index away.
            let mut x = [p.input.add(self.row * p.input_stride + self.from); GROUPS];
            for (g, x) in x.iter_mut().enumerate() {
                *x = x.wrapping_add(3 * g * p.input_stride);
            }
            let mut ahead = [0; P];
            for (n, ahead) in ahead.iter_mut().enumerate() {
                *ahead = self.ahead[n].wrapping_add(n * p.panel_bytes);
            }
            for _ in 0..self.inputs / S::INPUTS {
                w = opaque(w);
                for (g, x) in x.iter_mut().enumerate() {
                    if 3 * g < R {
                        *x = opaque(*x);
                    }
                }
                unroll!(n < P {
                    l.prefetch_later(w.wrapping_add(ahead[n]));
                });
                step::<L, S, R, P>(l, &mut sums, w, p.panel_bytes, &x, p.input_stride, 0);
                if S::INPUTS == 2 {
                    step::<L, S, R, P>(l, &mut sums, w, p.panel_bytes, &x, p.input_stride, 1);
                }
                w = w.wrapping_add(LINE);
                for x in &mut x {
                    *x = x.wrapping_add(S::INPUTS);
                }
            }
            if !self.inputs.is_multiple_of(S::INPUTS) {
                step::<L, S, R, P>(l, &mut sums, w, p.panel_bytes, &x, p.input_stride, 0);
            }
            unroll!(r < R {
                unroll!(n < P {
                    l.store(self.sums.add((r * P + n) * LANES), sums[r][n]);
                });
            });
        }
    }
}

/// Pointers that stand for three rows each, in the largest tile.
const GROUPS: usize = 4;

/// The same pointer, of which the compiler knows nothing: left to itself it derives one address
/// from another until it runs out of registers.
#[inline(always)]
#[allow(clippy::pointers_in_nomem_asm_block)]
pub(super) fn opaque<T>(mut at: *const T) -> *const T {
    // SAFETY: an empty statement.
    unsafe {
        std::arch::asm!("/* {0} */", inout(reg) at, options(nomem, nostack, preserves_flags));
    }
    at
}

/// One input of every row, times its weights.
#[inline(always)]
unsafe fn step<L: Lanes, S: Stored, const R: usize, const P: usize>(
    l: L,
    sums: &mut [[L::F; P]; R],
    line: *const u8,
    panel_bytes: usize,
    x: &[*const f32; GROUPS],
    stride: usize,
    which: usize,
) {
    // SAFETY: the caller says that the line and the input exist.
    unsafe {
        if !L::MANY_REGISTERS {
            // Loads each input once per panel, since sums leave room for one panel's weights.
            unroll!(n < P {
                let w = S::read(l, line.add(n * panel_bytes), which);
                unroll!(r < R {
                    let x = l.splat(*x[r / 3].add(r % 3 * stride + which));
                    sums[r][n] = l.fma(x, w, sums[r][n]);
                });
            });
            return;
        }
        let mut w = [l.splat(0.0); P];
        unroll!(n < P {
            w[n] = S::read(l, line.add(n * panel_bytes), which);
        });
        unroll!(r < R {
            let x = l.splat(*x[r / 3].add(r % 3 * stride + which));
            unroll!(n < P {
                sums[r][n] = l.fma(x, w[n], sums[r][n]);
            });
        });
    }
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
    /// As [`project_bf16`], with sums for all rows and these panels.
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
    /// As [`project_bf16`], with sums for all rows and these panels of gates and of ups, which
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

thread_local! {
    /// Sums carried from one block of inputs to the next.
    static CARRY: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

#[cfg(target_arch = "x86_64")]
tiles!(
    avx512, Avx512, ["avx512f,avx512bw,avx512dq,avx512vl,avx2,fma"],
    of 32 registers
);
#[cfg(target_arch = "x86_64")]
tiles!(
    avx2, Avx2, ["avx2,fma"],
    [4, 2, 1, 1, 1],
    1 x 4, 2 x 2, 1 x 1, 2 x 1, 3 x 1, 4 x 1, 5 x 1
);
tiles!(
    portable, Portable, [],
    [1, 1, 1, 1],
    1 x 1, 2 x 1, 3 x 1, 4 x 1
);

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

/// Panels for each row count of a tile.
fn panels_of(isa: Detected) -> &'static [usize] {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Detected::Avx512(_) => avx512::PANELS,
        #[cfg(target_arch = "x86_64")]
        Detected::Avx2(_) => avx2::PANELS,
        Detected::Portable => portable::PANELS,
    }
}

/// Tiles for `rows` rows of panels of so many bytes.
fn tiling(isa: Detected, rows: usize, panel_bytes: usize) -> Tiling {
    let mut tiling = Tiling::of(panels_of(isa), rows);
    // Two rows fill too few sums with one panel, but of streams two at a time measured slower.
    if tiling.panels == 2 && rows == 2 && panel_bytes >= STREAM * LINE {
        tiling.panels = 1;
    }
    tiling
}

/// How many panels belong together in a task.
pub(super) fn panels_together(isa: Detected, rows: usize, panel_bytes: usize) -> usize {
    tiling(isa, rows, panel_bytes).panels
}

/// Sums up a tile of a shape, rows by panels.
///
/// # Safety
/// The tile must lie within a product whose pointers are valid.
unsafe fn sum_tile<S: Stored>(isa: Detected, shape: (usize, usize), t: &FloatTile<'_, S>) {
    // SAFETY: the caller vouches for the tile.
    unsafe {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Detected::Avx512(l) => avx512::sum(l, shape, t),
            #[cfg(target_arch = "x86_64")]
            Detected::Avx2(l) => avx2::sum(l, shape, t),
            Detected::Portable => portable::sum(Portable, shape, t),
        }
    }
}

/// Sums of `panels` panels from `panel` on, a row after the other, into `sums`, which has room for
/// them. `next` is how many bytes behind this group's weights those lie that are wanted next.
unsafe fn sum_up<S: Stored>(
    isa: Detected,
    p: &Product,
    tiling: &Tiling,
    (panel, panels): (usize, usize),
    next: usize,
    sums: &mut [f32],
) {
    let tiles = tiling.tiles;
    let lines = p.inputs.div_ceil(S::INPUTS);
    let streams = p.rows <= 2 && tiling.panels >= 4 && lines >= STREAM;
    sums.fill(0.0);
    // A single tile runs some lines ahead of itself, and in its last block ahead into the panels
    // that come next. Several tiles share the asking for the block that comes next.
    let ahead = if streams { AHEAD_IN_STREAMS } else { AHEAD } / panels;
    let mut line = 0;
    loop {
        let left = lines - line;
        let block = match tiles {
            1 if left > ahead => left - ahead,
            1 => left,
            _ => left.min(BLOCK_LINES),
        };
        let distance = match tiles {
            1 if block < left => ahead * LINE,
            _ if block < left => block * LINE,
            _ => next.wrapping_sub(line * LINE),
        };
        let from = line * S::INPUTS;
        let inputs = (p.inputs - from).min(block * S::INPUTS);
        let mut row = 0;
        for index in 0..tiles {
            let rows = tiling.rows(index, p.rows);
            let mut t = FloatTile::<S> {
                product: p,
                panel,
                row,
                from,
                inputs,
                sums: sums.as_mut_ptr().wrapping_add(row * panels * LANES),
                ahead: [0; MAX_PANELS],
                stored: PhantomData,
            };
            for n in 0..panels {
                let turn = if tiles > panels { n } else { n * tiles / panels };
                if turn == index {
                    t.ahead[n] = distance;
                }
            }
            // SAFETY: the caller vouches for the product, and the sums have room.
            unsafe { sum_tile(isa, (rows, panels), &t) };
            row += rows;
        }
        line += block;
        if line >= lines {
            break;
        }
    }
}

unsafe fn product<S: Stored>(isa: Detected, p: &Product, first: usize, last: usize) {
    let tiling = tiling(isa, p.rows, p.panel_bytes);
    let sums = |group: (usize, usize), next: usize, sums: &mut [f32]| {
        // SAFETY: the caller vouches for the product.
        unsafe { sum_up::<S>(isa, p, &tiling, group, next, sums) }
    };
    // SAFETY: as above.
    unsafe { over_groups(isa, p, tiling.panels, first, last, sums) }
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

/// Panels `first..last` of a product with bf16 weights; of a gated one, panels of its gates.
///
/// # Safety
/// The product's pointers must be valid for its sizes, and no other task may write these panels'
/// outputs.
pub(super) unsafe fn project_bf16(isa: Detected, p: &Product, first: usize, last: usize) {
    // SAFETY: the caller vouches for the product.
    unsafe { product::<Bf16>(isa, p, first, last) }
}

/// Panels `first..last` of a product with f32 weights.
///
/// # Safety
/// As [`project_bf16`].
pub(super) unsafe fn project_f32(isa: Detected, p: &Product, first: usize, last: usize) {
    // SAFETY: the caller vouches for the product.
    unsafe { product::<F32>(isa, p, first, last) }
}
