//! What a round keeps is compacted everywhere alike.

use aquila_compute::cpu::{CpuBackend, IsaChoice};
use aquila_compute::{AttentionSpan, Backend, ForwardPlan, HostTensor, PlanBounds};
use aquila_spec::Kept;
use proptest::prelude::*;

/// Rows of the backend that hold their own number.
fn numbered(backend: &CpuBackend, rows: usize) -> <CpuBackend as Backend>::Rows {
    let values: Vec<f32> = (0..rows).map(|row| row as f32).collect();
    let table = HostTensor::from_f32("numbers", vec![rows, 1], &values).unwrap();
    let table = backend.table(&table).unwrap();
    let mut plan = ForwardPlan::default();
    for row in 0..rows as u32 {
        plan.tokens.push(row);
        plan.positions.push(0);
        plan.writes.push(row);
        plan.add_table([row]);
        plan.spans.push(AttentionSpan { start: row, prefix: 1, ..AttentionSpan::default() });
    }
    let mut placed = backend.plan(PlanBounds { rows, outputs: rows, slots: rows }).unwrap();
    backend.place(&plan, &mut placed).unwrap();
    let mut out = backend.rows(rows, 1).unwrap();
    backend.embed(&table, 1.0, &placed, &mut out).unwrap();
    out
}

/// Trees of one round: how many nodes each has, and the path that is kept of it.
fn trees() -> impl Strategy<Value = Vec<(usize, Vec<usize>)>> {
    let tree = (1usize..12).prop_flat_map(|nodes| {
        let path = proptest::collection::vec(any::<bool>(), nodes - 1).prop_map(|keep| {
            // Paths lead from the root to later and later nodes.
            let below = keep.iter().enumerate().filter(|(_, keep)| **keep);
            std::iter::once(0).chain(below.map(|(at, _)| at + 1)).collect()
        });
        (Just(nodes), path)
    });
    proptest::collection::vec(tree, 0..5)
}

proptest! {
    #[test]
    fn every_store_is_compacted_with_the_same_moves(trees in trees()) {
        let backend = CpuBackend::new(IsaChoice::Auto, 1).unwrap();
        let total: usize = trees.iter().map(|(nodes, _)| nodes).sum();
        // Slots lie in no order and have gaps.
        let slots: Vec<u32> = (0..total as u32).rev().map(|row| 3 * row + 1).collect();
        let mut kept = Kept::default();
        let mut first = 0;
        for (nodes, path) in &trees {
            kept.path(path, &slots[first..first + nodes], first);
            first += nodes;
        }
        // A store with a row for each slot, and one with a row for each row of the pass.
        let mut marks = vec![u32::MAX; 3 * total + 2];
        for (row, &slot) in slots.iter().enumerate() {
            marks[slot as usize] = row as u32;
        }
        for &(from, to) in &kept.slots {
            marks[to as usize] = marks[from as usize];
        }
        let mut hidden = numbered(&backend, total.max(1));
        backend.move_rows(&mut hidden, &kept.rows).unwrap();

        let hidden = backend.read(&hidden, total.max(1)).unwrap();
        let mut first = 0;
        for (nodes, path) in &trees {
            for (place, node) in path.iter().enumerate() {
                let want = (first + node) as u32;
                prop_assert_eq!(marks[slots[first + place] as usize], want);
                prop_assert_eq!(hidden[first + place], want as f32);
            }
            first += nodes;
        }
        // Exactly the nodes that are not in their places move: a stride of the setting's width or
        // a count of all nodes would move others.
        let moved: usize = trees
            .iter()
            .map(|(_, path)| path.iter().enumerate().filter(|(place, node)| place != *node).count())
            .sum();
        prop_assert_eq!(kept.rows.len(), moved);
        prop_assert_eq!(kept.slots.len(), moved);
    }
}

#[test]
fn a_chain_is_kept_without_any_move() {
    let mut kept = Kept::default();
    kept.path(&[0, 1, 2, 3], &[9, 4, 7, 2], 5);
    assert_eq!(kept, Kept::default());
}
