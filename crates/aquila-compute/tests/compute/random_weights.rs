//! Random weights, drawn while a backend packs or copies them, are those that their bytes say.

use aquila_compute::{
    Accumulate, AttentionSpan, Backend, ForwardPlan, HostTensor, PlanBounds, RandomWeights,
};

use crate::made::{backends, bits, made};
use crate::projections::FORMATS;

fn random(name: &str, shape: [usize; 2]) -> HostTensor {
    RandomWeights::new(5).tensor(name, shape.into()).unwrap()
}

/// The same weights as a file would have them.
fn stored(tensor: &HostTensor) -> HostTensor {
    let shape = tensor.shape().to_vec();
    HostTensor::new(tensor.name(), tensor.dtype(), shape, tensor.bytes()).unwrap()
}

#[test]
fn projections_of_random_weights_are_those_of_their_bytes() {
    let (outputs, inputs, rows) = (83, 131, 3);
    let parts = [random("a", [outputs - 7, inputs]), random("b", [7, inputs])];
    let x = made(1, rows * inputs);
    for backend in backends() {
        for format in FORMATS {
            let project = |parts: &[HostTensor]| {
                let weight = backend.pack(parts, format).unwrap();
                let mut input = backend.rows(rows, inputs).unwrap();
                let mut out = backend.rows(rows, outputs).unwrap();
                for (row, values) in x.chunks(inputs).enumerate() {
                    input.row_mut(row).copy_from_slice(values);
                }
                backend.project(&weight, None, &input, rows, Accumulate::Set, &mut out).unwrap();
                bits(&backend.read(&out, rows).unwrap())
            };
            assert_eq!(project(&parts), project(&parts.each_ref().map(stored)), "{format:?}");
        }
    }
}

#[test]
fn tables_of_random_weights_have_their_bytes() {
    // Larger than what a thread copies at a time.
    let (tokens, width) = (2100, 1001);
    let tensor = random("embed", [tokens, width]);
    let want = stored(&tensor).to_f32().unwrap();
    let plan = ForwardPlan {
        tokens: (0..tokens as u32).collect(),
        positions: vec![0; tokens],
        writes: vec![0; tokens],
        spans: vec![AttentionSpan { prefix: 1, ..AttentionSpan::default() }; tokens],
        changes: vec![(0, 1)],
        slots: vec![0],
        ..ForwardPlan::default()
    };
    for backend in backends() {
        let table = backend.table(&tensor).unwrap();
        let mut placed = backend.plan(PlanBounds { rows: tokens, outputs: 0, slots: 1 }).unwrap();
        backend.place(&plan, &mut placed).unwrap();
        let mut rows = backend.rows(tokens, width).unwrap();
        backend.embed(&table, 1.0, &placed, &mut rows).unwrap();
        assert_eq!(backend.read(&rows, tokens).unwrap(), want);
    }
}

#[test]
fn tensors_are_equal_where_all_their_bits_are() {
    let shape = [300, 500];
    let tensor = random("a", shape);
    assert!(tensor.equals(&random("a", shape)) && tensor.equals(&stored(&tensor)));
    assert!(stored(&tensor).equals(&tensor) && stored(&tensor).equals(&stored(&tensor)));
    assert!(!tensor.equals(&random("b", shape)) && !tensor.equals(&random("a", [500, 300])));
    let other = RandomWeights::new(6).tensor("a", shape.into()).unwrap();
    assert!(!tensor.equals(&other));
    let mut bytes = tensor.bytes().to_vec();
    *bytes.last_mut().unwrap() ^= 1;
    let last = HostTensor::new("a", tensor.dtype(), shape.into(), bytes.into()).unwrap();
    assert!(!tensor.equals(&last) && !last.equals(&tensor));
}
