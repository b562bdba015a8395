//! Norms, gated units, embeddings and gathers give the bits of the reference.

use aquila_compute::{
    Activation, AttentionSpan, Backend, ForwardPlan, HostTensor, PlanBounds, math, reference,
};
use proptest::prelude::*;

use crate::made::{backends, bits, made};

const ACTIVATIONS: [Activation; 2] = [Activation::Silu, Activation::GeluTanh];

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
            for activation in ACTIVATIONS {
                backend.gate(activation, &input, rows, &mut out).unwrap();
                for row in 0..rows {
                    let mut want = vec![0.0; width];
                    reference::gate(activation, &x[row * 2 * width..][..2 * width], &mut want);
                    prop_assert_eq!(bits(out.row(row)), bits(&want));
                }
            }
        }
    }

    #[test]
    fn soft_caps_give_the_bits_of_the_reference(width in 1usize..200, rows in 1usize..9, large in 0u32..8, seed in 0u64..99) {
        let scale = 4f32.powi(large as i32);
        let x: Vec<f32> = made(seed, rows * width).iter().map(|x| x * scale).collect();
        for backend in backends() {
            let mut capped = backend.rows(rows, width).unwrap();
            for row in 0..rows {
                capped.row_mut(row).copy_from_slice(&x[row * width..][..width]);
            }
            // The last row is beyond those that are asked for.
            backend.soft_cap(&mut capped, rows - 1, 30.0).unwrap();
            for (row, x) in x.chunks(width).enumerate() {
                let cap = |&x: &f32| if row < rows - 1 { reference::soft_cap(x, 30.0) } else { x };
                let want: Vec<f32> = x.iter().map(cap).collect();
                prop_assert_eq!(bits(capped.row(row)), bits(&want));
            }
        }
    }

    #[test]
    fn rows_are_added_to_rows(width in 1usize..200, rows in 1usize..9, seed in 0u64..99) {
        let (x, y) = (made(seed, rows * width), made(seed + 1, rows * width));
        for backend in backends() {
            let mut input = backend.rows(rows, width).unwrap();
            let mut out = backend.rows(rows, width).unwrap();
            for row in 0..rows {
                input.row_mut(row).copy_from_slice(&x[row * width..][..width]);
                out.row_mut(row).copy_from_slice(&y[row * width..][..width]);
            }
            backend.add(&input, rows - 1, &mut out).unwrap();
            for (row, (x, y)) in x.chunks(width).zip(y.chunks(width)).enumerate() {
                let sum = |(x, y): (&f32, &f32)| if row < rows - 1 { x + y } else { *y };
                let want: Vec<f32> = x.iter().zip(y).map(sum).collect();
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
        backend.gate(Activation::GeluTanh, &input, rows, &mut half).unwrap();
        let read = backend.read(&out, rows).unwrap();
        for row in 0..rows {
            let mut want = vec![0.0; width];
            reference::rms_norm(&x[row * width..][..width], &w, 1e-6, &mut want);
            assert_eq!(bits(&read[row * width..][..width]), bits(&want));
            let mut want = vec![0.0; width / 2];
            reference::gate(Activation::GeluTanh, &x[row * width..][..width], &mut want);
            assert_eq!(bits(half.row(row)), bits(&want));
        }
        // What was normed is added to what it was normed from, and capped.
        backend.add(&out, rows, &mut input).unwrap();
        backend.soft_cap(&mut input, rows, 2.0).unwrap();
        for row in 0..rows {
            let sums = x[row * width..][..width].iter().zip(out.row(row));
            let want: Vec<f32> = sums.map(|(x, y)| reference::soft_cap(x + y, 2.0)).collect();
            assert_eq!(bits(input.row(row)), bits(&want));
        }
    }
}

#[test]
fn activations_give_the_references_bits_at_their_edges() {
    // Gates that reach every branch of exp, by silu and by GELU.
    let gates = [
        0.0,
        -0.0,
        86.9,
        87.0,
        87.1,
        88.0,
        88.1,
        1e4,
        -86.9,
        -87.0,
        -87.5,
        -88.0,
        -89.0,
        -1e4,
        9.9,
        10.0,
        10.1,
        -9.9,
        -10.0,
        -10.1,
        1e20,
        -1e20,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
    ];
    let count = gates.len();
    let row: Vec<f32> = gates.iter().copied().chain(vec![1.0; count]).collect();
    for backend in backends() {
        let mut input = backend.rows(1, 2 * count).unwrap();
        let mut out = backend.rows(1, count).unwrap();
        input.row_mut(0).copy_from_slice(&row);
        for activation in ACTIVATIONS {
            backend.gate(activation, &input, 1, &mut out).unwrap();
            for (&gate, &got) in gates.iter().zip(out.row(0)) {
                let want = reference::activate(activation, gate);
                let same = got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan());
                assert!(
                    same,
                    "{activation:?}({gate}) = {got}, want {want}, {}",
                    backend.describe()
                );
            }
        }
        backend.soft_cap(&mut input, 1, 1.0).unwrap();
        for (&x, &got) in gates.iter().zip(input.row(0)) {
            let want = math::tanh(x);
            let same = got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan());
            assert!(same, "tanh({x}) = {got}, want {want}, {}", backend.describe());
        }
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
        assert_eq!(backend.gather_outputs(&rows, &plan, 0, &mut out).unwrap(), 2);
        assert_eq!(out.row(1), &values[24..30]);
        backend.embed(&table, 1.5, &plan, &mut rows).unwrap();
        let scaled: Vec<f32> = values[54..60].iter().map(|x| x * 1.5).collect();
        assert_eq!(rows.row(0), scaled);

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
