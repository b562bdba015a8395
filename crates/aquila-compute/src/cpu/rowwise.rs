//! Operations on one row after the other: norms, rotary embedding, gated units.

use super::lanes::{LANES, Lanes, kernel};

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
unsafe fn load<L: Lanes>(at: *const f32, left: usize) -> L::F {
    // SAFETY: the caller says that `left` values are readable.
    unsafe { if left == LANES { L::load(at) } else { L::load_first(at, left) } }
}

#[inline(always)]
unsafe fn store<L: Lanes>(at: *mut f32, left: usize, value: L::F) {
    // SAFETY: the caller says that `left` values are writable.
    unsafe { if left == LANES { L::store(at, value) } else { L::store_first(at, left, value) } }
}

#[inline(always)]
unsafe fn norm<L: Lanes>(
    input: *const f32,
    weight: *const f32,
    width: usize,
    epsilon: f32,
    out: *mut f32,
) {
    // SAFETY: the caller vouches for `width` values of each.
    unsafe {
        let mut squares = L::splat(0.0);
        chunks!(i, left of width => {
            let x = load::<L>(input.add(i), left);
            squares = L::fma(x, x, squares);
        });
        let scale = L::splat(1.0 / (L::fold(squares) / width as f32 + epsilon).sqrt());
        chunks!(i, left of width => {
            let x = L::mul(load::<L>(input.add(i), left), scale);
            store::<L>(out.add(i), left, L::mul(x, load::<L>(weight.add(i), left)));
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

/// `silu(gate) * up` of some lanes.
#[inline(always)]
pub(super) fn gated<L: Lanes>(gate: L::F, up: L::F) -> L::F {
    let one_and_more = L::add(L::splat(1.0), L::exp(L::mul(gate, L::splat(-1.0))));
    L::mul(L::div(gate, one_and_more), up)
}

#[inline(always)]
unsafe fn gate_row<L: Lanes>(gate: *const f32, up: *const f32, width: usize, out: *mut f32) {
    // SAFETY: the caller vouches for `width` values of each.
    unsafe {
        chunks!(i, left of width => {
            let (gate, up) = (load::<L>(gate.add(i), left), load::<L>(up.add(i), left));
            store::<L>(out.add(i), left, gated::<L>(gate, up));
        });
    }
}

kernel! {
    /// `silu(gate) * up`, as [`crate::reference::swiglu`] has it.
    ///
    /// # Safety
    /// `width` values of each pointer must be valid.
    pub(super) fn swiglu(gate: *const f32, up: *const f32, width: usize, out: *mut f32) = gate_row
}

#[inline(always)]
unsafe fn turned<L: Lanes>(head: *mut f32, cos: *const f32, sin: *const f32, half: usize) {
    // SAFETY: the caller vouches for the sizes.
    unsafe {
        let minus = L::splat(-1.0);
        chunks!(i, left of half => {
            let (a, b) = (load::<L>(head.add(i), left), load::<L>(head.add(half + i), left));
            let (c, s) = (load::<L>(cos.add(i), left), load::<L>(sin.add(i), left));
            store::<L>(head.add(i), left, L::fma(a, c, L::mul(L::mul(b, s), minus)));
            store::<L>(head.add(half + i), left, L::fma(b, c, L::mul(a, s)));
        });
    }
}

kernel! {
    /// [`crate::reference::turn`] of one head.
    ///
    /// # Safety
    /// `head` must have `2 * half` values, `cos` and `sin` `half`.
    pub(super) fn turn(head: *mut f32, cos: *const f32, sin: *const f32, half: usize) = turned
}
