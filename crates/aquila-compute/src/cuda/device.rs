//! One device and its one stream: memory, copies and launches.
//!
//! The one invariant: nothing is enqueued but through [`Device::enqueue`], which knows whether a
//! graph is being captured, by which thread, and keeps alive what the graph will name.

use std::mem::zeroed;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::{self, ThreadId};

use cudarc::driver::sys::{
    CUdevice_attribute, CUevent_flags, CUlaunchAttribute, CUlaunchAttributeID, CUlaunchConfig,
    CUresult, cuLaunchKernelEx,
};
use cudarc::driver::{
    CudaContext, CudaEvent, CudaSlice, CudaStream, DevicePtr, DeviceRepr, DriverError,
    PinnedHostSlice, ValidAsZeroBits, result,
};

use super::c_layout::Address;
use super::kernels::Kernel;
use crate::{Error, Result};

/// Device memory at a fixed address, freed when nothing names it any more.
#[derive(Clone)]
pub(super) struct Memory(Arc<Allocation>);

struct Allocation {
    what: String,
    address: Address,
    bytes: usize,
    _slice: CudaSlice<u8>,
}

impl Memory {
    /// The address of byte `offset`.
    pub(super) fn at(&self, offset: usize) -> Address {
        debug_assert!(offset <= self.bytes());
        self.0.address + offset as Address
    }

    /// How many bytes it has.
    pub(super) fn bytes(&self) -> usize {
        self.0.bytes
    }

    /// What it is for.
    pub(super) fn what(&self) -> &str {
        &self.0.what
    }
}

/// A capture in progress.
struct Capture {
    thread: ThreadId,
    kept: Vec<Memory>,
}

/// A device, its context and its stream.
pub(super) struct Device {
    pub(super) context: Arc<CudaContext>,
    pub(super) stream: Arc<CudaStream>,
    capture: Mutex<Option<Capture>>,
    /// The memory that checks of replays compare.
    compared: Mutex<Vec<Weak<Allocation>>>,
    /// Major and minor compute capability.
    pub(super) capability: (i32, i32),
}

/// A failure that the driver reported while doing `what`.
pub(super) fn failed(what: &str) -> impl Fn(DriverError) -> Error + '_ {
    move |error| Error::Device(format!("{what}: {error}"))
}

impl Device {
    /// Opens the device, or says what this machine lacks.
    pub(super) fn open(ordinal: usize) -> Result<Self> {
        // SAFETY: loads the library and looks at nothing else; its initializers are NVIDIA's.
        if !unsafe { cudarc::driver::sys::is_culib_present() } {
            return Err(Error::Unavailable(
                "no CUDA device: the NVIDIA driver's library (libcuda.so) is not there; install \
                 the driver or choose the CPU"
                    .into(),
            ));
        }
        let context = CudaContext::new(ordinal).map_err(|error| {
            Error::Unavailable(format!("CUDA device {ordinal} cannot be opened: {error}"))
        })?;
        // SAFETY: all work goes to one stream, so there is nothing to order by events; with them
        // a capture would wait for events from outside of it, which the driver refuses.
        unsafe { context.disable_event_tracking() };
        let stream = context.new_stream().map_err(failed("making a stream"))?;
        let capability = context.compute_capability().map_err(failed("asking about the device"))?;
        let (capture, compared) = (Mutex::default(), Mutex::default());
        Ok(Self { context, stream, capture, compared, capability })
    }

    /// A property of the device as the driver numbers them.
    pub(super) fn attribute(&self, attribute: CUdevice_attribute) -> Result<i32> {
        self.context.attribute(attribute).map_err(failed("asking about the device"))
    }

    /// Runs `enqueue` where nothing else can be enqueued meanwhile; `names` is the memory that it
    /// hands to the device. Refused on all threads but the capturing one during a capture.
    pub(super) fn enqueue(
        &self,
        names: &[&Memory],
        enqueue: impl FnOnce() -> std::result::Result<(), DriverError>,
    ) -> Result<()> {
        self.enqueue_as("enqueueing", names, enqueue)
    }

    /// The same, where an error says what failed.
    fn enqueue_as(
        &self,
        what: &str,
        names: &[&Memory],
        enqueue: impl FnOnce() -> std::result::Result<(), DriverError>,
    ) -> Result<()> {
        let mut capture = self.capture.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(capture) = capture.as_mut() {
            if capture.thread != thread::current().id() {
                return Err(Error::Device("another thread is capturing a graph".into()));
            }
            capture.kept.extend(names.iter().copied().cloned());
        }
        self.context.bind_to_thread().map_err(failed("binding the device"))?;
        enqueue().map_err(failed(what))
    }

    /// Refuses `what` during a capture: a graph would repeat it, or cannot hold it.
    pub(super) fn outside_capture(&self, what: &str) -> Result<()> {
        match *self.capture.lock().unwrap_or_else(PoisonError::into_inner) {
            None => Ok(()),
            Some(_) => Err(Error::Device(format!("{what} is not possible in a captured graph"))),
        }
    }

    /// Notes that this thread captures.
    pub(super) fn begin_capture(&self) -> Result<()> {
        let mut capture = self.capture.lock().unwrap_or_else(PoisonError::into_inner);
        if capture.is_some() {
            return Err(Error::Device("a graph is being captured already".into()));
        }
        *capture = Some(Capture { thread: thread::current().id(), kept: Vec::new() });
        Ok(())
    }

    /// Ends the note and answers the memory that was named.
    pub(super) fn end_capture(&self) -> Vec<Memory> {
        let capture = self.capture.lock().unwrap_or_else(PoisonError::into_inner).take();
        capture.map(|capture| capture.kept).unwrap_or_default()
    }

    /// Zeroed memory, which checks of replays compare.
    pub(super) fn allocate(&self, what: &str, bytes: usize) -> Result<Memory> {
        let memory = self.allocate_uncompared(what, bytes)?;
        let mut compared = self.compared.lock().unwrap_or_else(PoisonError::into_inner);
        compared.retain(|freed| freed.strong_count() > 0);
        compared.push(Arc::downgrade(&memory.0));
        Ok(memory)
    }

    /// Zeroed memory that no pass writes, or in which an operation leaves nothing that a later one
    /// reads: what is in it may depend on the order of thread blocks.
    pub(super) fn allocate_uncompared(&self, what: &str, bytes: usize) -> Result<Memory> {
        self.outside_capture("making room for memory")?;
        let slice = self.stream.alloc_zeros::<u8>(bytes.max(16)).map_err(|error| {
            if error.0 == CUresult::CUDA_ERROR_OUT_OF_MEMORY {
                Error::OutOfMemory { what: format!("{what} on the device"), bytes }
            } else {
                Error::Device(format!("allocating {what}: {error}"))
            }
        })?;
        let address = slice.device_ptr(&self.stream).0;
        Ok(Memory(Arc::new(Allocation { what: what.into(), address, bytes, _slice: slice })))
    }

    /// The memory that checks of replays compare.
    pub(super) fn compared(&self) -> Vec<Memory> {
        let compared = self.compared.lock().unwrap_or_else(PoisonError::into_inner);
        compared.iter().filter_map(Weak::upgrade).map(Memory).collect()
    }

    /// Copies `values` to byte `offset` of `memory`; they may change when this returns.
    pub(super) fn write<T: DeviceRepr>(
        &self,
        memory: &Memory,
        offset: usize,
        values: &[T],
    ) -> Result<()> {
        self.outside_capture("copying from the host")?;
        let size = size_of_val(values);
        assert!(offset + size <= memory.bytes(), "a copy stays within its memory");
        if size == 0 {
            return Ok(());
        }
        // SAFETY: the range was checked, and the driver is done with pageable memory on return.
        self.enqueue(&[], || unsafe {
            result::memcpy_htod_async(memory.at(offset), values, self.stream.cu_stream())
        })
    }

    /// Waits for all that was enqueued and copies f32 values from the start of `memory`.
    pub(super) fn read(&self, memory: &Memory, count: usize) -> Result<Vec<f32>> {
        self.outside_capture("reading")?;
        assert!(count * 4 <= memory.bytes(), "a copy stays within its memory");
        let mut values = vec![0.0f32; count];
        if count > 0 {
            // SAFETY: the range was checked, and `values` lives until the stream has caught up.
            self.enqueue(&[], || unsafe {
                result::memcpy_dtoh_async(&mut values, memory.at(0), self.stream.cu_stream())
            })?;
        }
        self.stream.synchronize().map_err(failed("waiting for the device"))?;
        Ok(values)
    }

    /// Waits for all that was enqueued and copies `values` from an address.
    ///
    /// # Safety
    /// As much device memory must be there.
    pub(super) unsafe fn read_at<T: DeviceRepr>(
        &self,
        address: Address,
        values: &mut [T],
    ) -> Result<()> {
        self.outside_capture("reading")?;
        if !values.is_empty() {
            // SAFETY: the caller's promise, and `values` lives until the stream has caught up.
            self.enqueue(&[], || unsafe {
                result::memcpy_dtoh_async(values, address, self.stream.cu_stream())
            })?;
        }
        self.stream.synchronize().map_err(failed("waiting for the device"))
    }

    /// Copies `values` to an address; they may change when this returns.
    ///
    /// # Safety
    /// As [`Device::read_at`].
    pub(super) unsafe fn write_at<T: DeviceRepr>(
        &self,
        address: Address,
        values: &[T],
    ) -> Result<()> {
        self.outside_capture("copying from the host")?;
        if values.is_empty() {
            return Ok(());
        }
        // SAFETY: the caller's promise, and the driver is done with pageable memory on return.
        self.enqueue(&[], || unsafe {
            result::memcpy_htod_async(address, values, self.stream.cu_stream())
        })
    }

    /// Launches a kernel that takes `arguments`, which name `names`. It may begin before the one
    /// before it has ended, and waits itself for what that one computes.
    ///
    /// # Safety
    /// `arguments` must be the structure that `kernel` declares, and its addresses and sizes must
    /// describe memory among `names`.
    pub(super) unsafe fn launch<A: DeviceRepr>(
        &self,
        kernel: &Kernel,
        grid: [usize; 3],
        threads: u32,
        shared_bytes: usize,
        arguments: &A,
        names: &[&Memory],
    ) -> Result<()> {
        if grid.contains(&0) {
            return Ok(());
        }
        // SAFETY: a plain C structure, of which all that matters is set below.
        let mut early: CUlaunchAttribute = unsafe { zeroed() };
        early.id = CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        early.value.programmaticStreamSerializationAllowed = 1;
        let config = CUlaunchConfig {
            gridDimX: grid[0] as u32,
            gridDimY: grid[1] as u32,
            gridDimZ: grid[2] as u32,
            blockDimX: threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shared_bytes as u32,
            hStream: self.stream.cu_stream(),
            attrs: &raw mut early,
            numAttrs: u32::from(self.capability.0 >= 9),
        };
        let mut parameters = [std::ptr::from_ref(arguments).cast_mut().cast()];
        self.enqueue_as(&kernel.name, names, || {
            // SAFETY: the caller vouches for the arguments, which the driver copies.
            unsafe {
                cuLaunchKernelEx(
                    &config,
                    kernel.function(),
                    parameters.as_mut_ptr(),
                    std::ptr::null_mut(),
                )
            }
            .result()
        })
    }

    /// Bytes that are free on the device, and all that it has.
    pub(super) fn free_and_total(&self) -> Result<(usize, usize)> {
        self.context.bind_to_thread().map_err(failed("binding the device"))?;
        result::mem_get_info().map_err(failed("asking about the device's memory"))
    }

    /// Waits for all that was enqueued.
    pub(super) fn wait(&self) -> Result<()> {
        self.outside_capture("waiting")?;
        self.stream.synchronize().map_err(failed("waiting for the device"))
    }

    /// An event that remembers when the device reached it.
    pub(super) fn mark(&self) -> Result<CudaEvent> {
        self.stream
            .record_event(Some(CUevent_flags::CU_EVENT_DEFAULT))
            .map_err(failed("recording an event"))
    }
}

/// Values of the device in page-locked memory, which grows to the most that was ever fetched.
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
    /// Enqueues a copy of `count` values from the start of `memory`, which are there after
    /// [`Device::wait`].
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
            // Without flags: write-combined memory, the default, is slow for the host to read.
            // SAFETY: every bit pattern is a value, and none is read before it was fetched.
            let made = unsafe { device.context.alloc_pinned_with_flags::<T>(count, 0) };
            let lacking = |_| Error::OutOfMemory { what: "a copy on the host".into(), bytes };
            self.memory = Some(made.map_err(lacking)?);
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
                .map_err(|_| Error::OutOfMemory { what: what.into(), bytes: words * 4 })?;
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
