//! What is in the memory of a deferring backend at a moment.

use std::sync::{Arc, Mutex};

use aquila_compute::Backend;
use aquila_compute::cpu::CpuBackend;

type Rows = <CpuBackend as Backend>::Rows;
type Kv = <CpuBackend as Backend>::Kv;
type State = <CpuBackend as Backend>::State;

/// Memory that outlives a pass.
#[derive(Clone)]
pub enum Memory {
    Rows(Arc<Mutex<Rows>>),
    Kv(Arc<Mutex<Kv>>),
    State(Arc<Mutex<State>>),
}

enum Contents {
    Rows(Vec<f32>),
    Kv(Vec<u8>),
    State(Box<State>),
}

/// The contents of all memory.
pub struct Snapshot(Vec<(Memory, Contents)>);

impl Snapshot {
    pub fn take(cpu: &CpuBackend, all: &[Memory]) -> Self {
        Self(all.iter().map(|memory| (memory.clone(), memory.contents(cpu))).collect())
    }

    /// Puts everything back.
    pub fn restore(self, cpu: &CpuBackend) {
        for (memory, contents) in self.0 {
            memory.replace(cpu, contents);
        }
    }

    /// Says where `other`, taken of the same memory, differs.
    pub fn differences(&self, other: &Snapshot) -> Option<String> {
        let pairs = self.0.iter().zip(&other.0);
        let differ = pairs.filter_map(|((_, ours), (_, theirs))| ours.difference(theirs));
        let all: Vec<String> = differ.collect();
        (!all.is_empty()).then(|| all.join("; "))
    }
}

/// The layers and the slots of a store.
fn all_of(cpu: &CpuBackend, kv: &Kv) -> (std::ops::Range<usize>, Vec<u32>) {
    let shape = cpu.kv_shape(kv);
    (0..shape.layers, (0..shape.slots as u32).collect())
}

impl Memory {
    fn contents(&self, cpu: &CpuBackend) -> Contents {
        match self {
            Memory::Rows(rows) => {
                let rows = rows.lock().unwrap();
                Contents::Rows(cpu.read(&rows, rows.capacity()).unwrap())
            }
            Memory::Kv(kv) => {
                let (kv, mut bytes) = (kv.lock().unwrap(), Vec::new());
                let (layers, slots) = all_of(cpu, &kv);
                cpu.read_slots(&kv, layers, &slots, &mut bytes).unwrap();
                Contents::Kv(bytes)
            }
            Memory::State(state) => Contents::State(Box::new(state.lock().unwrap().clone())),
        }
    }

    fn replace(&self, cpu: &CpuBackend, contents: Contents) {
        match (self, contents) {
            (Memory::Rows(rows), Contents::Rows(values)) => {
                let mut rows = rows.lock().unwrap();
                let width = rows.width();
                for (at, row) in values.chunks_exact(width).enumerate() {
                    rows.row_mut(at).copy_from_slice(row);
                }
            }
            (Memory::Kv(kv), Contents::Kv(bytes)) => {
                let mut kv = kv.lock().unwrap();
                let (layers, slots) = all_of(cpu, &kv);
                cpu.write_slots(&mut kv, layers, &slots, &bytes).unwrap();
            }
            (Memory::State(state), Contents::State(before)) => *state.lock().unwrap() = *before,
            _ => unreachable!("memory keeps its kind"),
        }
    }
}

impl Contents {
    fn difference(&self, other: &Contents) -> Option<String> {
        let count = |what: &str, differ: usize, all: usize| {
            (differ > 0).then(|| format!("{differ} of {all} {what}"))
        };
        match (self, other) {
            (Contents::Rows(ours), Contents::Rows(theirs)) => {
                let pairs = ours.iter().zip(theirs);
                let differ = pairs.filter(|(a, b)| a.to_bits() != b.to_bits()).count();
                count("values of rows", differ, ours.len())
            }
            (Contents::Kv(ours), Contents::Kv(theirs)) => {
                let differ = ours.iter().zip(theirs).filter(|(a, b)| a != b).count();
                count("bytes of keys and values", differ, ours.len())
            }
            // Every field, numbers exactly.
            (Contents::State(ours), Contents::State(theirs)) => {
                let differs = format!("{ours:?}") != format!("{theirs:?}");
                differs.then(|| "the rows of requests".into())
            }
            _ => unreachable!("memory keeps its kind"),
        }
    }
}
