//! Memory that NIXL knows, in slots of one size. A slot belongs to one transfer at a time.

use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::agent::{Agent, Memory};

/// Bytes of a slot.
pub(super) const SLOT: usize = 4 << 20;
/// Slots of a worker, for all its connections.
const SLOTS: usize = 16;

/// The agent of this worker and its slots.
pub(super) struct Slots {
    pub(super) agent: Agent,
    /// What other agents need to read from the slots.
    pub(super) metadata: Vec<u8>,
    free: Mutex<Vec<Memory>>,
    freed: Condvar,
}

impl Slots {
    /// Starts an agent of this name with slots of its own.
    pub(super) fn start(library: Option<&Path>, name: &str) -> Result<Arc<Self>, String> {
        let slot = |_| Box::leak(vec![0; SLOT].into_boxed_slice());
        let mut free: Vec<Memory> = (0..SLOTS).map(slot).collect();
        let agent = Agent::start(library, name, &mut free)?;
        let metadata = agent.metadata()?;
        Ok(Arc::new(Self { agent, metadata, free: Mutex::new(free), freed: Condvar::new() }))
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Memory>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A slot, if one is free within `patience`.
    pub(super) fn take(self: &Arc<Self>, patience: Duration) -> Option<Slot> {
        let free = self.lock();
        let (mut free, _) = self
            .freed
            .wait_timeout_while(free, patience, |free| free.is_empty())
            .unwrap_or_else(PoisonError::into_inner);
        Some(Slot { memory: Some(free.pop()?), slots: self.clone() })
    }
}

/// A slot that is in use. Dropped, it is free again.
pub(super) struct Slot {
    memory: Option<Memory>,
    slots: Arc<Slots>,
}

impl Slot {
    fn memory(&mut self) -> &mut [u8] {
        self.memory.as_deref_mut().expect("a slot has memory")
    }

    /// Puts bytes into it; answers their address.
    pub(super) fn fill(&mut self, bytes: &[u8]) -> u64 {
        self.memory()[..bytes.len()].copy_from_slice(bytes);
        self.memory().as_ptr() as u64
    }

    /// Appends to `bytes` what is at an address of another agent.
    ///
    /// # Errors
    /// Why that failed.
    pub(super) fn read(
        mut self,
        from: &std::ffi::CStr,
        address: u64,
        length: usize,
        patience: Duration,
        bytes: &mut Vec<u8>,
    ) -> Result<(), String> {
        let memory = self.memory.take().expect("a slot has memory");
        let (memory, result) = self.slots.agent.read(from, address, length, memory, patience);
        self.memory = memory;
        result?;
        bytes.extend(&self.memory()[..length]);
        Ok(())
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        match self.memory.take() {
            Some(memory) => {
                self.slots.lock().push(memory);
                self.slots.freed.notify_one();
            }
            None => tracing::warn!("a read through NIXL cannot be stopped: its memory is given up"),
        }
    }
}
