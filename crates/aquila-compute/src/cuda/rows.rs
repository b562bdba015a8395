//! Rows on the device, in two forms.

use super::arguments;
use super::device::{Device, Memory};
use crate::{Error, Result};

/// Rows begin at multiples of this many values, as many as two steps of a tensor core take. What is
/// between the width and the next multiple stays zero.
const ALIGN: usize = 32;

/// f32 rows on the device, and the same rounded to bfloat16 where tensor cores read them. Every
/// operation that writes one form writes the other.
pub struct CudaRows {
    pub(super) values: Memory,
    pub(super) halves: Option<Memory>,
    pub(super) capacity: usize,
    pub(super) width: usize,
    pub(super) stride: usize,
}

impl CudaRows {
    pub(super) fn new(
        device: &Device,
        capacity: usize,
        width: usize,
        with_halves: bool,
    ) -> Result<Self> {
        let stride = width.next_multiple_of(ALIGN);
        let values = device.allocate("rows", capacity * stride * 4)?;
        let halves = match with_halves {
            true => Some(device.allocate("rows", capacity * stride * 2)?),
            false => None,
        };
        Ok(Self { values, halves, capacity, width, stride })
    }

    /// Refuses what does not fit in the rows.
    pub(super) fn hold(&self, what: &str, rows: usize, width: usize) -> Result<()> {
        if rows <= self.capacity && width <= self.width {
            return Ok(());
        }
        Err(Error::Tensor(format!(
            "{what}: {rows} rows of {width} do not fit in {} rows of {}",
            self.capacity, self.width
        )))
    }

    /// As kernels take them.
    pub(super) fn parts(&self) -> arguments::Rows {
        self.parts_from(0)
    }

    /// The rows from `first` on.
    pub(super) fn parts_from(&self, first: usize) -> arguments::Rows {
        arguments::Rows {
            values: self.values.at(4 * first * self.stride),
            halves: self.halves.as_ref().map_or(0, |halves| halves.at(2 * first * self.stride)),
            stride: self.stride as u32,
            width: self.width as u32,
        }
    }

    /// All rows, from a column on.
    pub(super) fn parts_from_column(&self, column: usize) -> arguments::Rows {
        let rows = self.parts();
        arguments::Rows {
            values: self.values.at(4 * column),
            halves: self.halves.as_ref().map_or(0, |halves| halves.at(2 * column)),
            width: (self.width - column) as u32,
            ..rows
        }
    }

    /// The memory of both forms.
    pub(super) fn memory(&self) -> impl Iterator<Item = &Memory> {
        [Some(&self.values), self.halves.as_ref()].into_iter().flatten()
    }
}
