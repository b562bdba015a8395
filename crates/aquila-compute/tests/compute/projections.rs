//! A projection gives the bits of the reference, whatever the rows, threads and instructions.

use aquila_compute::cpu::{CpuBackend, Isa, IsaChoice};
use aquila_compute::{Accumulate, Activation, Backend, HostTensor, WeightFormat, reference};
use half::bf16;
use proptest::prelude::*;

use crate::made::{backends, bits, made};

/// What the reference says, output by output.
pub fn expected(
    weights: &[f32],
    inputs: usize,
    format: WeightFormat,
    x: &[f32],
    bias: Option<&[f32]>,
    accumulate: Accumulate,
    before: &[f32],
) -> Vec<f32> {
    let mut out = before.to_vec();
    for (n, (row, out)) in weights.chunks(inputs).zip(&mut out).enumerate() {
        let value = match format {
            WeightFormat::F32 => reference::project(x, row),
            WeightFormat::Bf16 => {
                let row: Vec<f32> = row.iter().map(|&w| bf16::from_f32(w).to_f32()).collect();
                reference::project(x, &row)
            }
            WeightFormat::Int8 => {
                let groups: Vec<_> = row.chunks(32).map(reference::quantize_weights).collect();
                reference::project_int8(x, &groups)
            }
        };
        reference::accumulate(value, bias.map(|b| b[n]), accumulate, out);
    }
    out
}

pub const FORMATS: [WeightFormat; 3] = [WeightFormat::Bf16, WeightFormat::F32, WeightFormat::Int8];

#[derive(Clone, Copy)]
struct Case {
    inputs: usize,
    outputs: usize,
    rows: usize,
    format: WeightFormat,
    accumulate: Accumulate,
    biased: bool,
    seed: u64,
}

fn compare(backends: &[CpuBackend], case: Case) {
    let Case { inputs, outputs, rows, format, accumulate, biased, seed } = case;
    let weights = made(seed, outputs * inputs);
    let bias = biased.then(|| made(seed + 1, outputs));
    // Rows that are wider than the projection needs must keep what is beyond it.
    let (in_width, out_width) = (inputs + 3, outputs + 5);
    let x = made(seed + 2, rows * in_width);
    let before = made(seed + 3, rows * out_width);
    for backend in backends {
        // Two parts, joined at an output that is no multiple of a panel.
        let cut = outputs / 2;
        let part = |name: &str, range: std::ops::Range<usize>| {
            let values = &weights[range.start * inputs..range.end * inputs];
            HostTensor::from_f32(name, vec![range.len(), inputs], values).unwrap()
        };
        let parts = [part("first", 0..cut), part("second", cut..outputs)];
        let weight = backend.pack(&parts, format).unwrap();
        assert_eq!(weight.bytes(), CpuBackend::packed_bytes(outputs, inputs, format));
        let bias_vector = bias.as_ref().map(|b| {
            backend.vector(&[HostTensor::from_f32("bias", vec![outputs], b).unwrap()]).unwrap()
        });
        let mut input = backend.rows(rows, in_width).unwrap();
        let mut out = backend.rows(rows, out_width).unwrap();
        for row in 0..rows {
            input.row_mut(row).copy_from_slice(&x[row * in_width..][..in_width]);
            out.row_mut(row).copy_from_slice(&before[row * out_width..][..out_width]);
        }
        backend.project(&weight, bias_vector.as_ref(), &input, rows, accumulate, &mut out).unwrap();
        for row in 0..rows {
            let mut want = before[row * out_width..][..out_width].to_vec();
            let x = &x[row * in_width..][..inputs];
            let some = expected(
                &weights,
                inputs,
                format,
                x,
                bias.as_deref(),
                accumulate,
                &want[..outputs],
            );
            want[..outputs].copy_from_slice(&some);
            assert_eq!(
                bits(out.row(row)),
                bits(&want),
                "{inputs}x{outputs} {format:?}, row {row} of {rows}, {}",
                backend.describe()
            );
        }
    }
}

#[test]
fn every_row_count_to_64_gives_the_references_bits() {
    let backends = backends();
    for rows in 1..=64 {
        for format in FORMATS {
            let (inputs, outputs, seed) = (70, 83, rows as u64);
            let accumulate = Accumulate::Set;
            compare(
                &backends,
                Case { inputs, outputs, rows, format, accumulate, biased: false, seed },
            );
        }
    }
}

#[test]
fn inputs_of_several_blocks_give_the_bits_of_the_reference() {
    let backends = backends();
    for rows in [1, 2, 5, 13, 29] {
        for format in FORMATS {
            let (inputs, outputs, seed) = (1301, 51, rows as u64);
            let accumulate = Accumulate::Add;
            compare(
                &backends,
                Case { inputs, outputs, rows, format, accumulate, biased: true, seed },
            );
        }
    }
}

#[test]
fn a_product_over_all_threads_gives_the_references_bits() {
    let backends = backends();
    for rows in [1, 3, 8] {
        for format in FORMATS {
            let (inputs, outputs, seed) = (512, 1000, rows as u64);
            let accumulate = Accumulate::Set;
            compare(
                &backends,
                Case { inputs, outputs, rows, format, accumulate, biased: true, seed },
            );
        }
    }
}

#[test]
fn a_gated_projection_gives_the_bits_of_its_two_steps() {
    let backends = backends();
    // Gates that fill panels and gates that do not, few and enough for all threads.
    for (inputs, gates) in [(70, 48), (70, 41), (512, 496)] {
        for rows in [1, 2, 3, 4, 7, 13, 29] {
            for (format, biased) in FORMATS.into_iter().zip([false, true, true]) {
                gated(&backends, inputs, gates, rows, format, biased);
            }
        }
    }
}

fn gated(
    backends: &[CpuBackend],
    inputs: usize,
    gates: usize,
    rows: usize,
    format: WeightFormat,
    biased: bool,
) {
    let (outputs, seed) = (2 * gates, rows as u64);
    let activation = if rows.is_multiple_of(2) { Activation::Silu } else { Activation::GeluTanh };
    let (weights, x) = (made(seed, outputs * inputs), made(seed + 2, rows * inputs));
    let bias = biased.then(|| made(seed + 1, outputs));
    for backend in backends {
        let tensor = HostTensor::from_f32("both", vec![outputs, inputs], &weights).unwrap();
        let weight = backend.pack(&[tensor], format).unwrap();
        let mut input = backend.rows(rows, inputs).unwrap();
        for row in 0..rows {
            input.row_mut(row).copy_from_slice(&x[row * inputs..][..inputs]);
        }
        let mut both = backend.rows(rows, outputs).unwrap();
        let mut out = backend.rows(rows, gates).unwrap();
        backend
            .project_gated(&weight, bias.as_ref(), activation, &input, rows, &mut both, &mut out)
            .unwrap();
        for (row, x) in x.chunks(inputs).enumerate() {
            let zeros = vec![0.0; outputs];
            let both =
                expected(&weights, inputs, format, x, bias.as_deref(), Accumulate::Set, &zeros);
            let mut want = vec![0.0; gates];
            reference::gate(activation, &both, &mut want);
            let on = backend.describe();
            assert_eq!(
                bits(out.row(row)),
                bits(&want),
                "{inputs}x{gates} {format:?}, row {row} of {rows}, {on}"
            );
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn odd_sizes_give_the_bits_of_the_reference(
        inputs in 1usize..140,
        outputs in 1usize..90,
        rows in 1usize..20,
        format in prop::sample::select(&FORMATS),
        add: bool,
        biased: bool,
        seed in 0u64..1000,
    ) {
        let accumulate = if add { Accumulate::Add } else { Accumulate::Set };
        compare(&backends(), Case { inputs, outputs, rows, format, accumulate, biased, seed });
    }
}

#[test]
fn matrices_that_do_not_fit_are_refused_by_name() {
    let backend = CpuBackend::new(IsaChoice::Only(Isa::Portable), 1).unwrap();
    let a = HostTensor::from_f32("wide", vec![2, 3], &[0.0; 6]).unwrap();
    let b = HostTensor::from_f32("narrow", vec![2, 2], &[0.0; 4]).unwrap();
    let error = backend.pack(&[a, b], WeightFormat::Bf16).err().unwrap().to_string();
    assert!(error.contains("narrow") && error.contains("wide"), "{error}");
    assert!(backend.pack(&[], WeightFormat::Bf16).is_err());
}
