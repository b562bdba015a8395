//! One device and its one stream: memory, copies that wait, and launches.
//!
//! The one invariant: nothing is enqueued but through [`Device::enqueue`], which knows whether a
//! graph is being captured, by which thread, and keeps alive what the graph will name.

use std::mem::zeroed;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::{self, ThreadId};

use cudarc::driver::sys::{
    CUdevice_attribute, CUevent_flags, CUlaunchAttribute, CUlaunchAttributeID, CUlaunchConfig,
    CUresult, cuLaunchKernelEx,
};
use cudarc::driver::{
    CudaContext, CudaEvent, CudaSlice, CudaStream, DevicePtr, DeviceRepr, DriverError, result,
};

use super::c_layout::Address;
use super::failure::lacking;
use super::found;
use super::kernels::Kernel;
use crate::{Error, Result};

pub(super) use super::failure::failed;

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
    /// Whether the next launch begins only when all before it is over. It does behind a kernel that writes
    /// plans, block tables or weights ([`Kernel::read_early`]), so every launch from there on sees what
    /// that kernel wrote before it waits for its inputs. And nothing that is read so changes while it is
    /// read: such a kernel waits itself before it writes, until all that was launched before it is over,
    /// as each of those ended only after it had waited. It does so behind copies, fills and graphs, too,
    /// and behind a launch that failed.
    /// Read and written where nothing else can be enqueued meanwhile.
    next_waits: AtomicBool,
    /// The memory that checks of replays compare.
    compared: Mutex<Vec<Weak<Allocation>>>,
    /// Major and minor compute capability.
    pub(super) capability: (i32, i32),
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
        found::check_driver()?;
        let count = found::device_count()?;
        if count == 0 {
            return Err(Error::Unavailable(
                "no CUDA device: the NVIDIA driver is there, but it shows this process none".into(),
            ));
        }
        if ordinal >= count {
            return Err(Error::NoSuchDevice { ordinal, count });
        }
        let context = CudaContext::new(ordinal).map_err(failed("opening the device"))?;
        // SAFETY: all work goes to one stream, so there is nothing to order by events; with them
        // a capture would wait for events from outside of it, which the driver refuses.
        unsafe { context.disable_event_tracking() };
        let stream = context.new_stream().map_err(failed("making a stream"))?;
        let capability = context.compute_capability().map_err(failed("asking about the device"))?;
        let (capture, compared) = (Mutex::default(), Mutex::default());
        let next_waits = AtomicBool::new(true);
        Ok(Self { context, stream, capture, next_waits, compared, capability })
    }

    /// A property of the device as the driver numbers them.
    pub(super) fn attribute(&self, attribute: CUdevice_attribute) -> Result<i32> {
        self.context.attribute(attribute).map_err(failed("asking about the device"))
    }

    /// Runs `enqueue` where nothing else can be enqueued meanwhile; `names` is the memory that it
    /// hands to the device. Refused on all threads but the capturing one during a capture. It enqueues
    /// copies or a graph: the driver promises kernels that begin early nothing about those.
    pub(super) fn enqueue(
        &self,
        names: &[&Memory],
        enqueue: impl FnOnce() -> std::result::Result<(), DriverError>,
    ) -> Result<()> {
        self.enqueue_as("enqueueing", names, || {
            self.let_next_wait();
            enqueue()
        })
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

    /// Ends the note and answers the memory that was named. What was captured has not run, so the next
    /// launch does not rely on it.
    pub(super) fn end_capture(&self) -> Vec<Memory> {
        let mut capture = self.capture.lock().unwrap_or_else(PoisonError::into_inner);
        self.let_next_wait();
        capture.take().map(|capture| capture.kept).unwrap_or_default()
    }

    /// Has the next launch begin only when all before it is over; to be called while something is enqueued.
    pub(super) fn let_next_wait(&self) {
        self.next_waits.store(true, Relaxed);
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
        self.let_next_wait();
        let slice = self.stream.alloc_zeros::<u8>(bytes.max(16)).map_err(|error| {
            if error.0 == CUresult::CUDA_ERROR_OUT_OF_MEMORY {
                lacking(format!("{what} on the device"), bytes)(error)
            } else {
                failed(&format!("allocating {what}"))(error)
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

    /// Launches a kernel that takes `arguments`, which name `names`. One that waits for its inputs
    /// itself may begin before the one before it has ended, but behind one that writes what others read
    /// early.
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
        let mut config = CUlaunchConfig {
            gridDimX: grid[0] as u32,
            gridDimY: grid[1] as u32,
            gridDimZ: grid[2] as u32,
            blockDimX: threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shared_bytes as u32,
            hStream: self.stream.cu_stream(),
            attrs: &raw mut early,
            numAttrs: 0,
        };
        let mut parameters = [std::ptr::from_ref(arguments).cast_mut().cast()];
        self.enqueue_as(&kernel.name, names, || {
            let waits = self.next_waits.swap(kernel.read_early, Relaxed);
            config.numAttrs = u32::from(kernel.waits && !waits);
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
            .inspect_err(|_| self.let_next_wait())
        })
    }

    /// Waits behind an error for copies that are under way, so that the host's side of them may be freed
    /// or written.
    pub(super) fn catch_up(&self) {
        // A failed wait means a lost context, which copies nothing any more.
        let _ = self.stream.synchronize();
    }

    /// Bytes that are free on the device, and all that it has.
    pub(super) fn free_and_total(&self) -> Result<(usize, usize)> {
        self.context.bind_to_thread().map_err(failed("binding the device"))?;
        result::mem_get_info().map_err(failed("asking about the device's memory"))
    }

    /// An event that remembers when the device reached it.
    pub(super) fn mark(&self) -> Result<CudaEvent> {
        self.stream
            .record_event(Some(CUevent_flags::CU_EVENT_DEFAULT))
            .map_err(failed("recording an event"))
    }
}
