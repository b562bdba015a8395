//! f32 rows in host memory.
//!
//! Rows begin an odd number of cache lines apart, so that a tile of rows spreads over the sets of
//! a cache whatever the width.

use std::ops::Range;

use super::memory::{Region, Shared};
use super::share::check;
use crate::Result;

/// f32 rows in host memory.
pub struct CpuRows {
    width: usize,
    stride: usize,
    capacity: usize,
    region: Region,
}

impl CpuRows {
    pub(super) fn new(capacity: usize, width: usize) -> Result<Self> {
        let stride = (width.div_ceil(16) | 1) * 16;
        let region = Region::of::<f32>(capacity.saturating_mul(stride), "rows of activations")?;
        Ok(Self { width, stride, capacity, region })
    }

    /// The width of a row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// How many rows there are.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// One row.
    pub fn row(&self, row: usize) -> &[f32] {
        assert!(row < self.capacity, "row {row} of {}", self.capacity);
        // SAFETY: the region holds `capacity` rows of `stride >= width` values.
        unsafe { std::slice::from_raw_parts(self.as_ptr().add(row * self.stride), self.width) }
    }

    /// One row, to be written.
    pub fn row_mut(&mut self, row: usize) -> &mut [f32] {
        assert!(row < self.capacity, "row {row} of {}", self.capacity);
        let at = self.region.as_mut_ptr().cast::<f32>();
        // SAFETY: as in `row`, and `self` is borrowed for writing.
        unsafe { std::slice::from_raw_parts_mut(at.add(row * self.stride), self.width) }
    }

    /// The columns from `first` on that take `count` values, if rows are that wide.
    pub(super) fn columns(&self, first: usize, count: usize) -> Result<Range<usize>> {
        let end = first + count;
        check(end <= self.width, || {
            format!("columns up to {end} do not fit rows of {}", self.width)
        })?;
        Ok(first..end)
    }

    /// Copies rows of `input`: of each pair of places, the first is read and the second written.
    pub(super) fn copy_rows(
        &mut self,
        input: &CpuRows,
        places: impl Iterator<Item = (usize, usize)>,
    ) -> Result<()> {
        check(input.width == self.width, || {
            format!("rows of {} do not fit rows of {}", input.width, self.width)
        })?;
        places.for_each(|(from, to)| self.row_mut(to).copy_from_slice(input.row(from)));
        Ok(())
    }

    /// Copies a row to another.
    pub(super) fn move_row(&mut self, from: usize, to: usize) {
        let count = self.capacity;
        assert!(from < count && to < count, "rows {from} and {to} of {count}");
        let at = self.region.as_mut_ptr().cast::<f32>();
        // SAFETY: both rows are within the region, which is borrowed for writing.
        unsafe { std::ptr::copy(at.add(from * self.stride), at.add(to * self.stride), self.width) }
    }

    pub(super) fn stride(&self) -> usize {
        self.stride
    }

    pub(super) fn as_ptr(&self) -> *const f32 {
        self.region.as_ptr().cast()
    }

    pub(super) fn shared(&mut self) -> SharedRows {
        SharedRows {
            at: Shared::new(self.region.as_mut_ptr().cast()),
            width: self.width,
            stride: self.stride,
            capacity: self.capacity,
        }
    }
}

/// Rows that the tasks of one operation write, each its own.
#[derive(Clone, Copy)]
pub(super) struct SharedRows {
    at: Shared<f32>,
    width: usize,
    stride: usize,
    capacity: usize,
}

impl SharedRows {
    pub(super) fn as_mut_ptr(self) -> *mut f32 {
        self.at.get()
    }

    /// One row, to be written.
    ///
    /// # Safety
    /// No other task touches this row, and the rows outlive the operation.
    pub(super) unsafe fn row_mut<'a>(self, row: usize) -> &'a mut [f32] {
        assert!(row < self.capacity, "row {row} of {}", self.capacity);
        // SAFETY: within the rows, and vouched for by the caller.
        unsafe { std::slice::from_raw_parts_mut(self.at.get().add(row * self.stride), self.width) }
    }
}
