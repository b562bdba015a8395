//! Operations on one row after the other: norms, rotary embedding, gated units, soft caps,
//! softmax.

use super::simd::{LANES, Lanes, kernel};
use crate::Activation;

/// Calls `$body` for every 16 elements of `$n`, the last time with fewer.
macro_rules! chunks {
    ($i:ident, $left:ident of $n:expr => $body:block) => {
        let mut $i = 0;
        while $i < $n {
            let $left = ($n - $i).min(LANES);
            $body
            $i += LANES;
        }
    };
}

#[inline(always)]
unsafe fn load<L: Lanes>(l: L, at: *const f32, left: usize) -> L::F {
    // SAFETY: the caller says that `left` values are readable.
    unsafe { if left == LANES { l.load(at) } else { l.load_first(at, left) } }
}

#[inline(always)]
unsafe fn store<L: Lanes>(l: L, at: *mut f32, left: usize, value: L::F) {
    // SAFETY: the caller says that `left` values are writable.
    unsafe { if left == LANES { l.store(at, value) } else { l.store_first(at, left, value) } }
}

#[inline(always)]
unsafe fn norm<L: Lanes>(
    l: L,
    input: *const f32,
    weight: *const f32,
    width: usize,
    epsilon: f32,
    out: *mut f32,
) {
    // SAFETY: the caller vouches for `width` values of each.
    unsafe {
        let mut squares = l.splat(0.0);
        chunks!(i, left of width => {
            let x = load(l, input.add(i), left);
            squares = l.fma(x, x, squares);
        });
        let scale = l.splat(1.0 / (l.fold(squares) / width as f32 + epsilon).sqrt());
        chunks!(i, left of width => {
            let x = l.mul(load(l, input.add(i), left), scale);
            store(l, out.add(i), left, l.mul(x, load(l, weight.add(i), left)));
        });
    }
}

kernel! {
    /// [`crate::reference::rms_norm`] of one row; `out` may be `input`.
    ///
    /// # Safety
    /// `width` values of each pointer must be valid.
    pub(super) fn rms_norm(
        input: *const f32,
        weight: *const f32,
        width: usize,
        epsilon: f32,
        out: *mut f32,
    ) = norm
}

/// `activation(gate) * up` of some lanes.
#[inline(always)]
pub(super) fn gated<L: Lanes>(l: L, activation: Activation, gate: L::F, up: L::F) -> L::F {
    let activated = match activation {
        Activation::Silu => l.silu(gate),
        Activation::GeluTanh => l.gelu_tanh(gate),
    };
    l.mul(activated, up)
}

#[inline(always)]
unsafe fn gate_row<L: Lanes>(
    l: L,
    activation: Activation,
    gate: *const f32,
    up: *const f32,
    width: usize,
    out: *mut f32,
) {
    // SAFETY: the caller vouches for `width` values of each.
    unsafe {
        chunks!(i, left of width => {
            let (gate, up) = (load(l, gate.add(i), left), load(l, up.add(i), left));
            store(l, out.add(i), left, gated(l, activation, gate, up));
        });
    }
}

kernel! {
    /// `activation(gate) * up`, as [`crate::reference::gate`] has it.
    ///
    /// # Safety
    /// `width` values of each pointer must be valid.
    pub(super) fn gate(
        activation: Activation,
        gate: *const f32,
        up: *const f32,
        width: usize,
        out: *mut f32,
    ) = gate_row
}

#[inline(always)]
unsafe fn add_row<L: Lanes>(l: L, input: *const f32, width: usize, out: *mut f32) {
    // SAFETY: the caller vouches for `width` values of each.
    unsafe {
        chunks!(i, left of width => {
            let sum = l.add(load(l, out.add(i), left), load(l, input.add(i), left));
            store(l, out.add(i), left, sum);
        });
    }
}

kernel! {
    /// `out += input`.
    ///
    /// # Safety
    /// `width` values of each pointer must be valid.
    pub(super) fn add(input: *const f32, width: usize, out: *mut f32) = add_row
}

#[inline(always)]
unsafe fn cap_row<L: Lanes>(l: L, row: *mut f32, width: usize, cap: f32) {
    // SAFETY: the caller vouches for `width` values.
    unsafe {
        let cap = l.splat(cap);
        chunks!(i, left of width => {
            let x = l.div(load(l, row.add(i), left), cap);
            store(l, row.add(i), left, l.mul(cap, l.tanh(x)));
        });
    }
}

kernel! {
    /// [`crate::reference::soft_cap`] of one row.
    ///
    /// # Safety
    /// `width` values must be valid.
    pub(super) fn soft_cap(row: *mut f32, width: usize, cap: f32) = cap_row
}

#[inline(always)]
unsafe fn soften<L: Lanes>(l: L, input: *const f32, width: usize, out: *mut f32) {
    let lowest = [f32::NEG_INFINITY; LANES];
    // SAFETY: the caller vouches for `width` values of each.
    unsafe {
        let mut largest = l.load(lowest.as_ptr());
        let whole = width / LANES * LANES;
        chunks!(i, _left of whole => {
            largest = l.max(l.load(input.add(i)), largest);
        });
        if whole < width {
            let mut last = lowest;
            std::ptr::copy_nonoverlapping(input.add(whole), last.as_mut_ptr(), width - whole);
            largest = l.max(l.load(last.as_ptr()), largest);
        }
        let max = l.splat(l.fold_max(largest));
        let mut sum = l.splat(0.0);
        chunks!(i, left of width => {
            store(l, out.add(i), left, l.exp(l.sub(load(l, input.add(i), left), max)));
            sum = l.add(sum, load(l, out.add(i), left));
        });
        let total = l.splat(l.fold(sum));
        chunks!(i, left of width => {
            store(l, out.add(i), left, l.div(load(l, out.add(i), left), total));
        });
    }
}

kernel! {
    /// [`crate::reference::softmax`] of one row.
    ///
    /// # Safety
    /// `width` values of each pointer must be valid.
    pub(super) fn softmax(input: *const f32, width: usize, out: *mut f32) = soften
}

#[inline(always)]
unsafe fn rotate<L: Lanes>(l: L, head: *mut f32, cos: *const f32, sin: *const f32, half: usize) {
    // SAFETY: the caller vouches for the sizes.
    unsafe {
        let minus = l.splat(-1.0);
        chunks!(i, left of half => {
            let (a, b) = (load(l, head.add(i), left), load(l, head.add(half + i), left));
            let (c, s) = (load(l, cos.add(i), left), load(l, sin.add(i), left));
            store(l, head.add(i), left, l.fma(a, c, l.mul(l.mul(b, s), minus)));
            store(l, head.add(half + i), left, l.fma(b, c, l.mul(a, s)));
        });
    }
}

kernel! {
    /// [`crate::reference::apply_rope`] of one head.
    ///
    /// # Safety
    /// `head` must have `2 * half` values, `cos` and `sin` `half`.
    pub(super) fn apply_rope(head: *mut f32, cos: *const f32, sin: *const f32, half: usize) = rotate
}
