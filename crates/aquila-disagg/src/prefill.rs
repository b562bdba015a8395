//! The worker that processes prompts: it listens for decode workers and sends them what prompts
//! leave.

use std::mem::take;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use aquila_compute::round::HostRows;
use aquila_engine::{Claim, EngineHandle, TokenRows};

use crate::error::{Error, Result};
use crate::handshake;
use crate::identity::Identity;
use crate::link::{Accept, Link, SMALL, Transport};
use crate::message::Message;
use crate::peers::Peers;
use crate::room::{Next, Room, Rooms};
use crate::secret::Secret;

/// How often a silent connection is told that it is alive.
const PULSE: Duration = Duration::from_millis(500);
/// How long a connection may stay without a claim.
const IDLE: Duration = Duration::from_secs(300);
/// Rows of tokens that a message has at most, of those that a request asked for.
const RETURNED: usize = 1024;
/// Connections at once.
const MOST: usize = 1024;

/// What a prefill worker is given.
#[derive(Debug, Clone)]
pub struct PrefillSettings {
    /// Where it listens, as `host:port`.
    pub address: String,
    /// What must be equal on a decode worker.
    pub identity: Identity,
    /// The secret that decode workers must know.
    pub secret: Secret,
    /// How long a room waits for its other side.
    pub patience: Duration,
    /// Bytes that may wait to be sent before the next prompt begins, or the next chunk of one that
    /// has its share in them.
    pub most_unsent: usize,
}

/// The worker that processes prompts. Dropped, it stops listening.
pub struct PrefillWorker {
    shared: Arc<Shared>,
    accept: Arc<dyn Accept>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    settings: PrefillSettings,
    engine: EngineHandle,
    rooms: Rooms,
    peers: Peers,
    connections: AtomicUsize,
    stop: AtomicBool,
}

impl PrefillWorker {
    /// Begins to listen.
    ///
    /// # Errors
    /// If that is not possible.
    pub fn start(
        transport: &dyn Transport,
        settings: PrefillSettings,
        engine: EngineHandle,
    ) -> Result<Self> {
        let accept = transport.listen(&settings.address)?;
        let rooms = Rooms::new(settings.most_unsent);
        let shared = Arc::new(Shared {
            settings,
            engine,
            rooms,
            peers: Peers::default(),
            connections: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
        });
        let listen = {
            let (shared, accept) = (shared.clone(), accept.clone());
            std::thread::spawn(move || listen(&shared, &*accept))
        };
        let expire = {
            let shared = shared.clone();
            std::thread::spawn(move || expire(&shared))
        };
        Ok(Self { shared, accept, threads: vec![listen, expire] })
    }

    /// The port on which it listens.
    pub fn port(&self) -> u16 {
        self.accept.port()
    }

    /// Opens a room for a request that is about to be submitted; the request's
    /// [`HandOver`](aquila_engine::HandOver) is the room, which must be told that it was
    /// [admitted](Room::admitted), or [closed](Self::close).
    ///
    /// # Errors
    /// If the room is open already.
    pub fn open(&self, room: u64) -> Result<Arc<Room>> {
        self.shared.rooms.open(room)
    }

    /// Ends a room whose request is not submitted.
    pub fn close(&self, room: u64) {
        self.shared.rooms.close(room);
    }

    /// What went to each decode worker.
    pub fn peers(&self) -> &Peers {
        &self.shared.peers
    }

    /// Waits until every room has ended, but not for ever: what prompts have left is still sent
    /// when their requests are answered.
    pub fn wait_for_transfers(&self) {
        let until = Instant::now() + self.shared.settings.patience;
        while self.shared.rooms.len() > 0 && Instant::now() < until {
            std::thread::sleep(PULSE / 50);
        }
    }

    /// Rooms that are open, and bytes that wait to be sent.
    pub fn load(&self) -> (usize, usize) {
        (self.shared.rooms.len(), self.shared.rooms.unsent())
    }
}

impl Drop for PrefillWorker {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.accept.close();
        for thread in self.threads.drain(..) {
            // A thread that panicked has said so.
            let _ = thread.join();
        }
    }
}

fn listen(shared: &Arc<Shared>, accept: &dyn Accept) {
    while let Some(link) = accept.accept() {
        if shared.connections.fetch_add(1, Ordering::AcqRel) >= MOST {
            shared.connections.fetch_sub(1, Ordering::AcqRel);
            shared.peers.count_stranger();
            continue;
        }
        let of_thread = shared.clone();
        let serve = move || {
            converse(&of_thread, link);
            of_thread.connections.fetch_sub(1, Ordering::AcqRel);
        };
        if let Err(e) = std::thread::Builder::new().spawn(serve) {
            shared.connections.fetch_sub(1, Ordering::AcqRel);
            tracing::error!("there is no thread for a decode worker's connection: {e}");
        }
    }
}

/// Ends rooms that nobody claims.
fn expire(shared: &Shared) {
    while !shared.stop.load(Ordering::Acquire) {
        std::thread::sleep(PULSE);
        for (room, request) in shared.rooms.expire(shared.settings.patience) {
            tracing::warn!("room {room} was given up: no decode worker has claimed it");
            if let Some(request) = request {
                shared.engine.abort(request);
            }
        }
    }
}

/// Serves one connection, one room after the other.
fn converse(shared: &Shared, mut link: Box<dyn Link>) {
    let link = &mut *link;
    let settings = &shared.settings;
    if let Err(e) = handshake::welcome(link, &settings.secret, &settings.identity) {
        shared.peers.count_stranger();
        return tracing::warn!("a connection was dropped: {e}");
    }
    loop {
        let claim = match link.receive(SMALL, IDLE) {
            Ok((claim, _)) => claim,
            Err(Error::HungUp { .. } | Error::Silent { .. }) => return,
            Err(e) => return tracing::warn!("a connection was dropped: {e}"),
        };
        let Message::Claim { room, claim } = claim else {
            shared.peers.count_stranger();
            return tracing::warn!("{} was dropped: it should have claimed a room", link.peer());
        };
        let peer = link.peer().to_owned();
        let served = serve(shared, link, room, claim);
        shared.peers.count(&peer, |counts| match &served {
            Ok(_) => counts.transfers += 1,
            Err(_) => counts.failures += 1,
        });
        match served {
            Ok(()) => (),
            // It was told, and may go on.
            Err(Error::Room { room, why }) => {
                tracing::warn!("room {room} was not transferred to {peer}: {why}");
            }
            Err(e) => return tracing::warn!("room {room} was not transferred: {e}"),
        }
    }
}

/// Sends what the request of a room leaves.
fn serve(shared: &Shared, link: &mut dyn Link, number: u64, claim: Claim) -> Result<()> {
    let claimed = Instant::now();
    let wait = |link: &mut dyn Link| {
        if link.has_hung_up() {
            return Err(Error::HungUp { peer: link.peer().to_owned() });
        }
        link.send(&Message::Wait).map(drop)
    };
    let fail = |link: &mut dyn Link, why: String| {
        link.send(&Message::Failed(why.clone()))?;
        Err(Error::Room { room: number, why })
    };
    let room = loop {
        if let Some(room) = shared.rooms.find(number, PULSE) {
            break room;
        }
        if claimed.elapsed() > shared.settings.patience {
            return fail(link, "no request has opened it".into());
        }
        wait(link)?;
    };
    if let Err(Error::Room { why, .. }) = room.claim() {
        return fail(link, why);
    }
    let sent = send_all(shared, link, &room, claim, claimed, wait);
    shared.rooms.close(number);
    if let Err(e) = &sent
        && let Some(request) = room.request(Duration::ZERO)
    {
        tracing::debug!("room {number}: the request is given up: {e}");
        shared.engine.abort(request);
    }
    match sent? {
        Some(why) => Err(Error::Room { room: number, why }),
        None => Ok(()),
    }
}

/// Sends all messages of a room that is claimed; answers why the request was given up, if it was.
fn send_all(
    shared: &Shared,
    link: &mut dyn Link,
    room: &Room,
    claim: Claim,
    claimed: Instant,
    wait: impl Fn(&mut dyn Link) -> Result<()>,
) -> Result<Option<String>> {
    let (mut begun, mut spoke) = (None, Instant::now());
    // A request begins when little waits to be sent, so that what waits stays bounded.
    let mut told = false;
    loop {
        if !told && let Some(request) = room.request(Duration::ZERO) {
            told = shared.rooms.have_room();
            if told {
                shared.engine.claim(request, claim);
            }
        }
        let patience = if told { PULSE } else { PULSE / 50 };
        let mut message = match room.next(patience) {
            Next::Message(message) => message,
            Next::Nothing => {
                if spoke.elapsed() >= PULSE {
                    wait(link)?;
                    spoke = Instant::now();
                }
                continue;
            }
            Next::Over => Message::Failed("its request was refused".into()),
        };
        let bytes = match send(link, &mut message) {
            // Nothing of such a message was sent, and the decode worker is told why.
            Err(why @ Error::TooLong { .. }) => {
                message = Message::Failed(why.to_string());
                link.send(&message)?
            }
            sent => sent?,
        } as u64;
        let now = Instant::now();
        let first = *begun.get_or_insert(now);
        let ended = match message {
            Message::Prefilled(_) => Some(None),
            Message::Failed(why) => Some(Some(why)),
            _ => None,
        };
        shared.peers.count(link.peer(), |counts| {
            counts.bytes += bytes;
            if ended.is_some() {
                counts.waited += first - claimed;
                counts.transferred += now - first;
            }
        });
        if let Some(ended) = ended {
            return Ok(ended);
        }
    }
}

/// Sends a message; before the end of a prompt what was asked for of the rows of its tokens, in
/// pieces.
fn send(link: &mut dyn Link, message: &mut Message) -> Result<usize> {
    let mut bytes = 0;
    if let Message::Prefilled(prefilled) = message {
        let TokenRows { from, hidden_states, routed_experts } = &mut prefilled.rows;
        let (hidden_states, routed_experts) = (take(hidden_states), take(routed_experts));
        let rows = hidden_states.len().max(routed_experts.len());
        for at in 0..rows.div_ceil(RETURNED) {
            bytes += link.send(&Message::Returned(TokenRows {
                from: *from,
                hidden_states: piece(&hidden_states, at),
                routed_experts: piece(&routed_experts, at),
            }))?;
        }
    }
    Ok(bytes + link.send(message)?)
}

/// The piece of this number.
fn piece<T: Copy>(rows: &HostRows<T>, at: usize) -> HostRows<T> {
    let of_piece = rows.values.chunks((RETURNED * rows.width).max(1)).nth(at);
    HostRows { width: rows.width, values: of_piece.unwrap_or_default().to_vec() }
}
