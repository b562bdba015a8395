//! Attention gives the bits of the reference, whatever the slots, tree_slots, rows, chunks, threads
//! and instructions.

use aquila_compute::cpu::CpuBackend;
use aquila_compute::{
    AttentionParams, AttentionSpan, Backend, BlockTables, ForwardPlan, HeadShape, HostTensor,
    KvDtype, KvShape, RopeTable, reference,
};
use proptest::prelude::*;

use crate::made::{backends, bits, made};

/// A request: a chain of committed tokens, then nodes of a draft tree, each with its parent.
#[derive(Debug, Clone)]
struct Request {
    chain: usize,
    parents: Vec<Option<usize>>,
}

impl Request {
    fn rows(&self) -> usize {
        self.chain + self.parents.len()
    }

    /// Ancestors of a node, the node included, from the root down.
    fn path(&self, node: usize) -> Vec<usize> {
        let mut path = vec![node];
        while let Some(parent) = self.parents[path[0]] {
            path.insert(0, parent);
        }
        path
    }

    /// What one row is: (position, positions of the chain that it sees, nodes that it sees).
    fn row(&self, row: usize) -> (usize, usize, Vec<usize>) {
        if row < self.chain {
            return (row, row + 1, Vec::new());
        }
        let path = self.path(row - self.chain);
        (self.chain + path.len() - 1, self.chain, path)
    }
}

#[derive(Clone)]
struct Case {
    heads: HeadShape,
    window: Option<usize>,
    dtype: KvDtype,
    normed: bool,
    rotary: usize,
    requests: Vec<Request>,
    /// Which slot each row of all requests writes.
    slots: Vec<u32>,
    seed: u64,
}

impl Case {
    fn params(&self) -> AttentionParams {
        AttentionParams { heads: self.heads, scale: 0.37, window: self.window }
    }

    fn rope(&self) -> RopeTable {
        let frequencies: Vec<f64> = (0..self.rotary / 2).map(|i| 0.7f64.powi(i as i32)).collect();
        RopeTable::new(400, &frequencies, 1.0)
    }

    fn norms(&self) -> (Vec<f32>, Vec<f32>) {
        (made(self.seed + 7, self.heads.head_dim), made(self.seed + 8, self.heads.head_dim))
    }

    /// The plan of rows `range`, counted over all requests.
    fn plan(&self, range: std::ops::Range<usize>) -> ForwardPlan {
        let mut plan = ForwardPlan::default();
        let mut base = 0;
        for request in &self.requests {
            let slots = &self.slots[base..base + request.rows()];
            let start = plan.add_table(slots[..request.chain].iter().copied());
            for row in 0..request.rows() {
                if !range.contains(&(base + row)) {
                    continue;
                }
                let (position, prefix, nodes) = request.row(row);
                let tree_start = plan.tree_slots.len() as u32;
                plan.tree_slots.extend(nodes.iter().map(|node| slots[request.chain + node]));
                plan.tokens.push(0);
                plan.positions.push(position as u32);
                plan.writes.push(slots[row]);
                plan.spans.push(AttentionSpan {
                    start,
                    prefix: prefix as u32,
                    tree_start,
                    tail: nodes.len() as u32,
                });
            }
            base += request.rows();
        }
        plan
    }

    fn rows(&self) -> usize {
        self.requests.iter().map(Request::rows).sum()
    }

    fn qkv(&self) -> Vec<f32> {
        made(self.seed, self.rows() * self.heads.qkv_width())
    }

    /// What the reference says: every row alone, from a dense store.
    fn expected(&self) -> Vec<Vec<f32>> {
        let (heads, d) = (self.heads, self.heads.head_dim);
        let (rope, (q_norm, k_norm)) = (self.rope(), self.norms());
        let plan = self.plan(0..self.rows());
        let mut tables = BlockTables::default();
        tables.change(&plan);
        let slots = self.slots.iter().max().unwrap() + 1;
        let mut keys = vec![vec![0.0; d]; slots as usize * heads.kv_heads];
        let mut values = keys.clone();
        let mut rows: Vec<Vec<f32>> =
            self.qkv().chunks(heads.qkv_width()).map(<[f32]>::to_vec).collect();
        for (row, qkv) in rows.iter_mut().enumerate() {
            for (head, part) in qkv.chunks_mut(d).take(heads.heads + heads.kv_heads).enumerate() {
                if self.normed {
                    let weight = if head < heads.heads { &q_norm } else { &k_norm };
                    let copy = part.to_vec();
                    reference::rms_norm(&copy, weight, 1e-5, part);
                }
                reference::apply_rope(part, &rope, plan.positions[row] as usize);
            }
            for head in 0..heads.kv_heads {
                let at = plan.writes[row] as usize * heads.kv_heads + head;
                for i in 0..d {
                    let k = heads.q_width() + head * d + i;
                    keys[at][i] = reference::stored(qkv[k], self.dtype);
                    values[at][i] = reference::stored(qkv[k + heads.kv_width()], self.dtype);
                }
            }
        }
        (0..rows.len())
            .map(|row| {
                let mut out = vec![0.0; heads.q_width()];
                reference::attend_row(
                    &plan,
                    &tables,
                    row,
                    &rows[row],
                    self.params(),
                    |slot, head| &keys[slot as usize * heads.kv_heads + head][..],
                    |slot, head| &values[slot as usize * heads.kv_heads + head][..],
                    &mut out,
                );
                out
            })
            .collect()
    }

    /// The same through a backend, `chunk` rows to a pass, in the last of three layers.
    fn got(&self, backend: &CpuBackend, chunk: usize) -> Vec<Vec<f32>> {
        let heads = self.heads;
        let shape = KvShape {
            layers: 3,
            slots: *self.slots.iter().max().unwrap() as usize + 1,
            kv_heads: heads.kv_heads,
            head_dim: heads.head_dim,
            dtype: self.dtype,
        };
        let vector = |values: &[f32]| {
            let tensor = HostTensor::from_f32("norm", vec![values.len()], values).unwrap();
            backend.vector(&[tensor]).unwrap()
        };
        let (q_norm, k_norm) = self.norms();
        let (q_norm, k_norm) = (vector(&q_norm), vector(&k_norm));
        let norms = self.normed.then_some((&q_norm, &k_norm, 1e-5));
        let rope = backend.rope(&self.rope()).unwrap();
        let mut kv = backend.kv(shape).unwrap();
        let all = self.qkv();
        let mut answers = Vec::new();
        for first in (0..self.rows()).step_by(chunk) {
            let last = (first + chunk).min(self.rows());
            let mut plan = backend
                .plan(aquila_compute::PlanBounds { rows: chunk, outputs: chunk, slots: 1000 })
                .unwrap();
            backend.place(&self.plan(first..last), &mut plan).unwrap();
            let mut qkv = backend.rows(chunk, heads.qkv_width()).unwrap();
            for row in first..last {
                let from = &all[row * heads.qkv_width()..][..heads.qkv_width()];
                qkv.row_mut(row - first).copy_from_slice(from);
            }
            let mut out = backend.rows(chunk, heads.q_width()).unwrap();
            backend.write_kv(&mut qkv, heads, norms, &rope, &plan, &mut kv, 2).unwrap();
            backend.attend(&qkv, self.params(), &plan, &kv, 2, &mut out).unwrap();
            answers.extend((0..last - first).map(|row| out.row(row).to_vec()));
        }
        answers
    }

    fn compare(&self, chunks: &[usize]) {
        let expected = self.expected();
        for backend in backends() {
            for &chunk in chunks {
                for (row, (got, want)) in
                    self.got(&backend, chunk).iter().zip(&expected).enumerate()
                {
                    let who = backend.describe();
                    assert_eq!(bits(got), bits(want), "row {row}, chunk {chunk}, {who}");
                }
            }
        }
    }
}

/// Slots in pages of `page`, the pages in an order that the seed decides.
fn paged(rows: usize, page: usize, seed: u64) -> Vec<u32> {
    let pages = rows.div_ceil(page);
    let mut order: Vec<usize> = (0..pages).collect();
    let keys = made(seed, pages);
    order.sort_by(|&a, &b| keys[a].total_cmp(&keys[b]));
    (0..rows).map(|row| (order[row / page] * page + row % page) as u32).collect()
}

#[test]
fn any_chunks_and_pages_give_the_bits_of_the_reference() {
    for (page, dtype) in
        [(1, KvDtype::F32), (3, KvDtype::Bf16), (16, KvDtype::F32), (64, KvDtype::Bf16)]
    {
        let case = Case {
            heads: HeadShape { heads: 6, kv_heads: 2, head_dim: 64 },
            window: None,
            dtype,
            normed: page == 3,
            rotary: 64,
            requests: vec![Request { chain: 150, parents: Vec::new() }],
            slots: paged(150, page, 11),
            seed: page as u64,
        };
        case.compare(&[1, 7, 64, 150]);
    }
}

#[test]
fn trees_of_several_requests_give_the_bits_of_the_reference() {
    let tree = vec![None, Some(0), Some(0), Some(1), Some(3), Some(2), Some(4)];
    let requests = vec![
        Request { chain: 62, parents: tree.clone() },
        Request { chain: 1, parents: Vec::new() },
        Request { chain: 130, parents: tree },
    ];
    let rows = requests.iter().map(Request::rows).sum();
    for (heads, head_dim) in [((8, 1), 128), ((12, 4), 128), ((4, 4), 80), ((9, 1), 20)] {
        let case = Case {
            heads: HeadShape { heads: heads.0, kv_heads: heads.1, head_dim },
            window: None,
            dtype: KvDtype::F32,
            normed: false,
            rotary: head_dim / 2,
            requests: requests.clone(),
            slots: paged(rows, 5, 3),
            seed: head_dim as u64,
        };
        // Chains first, so that a tree's pass finds its prefix written.
        case.compare(&[rows]);
    }
}

/// A long request and a short one, both with a tree, and rows of a chain between them.
fn windowed(window: Option<usize>, dtype: KvDtype) -> Case {
    let tree = vec![None, Some(0), Some(0), Some(1), Some(3), Some(2), Some(4)];
    let requests = vec![
        Request { chain: 200, parents: tree.clone() },
        Request { chain: 3, parents: Vec::new() },
        Request { chain: 62, parents: tree },
    ];
    let rows = requests.iter().map(Request::rows).sum();
    Case {
        heads: HeadShape { heads: 6, kv_heads: 2, head_dim: 40 },
        window,
        dtype,
        normed: false,
        rotary: 40,
        requests,
        slots: paged(rows, 7, 4),
        seed: 21,
    }
}

#[test]
fn windows_of_any_size_give_the_bits_of_the_reference() {
    // Within a tree, within a block, at its edges, over several blocks and over all.
    for window in [1, 2, 5, 16, 17, 63, 64, 65, 100, 128, 129, 199, 207] {
        let dtype = if window % 2 == 0 { KvDtype::F32 } else { KvDtype::Bf16 };
        let case = windowed(Some(window), dtype);
        case.compare(&[case.rows()]);
    }
}

#[test]
fn chunks_and_pages_change_no_bit_within_a_window() {
    for (page, window) in [(1, 70), (16, 33), (64, 64)] {
        let case = Case {
            heads: HeadShape { heads: 4, kv_heads: 2, head_dim: 32 },
            window: Some(window),
            dtype: KvDtype::F32,
            normed: true,
            rotary: 32,
            requests: vec![Request { chain: 230, parents: Vec::new() }],
            slots: paged(230, page, 12),
            seed: page as u64,
        };
        case.compare(&[1, 7, 64, 230]);
    }
}

#[test]
fn a_window_over_all_positions_changes_no_bit() {
    let backend = &backends()[0];
    let without = windowed(None, KvDtype::F32);
    let expected = without.got(backend, without.rows());
    for window in [208, 100_000] {
        let case = Case { window: Some(window), ..without.clone() };
        for (got, want) in case.got(backend, case.rows()).iter().zip(&expected) {
            assert_eq!(bits(got), bits(want), "window {window}");
        }
    }
}

#[test]
fn a_window_is_a_softmax_over_its_positions_alone() {
    let window = 50;
    let case = Case {
        heads: HeadShape { heads: 2, kv_heads: 1, head_dim: 16 },
        window: Some(window),
        dtype: KvDtype::F32,
        normed: false,
        rotary: 2,
        requests: vec![Request { chain: 180, parents: Vec::new() }],
        slots: paged(180, 16, 2),
        seed: 31,
    };
    let (rows, d) = (case.qkv(), 16);
    let part = |row: usize, at: usize| -> Vec<f64> {
        let from = &rows[row * case.heads.qkv_width() + at * d..][..d];
        from.iter().map(|&x| f64::from(x)).collect()
    };
    // Two elements of queries and keys are turned, by as many radians as the position says.
    let turned = |row: usize, at: usize| {
        let (mut x, (sin, cos)) = (part(row, at), (row as f64).sin_cos());
        (x[0], x[1]) = (x[0] * cos - x[1] * sin, x[1] * cos + x[0] * sin);
        x
    };
    let product = |a: Vec<f64>, b: Vec<f64>| -> f64 { a.iter().zip(&b).map(|(a, b)| a * b).sum() };
    for backend in backends() {
        for (row, got) in case.got(&backend, 180).iter().enumerate() {
            let seen = (row + 1).saturating_sub(window)..row + 1;
            for head in 0..2 {
                let score = |p: usize| 0.37 * product(turned(row, head), turned(p, 2));
                let weights: Vec<f64> = seen.clone().map(|p| score(p).exp()).collect();
                let total: f64 = weights.iter().sum();
                for i in 0..d {
                    let values = seen.clone().map(|p| part(p, 3)[i]);
                    let sum: f64 = weights.iter().zip(values).map(|(w, v)| w * v).sum();
                    let (got, want) = (f64::from(got[head * d + i]), sum / total);
                    assert!((got - want).abs() < 1e-5, "row {row}: {got}, want {want}");
                }
            }
        }
    }
}

#[test]
fn what_a_window_leaves_out_is_never_read() {
    let heads = HeadShape { heads: 4, kv_heads: 2, head_dim: 24 };
    let case = Case {
        heads,
        window: Some(70),
        dtype: KvDtype::F32,
        normed: false,
        rotary: 24,
        requests: vec![Request { chain: 200, parents: Vec::new() }],
        slots: paged(200, 16, 9),
        seed: 13,
    };
    let (want, all) = (&case.expected()[199], case.qkv());
    for backend in backends() {
        let shape = KvShape { layers: 1, slots: 208, kv_heads: 2, head_dim: 24, dtype: case.dtype };
        let (rope, mut kv) = (backend.rope(&case.rope()).unwrap(), backend.kv(shape).unwrap());
        let bounds = aquila_compute::PlanBounds { rows: 200, outputs: 200, slots: 400 };
        let mut plan = backend.plan(bounds).unwrap();
        let mut qkv = backend.rows(200, heads.qkv_width()).unwrap();
        let mut out = backend.rows(1, heads.q_width()).unwrap();
        for (row, from) in all.chunks(heads.qkv_width()).enumerate() {
            qkv.row_mut(row).copy_from_slice(from);
        }
        // Position 130 is the first of the 70 that the last row sees.
        (0..130).for_each(|row| qkv.row_mut(row).fill(f32::NAN));
        backend.place(&case.plan(0..200), &mut plan).unwrap();
        backend.write_kv(&mut qkv, heads, None, &rope, &plan, &mut kv, 0).unwrap();
        backend.move_rows(&mut qkv, &[(199, 0)]).unwrap();
        backend.place(&case.plan(199..200), &mut plan).unwrap();
        backend.attend(&qkv, case.params(), &plan, &kv, 0, &mut out).unwrap();
        assert_eq!(bits(out.row(0)), bits(want), "{}", backend.describe());
    }
}

#[test]
fn a_window_of_no_position_is_refused() {
    let case = windowed(Some(0), KvDtype::F32);
    let backend = &backends()[0];
    let shape = KvShape { layers: 1, slots: 300, kv_heads: 2, head_dim: 40, dtype: case.dtype };
    let bounds = aquila_compute::PlanBounds { rows: 1, outputs: 1, slots: 400 };
    let (kv, mut plan) = (backend.kv(shape).unwrap(), backend.plan(bounds).unwrap());
    backend.place(&case.plan(0..1), &mut plan).unwrap();
    let qkv = backend.rows(1, case.heads.qkv_width()).unwrap();
    let mut out = backend.rows(1, case.heads.q_width()).unwrap();
    let error = backend.attend(&qkv, case.params(), &plan, &kv, 0, &mut out).unwrap_err();
    assert!(error.to_string().contains("window"), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    #[test]
    fn any_heads_and_lengths_give_the_bits_of_the_reference(
        kv_heads in 1usize..4,
        group in 1usize..6,
        head_dim in (1usize..45).prop_map(|d| 2 * d),
        chain in 1usize..140,
        bf16: bool,
        normed: bool,
        page in 1usize..20,
        window in prop::option::of(1usize..150),
        seed in 0u64..1000,
    ) {
        let case = Case {
            heads: HeadShape { heads: kv_heads * group, kv_heads, head_dim },
            window,
            dtype: if bf16 { KvDtype::Bf16 } else { KvDtype::F32 },
            normed,
            rotary: head_dim,
            requests: vec![Request { chain, parents: vec![None, Some(0), None] }],
            slots: paged(chain + 3, page, seed),
            seed,
        };
        case.compare(&[chain + 3, 40.min(chain)]);
    }
}

#[test]
fn moved_slots_carry_their_keys_and_values_in_every_layer() {
    let heads = HeadShape { heads: 2, kv_heads: 1, head_dim: 24 };
    for backend in backends() {
        let shape = KvShape { layers: 3, slots: 9, kv_heads: 1, head_dim: 24, dtype: KvDtype::F32 };
        let case = Case {
            heads,
            window: None,
            dtype: KvDtype::F32,
            normed: false,
            rotary: 24,
            requests: vec![Request { chain: 3, parents: Vec::new() }],
            slots: vec![0, 1, 2],
            seed: 5,
        };
        let rope = backend.rope(&case.rope()).unwrap();
        let mut kv = backend.kv(shape).unwrap();
        let mut plan =
            backend.plan(aquila_compute::PlanBounds { rows: 3, outputs: 3, slots: 9 }).unwrap();
        backend.place(&case.plan(0..3), &mut plan).unwrap();
        let all = case.qkv();
        let mut qkv = backend.rows(3, heads.qkv_width()).unwrap();
        for layer in 0..3 {
            for row in 0..3 {
                let from = &all[row * heads.qkv_width()..][..heads.qkv_width()];
                qkv.row_mut(row).copy_from_slice(from);
            }
            backend.write_kv(&mut qkv, heads, None, &rope, &plan, &mut kv, layer).unwrap();
        }
        let mut before = backend.rows(3, heads.q_width()).unwrap();
        backend.attend(&qkv, case.params(), &plan, &kv, 1, &mut before).unwrap();
        // In the order given: 7 gets what was in 1 before 1 is overwritten.
        backend.move_slots(&mut kv, &[(1, 7), (0, 1), (2, 8), (1, 5)]).unwrap();
        let mut moved = case.plan(0..3);
        moved.slots = vec![5, 7, 8];
        backend.place(&moved, &mut plan).unwrap();
        for layer in 0..3 {
            let mut after = backend.rows(3, heads.q_width()).unwrap();
            backend.attend(&qkv, case.params(), &plan, &kv, layer, &mut after).unwrap();
            for row in 0..3 {
                assert_eq!(bits(after.row(row)), bits(before.row(row)), "layer {layer}");
            }
        }
    }
}

#[test]
fn a_block_table_stays_until_a_plan_changes_it() {
    let heads = HeadShape { heads: 2, kv_heads: 1, head_dim: 24 };
    let case = Case {
        heads,
        window: None,
        dtype: KvDtype::F32,
        normed: false,
        rotary: 24,
        requests: vec![Request { chain: 90, parents: Vec::new() }],
        slots: paged(90, 5, 3),
        seed: 6,
    };
    let want = case.expected();
    for backend in backends() {
        let bounds = aquila_compute::PlanBounds { rows: 90, outputs: 90, slots: 400 };
        let mut plan = backend.plan(bounds).unwrap();
        let slots = *case.slots.iter().max().unwrap() as usize + 1;
        let shape = KvShape { layers: 1, slots, kv_heads: 1, head_dim: 24, dtype: KvDtype::F32 };
        let mut kv = backend.kv(shape).unwrap();
        let rope = backend.rope(&case.rope()).unwrap();
        let all = case.qkv();
        let mut qkv = backend.rows(1, heads.qkv_width()).unwrap();
        let mut out = backend.rows(1, heads.q_width()).unwrap();
        // One row a pass, each of which tells the slot of its own row alone, behind another table.
        for row in 0..90 {
            let mut host = case.plan(row..row + 1);
            (host.changes, host.slots) = (Vec::new(), Vec::new());
            host.spans[0].start = 200;
            host.change_table(200 + row, &case.slots[row..row + 1]);
            backend.place(&host, &mut plan).unwrap();
            qkv.row_mut(0).copy_from_slice(&all[row * heads.qkv_width()..][..heads.qkv_width()]);
            backend.write_kv(&mut qkv, heads, None, &rope, &plan, &mut kv, 0).unwrap();
            backend.attend(&qkv, case.params(), &plan, &kv, 0, &mut out).unwrap();
            assert_eq!(bits(out.row(0)), bits(&want[row]), "row {row}");
        }
    }
}

#[test]
fn a_store_that_cannot_be_had_is_an_error() {
    let backend = &backends()[0];
    let shape = KvShape {
        layers: 1 << 20,
        slots: 1 << 30,
        kv_heads: 64,
        head_dim: 128,
        dtype: KvDtype::F32,
    };
    let error = backend.kv(shape).err().unwrap().to_string();
    assert!(error.contains("keys"), "{error}");
}

#[test]
fn rows_that_write_one_slot_leave_the_last_of_them() {
    let heads = HeadShape { heads: 1, kv_heads: 1, head_dim: 16 };
    let case = Case {
        heads,
        window: None,
        dtype: KvDtype::F32,
        normed: false,
        rotary: 16,
        requests: vec![Request { chain: 300, parents: Vec::new() }],
        slots: vec![0; 300],
        seed: 9,
    };
    case.compare(&[300]);
}
