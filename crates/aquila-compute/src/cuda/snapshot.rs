//! What is in the device's memory at a moment, on the host: what a check compares of a graph that was
//! replayed and the operations that it was captured from.
//!
//! The one invariant: it has all memory that a pass may write and a later operation may read, whether
//! a graph names it or a row of the state does.

use super::device::{Device, Memory};
use crate::Result;

/// Copies of the memory that checks compare.
pub(super) struct Snapshot {
    copies: Vec<(Memory, Vec<u8>)>,
}

impl Snapshot {
    /// Waits for all that was enqueued and copies what is there then.
    pub(super) fn take(device: &Device) -> Result<Self> {
        let mut copies = Vec::new();
        for memory in device.compared() {
            let mut bytes = vec![0; memory.bytes()];
            // SAFETY: as much is there.
            unsafe { device.read_at(memory.at(0), &mut bytes)? };
            copies.push((memory, bytes));
        }
        Ok(Self { copies })
    }

    /// Puts back what has changed by the time of `later`.
    pub(super) fn restore(self, device: &Device, later: &Snapshot) -> Result<()> {
        for (memory, before, _) in self.changes(later) {
            device.write(memory, 0, before)?;
        }
        Ok(())
    }

    /// Says what `other`, taken of the same memory, has otherwise.
    pub(super) fn differences(&self, other: &Snapshot) -> Option<String> {
        let all: Vec<String> = self
            .changes(other)
            .map(|(memory, ours, theirs)| {
                let differ = |at: &usize| ours[*at] != theirs[*at];
                let (count, first) = (
                    (0..ours.len()).filter(differ).count(),
                    (0..ours.len()).find(differ).unwrap_or_default(),
                );
                let (what, bytes) = (memory.what(), ours.len());
                format!("{count} of {bytes} bytes of {what}, from byte {first} on")
            })
            .collect();
        (!all.is_empty()).then(|| all.join("; "))
    }

    /// The memory whose contents differ, with those here and those of `other`.
    fn changes<'a>(
        &'a self,
        other: &'a Snapshot,
    ) -> impl Iterator<Item = (&'a Memory, &'a [u8], &'a [u8])> {
        let pairs = self.copies.iter().zip(&other.copies);
        pairs
            .filter(|((_, ours), (_, theirs))| ours != theirs)
            .map(|((memory, ours), (_, theirs))| (memory, ours.as_slice(), theirs.as_slice()))
    }
}
