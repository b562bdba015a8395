//! Copies between the device and page-locked memory of the host, without waiting.
//!
//! The one invariant: page-locked memory is not written or freed while a copy of it is under way.

use cudarc::driver::{CudaEvent, DeviceRepr, PinnedHostSlice, ValidAsZeroBits, result};

use super::c_layout::Address;
use super::device::{Device, Memory, failed};
use super::failure::lacking;
use crate::Result;

/// Values of the device in page-locked memory, which grows by powers of two to the most that was
/// ever fetched.
pub(super) struct HostCopy<T> {
    memory: Option<PinnedHostSlice<T>>,
    count: usize,
}

impl<T> Default for HostCopy<T> {
    fn default() -> Self {
        Self { memory: None, count: 0 }
    }
}

impl<T: DeviceRepr + ValidAsZeroBits> HostCopy<T> {
    /// Enqueues a copy of `count` values from the start of `memory`, which are there when the stream
    /// has come so far.
    pub(super) fn fetch(&mut self, device: &Device, memory: &Memory, count: usize) -> Result<()> {
        device.outside_capture("reading")?;
        let bytes = count * size_of::<T>();
        assert!(bytes <= memory.bytes(), "a copy stays within its memory");
        self.count = count;
        if count == 0 {
            return Ok(());
        }
        let lacks = |copy: &PinnedHostSlice<T>| copy.len() < count;
        if self.memory.as_ref().is_none_or(lacks) {
            // What it had may still be written: a round that failed was not waited for.
            if self.memory.is_some() {
                device.catch_up();
            }
            let room = count.next_power_of_two();
            let bytes = room * size_of::<T>();
            // Without flags: write-combined memory, the default, is slow for the host to read.
            // SAFETY: every bit pattern is a value, and none is read before it was fetched.
            let made = unsafe { device.context.alloc_pinned_with_flags::<T>(room, 0) };
            self.memory = Some(made.map_err(lacking("a copy on the host", bytes))?);
        }
        let copy = self.memory.as_mut().expect("it was made");
        let values = copy.as_mut_slice().map_err(failed("reading"))?;
        // SAFETY: the range was checked; the copy is not read or freed before the stream has caught up.
        device.enqueue(&[], || unsafe {
            let stream = device.stream.cu_stream();
            result::memcpy_dtoh_async(&mut values[..count], memory.at(0), stream)
        })
    }

    /// What was fetched last.
    pub(super) fn values(&self) -> &[T] {
        let values = self.memory.as_ref().and_then(|memory| memory.as_slice().ok());
        &values.unwrap_or_default()[..self.count]
    }
}

/// Device memory that the host fills again and again without waiting: two page-locked copies take
/// turns, so that one can be written while the other is still on its way.
pub(super) struct Mailbox {
    pub(super) memory: Memory,
    copies: [PinnedCopy; 2],
    turn: usize,
}

/// Page-locked memory, and the event behind the last copy from it. The event is ours: the one that
/// the memory brings is not recorded once event tracking is off.
struct PinnedCopy {
    words: PinnedHostSlice<u32>,
    sent: CudaEvent,
}

impl Drop for PinnedCopy {
    fn drop(&mut self) {
        // A failed wait means a lost context, which no longer reads this memory.
        let _ = self.sent.synchronize();
    }
}

impl Mailbox {
    /// How many words fit.
    pub(super) fn words(&self) -> usize {
        self.copies[0].words.len()
    }

    /// A mailbox of `words` words.
    pub(super) fn new(device: &Device, what: &str, words: usize) -> Result<Self> {
        let memory = device.allocate(what, words * 4)?;
        let copy = || -> Result<PinnedCopy> {
            // SAFETY: every bit pattern is a u32, and `post` writes what it sends.
            let words = unsafe { device.context.alloc_pinned::<u32>(words.max(4)) }
                .map_err(lacking(what, words * 4))?;
            let sent = device.context.new_event(None).map_err(failed("making an event"))?;
            Ok(PinnedCopy { words, sent })
        };
        Ok(Self { memory, copies: [copy()?, copy()?], turn: 0 })
    }

    /// Has `fill` write words from the start and enqueues the copy of as many as it says. Waits
    /// only where the copy before the last has not left yet.
    pub(super) fn post(
        &mut self,
        device: &Device,
        fill: impl FnOnce(&mut [u32]) -> usize,
    ) -> Result<()> {
        device.outside_capture("placing a plan")?;
        let copy = &mut self.copies[self.turn];
        self.turn = 1 - self.turn;
        copy.sent.synchronize().map_err(failed("waiting for a copy"))?;
        let words = copy.words.as_mut_slice().map_err(failed("writing a copy"))?;
        let used = fill(words);
        device.enqueue(&[], || {
            // SAFETY: the device memory has as many words as the copy, and the copy is not written
            // or freed before the event behind it.
            unsafe {
                result::memcpy_htod_async(
                    self.memory.at(0),
                    &words[..used],
                    device.stream.cu_stream(),
                )
            }?;
            copy.sent.record(&device.stream)
        })
    }

    /// Enqueues the copy of a list of pairs; answers how many there are, and where they will be.
    pub(super) fn post_pairs(
        &mut self,
        device: &Device,
        pairs: &[(u32, u32)],
    ) -> Result<(u32, Address)> {
        self.post(device, |words| {
            for (out, &(from, to)) in words.chunks_exact_mut(2).zip(pairs) {
                out.copy_from_slice(&[from, to]);
            }
            2 * pairs.len()
        })?;
        Ok((pairs.len() as u32, self.memory.at(0)))
    }
}
