//! Rows of the device on their way from and to other machines: keys and values through page-locked
//! memory of the host, and single rows.

use std::ops::Range;

use cudarc::driver::{PinnedHostSlice, result};

use super::device::{Device, Memory, failed};
use super::failure::lacking;
use super::memory::CudaKv;
use super::rows::CudaRows;
use crate::{Error, Result};

/// Bytes of page-locked memory. A part of a store that has more goes in pieces.
const STAGING: usize = 8 << 20;

/// Page-locked memory that rows pass through, made when it is first needed.
#[derive(Default)]
pub(super) struct Staging {
    memory: Option<PinnedHostSlice<u8>>,
}

/// Bytes that lie side by side on the device.
struct Run {
    address: cudarc::driver::sys::CUdeviceptr,
    bytes: usize,
}

impl Staging {
    fn bytes(&mut self, device: &Device) -> Result<&mut [u8]> {
        if self.memory.is_none() {
            // Without flags: write-combined memory, the default, is slow for the host to read.
            // SAFETY: every bit pattern is a byte, and none is read before it was written.
            let made = unsafe { device.context.alloc_pinned_with_flags::<u8>(STAGING, 0) };
            self.memory = Some(made.map_err(lacking("rows on their way", STAGING))?);
        }
        let memory = self.memory.as_mut().expect("it was made");
        memory.as_mut_slice().map_err(failed("reading"))
    }

    /// Waits for all that was enqueued and copies keys and values to the end of `out`.
    pub(super) fn read_slots(
        &mut self,
        device: &Device,
        kv: &CudaKv,
        layers: Range<usize>,
        slots: &[u32],
        out: &mut Vec<u8>,
    ) -> Result<()> {
        device.outside_capture("reading keys and values")?;
        kv.shape.check_part(&layers, slots)?;
        let staging = self.bytes(device)?;
        let mut used = 0;
        let mut flush = |used: &mut usize, staging: &[u8]| -> Result<()> {
            device.stream.synchronize().map_err(failed("waiting for the device"))?;
            out.extend_from_slice(&staging[..*used]);
            *used = 0;
            Ok(())
        };
        for run in runs(kv, layers, slots)? {
            if used + run.bytes > staging.len() {
                flush(&mut used, staging)?;
            }
            let to = &mut staging[used..used + run.bytes];
            // SAFETY: slots and layers were checked, and the copy lives until it was flushed.
            let copied = device.enqueue(&[], || unsafe {
                result::memcpy_dtoh_async(to, run.address, device.stream.cu_stream())
            });
            copied.inspect_err(|_| device.catch_up())?;
            used += run.bytes;
        }
        flush(&mut used, staging)
    }

    /// Copies keys and values to the device.
    pub(super) fn write_slots(
        &mut self,
        device: &Device,
        kv: &CudaKv,
        layers: Range<usize>,
        slots: &[u32],
        bytes: &[u8],
    ) -> Result<()> {
        device.outside_capture("writing keys and values")?;
        kv.shape.check_bytes(&layers, slots, bytes)?;
        let staging = self.bytes(device)?;
        let wait = || device.stream.synchronize().map_err(failed("waiting for the device"));
        let (mut used, mut done) = (0, 0);
        for run in runs(kv, layers, slots)? {
            if used + run.bytes > staging.len() {
                wait()?;
                used = 0;
            }
            let from = &mut staging[used..used + run.bytes];
            from.copy_from_slice(&bytes[done..done + run.bytes]);
            // SAFETY: slots and layers were checked, and the copy does not change until the
            // device has caught up.
            let copied = device.enqueue(&[], || unsafe {
                result::memcpy_htod_async(run.address, from, device.stream.cu_stream())
            });
            copied.inspect_err(|_| device.catch_up())?;
            (used, done) = (used + run.bytes, done + run.bytes);
        }
        wait()
    }
}

/// The bytes of a part of a store in the order of
/// [`Backend::read_slots`](crate::Backend::read_slots), neighbouring slots together.
fn runs(kv: &CudaKv, layers: Range<usize>, slots: &[u32]) -> Result<Vec<Run>> {
    let width = kv.shape.bytes_per_layer() / 2;
    if width > STAGING {
        return Err(Error::Unavailable(format!("rows of {width} bytes are too wide to be sent")));
    }
    let most = STAGING / width;
    let mut runs = Vec::new();
    for layer in layers {
        let first = kv.layer(layer)?;
        for side in [&kv.keys, &kv.values] {
            let neighbours = slots.chunk_by(|&a, &b| b == a + 1).flat_map(|run| run.chunks(most));
            runs.extend(neighbours.map(|run| Run {
                address: side.at(first + run[0] as usize * width),
                bytes: run.len() * width,
            }));
        }
    }
    Ok(runs)
}

/// Copies one row to the host.
pub(super) fn read_row(device: &Device, rows: &CudaRows, row: usize) -> Result<Vec<f32>> {
    device.outside_capture("reading")?;
    rows.hold("a row to read", row + 1, rows.width)?;
    let mut values = vec![0.0f32; rows.width];
    // SAFETY: the row is there, and `values` lives until the stream has caught up.
    device.enqueue(&[], || unsafe {
        let address = rows.values.at(4 * row * rows.stride);
        result::memcpy_dtoh_async(&mut values, address, device.stream.cu_stream())
    })?;
    device.stream.synchronize().map_err(failed("waiting for the device"))?;
    Ok(values)
}

/// Replaces one row, in both of its forms.
pub(super) fn write_row(
    device: &Device,
    rows: &CudaRows,
    row: usize,
    values: &[f32],
) -> Result<()> {
    rows.hold("a row to write", row + 1, values.len())?;
    if values.len() != rows.width {
        let (there, width) = (values.len(), rows.width);
        return Err(Error::Tensor(format!("{there} values for a row of {width}")));
    }
    device.write(&rows.values, 4 * row * rows.stride, values)?;
    let round = |memory: &Memory| {
        let halves: Vec<u16> = values.iter().map(|&x| half::bf16::from_f32(x).to_bits()).collect();
        device.write(memory, 2 * row * rows.stride, &halves)
    };
    rows.halves.as_ref().map_or(Ok(()), round)
}
