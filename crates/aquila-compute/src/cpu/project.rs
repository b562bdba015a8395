//! Products of rows with packed f32 and bf16 weights.
//!
//! A tile is some rows by some panels whose sums stay in registers while the inputs go by in
//! order. Each (row, output) has one sum of its own, so a tile's shape changes the speed and
//! nothing else. When rows need several tiles, inputs go by in blocks: a block of weights is
//! fetched from memory once and serves all tiles from the cache, while they ask for the next.

use std::cell::RefCell;

use super::Isa;
use super::lanes::{LANES, Lanes, kernel};
use super::weight::LINE;
use crate::Sink;

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
    pub sink: Sink,
}

// SAFETY: tasks read the inputs and write outputs of different panels.
unsafe impl Sync for Product {}

/// Lines ahead of the one in use that are asked for when weights are read once.
const AHEAD: usize = 24;
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
    unsafe fn read<L: Lanes>(line: *const u8, which: usize) -> L::F;
}

struct Bf16;
struct F32;

impl Stored for Bf16 {
    const INPUTS: usize = 2;

    #[inline(always)]
    unsafe fn read<L: Lanes>(line: *const u8, which: usize) -> L::F {
        // SAFETY: vouched for by the caller.
        unsafe { if which == 0 { L::load_low(line.cast()) } else { L::load_high(line.cast()) } }
    }
}

impl Stored for F32 {
    const INPUTS: usize = 1;

    #[inline(always)]
    unsafe fn read<L: Lanes>(line: *const u8, _which: usize) -> L::F {
        // SAFETY: vouched for by the caller.
        unsafe { L::load(line.cast()) }
    }
}

/// One tile's share of one block of inputs.
struct Tile<'a> {
    product: &'a Product,
    panel: usize,
    row: usize,
    /// First input and number of inputs of the block.
    from: usize,
    inputs: usize,
    /// Sums of earlier blocks, 16 for each panel, a row after the other; null in the first block.
    carried: *const f32,
    /// Where sums go if this is not the last block.
    carry: *mut f32,
    /// Per panel, how far ahead of the line in use to ask for another.
    ahead: [usize; MAX_PANELS],
}

const MAX_PANELS: usize = 8;

#[inline(always)]
unsafe fn tile<L: Lanes, S: Stored, const R: usize, const P: usize>(t: &Tile<'_>) {
    // SAFETY: the caller vouches for the product; the tile lies within it.
    unsafe {
        let p = t.product;
        let mut sums = [[L::splat(0.0); P]; R];
        if !t.carried.is_null() {
            for (r, sums) in sums.iter_mut().enumerate() {
                for (n, sum) in sums.iter_mut().enumerate() {
                    *sum = L::load(t.carried.add((r * P + n) * LANES));
                }
            }
        }
        let first = p.weights.add(t.panel * p.panel_bytes + t.from / S::INPUTS * LINE);
        let panels: [*const u8; P] = std::array::from_fn(|n| first.add(n * p.panel_bytes));
        let ahead: [usize; P] = std::array::from_fn(|n| t.ahead[n]);
        let x0 = p.input.add(t.row * p.input_stride + t.from);
        let x: [*const f32; R] = std::array::from_fn(|r| x0.add(r * p.input_stride));
        for line in 0..t.inputs / S::INPUTS {
            for n in 0..P {
                L::prefetch(panels[n].wrapping_add(line * LINE + ahead[n]));
            }
            for which in 0..S::INPUTS {
                step::<L, S, R, P>(&mut sums, &panels, &x, line, which);
            }
        }
        if t.inputs % S::INPUTS != 0 {
            step::<L, S, R, P>(&mut sums, &panels, &x, t.inputs / S::INPUTS, 0);
        }
        for (r, sums) in sums.iter().enumerate() {
            for (n, &sum) in sums.iter().enumerate() {
                if t.carry.is_null() {
                    finish::<L>(p, t.row + r, t.panel + n, sum);
                } else {
                    L::store(t.carry.add((r * P + n) * LANES), sum);
                }
            }
        }
    }
}

/// One input of every row, times its weights.
#[inline(always)]
unsafe fn step<L: Lanes, S: Stored, const R: usize, const P: usize>(
    sums: &mut [[L::F; P]; R],
    panels: &[*const u8; P],
    x: &[*const f32; R],
    line: usize,
    which: usize,
) {
    // SAFETY: the caller says that the line and the input exist.
    unsafe {
        let mut w = [L::splat(0.0); P];
        for n in 0..P {
            w[n] = S::read::<L>(panels[n].add(line * LINE), which);
        }
        for r in 0..R {
            let x = L::splat(*x[r].add(line * S::INPUTS + which));
            for n in 0..P {
                sums[r][n] = L::fma(x, w[n], sums[r][n]);
            }
        }
    }
}

/// Puts 16 outputs of one row where they belong.
#[inline(always)]
pub(super) unsafe fn finish<L: Lanes>(p: &Product, row: usize, panel: usize, sum: L::F) {
    // SAFETY: the row and the panel's outputs are within the product.
    unsafe {
        let column = panel * LANES;
        let width = (p.outputs - column).min(LANES);
        let out = p.out.add(row * p.out_stride + column);
        let mut value = sum;
        if width == LANES {
            if !p.bias.is_null() {
                value = L::add(value, L::load(p.bias.add(column)));
            }
            if p.sink == Sink::Add {
                value = L::add(L::load(out), value);
            }
            L::store(out, value);
        } else {
            if !p.bias.is_null() {
                value = L::add(value, L::load_first(p.bias.add(column), width));
            }
            if p.sink == Sink::Add {
                value = L::add(L::load_first(out, width), value);
            }
            L::store_first(out, width, value);
        }
    }
}

thread_local! {
    /// Sums carried from one block of inputs to the next.
    static CARRY: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// The most rows of one tile, and the panels of a tile of so many rows.
#[inline(always)]
fn shape<L: Lanes>(rows: usize) -> (usize, usize) {
    if L::MANY_REGISTERS {
        (12, [8, 8, 6, 6, 4, 4, 3, 3, 2, 2, 2, 2][rows.min(12) - 1])
    } else {
        (4, [4, 2, 1, 1][rows.min(4) - 1])
    }
}

/// Rows and panels of the tiles that a product of `rows` rows is made of.
fn tiling<L: Lanes>(rows: usize) -> (usize, usize, usize) {
    let (most, _) = shape::<L>(rows);
    let tiles = rows.div_ceil(most);
    let largest = rows.div_ceil(tiles);
    (tiles, largest, shape::<L>(largest).1)
}

/// How many panels belong together in a task on this instruction set.
pub(super) fn panels_together(isa: Isa, rows: usize) -> usize {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => tiling::<super::lanes::Avx512>(rows).2,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => tiling::<super::lanes::Avx2>(rows).2,
        _ => tiling::<super::lanes::Portable>(rows).2,
    }
}

#[inline(always)]
unsafe fn tile_of<L: Lanes, S: Stored>(rows: usize, panels: usize, t: &Tile<'_>) {
    macro_rules! pick {
        ($($r:literal x $p:literal),*) => {
            match (rows, panels) {
                // SAFETY: the caller vouches for the tile.
                $(($r, $p) => unsafe { tile::<L, S, $r, $p>(t) },)*
                _ => unreachable!("no tile of {rows} rows by {panels} panels"),
            }
        };
    }
    if L::MANY_REGISTERS {
        pick!(1 x 8, 2 x 8, 3 x 6, 4 x 6, 5 x 4, 6 x 4, 7 x 3, 8 x 3, 9 x 2, 10 x 2, 11 x 2, 12 x 2,
              6 x 3, 8 x 2,
              1 x 1, 2 x 1, 3 x 1, 4 x 1, 5 x 1, 6 x 1, 7 x 1, 8 x 1, 9 x 1, 10 x 1, 11 x 1, 12 x 1);
    } else {
        pick!(1 x 4, 2 x 2, 3 x 1, 4 x 1, 1 x 1, 2 x 1);
    }
}

#[inline(always)]
unsafe fn product<L: Lanes, S: Stored>(p: &Product, first: usize, last: usize) {
    let (tiles, largest, together) = tiling::<L>(p.rows);
    let lines = p.inputs.div_ceil(S::INPUTS);
    let block_lines = if tiles == 1 { lines.max(1) } else { BLOCK_LINES };
    let blocks = lines.div_ceil(block_lines).max(1);
    // Taken rather than borrowed in a closure, which would be compiled without the instructions.
    let mut carry = CARRY.take();
    if blocks > 1 {
        carry.resize(carry.len().max(p.rows * together * LANES), 0.0);
    }
    let mut panel = first;
    while panel < last {
        let panels = if panel + together <= last { together } else { 1 };
        for block in 0..blocks {
            let from = block * block_lines * S::INPUTS;
            let inputs = (p.inputs - from).min(block_lines * S::INPUTS);
            let mut row = 0;
            for index in 0..tiles {
                // Tiles differ by one row at most, the larger ones first.
                let rows = largest - usize::from(index >= p.rows - (largest - 1) * tiles);
                let mut t = Tile {
                    product: p,
                    panel,
                    row,
                    from,
                    inputs,
                    carried: std::ptr::null(),
                    carry: std::ptr::null_mut(),
                    ahead: [0; MAX_PANELS],
                };
                let kept = carry.as_mut_ptr().wrapping_add(row * panels * LANES);
                if block > 0 {
                    t.carried = kept;
                }
                if block + 1 < blocks {
                    t.carry = kept;
                }
                // A single tile runs ahead of itself; several share the next block's panels.
                for n in 0..panels {
                    let turn = if tiles > panels { n } else { n * tiles / panels };
                    if tiles == 1 {
                        t.ahead[n] = AHEAD * LINE;
                    } else if turn == index {
                        t.ahead[n] = if block + 1 < blocks {
                            block_lines * LINE
                        } else {
                            panels * p.panel_bytes - block * block_lines * LINE
                        };
                    }
                }
                // SAFETY: the caller vouches for the product.
                unsafe { tile_of::<L, S>(rows, panels, &t) };
                row += rows;
            }
        }
        panel += panels;
    }
    CARRY.set(carry);
}

#[inline(always)]
unsafe fn product_bf16<L: Lanes>(p: &Product, first: usize, last: usize) {
    // SAFETY: the caller vouches for the product.
    unsafe { product::<L, Bf16>(p, first, last) }
}

#[inline(always)]
unsafe fn product_f32<L: Lanes>(p: &Product, first: usize, last: usize) {
    // SAFETY: the caller vouches for the product.
    unsafe { product::<L, F32>(p, first, last) }
}

kernel! {
    /// Panels `first..last` of a product with bf16 weights.
    ///
    /// # Safety
    /// The product's pointers must be valid for its sizes, and no other task may write these
    /// panels' outputs.
    pub(super) fn project_bf16(p: &Product, first: usize, last: usize) = product_bf16
}

kernel! {
    /// Panels `first..last` of a product with f32 weights.
    ///
    /// # Safety
    /// As [`project_bf16`].
    pub(super) fn project_f32(p: &Product, first: usize, last: usize) = product_f32
}
