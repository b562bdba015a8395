//! Attention by tensor cores, within windows and without, against the contract.

use aquila_compute::cuda::{CudaBackend, contract};
use aquila_compute::{
    AttentionParams, Backend, BlockTables, ForwardPlan, HeadShape, HostTensor, KvDtype, KvShape,
    PlanBounds, Result, RopeTable, reference,
};
use half::bf16;

use crate::Findings;
use crate::random::{Kind, Random, Request, RowKind};
use crate::tensor::{Checks, halves, parallel, poisoned};

/// Tokens of the table that rows are taken from.
const TOKENS: usize = 61;

/// Attention with room for so few blocks that launches take few rows each, and that the blocks of some
/// rows stay with one thread block while those of others wait to be merged.
pub fn check_room(
    b: &mut CudaBackend,
    random: &mut Random,
    small: bool,
    findings: &mut Findings,
) -> Result<()> {
    let shapes = [(8, 2, 64), (7, 1, 128), (2, 2, 40), (20, 1, 64)];
    for (heads, kv_heads, head_dim) in shapes.into_iter().take(if small { 2 } else { 4 }) {
        let heads = HeadShape { heads, kv_heads, head_dim };
        for (blocks, window) in [(1, None), (12, Some(130)), (60, None)] {
            b.bound_attention(4 * heads.q_width() * blocks);
            let mut checks = Checks { b, random, findings };
            checks.attention_together(heads, window)?;
            // Contexts of so many blocks that a second launch merges them, where there is room.
            let contexts = if blocks == 60 { [10, 4300, 20, 4200] } else { [10, 140, 300, 5] };
            checks.attention(heads, false, window, &contexts)?;
        }
    }
    Ok(())
}

impl Checks<'_> {
    /// Keys and values written, and attention over them, of requests with these contexts.
    pub fn attention(
        &mut self,
        heads: HeadShape,
        norms: bool,
        window: Option<usize>,
        contexts: &[usize],
    ) -> Result<()> {
        let plan = self.random.plan(contexts, TOKENS);
        self.attention_of(heads, norms, window, plan, &format!("{contexts:?}"))
    }

    /// Rows that go together and rows that do not: chunks, trees and paths that reach over the end of
    /// a block, beside each other.
    pub fn attention_together(&mut self, heads: HeadShape, window: Option<usize>) -> Result<()> {
        let request = |kind| move |context, rows| Request { context, rows, kind };
        let [chunk, tree, path] = [RowKind::Chunk, RowKind::Tree, RowKind::Path].map(request);
        let few = [tree(124, 7), chunk(0, 5), tree(300, 3), path(117, 21), tree(0, 6)];
        let many = [chunk(100, 150), tree(250, 17), path(255, 18), chunk(384, 1), tree(128, 1)];
        // So many rows that some GPUs have room in shared memory for 64 queries and no more.
        let some = [chunk(90, 50), tree(131, 9), path(125, 4), chunk(0, 6), chunk(256, 1)];
        let each = (0..80).map(|i| tree(4 * i, 1 + i % 2)).collect::<Vec<_>>();
        for requests in [&few[..], &many, &some, &each] {
            let plan = self.random.plan_of(requests, TOKENS);
            self.attention_of(heads, false, window, plan, &format!("{requests:?}"))?;
        }
        Ok(())
    }

    fn attention_of(
        &mut self,
        heads: HeadShape,
        norms: bool,
        window: Option<usize>,
        (plan, slots): (ForwardPlan, usize),
        requests: &str,
    ) -> Result<()> {
        const EPSILON: f32 = 1e-6;
        let b = self.b;
        let (d, width) = (heads.head_dim, heads.qkv_width());
        let half = d / 2 - usize::from(norms && d > 16) * 2;
        let frequencies: Vec<f64> = (0..half).map(|i| 0.7f64.powi(i as i32)).collect();
        let positions = plan.positions.iter().max().map_or(0, |&last| last as usize + 1);
        let rope = RopeTable::new(positions, &frequencies, 1.0);
        let head_norms = [0, 1].map(|_| self.random.values(d, Kind::Even));
        let fill = self.random.fill(&plan, TOKENS);
        let (table, rows) = (self.random.values(TOKENS * width, Kind::Even), plan.rows());
        let table: Vec<f32> = table.iter().map(|&x| bf16::from_f32(3.0 * x).to_f32()).collect();

        let on_device = b.table(&HostTensor::from_f32("table", vec![TOKENS, width], &table)?)?;
        let vector = |values: &Vec<f32>| b.vector(&[HostTensor::from_f32("n", vec![d], values)?]);
        let (query_norm, key_norm) = (vector(&head_norms[0])?, vector(&head_norms[1])?);
        let with_norms = norms.then_some((&query_norm, &key_norm, EPSILON));
        let shape = KvShape {
            layers: 2,
            slots,
            kv_heads: heads.kv_heads,
            head_dim: d,
            dtype: KvDtype::Bf16,
        };
        let mut kv = b.kv(shape)?;
        let capacity = rows.max(fill.rows());
        let tree_slots = plan.tree_slots.len();
        let bounds =
            PlanBounds { rows: capacity, outputs: capacity, slots: tree_slots + 4 * slots + 64 };
        let mut placed = b.plan(bounds)?;
        let device_rope = b.rope(&rope)?;
        let mut qkv = b.rows(capacity, width)?;
        let mut out = poisoned(b, rows, heads.q_width())?;
        for plan in [&fill, &plan] {
            b.place(plan, &mut placed)?;
            b.embed(&on_device, 1.0, &placed, &mut qkv)?;
            b.write_kv(&mut qkv, heads, with_norms, &device_rope, &placed, &mut kv, 1)?;
        }
        let scale = 1.0 / (d as f32).sqrt();
        let params = AttentionParams { heads, scale, window };
        b.attend(&qkv, params, &placed, &kv, 1, &mut out)?;

        // The same by definition.
        let turned = |token: u32, position: u32, head: usize| -> Vec<f32> {
            let mut x = table[token as usize * width + head * d..][..d].to_vec();
            if norms {
                let weight = &head_norms[usize::from(head >= heads.heads)];
                let mut normed = vec![0.0; d];
                let lanes = contract::HEAD_NORM_LANES;
                contract::rms_norm(&x, weight, EPSILON, lanes, &mut normed);
                x = normed;
            }
            reference::apply_rope(&mut x, &rope, position as usize);
            x
        };
        let mut keys = vec![vec![bf16::NAN; d]; slots * heads.kv_heads];
        let mut values = keys.clone();
        for plan in [&fill, &plan] {
            for row in 0..plan.rows() {
                let (token, position, slot) =
                    (plan.tokens[row], plan.positions[row], plan.writes[row]);
                for head in 0..heads.kv_heads {
                    let at = slot as usize * heads.kv_heads + head;
                    keys[at] = halves(&turned(token, position, heads.heads + head));
                    let column = width - heads.kv_width() + head * d;
                    values[at] = halves(&table[token as usize * width + column..][..d]);
                }
            }
        }
        let mut tables = BlockTables::default();
        tables.change(&plan);
        let want: Vec<(Vec<f32>, Vec<f32>)> = parallel(rows, |row| {
            let seen: Vec<usize> = tables.seen(&plan, row).map(|slot| slot as usize).collect();
            let (mut queries, mut out) = (Vec::new(), vec![0.0; heads.q_width()]);
            for (head, out) in out.chunks_mut(d).enumerate() {
                let query = turned(plan.tokens[row], plan.positions[row], head);
                let at = |p: usize| seen[p] * heads.kv_heads + head / heads.group();
                let half_query = halves(&query);
                contract::attend(
                    &half_query,
                    scale,
                    params.first_seen(seen.len())..seen.len(),
                    |p| &keys[at(p)],
                    |p| &values[at(p)],
                    out,
                );
                queries.extend(query);
            }
            (queries, out)
        });
        let (queries, want): (Vec<_>, Vec<_>) = want.into_iter().unzip();
        let got: Vec<f32> = b.read(&qkv, rows)?;
        let got: Vec<f32> =
            got.chunks(width).flat_map(|row| row[..heads.q_width()].to_vec()).collect();
        let what = format!("{heads:?}, norms {norms}, window {window:?}, {rows} rows, {requests}");
        self.findings.compare(&format!("write_kv, {what}"), &got, &queries.concat());
        self.compare(&format!("attend, {what}"), &out, rows, &want.concat())
    }
}
