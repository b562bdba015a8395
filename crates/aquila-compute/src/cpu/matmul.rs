//! Products of rows with packed f32 and bf16 weights.
//!
//! A tile is some rows by some panels whose sums stay in registers while the inputs go by in
//! order. Each (row, output) has one sum of its own, so a tile's shape changes the speed and
//! nothing else. When rows need several tiles, inputs go by in blocks: a block of weights is
//! fetched from memory once and serves all tiles from the cache, while they ask for the next.

use std::marker::PhantomData;

use super::isa::Detected;
use super::product::{Product, Tiling, over_groups};
use super::simd::{LANES, Lanes, Portable, Tile, tiles, unroll};
use super::weight::LINE;

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
