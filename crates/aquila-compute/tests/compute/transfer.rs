//! Rows that leave a backend and come to another: the bits stay, slots and stores differ.

use aquila_compute::cpu::{CpuBackend, IsaChoice};
use aquila_compute::{Backend, Error, KvDtype, KvShape};

/// Bytes that no two rows share.
fn bytes(shape: KvShape, layers: usize, slots: usize) -> Vec<u8> {
    let count = layers * slots * shape.bytes_per_layer();
    (0..count).map(|at| (at * 31 + at / 251) as u8).collect()
}

fn shapes() -> impl Iterator<Item = KvShape> {
    // Heads as wide as the store's units, narrower and wider.
    let sizes = [(3, 2, 16), (2, 1, 24), (1, 3, 64), (4, 1, 7)];
    let dtypes = [KvDtype::F32, KvDtype::Bf16];
    dtypes.into_iter().flat_map(move |dtype| {
        sizes.map(|(layers, kv_heads, head_dim)| KvShape {
            layers,
            slots: 20,
            kv_heads,
            head_dim,
            dtype,
        })
    })
}

#[test]
fn rows_are_read_as_they_were_written() {
    let backend = CpuBackend::new(IsaChoice::Auto, 1).unwrap();
    for shape in shapes() {
        let mut kv = backend.kv(shape).unwrap();
        assert_eq!(backend.kv_shape(&kv), shape);
        let (all, slots) = (0..shape.layers, [3, 4, 5, 19, 0]);
        let written = bytes(shape, shape.layers, slots.len());
        backend.write_slots(&mut kv, all.clone(), &slots, &written).unwrap();
        let mut read = vec![7];
        backend.read_slots(&kv, all.clone(), &slots, &mut read).unwrap();
        assert_eq!(read[0], 7, "what was there stays");
        assert_eq!(read[1..], written, "{shape:?}");

        // Layer by layer and slot by slot, in another order.
        let row = shape.bytes_per_layer() / 2;
        for layer in all {
            for at in [4, 1, 0, 3, 2] {
                let mut one = Vec::new();
                backend.read_slots(&kv, layer..layer + 1, &slots[at..at + 1], &mut one).unwrap();
                let keys = 2 * layer * slots.len() * row;
                let values = keys + slots.len() * row;
                assert_eq!(one[..row], written[keys + at * row..][..row], "keys, {shape:?}");
                assert_eq!(one[row..], written[values + at * row..][..row], "values, {shape:?}");
            }
        }
        let mut others = Vec::new();
        backend.read_slots(&kv, 0..shape.layers, &[1, 2, 6, 18], &mut others).unwrap();
        assert!(others.iter().all(|&byte| byte == 0), "other slots stay as they were");
    }
}

#[test]
fn parts_that_a_store_does_not_have_are_refused() {
    let backend = CpuBackend::new(IsaChoice::Auto, 1).unwrap();
    let shape = shapes().next().unwrap();
    let mut kv = backend.kv(shape).unwrap();
    let right = bytes(shape, 1, 2);
    let mut write = |layers, slots: &[u32], bytes: &[u8]| {
        backend.write_slots(&mut kv, layers, slots, bytes).map_err(|error| match error {
            Error::Tensor(why) => why,
            other => panic!("{other}"),
        })
    };
    assert_eq!(write(2..3, &[0, 1], &right), Ok(()));
    let why = write(3..4, &[0, 1], &right).unwrap_err();
    assert_eq!(why, "layers 3..4 of 3");
    let why = write(0..1, &[0, 20], &right).unwrap_err();
    assert_eq!(why, "slot 20 of 20");
    let why = write(0..1, &[0, 1], &right[1..]).unwrap_err();
    assert!(why.ends_with("bytes of keys and values, not 512"), "{why}");
    assert!(backend.read_slots(&kv, 0..4, &[0], &mut Vec::new()).is_err());
    let mut rows = backend.rows(2, 3).unwrap();
    backend.write_row(&mut rows, 1, &[1.0, -0.0, 3.0]).unwrap();
    let row: Vec<u32> = backend.read_row(&rows, 1).unwrap().iter().map(|x| x.to_bits()).collect();
    assert_eq!(row, [1.0f32, -0.0, 3.0].map(f32::to_bits));
    assert!(backend.write_row(&mut rows, 2, &[0.0; 3]).is_err());
    assert!(backend.write_row(&mut rows, 0, &[0.0; 4]).is_err());
    assert!(backend.read_row(&rows, 2).is_err());
}
