//! Products of rows with packed int8 weights.
//!
//! Rows are quantized first, group by group, each from its own values. The integer sum of a group
//! is exact, so only the order of the groups matters, and that is the order of the inputs.

use super::lanes::{Int8Lanes, LANES, Lanes, kernel};
use super::project::{Product, finish};
use super::weight::{GROUP_LINES, LINE};
use crate::shape::INT8_GROUP;

/// Quantized rows: for each row and group 32 bytes, a scale and -128 times the sum of the bytes.
#[derive(Default)]
pub(super) struct QuantizedRows {
    groups: usize,
    values: Vec<i8>,
    scales: Vec<f32>,
    corrections: Vec<i32>,
}

/// The same, as kernels see it.
#[derive(Clone, Copy)]
pub(super) struct Quantized {
    groups: usize,
    /// Bytes from row to row.
    stride: usize,
    values: *mut i8,
    scales: *mut f32,
    corrections: *mut i32,
}

// SAFETY: tasks write different rows, or only read.
unsafe impl Sync for Quantized {}

impl QuantizedRows {
    /// Makes room for `rows` rows of `inputs`.
    pub(super) fn prepare(&mut self, rows: usize, inputs: usize) -> Quantized {
        self.groups = inputs.div_ceil(INT8_GROUP);
        // An odd number of lines, as in rows of f32.
        let stride = ((self.groups * INT8_GROUP).div_ceil(LINE) | 1) * LINE;
        grow(&mut self.values, rows * stride);
        grow(&mut self.scales, rows * self.groups);
        grow(&mut self.corrections, rows * self.groups);
        Quantized {
            groups: self.groups,
            stride,
            values: self.values.as_mut_ptr(),
            scales: self.scales.as_mut_ptr(),
            corrections: self.corrections.as_mut_ptr(),
        }
    }
}

fn grow<T: Default + Clone>(values: &mut Vec<T>, size: usize) {
    if values.len() < size {
        values.resize(size, T::default());
    }
}

#[inline(always)]
unsafe fn quantize<L: Lanes>(p: &Product, q: &Quantized, first: usize, last: usize) {
    // SAFETY: rows and groups are within what `prepare` made room for.
    unsafe {
        for row in first..last {
            for group in 0..q.groups {
                let x = p.input.add(row * p.input_stride + group * INT8_GROUP);
                let left = p.inputs - group * INT8_GROUP;
                let (a, b) = if left >= INT8_GROUP {
                    (L::load(x), L::load(x.add(LANES)))
                } else if left >= LANES {
                    (L::load(x), L::load_first(x.add(LANES), left - LANES))
                } else {
                    (L::load_first(x, left), L::splat(0.0))
                };
                let zero = L::splat(0.0);
                let largest = L::fold_max(L::max(L::abs(a), L::max(L::abs(b), zero)));
                let (inverse, scale) =
                    if largest < 1e-30 { (0.0, 0.0) } else { (127.0 / largest, largest / 127.0) };
                let at = q.values.add(row * q.stride + group * INT8_GROUP);
                L::store_i8(at, L::round(L::mul(a, L::splat(inverse))));
                L::store_i8(at.add(LANES), L::round(L::mul(b, L::splat(inverse))));
                let mut sum = 0;
                for i in 0..INT8_GROUP {
                    sum += i32::from(*at.add(i));
                }
                *q.scales.add(row * q.groups + group) = scale;
                *q.corrections.add(row * q.groups + group) = -128 * sum;
            }
        }
    }
}

/// Lines ahead of the one in use that are asked for.
const AHEAD: usize = 24;

#[inline(always)]
unsafe fn tile<L: Int8Lanes, const R: usize, const P: usize>(
    p: &Product,
    q: &Quantized,
    panel: usize,
    row: usize,
) {
    // SAFETY: the caller vouches for the product; the tile lies within it.
    unsafe {
        let mut sums = [[L::splat(0.0); P]; R];
        let first = p.weights.add(panel * p.panel_bytes);
        let scales = first.add(q.groups * GROUP_LINES * LINE);
        for group in 0..q.groups {
            let mut dots = [[L::start(0); P]; R];
            for r in 0..R {
                let correction = *q.corrections.add((row + r) * q.groups + group);
                dots[r] = [L::start(correction); P];
            }
            let lines = first.add(group * GROUP_LINES * LINE);
            let x = q.values.add(row * q.stride + group * INT8_GROUP);
            for line in 0..GROUP_LINES {
                for n in 0..P {
                    let at = lines.add(n * p.panel_bytes + line * LINE);
                    L::prefetch(at.wrapping_add(AHEAD * LINE));
                    let w = L::weights(at);
                    for r in 0..R {
                        dots[r][n] = L::dot4(dots[r][n], w, x.add(r * q.stride + line * 4));
                    }
                }
            }
            for n in 0..P {
                let scale = L::load_bf16(scales.add(n * p.panel_bytes + group * 2 * LANES).cast());
                for r in 0..R {
                    let of_row = L::splat(*q.scales.add((row + r) * q.groups + group));
                    let dot = L::to_f32(dots[r][n]);
                    sums[r][n] = L::fma(dot, L::mul(of_row, scale), sums[r][n]);
                }
            }
        }
        for r in 0..R {
            for n in 0..P {
                finish::<L>(p, row + r, panel + n, sums[r][n]);
            }
        }
    }
}

/// The most rows of a tile, and the panels of a tile of so many rows.
#[inline(always)]
fn shape<L: Lanes>(rows: usize) -> (usize, usize) {
    if L::MANY_REGISTERS {
        (6, [4, 4, 4, 2, 2, 2][rows.min(6) - 1])
    } else {
        (3, [2, 1, 1][rows.min(3) - 1])
    }
}

/// How many panels a task should take at least.
pub(super) const PANELS_TOGETHER: usize = 4;

#[inline(always)]
unsafe fn tile_of<L: Int8Lanes>(
    rows: usize,
    panels: usize,
    p: &Product,
    q: &Quantized,
    panel: usize,
    row: usize,
) {
    macro_rules! pick {
        ($($r:literal x $p:literal),*) => {
            match (rows, panels) {
                // SAFETY: the caller vouches for the tile.
                $(($r, $p) => unsafe { tile::<L, $r, $p>(p, q, panel, row) },)*
                _ => unreachable!("no tile of {rows} rows by {panels} panels"),
            }
        };
    }
    if L::MANY_REGISTERS {
        pick!(1 x 4, 2 x 4, 3 x 4, 4 x 2, 5 x 2, 6 x 2, 3 x 2,
              1 x 1, 2 x 1, 3 x 1, 4 x 1, 5 x 1, 6 x 1);
    } else {
        pick!(1 x 2, 2 x 1, 3 x 1, 1 x 1);
    }
}

#[inline(always)]
unsafe fn product<L: Int8Lanes>(p: &Product, q: &Quantized, first: usize, last: usize) {
    let tiles = p.rows.div_ceil(shape::<L>(p.rows).0);
    let largest = p.rows.div_ceil(tiles);
    let together = shape::<L>(largest).1;
    let mut panel = first;
    while panel < last {
        let panels = if panel + together <= last { together } else { 1 };
        let mut row = 0;
        for index in 0..tiles {
            // Tiles differ by one row at most, the larger ones first.
            let rows = largest - usize::from(index >= p.rows - (largest - 1) * tiles);
            // SAFETY: the caller vouches for the product.
            unsafe { tile_of::<L>(rows, panels, p, q, panel, row) };
            row += rows;
        }
        panel += panels;
    }
}

kernel! {
    /// Quantizes rows `first..last` of the product's input.
    ///
    /// # Safety
    /// The product's input must be valid, `q` prepared for it, and no other task may write these
    /// rows.
    pub(super) fn quantize_rows(p: &Product, q: &Quantized, first: usize, last: usize) = quantize
}

kernel! {
    /// Panels `first..last` of a product with int8 weights.
    ///
    /// # Safety
    /// As [`super::project::project_bf16`], with `q` quantized from the product's input.
    pub(super) int8 fn project_int8(p: &Product, q: &Quantized, first: usize, last: usize) = product
}
