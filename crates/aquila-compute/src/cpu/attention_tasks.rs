//! Keys and values into their slots, and attention over them: checked, and shared out to threads.

use super::CpuBackend;
use super::attend::{self, Attention};
use super::kv::CpuKv;
use super::plan::CpuPlan;
use super::rows::CpuRows;
use super::rowwise;
use super::share::check;
use crate::{AttentionParams, HeadShape, Result, RopeTable};

/// Multiply-adds of an attention, counted once for keys, below which one thread does all of it.
const SMALL_ATTENTION: usize = 64 << 10;

impl CpuBackend {
    /// [`crate::Backend::write_kv`].
    pub(super) fn place_kv(
        &self,
        qkv: &mut CpuRows,
        heads: HeadShape,
        norms: Option<(&Vec<f32>, &Vec<f32>, f32)>,
        rope: &RopeTable,
        plan: &CpuPlan,
        (kv, layer): (&mut CpuKv, usize),
    ) -> Result<()> {
        self.check_heads(qkv, heads, plan, kv)?;
        let (d, half) = (heads.head_dim, rope.half);
        check(2 * half <= d && rope.positions() >= plan.positions(), || {
            format!(
                "a rope of {} positions and width {} does not cover position {} of heads of {d}",
                rope.positions(),
                2 * half,
                plan.positions().saturating_sub(1)
            )
        })?;
        check(norms.is_none_or(|(q, k, _)| q.len() == d && k.len() == d), || {
            format!("norms of queries and keys must have the width of a head, {d}")
        })?;
        let (isa, host) = (self.isa, plan.host());
        let (kv, shared) = (kv.layer(layer), qkv.shared());
        let write = |row: usize| {
            let position = host.positions[row] as usize * half;
            let (cos, sin) = (&rope.cos[position..][..half], &rope.sin[position..][..half]);
            // SAFETY: each row is written by one task; sizes were checked above.
            let values = unsafe { shared.row_mut(row) };
            for (head, part) in
                values.chunks_exact_mut(d).take(heads.heads + heads.kv_heads).enumerate()
            {
                let at = part.as_mut_ptr();
                // SAFETY: `part` and the norms have `d` values, cosines and sines `half`.
                unsafe {
                    if let Some((q, k, epsilon)) = norms {
                        let weight = if head < heads.heads { q } else { k };
                        rowwise::rms_norm(isa, at, weight.as_ptr(), d, epsilon, at);
                    }
                    rowwise::apply_rope(isa, at, cos.as_ptr(), sin.as_ptr(), half);
                }
            }
            let (keys, values) = values[heads.q_width()..].split_at(heads.kv_width());
            let values = &values[..heads.kv_width()];
            for (head, (k, v)) in keys.chunks_exact(d).zip(values.chunks_exact(d)).enumerate() {
                // SAFETY: the plan's slots are within the store, which is borrowed for writing;
                // rows that share a slot are written one after the other.
                unsafe { kv.write(host.writes[row], head, k, v) }
            }
        };
        if plan.writes_apart() {
            // Rotations and copies cost a few times what their elements suggest.
            self.over_rows(host.rows(), 4 * heads.qkv_width(), &write);
        } else {
            (0..host.rows()).for_each(write);
        }
        Ok(())
    }

    /// [`crate::Backend::attend`].
    pub(super) fn attend_placed(
        &self,
        qkv: &CpuRows,
        params: AttentionParams,
        plan: &CpuPlan,
        (kv, layer): (&CpuKv, usize),
        out: &mut CpuRows,
    ) -> Result<()> {
        let heads = params.heads;
        self.check_heads(qkv, heads, plan, kv)?;
        check(params.window != Some(0), || "a window must have at least one position".into())?;
        check(out.width() >= heads.q_width() && out.capacity() >= plan.host().rows(), || {
            format!("attention of width {} does not fit rows of {}", heads.q_width(), out.width())
        })?;
        let attention = Attention {
            plan: plan.host(),
            tables: plan.tables(),
            params,
            kv: kv.layer(layer),
            queries: qkv.as_ptr(),
            query_stride: qkv.stride(),
            out: out.shared().as_mut_ptr(),
            out_stride: out.stride(),
        };
        let rows = plan.host().rows();
        let together = (rows * heads.kv_heads / (self.threads() * 4)).clamp(1, 8);
        let tiles = rows.div_ceil(together);
        let tasks = tiles * heads.kv_heads;
        let run = |task: usize| {
            let (head, first) = (task % heads.kv_heads, task / heads.kv_heads * together);
            let last = (first + together).min(rows);
            // SAFETY: sizes and slots were checked; tasks differ in rows or heads.
            unsafe { attend::attend_rows(self.isa, &attention, head, first, last) }
        };
        if plan.seen(params) * heads.q_width() < SMALL_ATTENTION {
            (0..tasks).for_each(run);
        } else {
            self.pool.run(tasks, &run);
        }
        Ok(())
    }

    fn check_heads(
        &self,
        qkv: &CpuRows,
        heads: HeadShape,
        plan: &CpuPlan,
        kv: &CpuKv,
    ) -> Result<()> {
        let shape = kv.shape();
        check(heads.kv_heads > 0 && heads.heads.is_multiple_of(heads.kv_heads), || {
            format!("{} heads cannot share {} key and value heads", heads.heads, heads.kv_heads)
        })?;
        check((shape.kv_heads, shape.head_dim) == (heads.kv_heads, heads.head_dim), || {
            format!(
                "a store of {} heads of {} does not hold {} heads of {}",
                shape.kv_heads, shape.head_dim, heads.kv_heads, heads.head_dim
            )
        })?;
        check(qkv.width() >= heads.qkv_width(), || {
            format!(
                "rows of {} do not hold queries, keys and values of {}",
                qkv.width(),
                heads.qkv_width()
            )
        })?;
        assert!(plan.host().rows() <= qkv.capacity(), "rows beyond the buffer");
        assert!(plan.slots() <= shape.slots, "a plan's slots are beyond the store");
        Ok(())
    }
}
