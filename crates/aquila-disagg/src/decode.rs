//! The worker that decodes: it claims the rooms of its requests and hands their rows to the engine.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use aquila_engine::{Claim, Delivery, EngineHandle, RequestId, Source};

use crate::error::{Error, Result};
use crate::handshake;
use crate::identity::Identity;
use crate::link::{LARGE, Link, Transport};
use crate::message::Message;
use crate::peers::Peers;
use crate::secret::Secret;

/// How long a prefill worker may be silent: it says something twice a second.
const SILENCE: Duration = Duration::from_secs(10);
/// How long connecting may take.
const CONNECT: Duration = Duration::from_secs(5);
/// Connections to one prefill worker that are kept for the next request.
const IDLE: usize = 32;

/// What a decode worker is given.
#[derive(Debug, Clone)]
pub struct DecodeSettings {
    /// What must be equal on a prefill worker.
    pub identity: Identity,
    /// The secret that prefill workers must know.
    pub secret: Secret,
    /// The hosts of prefill workers, where they need not prove that they know the secret. Those of
    /// this machine's own loopback always count.
    pub hosts: Vec<String>,
    /// The port of prefill workers where a request says none.
    pub port: u16,
}

/// Where a request's prefill worker is, as the request says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PrefillAddress {
    /// Its host.
    pub host: String,
    /// Its bootstrap port, if the request says one.
    pub port: Option<u16>,
    /// The room of the request.
    pub room: u64,
}

/// The worker that decodes.
pub struct DecodeWorker {
    settings: DecodeSettings,
    transport: Box<dyn Transport>,
    engine: EngineHandle,
    peers: Peers,
    /// Connections that wait for the next request, by address.
    idle: Mutex<HashMap<String, Vec<Box<dyn Link>>>>,
}

impl DecodeWorker {
    /// Begins without any connection.
    pub fn new(
        transport: Box<dyn Transport>,
        settings: DecodeSettings,
        engine: EngineHandle,
    ) -> Arc<Self> {
        let (peers, idle) = (Peers::default(), Mutex::default());
        Arc::new(Self { settings, transport, engine, peers, idle })
    }

    /// What brings the rows of a request from its prefill worker.
    ///
    /// # Errors
    /// If this worker must not connect to that host.
    pub fn source(self: &Arc<Self>, prefill: &PrefillAddress) -> Result<Box<dyn Source>> {
        let host = prefill.host.trim_start_matches('[').trim_end_matches(']');
        let is_loopback =
            host == "localhost" || host.parse().is_ok_and(|ip: IpAddr| ip.is_loopback());
        let is_named = self.settings.hosts.iter().any(|named| named == host);
        if !(is_loopback || is_named || self.settings.secret.is_set()) {
            return Err(Error::Host { host: host.to_owned() });
        }
        let port = prefill.port.unwrap_or(self.settings.port);
        let address = match host.contains(':') {
            true => format!("[{host}]:{port}"),
            false => format!("{host}:{port}"),
        };
        let given_up = Arc::new(AtomicBool::new(false));
        Ok(Box::new(RoomSource { worker: self.clone(), address, room: prefill.room, given_up }))
    }

    /// What came from each prefill worker.
    pub fn peers(&self) -> &Peers {
        &self.peers
    }

    fn idle(&self) -> MutexGuard<'_, HashMap<String, Vec<Box<dyn Link>>>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A connection to this address on which a room is claimed, and the first answer to that.
    fn claim(&self, address: &str, claim: &Message) -> Result<(Box<dyn Link>, (Message, usize))> {
        loop {
            let Some(mut link) = self.idle().get_mut(address).and_then(Vec::pop) else { break };
            // The worker may have stopped meanwhile, or another one may be there.
            if link.has_hung_up() || link.send(claim).is_err() {
                continue;
            }
            match link.receive(LARGE, SILENCE) {
                Ok(answer) => return Ok((link, answer)),
                Err(Error::HungUp { .. } | Error::Connection { .. }) => (),
                Err(e) => {
                    // Others to a worker that cannot be reached are no better.
                    self.idle().remove(address);
                    return Err(e);
                }
            }
        }
        let mut link = self.transport.connect(address, CONNECT)?;
        if let Err(e) = handshake::join(&mut *link, &self.settings.secret, &self.settings.identity)
        {
            self.peers.count_stranger();
            return Err(e);
        }
        link.send(claim)?;
        let answer = link.receive(LARGE, SILENCE)?;
        Ok((link, answer))
    }

    /// Brings what a room has; answers why it failed, if the prefill worker says so.
    fn bring(
        &self,
        address: &str,
        claim: &Message,
        request: RequestId,
        given_up: &AtomicBool,
    ) -> Result<Option<String>> {
        let claimed = Instant::now();
        let (mut link, first) = self.claim(address, claim)?;
        let (mut next, mut begun) = (Some(first), None);
        loop {
            let (message, bytes) = match next.take() {
                Some(first) => first,
                None => link.receive(LARGE, SILENCE)?,
            };
            if given_up.load(Ordering::Acquire) {
                // The prefill worker gives the request up when the connection ends.
                return Ok(None);
            }
            let ended = match message {
                Message::Wait => continue,
                Message::Rows(rows) => {
                    self.engine.deliver(request, Delivery::Rows(rows));
                    None
                }
                Message::Returned(rows) => {
                    self.engine.deliver(request, Delivery::Returned(rows));
                    None
                }
                Message::Prefilled(prefilled) => {
                    self.engine.deliver(request, Delivery::Prefilled(prefilled));
                    Some(None)
                }
                Message::Failed(why) => Some(Some(why)),
                _ => return Err(Error::protocol(address, "it should have sent rows")),
            };
            let now = Instant::now();
            let first = *begun.get_or_insert(now);
            self.peers.count(address, |counts| {
                counts.bytes += bytes as u64;
                if ended.is_some() {
                    counts.waited += first - claimed;
                    counts.transferred += now - first;
                }
                counts.transfers += u64::from(ended == Some(None));
            });
            let Some(ended) = ended else { continue };
            let mut idle = self.idle();
            // Workers that are gone leave no connections behind.
            idle.retain(|_, links| {
                links.retain_mut(|link| !link.has_hung_up());
                !links.is_empty()
            });
            let links = idle.entry(address.to_owned()).or_default();
            if links.len() < IDLE {
                links.push(link);
            }
            return Ok(ended);
        }
    }
}

/// The room of one request.
struct RoomSource {
    worker: Arc<DecodeWorker>,
    address: String,
    room: u64,
    given_up: Arc<AtomicBool>,
}

impl Source for RoomSource {
    fn begin(&mut self, request: RequestId, claim: Claim) {
        let (worker, address) = (self.worker.clone(), self.address.clone());
        let (room, given_up) = (self.room, self.given_up.clone());
        let bring = move || {
            let claim = Message::Claim { room, claim };
            let why = match worker.bring(&address, &claim, request, &given_up) {
                Ok(None) => return,
                Ok(Some(why)) => format!("the prefill worker {address} gave the request up: {why}"),
                Err(e) => e.to_string(),
            };
            if given_up.load(Ordering::Acquire) {
                return;
            }
            tracing::warn!("room {room} was not transferred: {why}");
            worker.peers.count(&address, |counts| counts.failures += 1);
            worker.engine.deliver(request, Delivery::Failed(why));
        };
        if let Err(e) = std::thread::Builder::new().spawn(bring) {
            let why = format!("there is no thread to transfer room {room}: {e}");
            self.worker.engine.deliver(request, Delivery::Failed(why));
        }
    }
}

impl Drop for RoomSource {
    fn drop(&mut self) {
        self.given_up.store(true, Ordering::Release);
    }
}
