//! Attention over slot lists, in blocks aligned to absolute position.
//!
//! A task takes some rows and one key and value head, and goes through the blocks: rows that see
//! the same slots find them in the cache, and so do the query heads that share the head. The
//! order of every sum is that of [`crate::reference::attend`].

use std::cell::RefCell;

use super::block::{Block, MOST_HEADS, rows_alike};
use super::isa::Detected;
use super::kv::SharedKv;
use super::simd::{LANES, Lanes, kernel, unroll};
use crate::reference::BLOCK;
use crate::{AttentionParams, BlockTables, ForwardPlan, KvDtype};

/// What an attention reads and writes. Pointers are valid for all rows of the plan.
#[derive(Clone, Copy)]
pub(super) struct Attention<'a> {
    pub plan: &'a ForwardPlan,
    pub tables: &'a BlockTables,
    pub params: AttentionParams,
    pub kv: SharedKv,
    pub queries: *const f32,
    pub query_stride: usize,
    pub out: *mut f32,
    pub out_stride: usize,
}

// SAFETY: tasks read queries, keys and values, and write outputs of different rows and heads.
unsafe impl Sync for Attention<'_> {}

/// How an element of keys and values is read.
trait Element: Copy + 'static {
    /// # Safety
    /// 16 elements must be readable.
    unsafe fn read<L: Lanes>(l: L, at: *const Self) -> L::F;
}

impl Element for f32 {
    #[inline(always)]
    unsafe fn read<L: Lanes>(l: L, at: *const f32) -> L::F {
        // SAFETY: vouched for by the caller.
        unsafe { l.load(at) }
    }
}

impl Element for u16 {
    #[inline(always)]
    unsafe fn read<L: Lanes>(l: L, at: *const u16) -> L::F {
        // SAFETY: vouched for by the caller.
        unsafe { l.load_bf16(at) }
    }
}

thread_local! {
    /// Queries, unfinished outputs, and the softmax of each row and head of a task.
    static SCRATCH: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

#[inline(always)]
unsafe fn attend<L: Lanes, E: Element>(
    l: L,
    a: &Attention<'_>,
    kv_head: usize,
    first: usize,
    last: usize,
) {
    let group = a.params.heads.group();
    let width = a.kv.width;
    let places = (last - first) * group;
    // Taken rather than borrowed in a closure, which would be compiled without the instructions.
    let mut scratch = SCRATCH.take();
    let size = places * (2 * width + 2 * LANES);
    if scratch.len() < size {
        scratch.resize(size, 0.0);
    }
    let queries = scratch.as_mut_ptr();
    // SAFETY: the scratch has room for queries, sums, largest scores and totals of all places;
    // the caller vouches for the attention.
    unsafe {
        let sums = queries.add(places * width);
        let maxima = sums.add(places * width);
        let totals = maxima.add(places * LANES);
        let dim = a.params.heads.head_dim;
        for place in 0..places {
            let head = kv_head * group + place % group;
            let from = a.queries.add((first + place / group) * a.query_stride + head * dim);
            let to = queries.add(place * width);
            std::ptr::copy_nonoverlapping(from, to, dim);
            std::slice::from_raw_parts_mut(to.add(dim), width - dim).fill(0.0);
        }
        let spans = &a.plan.spans[first..last];
        let longest = spans.iter().map(|s| s.len()).max().unwrap_or(0);
        let nearest = spans.iter().map(|s| a.params.first_seen(s.len())).min().unwrap_or(0);
        let mut block = Block::new();
        let mut start = nearest / BLOCK * BLOCK;
        while start < longest {
            let mut row = first;
            while row < last {
                let alike = rows_alike(a, row, last, start);
                if block.find(a, row, kv_head, start) {
                    let (mut place, end) = ((row - first) * group, (row + alike - first) * group);
                    // Rows of one request share the slots, so the first asks for the block that
                    // follows; before a row of another request, the last asks for that row's.
                    let next = row + alike;
                    let mut cold = true;
                    let request = |row: usize| a.plan.spans[row].start;
                    if next < last && request(next) != request(row) {
                        block.look_ahead(a, next, kv_head, start);
                    } else if row == first || next == last && request(row) != request(first) {
                        block.look_ahead(a, first, kv_head, start + BLOCK);
                    } else {
                        cold = false;
                    }
                    while place < end {
                        let heads = (end - place).min(MOST_HEADS);
                        score::<L, E>(l, a, &mut block, heads, queries.add(place * width), cold);
                        for h in 0..heads {
                            let max = maxima.add((place + h) * LANES);
                            let total = totals.add((place + h) * LANES);
                            soften(l, &mut block, h, max, total);
                        }
                        add_values::<L, E>(l, a, &block, heads, sums.add(place * width));
                        place += heads;
                        cold = false;
                    }
                }
                row += alike;
            }
            start += BLOCK;
        }
        for place in 0..places {
            let head = kv_head * group + place % group;
            let to = a.out.add((first + place / group) * a.out_stride + head * dim);
            let inverse = l.div(l.splat(1.0), l.load(totals.add(place * LANES)));
            let mut i = 0;
            while i < dim {
                let value = l.mul(l.load(sums.add(place * width + i)), inverse);
                if dim - i >= LANES {
                    l.store(to.add(i), value);
                } else {
                    l.store_first(to.add(i), dim - i, value);
                }
                i += LANES;
            }
        }
    }
    SCRATCH.set(scratch);
}

/// Scores of `heads` heads over a block: 16 keys serve all heads while they are in the cache.
#[inline(always)]
unsafe fn score<L: Lanes, E: Element>(
    l: L,
    a: &Attention<'_>,
    block: &mut Block,
    heads: usize,
    queries: *const f32,
    cold: bool,
) {
    let width = a.kv.width;
    let mut p = 0;
    while p < block.count {
        // SAFETY: the caller vouches for the attention and the queries; positions come in 16s.
        unsafe {
            let keys = a.kv.keys.get().cast::<E>();
            let at = block.at.as_ptr().add(p);
            for h in 0..heads {
                if cold {
                    // The next block, in as many parts as there are heads to hide it behind.
                    let (from, to) = (p + LANES * h / heads, p + LANES * (h + 1) / heads);
                    for at in &block.ahead[from..to.min(block.ahead_count.max(from))] {
                        prefetch_head::<L, E>(l, a, *at);
                    }
                }
                let query = queries.add(h * width);
                let mut dots = [l.splat(0.0); LANES];
                let to = dots.as_mut_ptr();
                if L::MANY_REGISTERS {
                    dot_some::<L, E, 8>(l, keys, at, query, width, to);
                    dot_some::<L, E, 8>(l, keys, at.add(8), query, width, to.add(8));
                } else {
                    dot_some::<L, E, 4>(l, keys, at, query, width, to);
                    dot_some::<L, E, 4>(l, keys, at.add(4), query, width, to.add(4));
                    dot_some::<L, E, 4>(l, keys, at.add(8), query, width, to.add(8));
                    dot_some::<L, E, 4>(l, keys, at.add(12), query, width, to.add(12));
                }
                let dots = l.mul(l.fold_each(&dots), l.splat(a.params.scale));
                l.store(block.scores[h].as_mut_ptr().add(p), dots);
            }
        }
        p += LANES;
    }
}

/// Asks for the key and the value of one position.
#[inline(always)]
fn prefetch_head<L: Lanes, E: Element>(l: L, a: &Attention<'_>, at: usize) {
    let key = a.kv.keys.get().cast::<E>().wrapping_add(at).cast::<u8>();
    let value = a.kv.values.get().cast::<E>().wrapping_add(at).cast::<u8>();
    let mut line = 0;
    while line < a.kv.width * size_of::<E>() {
        l.prefetch_later(key.wrapping_add(line));
        l.prefetch_later(value.wrapping_add(line));
        line += 64;
    }
}

/// Makes one head's scores the weights of the block's own softmax; merges the largest score and
/// the total of the blocks before.
#[inline(always)]
unsafe fn soften<L: Lanes>(l: L, block: &mut Block, h: usize, max: *mut f32, total: *mut f32) {
    let scores = &mut block.scores[h];
    let rounded = block.count.next_multiple_of(LANES);
    scores[block.count..rounded].fill(f32::NEG_INFINITY);
    // SAFETY: the caller vouches for 16 values of each pointer; a block has `rounded` scores.
    unsafe {
        let mut largest = l.splat(f32::NEG_INFINITY);
        let mut p = 0;
        while p < rounded {
            largest = l.max(l.load(scores.as_ptr().add(p)), largest);
            p += LANES;
        }
        let block_max = l.splat(l.fold_max(largest));
        let mut sum = l.splat(0.0);
        let mut p = 0;
        while p < rounded {
            let weights = l.exp(l.sub(l.load(scores.as_ptr().add(p)), block_max));
            sum = l.add(sum, weights);
            l.store(scores.as_mut_ptr().add(p), weights);
            p += LANES;
        }
        let block_total = l.splat(l.fold(sum));
        if block.first {
            l.store(max, block_max);
            l.store(total, block_total);
            return;
        }
        let before = l.load(max);
        let new_max = l.max(block_max, before);
        let old = l.exp(l.sub(before, new_max));
        let new = l.exp(l.sub(block_max, new_max));
        l.store(total, l.fma(l.load(total), old, l.mul(block_total, new)));
        l.store(max, new_max);
        l.store(block.old[h].as_mut_ptr(), old);
        l.store(block.new[h].as_mut_ptr(), new);
    }
}

/// Products of one query with `J` keys, before their folding.
#[inline(always)]
unsafe fn dot_some<L: Lanes, E: Element, const J: usize>(
    l: L,
    keys: *const E,
    at: *const usize,
    query: *const f32,
    width: usize,
    out: *mut L::F,
) {
    // SAFETY: the caller vouches for `J` positions and `width` elements of each.
    unsafe {
        let mut dots = [l.splat(0.0); J];
        let mut d = 0;
        while d < width {
            let q = l.load(query.add(d));
            unroll!(j < J {
                dots[j] = l.fma(q, E::read(l, keys.add(*at.add(j) + d)), dots[j]);
            });
            d += LANES;
        }
        unroll!(j < J {
            out.add(j).write(dots[j]);
        });
    }
}

/// Adds the block's values, weighted, to the sums of `heads` heads.
#[inline(always)]
unsafe fn add_values<L: Lanes, E: Element>(
    l: L,
    a: &Attention<'_>,
    block: &Block,
    heads: usize,
    sums: *mut f32,
) {
    // Elements outside, heads inside: so much of the values serves all heads from the cache.
    let width = a.kv.width;
    let mut d = 0;
    while d < width {
        let left = (width - d) / LANES;
        let columns = match (heads, L::MANY_REGISTERS) {
            (1, true) if left >= 8 => 8,
            (_, true) | (1, false) if left >= 4 => 4,
            (_, false) if left >= 2 => 2,
            _ => 1,
        };
        let mut h = 0;
        while h < heads {
            let most = if L::MANY_REGISTERS || columns == 1 { 4 } else { 2 };
            let together = (heads - h).min(most);
            // SAFETY: the caller vouches for the attention and the sums.
            unsafe {
                let to = sums.add(h * width + d);
                match (together, columns) {
                    (1, 8) => values::<L, E, 1, 8>(l, a, block, h, d, to),
                    (1, 4) => values::<L, E, 1, 4>(l, a, block, h, d, to),
                    (2, 4) => values::<L, E, 2, 4>(l, a, block, h, d, to),
                    (3, 4) => values::<L, E, 3, 4>(l, a, block, h, d, to),
                    (_, 4) => values::<L, E, 4, 4>(l, a, block, h, d, to),
                    (1, 2) => values::<L, E, 1, 2>(l, a, block, h, d, to),
                    (_, 2) => values::<L, E, 2, 2>(l, a, block, h, d, to),
                    (1, _) => values::<L, E, 1, 1>(l, a, block, h, d, to),
                    (2, _) => values::<L, E, 2, 1>(l, a, block, h, d, to),
                    (3, _) => values::<L, E, 3, 1>(l, a, block, h, d, to),
                    _ => values::<L, E, 4, 1>(l, a, block, h, d, to),
                }
            }
            h += together;
        }
        d += columns * LANES;
    }
}

/// `C` times 16 elements of the values for `H` heads.
#[inline(always)]
unsafe fn values<L: Lanes, E: Element, const H: usize, const C: usize>(
    l: L,
    a: &Attention<'_>,
    block: &Block,
    first: usize,
    d: usize,
    sums: *mut f32,
) {
    // SAFETY: the caller vouches for the attention and the sums.
    unsafe {
        let values = a.kv.values.get().cast::<E>().add(d);
        let mut parts = [[l.splat(0.0); C]; H];
        for p in 0..block.count {
            let row = values.add(*block.at.as_ptr().add(p));
            let mut v = [l.splat(0.0); C];
            unroll!(c < C {
                v[c] = E::read(l, row.add(c * LANES));
            });
            unroll!(h < H {
                let w = l.splat(*block.scores.as_ptr().add(first + h).cast::<f32>().add(p));
                unroll!(c < C {
                    parts[h][c] = l.fma(w, v[c], parts[h][c]);
                });
            });
        }
        unroll!(h < H {
            let old = l.load(block.old.as_ptr().add(first + h).cast());
            let new = l.load(block.new.as_ptr().add(first + h).cast());
            unroll!(c < C {
                let at = sums.add(h * a.kv.width + c * LANES);
                if block.first {
                    l.store(at, parts[h][c]);
                } else {
                    l.store(at, l.fma(l.load(at), old, l.mul(parts[h][c], new)));
                }
            });
        });
    }
}

#[inline(always)]
unsafe fn attend_f32<L: Lanes>(l: L, a: &Attention<'_>, kv_head: usize, first: usize, last: usize) {
    // SAFETY: the caller vouches for the attention.
    unsafe { attend::<L, f32>(l, a, kv_head, first, last) }
}

#[inline(always)]
unsafe fn attend_bf16<L: Lanes>(
    l: L,
    a: &Attention<'_>,
    kv_head: usize,
    first: usize,
    last: usize,
) {
    // SAFETY: the caller vouches for the attention.
    unsafe { attend::<L, u16>(l, a, kv_head, first, last) }
}

kernel! {
    fn over_f32(a: &Attention<'_>, kv_head: usize, first: usize, last: usize) = attend_f32
}

kernel! {
    fn over_bf16(a: &Attention<'_>, kv_head: usize, first: usize, last: usize) = attend_bf16
}

/// Attention of rows `first..last` and the query heads that share `kv_head`.
///
/// # Safety
/// The attention's pointers and the plan's slots must be valid for its sizes, and no other task
/// may write the outputs of these rows and heads.
pub(super) unsafe fn attend_rows(
    isa: Detected,
    a: &Attention<'_>,
    kv_head: usize,
    first: usize,
    last: usize,
) {
    // SAFETY: the caller vouches for the attention.
    unsafe {
        match a.kv.dtype {
            KvDtype::F32 => over_f32(isa, a, kv_head, first, last),
            KvDtype::Bf16 => over_bf16(isa, a, kv_head, first, last),
        }
    }
}
