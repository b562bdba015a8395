//! The listener, its connections and its way to stop.
//!
//! Draining goes in this order: requests are refused, those under way finish, connections close,
//! the engine ends. Connections are accepted until the second step is done, so that whoever asks
//! hears a reason.

use std::fmt::Arguments;
use std::io::Write;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use aquila_text::Generator;
use axum::Router;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::address::Address;
use crate::connection::{Peer, Serving};
use crate::connections::Connections;
use crate::error::{Error, Result};
use crate::refusal::Refusal;
use crate::routes;
use crate::settings::Settings;
use crate::signals;
use crate::state::App;

/// How long connections may take to deliver what is written when all requests have ended.
const LAST_WORDS: Duration = Duration::from_secs(5);
/// How long to wait when the system has no socket to spare.
const NO_SOCKETS: Duration = Duration::from_millis(50);
/// How often throughput is measured.
const SECOND: Duration = Duration::from_secs(1);

/// A server that listens but does not serve yet.
pub struct Server {
    listener: TcpListener,
    address: SocketAddr,
    app: Arc<App>,
}

impl Server {
    /// Listens. Must be called on the threads of a runtime.
    pub fn listen(address: Address, generator: Generator, settings: Settings) -> Result<Self> {
        let (listener, address) = address.listen()?;
        let app = App::new(generator, settings, address.ip().to_canonical().is_loopback());
        Ok(Self { listener, address, app: Arc::new(app) })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves until `stop` is complete and all requests are answered. Where the engine fails, all
    /// that comes is refused with the reason until then.
    pub async fn serve(self, stop: impl Future<Output = ()>) {
        let Self { listener, app, .. } = self;
        let (close, closing) = watch::channel(false);
        let mut connections = Accepting {
            router: routes::router(app.clone()),
            app: app.clone(),
            all: Connections::new(app.settings.limits.connections),
            closing,
            tasks: JoinSet::new(),
        };
        let meter = tokio::spawn(measure_throughput(app.clone()));
        let exporting = app.settings.traces.clone().map(|endpoint| {
            let (traces, export) = crate::traces::Traces::new(endpoint);
            app.traces.get_or_init(|| traces);
            tokio::spawn(export.run())
        });
        connections.accept(&listener, stop).await;
        app.drain();
        connections.accept(&listener, app.active_requests.wait_for_none()).await;
        drop(listener);
        // Those who wait for it are the connections, and they end with it or before.
        let _ = close.send(true);
        let all = async { while connections.tasks.join_next().await.is_some() {} };
        if tokio::time::timeout(LAST_WORDS, all).await.is_err() {
            tracing::warn!("connections that took nothing any more were cut");
        }
        connections.tasks.shutdown().await;
        meter.abort();
        if let (Some(traces), Some(exporting)) = (app.traces.get(), exporting) {
            traces.close();
            // Spans that no collector takes in time are lost.
            let _ = tokio::time::timeout(LAST_WORDS, exporting).await;
        }
        let engine = app.generator.engine().clone();
        if engine.failure().is_some() {
            // Giving back what a device holds that is lost is left to the end of the process.
            return;
        }
        // Nothing is left to do for the engine, so this ends at once.
        let _ = tokio::task::spawn_blocking(move || engine.drain()).await;
    }
}

struct Accepting {
    router: Router,
    app: Arc<App>,
    all: Arc<Connections>,
    closing: watch::Receiver<bool>,
    tasks: JoinSet<()>,
}

impl Accepting {
    /// Accepts connections until `stop` is complete.
    async fn accept(&mut self, listener: &TcpListener, stop: impl Future<Output = ()>) {
        let mut stop = std::pin::pin!(stop);
        loop {
            tokio::select! {
                biased;
                () = &mut stop => return,
                accepted = listener.accept() => match accepted {
                    Ok((socket, peer)) => self.serve(socket, Peer(peer)),
                    Err(error) => {
                        tracing::warn!(%error, "a connection was not accepted");
                        // Where the system has no more files, one of ours may be given back.
                        self.all.close_one();
                        tokio::time::sleep(NO_SOCKETS).await;
                    }
                },
                Some(ended) = self.tasks.join_next() => {
                    if let Err(error) = ended {
                        tracing::error!(%error, "a connection failed");
                    }
                }
            }
        }
    }

    fn serve(&mut self, socket: TcpStream, peer: Peer) {
        let app = self.app.clone();
        let Some(place) = self.all.place() else {
            app.metrics.http.connection_refused();
            // Without a handshake, no word would be understood.
            if app.settings.tls.is_none() {
                refuse(socket, app.settings.limits.connections);
            }
            return;
        };
        let (router, closing) = (self.router.clone(), self.closing.clone());
        self.tasks.spawn(Serving { app, router, place, peer, closing }.serve(socket));
    }
}

/// Refuses a connection; what the socket does not take at once is lost.
fn refuse(socket: TcpStream, most: usize) {
    let why = format!("all {most} connections that this server may have are being answered");
    let refusal = Refusal::busy(why).whole_response();
    let said = socket.into_std().and_then(|mut socket| socket.write_all(&refusal));
    if let Err(error) = said {
        tracing::debug!(%error, "a connection was closed without a word");
    }
}

/// Measures second by second, from a request on until a second has passed without a token.
async fn measure_throughput(app: Arc<App>) {
    let tokens = || app.generator.engine().stats().snapshot().completion_tokens;
    let mut before = tokens();
    loop {
        app.active_requests.wait_for_some().await;
        let mut last = Instant::now();
        loop {
            tokio::time::sleep(SECOND).await;
            let (now, count) = (Instant::now(), tokens());
            let made = count - before;
            app.metrics.set_throughput(made as f64 / (now - last).as_secs_f64());
            (last, before) = (now, count);
            if made == 0 && app.active_requests.count() == 0 {
                break;
            }
        }
    }
}

/// Few threads: the cores are for the model, and a thread that is awake already costs the engine
/// no call to wake it for the next token.
fn http_threads() -> usize {
    std::thread::available_parallelism().map_or(1, |cores| (cores.get() / 8).clamp(1, 8))
}

/// Serves on threads of its own until a signal comes, then drains; a second signal ends the
/// process at once, always. Where the engine fails for good, it drains, too, and that is the error. `ready` hears the address when the server listens; `say` writes what
/// signals do.
pub fn run(
    address: Address,
    generator: Generator,
    settings: Settings,
    ready: impl FnOnce(SocketAddr),
    say: fn(Arguments<'_>),
) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(http_threads())
        .max_blocking_threads(8)
        .thread_name("aquila-http")
        .enable_all()
        .build()
        .map_err(Error::Threads)?;
    let engine = generator.engine().clone();
    let served = runtime.block_on(async {
        let server = Server::listen(address, generator, settings)?;
        let (stop, stopped) = tokio::sync::oneshot::channel();
        signals::listen(stop, say).map_err(Error::Threads)?;
        let failed = Arc::new(Notify::new());
        let tell = failed.clone();
        engine.when_failed(move |_| tell.notify_one());
        ready(server.address());
        server
            .serve(async {
                tokio::select! {
                    // If the sender is gone, so is the only way to stop.
                    _ = stopped => (),
                    () = failed.notified() => (),
                }
            })
            .await;
        match engine.failure() {
            Some(failure) => Err(Error::Engine(failure.clone())),
            None => Ok(()),
        }
    });
    // A read that is stuck on a thread of the runtime ends with the process.
    runtime.shutdown_background();
    served
}
