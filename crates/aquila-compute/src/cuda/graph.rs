//! Captured passes, and marks in time.
//!
//! The one invariant: a graph owns a share of all memory that it names, so a replay never touches
//! memory that was given out again.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use cudarc::driver::{CudaEvent, CudaGraph};

use super::device::{Device, Memory, failed};
use super::snapshot::Snapshot;
use crate::{Error, Result};

/// The driver's graph. It may go from thread to thread, and calls on it take turns.
struct Captured(CudaGraph);

// SAFETY: the driver asks that calls on one graph never overlap, whichever thread makes them; the
// mutex around it sees to that.
unsafe impl Send for Captured {}

/// A sequence of operations, captured once and replayed with whatever plan is placed.
pub struct Graph {
    captured: Mutex<Captured>,
    device: Arc<Device>,
    /// Freed after the graph, and in the stream's order.
    _kept: Vec<Memory>,
}

impl Graph {
    /// Captures what `enqueue` enqueues, without running it.
    pub(super) fn capture(
        device: &Arc<Device>,
        enqueue: impl FnOnce() -> Result<()>,
    ) -> Result<Self> {
        let mut capturing = Capturing::begin(device)?;
        enqueue()?;
        let (captured, kept) = capturing.end()?;
        Ok(Self { captured: Mutex::new(Captured(captured)), device: device.clone(), _kept: kept })
    }

    /// Enqueues the captured operations once more.
    pub fn replay(&self) -> Result<()> {
        self.device.outside_capture("replaying another graph")?;
        let captured = self.captured.lock().unwrap_or_else(PoisonError::into_inner);
        self.device.enqueue(&[], || captured.0.launch())
    }

    /// [`Backend::check_replay`](crate::Backend::check_replay).
    pub(super) fn check_replay(
        &self,
        enqueue: impl FnOnce() -> Result<()>,
    ) -> Result<Option<String>> {
        let before = Snapshot::take(&self.device)?;
        self.replay()?;
        let replayed = Snapshot::take(&self.device)?;
        before.restore(&self.device, &replayed)?;
        enqueue()?;
        Ok(replayed.differences(&Snapshot::take(&self.device)?))
    }
}

/// A capture that ends when it is dropped, so that an error or a panic leaves a usable stream.
struct Capturing<'a> {
    device: &'a Device,
    open: bool,
}

impl<'a> Capturing<'a> {
    fn begin(device: &'a Device) -> Result<Self> {
        device.begin_capture()?;
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        if let Err(error) = device.stream.begin_capture(mode) {
            device.end_capture();
            return Err(failed("beginning a capture")(error));
        }
        Ok(Self { device, open: true })
    }

    fn end(&mut self) -> Result<(CudaGraph, Vec<Memory>)> {
        self.open = false;
        let captured = self.device.stream.end_capture(CUgraphInstantiate_flags(0));
        let kept = self.device.end_capture();
        match captured.map_err(failed("ending a capture"))? {
            Some(graph) => Ok((graph, kept)),
            None => Err(Error::Device("nothing was captured".into())),
        }
    }
}

impl Drop for Capturing<'_> {
    fn drop(&mut self) {
        if self.open {
            // The error that led here is the one to report.
            let _ = self.end();
        }
    }
}

/// A moment of the device's stream.
pub struct Mark {
    event: CudaEvent,
}

impl Mark {
    pub(super) fn new(device: &Device) -> Result<Self> {
        Ok(Self { event: device.mark()? })
    }

    /// Waits for both and answers the seconds from this one to `later`.
    pub fn seconds_until(&self, later: &Mark) -> Result<f64> {
        let elapsed = self.event.elapsed_ms(&later.event).map_err(failed("timing"))?;
        Ok(f64::from(elapsed) / 1e3)
    }

    /// The time from this mark to a later one, as a duration.
    pub fn time_until(&self, later: &Mark) -> Result<Duration> {
        Ok(Duration::try_from_secs_f64(self.seconds_until(later)?).unwrap_or_default())
    }
}
