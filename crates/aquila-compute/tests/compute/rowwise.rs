//! Norms, gated units, embeddings and gathers give the bits of the reference.

use aquila_compute::{
    Activation, AttentionSpan, Backend, ForwardPlan, HostTensor, PlanBounds, math, reference,
};
use proptest::prelude::*;

use crate::made::{backends, bits, made};

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn norms_give_the_bits_of_the_reference(width in 1usize..200, rows in 1usize..9, seed in 0u64..99) {
        let (x, w) = (made(seed, rows * width), made(seed + 1, width));
        for backend in backends() {
            let weight =
                backend.vector(&[HostTensor::from_f32("w", vec![width], &w).unwrap()]).unwrap();
            let mut input = backend.rows(rows, width).unwrap();
            let mut out = backend.rows(rows, width).unwrap();
            for row in 0..rows {
                input.row_mut(row).copy_from_slice(&x[row * width..][..width]);
            }
            backend.rms_norm(&input, &weight, 1e-6, rows, &mut out).unwrap();
            for row in 0..rows {
                let mut want = vec![0.0; width];
                reference::rms_norm(&x[row * width..][..width], &w, 1e-6, &mut want);
                prop_assert_eq!(bits(out.row(row)), bits(&want));
            }
        }
    }

    #[test]
    fn gated_units_give_the_bits_of_the_reference(width in 1usize..200, rows in 1usize..9, large in 0u32..8, seed in 0u64..99) {
        let scale = 4f32.powi(large as i32);
        let x: Vec<f32> = made(seed, rows * 2 * width).iter().map(|x| x * scale).collect();
        for backend in backends() {
            let mut input = backend.rows(rows, 2 * width).unwrap();
            let mut out = backend.rows(rows, width).unwrap();
            for row in 0..rows {
                input.row_mut(row).copy_from_slice(&x[row * 2 * width..][..2 * width]);
            }
            backend.gate(Activation::Silu, &input, rows, &mut out).unwrap();
            for row in 0..rows {
                let mut want = vec![0.0; width];
                reference::gate(Activation::Silu, &x[row * 2 * width..][..2 * width], &mut want);
                prop_assert_eq!(bits(out.row(row)), bits(&want));
            }
        }
    }
}

#[test]
fn many_rows_over_threads_give_the_references_bits() {
    let (rows, width) = (120, 1000);
    let (x, w) = (made(1, rows * width), made(2, width));
    for backend in backends() {
        let weight =
            backend.vector(&[HostTensor::from_f32("w", vec![width], &w).unwrap()]).unwrap();
        let mut input = backend.rows(rows, width).unwrap();
        let mut out = backend.rows(rows, width).unwrap();
        let mut half = backend.rows(rows, width / 2).unwrap();
        for row in 0..rows {
            input.row_mut(row).copy_from_slice(&x[row * width..][..width]);
        }
        backend.rms_norm(&input, &weight, 1e-6, rows, &mut out).unwrap();
        backend.gate(Activation::Silu, &input, rows, &mut half).unwrap();
        let read = backend.read(&out, rows).unwrap();
        for row in 0..rows {
            let mut want = vec![0.0; width];
            reference::rms_norm(&x[row * width..][..width], &w, 1e-6, &mut want);
            assert_eq!(bits(&read[row * width..][..width]), bits(&want));
            let mut want = vec![0.0; width / 2];
            reference::gate(Activation::Silu, &x[row * width..][..width], &mut want);
            assert_eq!(bits(half.row(row)), bits(&want));
        }
    }
}

#[test]
fn exp_with_overlap_is_exp_at_its_edges() {
    // Through a gated unit: silu(g) * 1 with gates that reach every branch of exp.
    let gates =
        [0.0, -0.0, 86.9, 87.0, 87.1, 88.0, 88.1, 1e4, -86.9, -87.0, -87.5, -88.0, -89.0, -1e4];
    let row: Vec<f32> = gates.iter().copied().chain([1.0; 14]).collect();
    for backend in backends() {
        let mut input = backend.rows(1, 28).unwrap();
        let mut out = backend.rows(1, 14).unwrap();
        input.row_mut(0).copy_from_slice(&row);
        backend.gate(Activation::Silu, &input, 1, &mut out).unwrap();
        let want: Vec<f32> = gates.iter().map(|&g| math::silu(g) * 1.0).collect();
        assert_eq!(bits(out.row(0)), bits(&want), "{}", backend.describe());
    }
}

#[test]
fn embeddings_are_read_and_outputs_gathered_by_the_plan() {
    let values = made(4, 10 * 6);
    for backend in backends() {
        let tensor = HostTensor::from_f32("embed", vec![10, 6], &values).unwrap();
        let table = backend.table(&tensor).unwrap();
        let mut host = ForwardPlan {
            tokens: vec![9, 0, 4],
            positions: vec![0, 1, 2],
            writes: vec![0, 1, 2],
            spans: vec![AttentionSpan { prefix: 1, ..AttentionSpan::default() }; 3],
            changes: vec![(0, 1)],
            slots: vec![0],
            tree_slots: Vec::new(),
            outputs: vec![0, 2],
            sources: Vec::new(),
            destinations: Vec::new(),
        };
        let mut plan = backend.plan(PlanBounds { rows: 3, outputs: 3, slots: 9 }).unwrap();
        backend.place(&host, &mut plan).unwrap();
        let mut rows = backend.rows(3, 6).unwrap();
        let mut out = backend.rows(2, 6).unwrap();
        backend.embed(&table, 1.0, &plan, &mut rows).unwrap();
        assert_eq!(rows.row(0), &values[54..60]);
        assert_eq!(rows.row(1), &values[0..6]);
        assert_eq!(backend.gather_outputs(&rows, &plan, &mut out).unwrap(), 2);
        assert_eq!(out.row(1), &values[24..30]);

        host.tokens[1] = 10;
        backend.place(&host, &mut plan).unwrap();
        let error = backend.embed(&table, 1.0, &plan, &mut rows).unwrap_err().to_string();
        assert!(error.contains("token 10"), "{error}");
    }
}

#[test]
fn a_plan_that_refers_beyond_itself_is_refused() {
    let backend = &backends()[0];
    let mut plan = backend.plan(PlanBounds { rows: 3, outputs: 3, slots: 9 }).unwrap();
    let host = ForwardPlan {
        tokens: vec![1],
        positions: vec![0],
        writes: vec![0],
        spans: vec![AttentionSpan { prefix: 2, ..AttentionSpan::default() }],
        changes: vec![(0, 1)],
        slots: vec![0],
        ..ForwardPlan::default()
    };
    assert!(backend.place(&host, &mut plan).is_err());
}
