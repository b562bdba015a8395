//! The listener, its connections and its way to stop.
//!
//! Draining goes in this order: requests are refused, those under way finish, connections close,
//! the engine ends. Connections are accepted until the second step is done, so that whoever asks
//! hears a reason.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use aquila_text::Generator;
use axum::Router;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::connection;
use crate::error::{Error, Result};
use crate::routes;
use crate::settings::Settings;
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
    /// Listens.
    pub async fn bind(generator: Generator, settings: Settings) -> Result<Self> {
        let address = (settings.host.as_str(), settings.port);
        let failed = |source| Error::Listen {
            address: format!("{}:{}", settings.host, settings.port),
            source,
        };
        let listener = TcpListener::bind(address).await.map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        Ok(Self { listener, address, app: Arc::new(App::new(generator, settings)) })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves until `stop` is complete and all requests are answered.
    pub async fn serve(self, stop: impl Future<Output = ()>) {
        let Self { listener, app, .. } = self;
        let (close, closing) = watch::channel(false);
        let mut connections = Connections {
            router: routes::router(app.clone()),
            app: app.clone(),
            closing,
            tasks: JoinSet::new(),
        };
        let meter = tokio::spawn(measure_throughput(app.clone()));
        connections.accept(&listener, stop).await;
        app.drain();
        connections.accept(&listener, app.under_way.wait_for_none()).await;
        drop(listener);
        // Those who wait for it are the connections, and they end with it or before.
        let _ = close.send(true);
        let all = async { while connections.tasks.join_next().await.is_some() {} };
        if tokio::time::timeout(LAST_WORDS, all).await.is_err() {
            tracing::warn!("connections that took nothing any more were cut");
        }
        connections.tasks.shutdown().await;
        meter.abort();
        let engine = app.generator.engine().clone();
        // Nothing is left to do for the engine, so this ends at once.
        let _ = tokio::task::spawn_blocking(move || engine.drain()).await;
    }
}

struct Connections {
    router: Router,
    app: Arc<App>,
    closing: watch::Receiver<bool>,
    tasks: JoinSet<()>,
}

impl Connections {
    /// Accepts connections until `stop` is complete.
    async fn accept(&mut self, listener: &TcpListener, stop: impl Future<Output = ()>) {
        let mut stop = std::pin::pin!(stop);
        loop {
            tokio::select! {
                biased;
                () = &mut stop => return,
                accepted = listener.accept() => match accepted {
                    Ok((socket, _)) => self.serve(socket),
                    Err(error) => {
                        tracing::warn!(%error, "a connection was not accepted");
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

    fn serve(&mut self, socket: TcpStream) {
        let limits = self.app.settings.limits.clone();
        let serving = connection::serve(socket, self.router.clone(), limits, self.closing.clone());
        self.tasks.spawn(serving);
    }
}

async fn measure_throughput(app: Arc<App>) {
    let tokens = || app.generator.engine().stats().snapshot().completion_tokens;
    let mut last = (Instant::now(), tokens());
    let mut ticks = tokio::time::interval(SECOND);
    loop {
        ticks.tick().await;
        let now = (Instant::now(), tokens());
        let seconds = (now.0 - last.0).as_secs_f64();
        if seconds > 0.5 {
            app.metrics.set_throughput((now.1 - last.1) as f64 / seconds);
            last = now;
        }
    }
}

/// Few threads: the cores are for the model, and a thread that is awake already costs the engine
/// no call to wake it for the next token.
fn http_threads() -> usize {
    std::thread::available_parallelism().map_or(1, |cores| (cores.get() / 8).clamp(1, 8))
}

/// Serves on threads of its own until a signal comes, then drains; a second signal ends the
/// process at once. `ready` hears the address when the server listens.
pub fn run(generator: Generator, settings: Settings, ready: impl FnOnce(SocketAddr)) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(http_threads())
        .max_blocking_threads(8)
        .thread_name("aquila-http")
        .enable_all()
        .build()
        .map_err(Error::Threads)?;
    runtime.block_on(async {
        let server = Server::bind(generator, settings).await?;
        let mut signals = Signals::listen().map_err(Error::Threads)?;
        ready(server.address());
        let (stop, stopped) = tokio::sync::oneshot::channel();
        tokio::spawn(async move {
            let name = signals.next().await;
            eprintln!("{name}: finishing what is under way; a second signal ends at once");
            // A server that has ended already needs no telling.
            let _ = stop.send(());
            let name = signals.next().await;
            eprintln!("{name}: ended with requests under way");
            std::process::exit(1);
        });
        server
            .serve(async {
                // If the sender is gone, so is the only way to stop.
                let _ = stopped.await;
            })
            .await;
        Ok(())
    })
}

/// The signals that ask a process to end.
struct Signals {
    #[cfg(unix)]
    terminate: tokio::signal::unix::Signal,
    #[cfg(unix)]
    interrupt: tokio::signal::unix::Signal,
}

#[cfg(unix)]
impl Signals {
    fn listen() -> std::io::Result<Self> {
        use tokio::signal::unix::{SignalKind, signal};
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
        })
    }

    async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        }
    }
}

#[cfg(not(unix))]
impl Signals {
    fn listen() -> std::io::Result<Self> {
        Ok(Self {})
    }

    async fn next(&mut self) -> &'static str {
        // Where the system has no such signal, nothing ever comes.
        if tokio::signal::ctrl_c().await.is_err() {
            std::future::pending::<()>().await;
        }
        "Ctrl-C"
    }
}
