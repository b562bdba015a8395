//! Products of rows with packed int8 weights.
//!
//! Rows are quantized first, group by group, each from its own values. The integer sum of a group
//! is exact, so only the order of the groups matters, and that is the order of the inputs.

use super::isa::{Detected, DetectedInt8};
use super::matmul::opaque;
use super::product::{Product, Tiling, over_groups};
use super::simd::{Floats, Int8Lanes, LANES, Lanes, Portable, Tile, kernel, tiles, unroll};
use super::weight::{GROUP_LINES, LINE, PAIR_BYTES};
use crate::shape::INT8_GROUP;

/// Quantized rows: for each row and group 32 values as the instruction set takes them, a scale and -128 times the sum of the values.
#[derive(Default)]
pub(super) struct QuantizedRows {
    groups: usize,
    values: Vec<i8>,
    scales: Vec<f32>,
    corrections: Vec<i32>,
}

/// The most bytes of a quantized value; see [`Int8Lanes::STEPS`].
const MOST_STEPS: usize = 2;

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
        let stride = ((self.groups * INT8_GROUP * MOST_STEPS).div_ceil(LINE) | 1) * LINE;
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

impl Quantized {
    /// What is behind the first `rows` rows.
    pub(super) fn skip_rows(self, rows: usize) -> Self {
        Self {
            values: self.values.wrapping_add(rows * self.stride),
            scales: self.scales.wrapping_add(rows * self.groups),
            corrections: self.corrections.wrapping_add(rows * self.groups),
            ..self
        }
    }

    /// Copies the first row to that of another of the same width.
    ///
    /// # Safety
    /// Both must have a row, and no other task may touch the one that is written.
    pub(super) unsafe fn copy_row(self, to: Self) {
        // SAFETY: vouched for by the caller.
        unsafe {
            std::ptr::copy_nonoverlapping(self.values, to.values, self.stride);
            std::ptr::copy_nonoverlapping(self.scales, to.scales, self.groups);
            std::ptr::copy_nonoverlapping(self.corrections, to.corrections, self.groups);
        }
    }
}

fn grow<T: Default + Clone>(values: &mut Vec<T>, size: usize) {
    if values.len() < size {
        values.resize(size, T::default());
    }
}

/// The 32 values of a group, zeros after the row's last.
#[inline(always)]
unsafe fn group_of<L: Int8Lanes>(l: L, x: *const f32, left: usize) -> (Floats<L>, Floats<L>) {
    let f = l.lanes();
    // SAFETY: the caller says that `left` values are readable.
    unsafe {
        if left >= INT8_GROUP {
            (f.load(x), f.load(x.add(LANES)))
        } else if left >= LANES {
            (f.load(x), f.load_first(x.add(LANES), left - LANES))
        } else {
            (f.load_first(x, left), f.splat(0.0))
        }
    }
}

#[inline(always)]
unsafe fn quantize<L: Int8Lanes>(l: L, p: &Product, q: &Quantized, first: usize, last: usize) {
    let f = l.lanes();
    let (q, inputs, zero) = (*q, p.inputs, f.splat(0.0));
    // Sixteen groups at a time, so that their scales are divided together.
    let mut largest = [0.0f32; LANES];
    let mut inverses = [0.0f32; LANES];
    let mut scales = [0.0f32; LANES];
    for row in first..last {
        let mut group = 0;
        while group < q.groups {
            let together = (q.groups - group).min(LANES);
            // SAFETY: rows and groups are within what `prepare` made room for.
            unsafe {
                let x = p.input.add(row * p.input_stride + group * INT8_GROUP);
                let left = inputs - group * INT8_GROUP;
                for (g, largest) in largest.iter_mut().enumerate().take(together) {
                    let skipped = g * INT8_GROUP;
                    let (a, b) = group_of(l, x.add(skipped), left - skipped);
                    let most = f.max(f.abs(a), f.max(f.abs(b), zero));
                    *largest = f.fold_max(most);
                }
                let (most, tiny) = (f.load(largest.as_ptr()), f.splat(1e-30));
                let (inverse, scale) = (f.div(f.splat(127.0), most), f.div(most, f.splat(127.0)));
                f.store(inverses.as_mut_ptr(), f.zero_below(most, tiny, inverse));
                f.store(scales.as_mut_ptr(), f.zero_below(most, tiny, scale));
                let of_group = row * q.groups + group;
                let to = q.values.add(row * q.stride + group * INT8_GROUP * L::STEPS);
                for g in 0..together {
                    let skipped = g * INT8_GROUP;
                    let (a, b) = group_of(l, x.add(skipped), left - skipped);
                    let inverse = f.splat(inverses[g]);
                    let to = to.add(skipped * L::STEPS);
                    let sum = l.store_inputs(to, f.round(f.mul(a, inverse)))
                        + l.store_inputs(to.add(LANES * L::STEPS), f.round(f.mul(b, inverse)));
                    *q.corrections.add(of_group + g) = -128 * sum;
                    *q.scales.add(of_group + g) = scales[g];
                }
            }
            group += together;
        }
    }
}

/// Groups ahead of the one in use that are asked for, over all panels of a tile. They go to the
/// second-level cache, which measured faster than the first.
const AHEAD: usize = 16;

/// Some rows by some panels.
struct Int8Tile<'a> {
    product: &'a Product,
    rows: &'a Quantized,
    panel: usize,
    row: usize,
    /// How many bytes behind this tile's weights those lie that are wanted next.
    next: usize,
    /// 16 for each panel, a row after the other; zero at first. In memory, since registers are
    /// better spent on the integer sums of a group.
    sums: *mut f32,
}

impl<L: Int8Lanes> Tile<L> for Int8Tile<'_> {
    #[inline(always)]
    unsafe fn sum<const R: usize, const P: usize>(&self, l: L) {
        let f = l.lanes();
        // SAFETY: the caller vouches for the product; the tile lies within it.
        unsafe {
            let (p, q) = (self.product, self.rows);
            let mut w = p.weights.add(self.panel * p.panel_bytes);
            let mut scales = w;
            // One pointer for three rows: the other two are a scaled index away.
            let mut x = [q.values.add(self.row * q.stride).cast_const(); POINTERS];
            for (g, x) in x.iter_mut().enumerate() {
                *x = x.wrapping_add(3 * g * q.stride);
            }
            let far = (AHEAD / P / 2).max(1);
            let mut ahead = 0;
            for group in 0..q.groups {
                let row_of_groups = self.row * q.groups + group;
                if group % 2 == 0 {
                    // Within the panel, or at the beginning of the one that comes next.
                    ahead = far * PAIR_BYTES;
                    if group + 2 * far >= q.groups {
                        ahead = ahead.wrapping_add(self.next.wrapping_sub(p.panel_bytes));
                    }
                    scales = w;
                    unroll!(n < P {
                        f.prefetch_later(w.wrapping_add(ahead).wrapping_add(n * p.panel_bytes));
                    });
                    w = w.wrapping_add(LINE);
                } else {
                    scales = scales.wrapping_add(2 * LANES);
                }
                let mut dots = [[l.start(0); P]; R];
                unroll!(r < R {
                    let start = l.start(*q.corrections.add(row_of_groups + r * q.groups));
                    unroll!(n < P {
                        dots[r][n] = start;
                    });
                });
                for _ in 0..GROUP_LINES {
                    w = opaque(w);
                    for (g, x) in x.iter_mut().enumerate() {
                        if 3 * g < R {
                            *x = opaque(*x);
                        }
                    }
                    unroll!(n < P {
                        f.prefetch_later(w.wrapping_add(ahead).wrapping_add(n * p.panel_bytes));
                    });
                    four_inputs::<L, R, P>(l, &mut dots, w, p.panel_bytes, &x, q.stride, 0);
                    if L::STEPS == 2 {
                        four_inputs::<L, R, P>(l, &mut dots, w, p.panel_bytes, &x, q.stride, 1);
                    }
                    w = w.wrapping_add(LINE);
                    for x in &mut x {
                        *x = x.wrapping_add(4 * L::STEPS);
                    }
                }
                unroll!(n < P {
                    let scale = f.load_bf16(scales.add(n * p.panel_bytes).cast());
                    unroll!(r < R {
                        let of_row = f.splat(*q.scales.add(row_of_groups + r * q.groups));
                        let sum = self.sums.add((r * P + n) * LANES);
                        let dot = l.to_f32(dots[r][n]);
                        f.store(sum, f.fma(dot, f.mul(of_row, scale), f.load(sum)));
                    });
                });
            }
        }
    }
}

/// One step of four inputs of every row, times their weights.
#[inline(always)]
unsafe fn four_inputs<L: Int8Lanes, const R: usize, const P: usize>(
    l: L,
    dots: &mut [[L::I; P]; R],
    line: *const u8,
    panel_bytes: usize,
    x: &[*const i8; POINTERS],
    stride: usize,
    step: usize,
) {
    // SAFETY: the caller says that the line and the inputs exist.
    unsafe {
        if !L::Lanes::MANY_REGISTERS {
            // Loads inputs once per panel, since sums leave room for one panel's weights.
            unroll!(n < P {
                let w = l.weights(line.add(n * panel_bytes), step);
                unroll!(r < R {
                    let x = l.inputs(x[r / 3].add(r % 3 * stride), step);
                    dots[r][n] = l.dot(dots[r][n], w, x);
                });
            });
            return;
        }
        let mut w = [l.weights(line, step); P];
        unroll!(n < P {
            w[n] = l.weights(line.add(n * panel_bytes), step);
        });
        unroll!(r < R {
            let x = l.inputs(x[r / 3].add(r % 3 * stride), step);
            unroll!(n < P {
                dots[r][n] = l.dot(dots[r][n], w[n], x);
            });
        });
    }
}

/// Pointers that stand for three rows each, in the largest tile.
const POINTERS: usize = 4;

#[cfg(target_arch = "x86_64")]
tiles!(
    vnni, Vnni, ["avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma"],
    of 32 registers
);
#[cfg(target_arch = "x86_64")]
tiles!(
    avx2, Avx2, ["avx2,fma"],
    [2, 1, 1, 1, 1],
    1 x 2, 1 x 1, 2 x 1, 3 x 1, 4 x 1, 5 x 1
);
tiles!(portable, Portable, [], [1, 1, 1, 1], 1 x 1, 2 x 1, 3 x 1, 4 x 1);

/// Panels for each row count of a tile.
fn panels_of(isa: DetectedInt8) -> &'static [usize] {
    match isa {
        #[cfg(target_arch = "x86_64")]
        DetectedInt8::Vnni(_) => vnni::PANELS,
        #[cfg(target_arch = "x86_64")]
        DetectedInt8::Avx2(_) => avx2::PANELS,
        DetectedInt8::Portable => portable::PANELS,
    }
}

/// Sums up a tile of a shape, rows by panels.
///
/// # Safety
/// The tile must lie within a product whose pointers are valid.
unsafe fn sum_tile(isa: DetectedInt8, shape: (usize, usize), t: &Int8Tile<'_>) {
    // SAFETY: the caller vouches for the tile.
    unsafe {
        match isa {
            #[cfg(target_arch = "x86_64")]
            DetectedInt8::Vnni(l) => vnni::sum(l, shape, t),
            #[cfg(target_arch = "x86_64")]
            DetectedInt8::Avx2(l) => avx2::sum(l, shape, t),
            DetectedInt8::Portable => portable::sum(Portable, shape, t),
        }
    }
}

/// How many panels belong together in a task.
pub(super) fn panels_together(isa: Detected, rows: usize) -> usize {
    Tiling::of(panels_of(isa.int8()), rows).panels
}

/// Panels `first..last` of a product with int8 weights.
///
/// # Safety
/// As [`super::matmul::project_bf16`], with `q` quantized from the product's input.
pub(super) unsafe fn project_int8(
    isa: Detected,
    p: &Product,
    q: &Quantized,
    first: usize,
    last: usize,
) {
    let int8 = isa.int8();
    let tiling = Tiling::of(panels_of(int8), p.rows);
    let sum = |(panel, panels): (usize, usize), next: usize, sums: &mut [f32]| {
        sums.fill(0.0);
        let mut row = 0;
        for index in 0..tiling.tiles {
            let rows = tiling.rows(index, p.rows);
            let sums = sums.as_mut_ptr().wrapping_add(row * panels * LANES);
            let tile = Int8Tile { product: p, rows: q, panel, row, next, sums };
            // SAFETY: the caller vouches for the product; there is room for the sums.
            unsafe { sum_tile(int8, (rows, panels), &tile) };
            row += rows;
        }
    };
    // SAFETY: the caller vouches for the product.
    unsafe { over_groups(isa, p, tiling.panels, first, last, sum) }
}

kernel! {
    /// Quantizes rows `first..last` of the product's input.
    ///
    /// # Safety
    /// The product's input must be valid, `q` prepared for it, and no other task may write these
    /// rows.
    pub(super) fn quantize_rows(
        p: &Product,
        q: &Quantized,
        first: usize,
        last: usize,
    ) = quantize over int8
}
