//! Memory for weights, keys and values, and rows: zeroed, aligned, lazily backed, on huge pages
//! where the system has them. A refusal is an error, never an abort.

use std::ptr::NonNull;

use crate::{Error, Result};

/// Bytes of a page and of a huge page; larger pages of other systems are multiples of the first.
const PAGE: usize = 64 << 10;
const HUGE: usize = 2 << 20;

/// A private mapping, zero until written, released when dropped.
#[derive(Debug)]
pub(super) struct Region {
    at: NonNull<u8>,
    bytes: usize,
    /// Bytes mapped: `bytes` in whole pages.
    length: usize,
}

// SAFETY: a region owns its memory; shared references only read it.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// Maps `bytes` bytes for `what`.
    pub(super) fn new(bytes: usize, what: &str) -> Result<Self> {
        let refused = || Error::OutOfMemory { what: what.into(), bytes };
        // A zero-length mapping is not allowed, and slices must not exceed isize. Whole pages.
        let length = bytes.max(1).checked_next_multiple_of(PAGE).ok_or_else(refused)?;
        // What is as large as a huge page must begin on one, or it has none at its ends.
        let slack = if length >= HUGE { HUGE } else { 0 };
        let whole = length.checked_add(slack).ok_or_else(refused)?;
        if isize::try_from(whole).is_err() {
            return Err(refused());
        }
        // SAFETY: a new anonymous mapping touches no memory of ours.
        let at = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                whole,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if at == libc::MAP_FAILED {
            return Err(refused());
        }
        let before = if slack == 0 { 0 } else { at.align_offset(HUGE) };
        let start = at.wrapping_byte_add(before);
        // SAFETY: both ends are parts of the mapping just made, outside of what is kept; advice
        // on the rest changes no contents.
        unsafe {
            if before > 0 {
                libc::munmap(at, before);
            }
            if slack > before {
                libc::munmap(start.wrapping_byte_add(length), slack - before);
            }
            #[cfg(target_os = "linux")]
            libc::madvise(start, length, libc::MADV_HUGEPAGE);
        }
        Ok(Self { at: NonNull::new(start.cast()).ok_or_else(refused)?, bytes, length })
    }

    /// Room for `count` elements of `T`, which must be valid when all bytes are zero.
    pub(super) fn of<T>(count: usize, what: &str) -> Result<Self> {
        let size = size_of::<T>();
        let bytes = count
            .checked_mul(size)
            .ok_or_else(|| Error::OutOfMemory { what: what.into(), bytes: usize::MAX })?;
        Self::new(bytes, what)
    }

    /// Where the memory begins; aligned to a page.
    pub(super) fn as_ptr(&self) -> *const u8 {
        self.at.as_ptr()
    }

    /// Where the memory begins, to be written.
    pub(super) fn as_mut_ptr(&mut self) -> *mut u8 {
        self.at.as_ptr()
    }

    /// How much memory there is.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl AsRef<[u8]> for Region {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: the mapping has at least `bytes` bytes, zero or written, and is borrowed.
        unsafe { std::slice::from_raw_parts(self.as_ptr(), self.bytes) }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `new` and nothing borrows it any more.
        unsafe {
            libc::munmap(self.at.as_ptr().cast(), self.length);
        }
    }
}

/// A pointer that tasks of one operation share; each writes a part of its own.
#[derive(Clone, Copy)]
pub(super) struct Shared<T>(*mut T);

// SAFETY: whoever dereferences it vouches for disjoint parts.
unsafe impl<T> Send for Shared<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Shared<T> {}

impl<T> Shared<T> {
    pub(super) fn new(at: *mut T) -> Self {
        Self(at)
    }

    pub(super) fn get(self) -> *mut T {
        self.0
    }
}
