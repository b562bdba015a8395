//! NIXL's C interface, loaded at run time, as one agent that lets others read its memory and reads
//! theirs. All `unsafe` of this crate is here.
//!
//! The declarations are those of the header that the crate `nixl-sys` 1.5 has (`wrapper.h`).

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::Path;
use std::ptr::{null, null_mut};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use libloading::Library;

/// The library's file name, where no path is given.
const LIBRARY: &str = "libnixl_capi.so";
/// The plugin that moves bytes: shared memory on one machine, RDMA or sockets between machines.
const PLUGIN: &CStr = c"UCX";
/// Results of calls, memory of the host, and an operation.
const SUCCESS: c_int = 0;
const IN_PROGRESS: c_int = 1;
const DRAM: c_int = 0;
const READ: c_int = 0;
/// How often a transfer is asked for its state before the thread sleeps in between, and how long.
const SPINS: usize = 64;
const NAP: Duration = Duration::from_micros(50);

/// An object of the library.
type Handle = *mut c_void;
type Status = c_int;

/// How an agent is made. The last field is room for what later versions may add.
#[repr(C)]
struct Config {
    progress_thread: bool,
    listen_thread: bool,
    listen_port: c_int,
    thread_sync: c_int,
    workers: u32,
    progress_delay_us: u64,
    listen_delay_us: u64,
    telemetry: bool,
    later: [u64; 8],
}

/// Declares the functions that are used, and finds them in the library.
macro_rules! functions {
    ($($name:ident: $symbol:literal ($($argument:ty),*);)*) => {
        struct Functions {
            $($name: unsafe extern "C" fn($($argument),*) -> Status,)*
            /// It stays loaded as long as its functions are known.
            _library: Library,
        }

        impl Functions {
            fn find(library: Library) -> Result<Self, libloading::Error> {
                // SAFETY: the types are those of the library's header.
                unsafe {
                    Ok(Self {
                        $($name: *library.get(concat!("nixl_capi_", $symbol))?,)*
                        _library: library,
                    })
                }
            }
        }
    };
}

functions! {
    create_agent: "create_configured_agent" (*const c_char, *const Config, *mut Handle);
    destroy_agent: "destroy_agent" (Handle);
    plugin_params: "get_plugin_params" (Handle, *const c_char, *mut Handle, *mut Handle);
    destroy_memory_kinds: "destroy_mem_list" (Handle);
    destroy_params: "destroy_params" (Handle);
    create_backend: "create_backend" (Handle, *const c_char, Handle, *mut Handle);
    destroy_backend: "destroy_backend" (Handle);
    create_regions: "create_reg_dlist" (c_int, *mut Handle);
    add_region: "reg_dlist_add_desc" (Handle, usize, usize, u64, *const c_void, usize);
    destroy_regions: "destroy_reg_dlist" (Handle);
    register: "register_mem" (Handle, Handle, Handle);
    metadata: "get_local_md" (Handle, *mut *mut c_void, *mut usize);
    load_remote: "load_remote_md" (Handle, *const c_void, usize, *mut *mut c_char);
    forget_remote: "invalidate_remote_md" (Handle, *const c_char);
    create_ranges: "create_xfer_dlist" (c_int, *mut Handle);
    add_range: "xfer_dlist_add_desc" (Handle, usize, usize, u64);
    destroy_ranges: "destroy_xfer_dlist" (Handle);
    create_transfer: "create_xfer_req"
        (Handle, c_int, Handle, Handle, *const c_char, *mut Handle, Handle);
    post: "post_xfer_req" (Handle, Handle, Handle);
    status: "get_xfer_status" (Handle, Handle);
    release: "release_xfer_req" (Handle, Handle);
    destroy_transfer: "destroy_xfer_req" (Handle);
    create_notifications: "create_notif_map" (*mut Handle);
    notifications: "get_notifs" (Handle, Handle, Handle);
    destroy_notifications: "destroy_notif_map" (Handle);
}

/// Why a call failed.
fn check(status: Status, what: &str) -> Result<(), String> {
    match status {
        SUCCESS | IN_PROGRESS => Ok(()),
        -1 => Err(format!("NIXL cannot {what}: a parameter is wrong")),
        -6 => Err(format!("NIXL cannot {what}: the other agent is not known")),
        _ => Err(format!("NIXL cannot {what} (status {status})")),
    }
}

/// Memory that other agents may read, and that this one reads into. It is never freed, because NIXL
/// and its peers know its address.
pub(super) type Memory = &'static mut [u8];

/// One agent: it has memory that others may read, and reads theirs.
pub(super) struct Agent {
    functions: Functions,
    /// The agent, which one thread uses at a time.
    agent: Mutex<Owned>,
}

/// The library's objects, of this agent alone.
struct Owned {
    agent: Handle,
    backend: Handle,
    notifications: Handle,
}

// SAFETY: the objects are not bound to the thread that made them.
unsafe impl Send for Owned {}

impl Agent {
    /// Loads the library and makes an agent of this name with the memory that it is given.
    pub(super) fn start(
        library: Option<&Path>,
        name: &str,
        memory: &mut [Memory],
    ) -> Result<Self, String> {
        let path = library.unwrap_or(Path::new(LIBRARY));
        let cannot = |e: libloading::Error| {
            let why = std::error::Error::source(&e).map_or(e.to_string(), ToString::to_string);
            format!("NIXL's library {} cannot be loaded: {why}", path.display())
        };
        // SAFETY: the operator names the library, whose initialisers may run.
        let library = unsafe { Library::new(path) }.map_err(cannot)?;
        let functions = Functions::find(library).map_err(cannot)?;
        let name = CString::new(name).map_err(|e| e.to_string())?;
        // Its own thread would poll without rest; transfers are polled by those who wait for them.
        let config = Config {
            progress_thread: false,
            listen_thread: false,
            listen_port: 0,
            thread_sync: 0,
            workers: 1,
            progress_delay_us: 0,
            listen_delay_us: 0,
            telemetry: false,
            later: [0; 8],
        };
        let mut owned = Owned { agent: null_mut(), backend: null_mut(), notifications: null_mut() };
        // SAFETY: name and config live through the call, which writes one handle.
        let made =
            unsafe { (functions.create_agent)(name.as_ptr(), &raw const config, &mut owned.agent) };
        check(made, "make an agent")?;
        // From here on the agent is destroyed whatever happens.
        let this = Self { functions, agent: Mutex::new(owned) };
        this.prepare(memory)?;
        Ok(this)
    }

    fn lock(&self) -> MutexGuard<'_, Owned> {
        self.agent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Loads the plugin and registers the memory.
    fn prepare(&self, memory: &mut [Memory]) -> Result<(), String> {
        let f = &self.functions;
        let mut owned = self.lock();
        let Owned { agent, backend, notifications } = &mut *owned;
        let (mut kinds, mut params) = (null_mut(), null_mut());
        // SAFETY: the agent is alive; each call writes the handles that it is given, and those are
        // destroyed once.
        unsafe {
            check(
                (f.plugin_params)(*agent, PLUGIN.as_ptr(), &mut kinds, &mut params),
                "find its plugin UCX",
            )?;
            let made = (f.create_backend)(*agent, PLUGIN.as_ptr(), params, backend);
            (f.destroy_memory_kinds)(kinds);
            (f.destroy_params)(params);
            check(made, "start its plugin UCX")?;
            check((f.create_notifications)(notifications), "make a list")?;
            let mut regions = null_mut();
            check((f.create_regions)(DRAM, &mut regions), "make a list")?;
            let mut status = SUCCESS;
            for slot in memory {
                let (start, length) = (slot.as_mut_ptr() as usize, slot.len());
                if status == SUCCESS {
                    status = (f.add_region)(regions, start, length, 0, null(), 0);
                }
            }
            if status == SUCCESS {
                status = (f.register)(*agent, regions, null_mut());
            }
            (f.destroy_regions)(regions);
            check(status, "register memory")
        }
    }

    /// What another agent needs to read this one's memory.
    pub(super) fn metadata(&self) -> Result<Vec<u8>, String> {
        let owned = self.lock();
        let (mut bytes, mut length) = (null_mut(), 0);
        // SAFETY: the call writes pointer and length of bytes that belong to the caller.
        unsafe {
            check(
                (self.functions.metadata)(owned.agent, &mut bytes, &mut length),
                "describe its memory",
            )?;
            let metadata = std::slice::from_raw_parts(bytes.cast(), length).to_vec();
            libc::free(bytes);
            Ok(metadata)
        }
    }

    /// Learns of another agent; answers its name. NIXL trusts these bytes, so they must come from a
    /// peer that this worker trusts.
    pub(super) fn load_remote(&self, metadata: &[u8]) -> Result<CString, String> {
        let owned = self.lock();
        let mut name = null_mut();
        // SAFETY: the bytes live through the call, which writes a string that belongs to the caller.
        unsafe {
            let loaded = (self.functions.load_remote)(
                owned.agent,
                metadata.as_ptr().cast(),
                metadata.len(),
                &mut name,
            );
            check(loaded, "learn of the other agent")?;
            let copy = CStr::from_ptr(name).to_owned();
            libc::free(name.cast());
            Ok(copy)
        }
    }

    /// Forgets another agent.
    pub(super) fn forget_remote(&self, name: &CStr) {
        let owned = self.lock();
        // SAFETY: the name lives through the call. One that is not known any more is no fault.
        let _ = unsafe { (self.functions.forget_remote)(owned.agent, name.as_ptr()) };
    }

    /// Lets others get on with what they read here, where the network does not do that alone.
    pub(super) fn progress(&self) -> Result<(), String> {
        let owned = self.lock();
        // SAFETY: agent and list are alive. Nothing is notified, so the list stays empty.
        let status =
            unsafe { (self.functions.notifications)(owned.agent, owned.notifications, null_mut()) };
        check(status, "go on")
    }

    /// Reads `length` bytes at an address of another agent into the beginning of `memory`. Where
    /// that does not end within `patience` and cannot be stopped, the memory is lost.
    pub(super) fn read(
        &self,
        from: &CStr,
        address: u64,
        length: usize,
        memory: Memory,
        patience: Duration,
    ) -> (Option<Memory>, Result<(), String>) {
        assert!(length <= memory.len(), "the piece fits");
        let f = &self.functions;
        let transfer = match self.begin(from, address, length, &mut *memory) {
            Ok(transfer) => transfer,
            Err(why) => return (Some(memory), Err(why)),
        };
        let begun = Instant::now();
        let mut asked = 0;
        let result = loop {
            // SAFETY: agent and transfer are alive.
            match unsafe { (f.status)(self.lock().agent, transfer) } {
                IN_PROGRESS if begun.elapsed() > patience => {
                    break Err("NIXL has not read in time".to_owned());
                }
                IN_PROGRESS => {
                    asked += 1;
                    if asked > SPINS { std::thread::sleep(NAP) } else { std::thread::yield_now() }
                }
                status => break check(status, "read"),
            }
        };
        // SAFETY: agent and transfer are alive; it is destroyed only once it was released.
        let released = unsafe {
            let released = (f.release)(self.lock().agent, transfer) == SUCCESS;
            if released {
                (f.destroy_transfer)(transfer);
            }
            released
        };
        // What has ended is not written any more, whether or not it was released.
        ((released || result.is_ok()).then_some(memory), result)
    }

    /// Makes a transfer and begins it.
    fn begin(
        &self,
        from: &CStr,
        address: u64,
        length: usize,
        memory: &mut [u8],
    ) -> Result<Handle, String> {
        let f = &self.functions;
        let owned = self.lock();
        let (mut here, mut there, mut transfer) = (null_mut(), null_mut(), null_mut());
        // SAFETY: the agent is alive; each call writes the handle that it is given; lists are
        // destroyed once, after the transfer has copied them. The memory is registered and stays
        // with the transfer until that is released.
        unsafe {
            check((f.create_ranges)(DRAM, &mut here), "make a list")?;
            let mut status = (f.create_ranges)(DRAM, &mut there);
            if status == SUCCESS {
                status = (f.add_range)(here, memory.as_mut_ptr() as usize, length, 0);
            }
            if status == SUCCESS {
                status = (f.add_range)(there, address as usize, length, 0);
            }
            if status == SUCCESS {
                let name = from.as_ptr();
                status = (f.create_transfer)(
                    owned.agent,
                    READ,
                    here,
                    there,
                    name,
                    &mut transfer,
                    null_mut(),
                );
            }
            (f.destroy_ranges)(here);
            if !there.is_null() {
                (f.destroy_ranges)(there);
            }
            check(status, "prepare a read of the other agent's memory")?;
            let posted = (f.post)(owned.agent, transfer, null_mut());
            if let Err(why) = check(posted, "begin to read") {
                if (f.release)(owned.agent, transfer) == SUCCESS {
                    (f.destroy_transfer)(transfer);
                }
                return Err(why);
            }
        }
        Ok(transfer)
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let f = &self.functions;
        let Owned { agent, backend, notifications } =
            *self.agent.get_mut().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: each is destroyed once, and nobody uses the agent any more.
        unsafe {
            if !notifications.is_null() {
                (f.destroy_notifications)(notifications);
            }
            (f.destroy_agent)(agent);
            if !backend.is_null() {
                (f.destroy_backend)(backend);
            }
        }
    }
}
