//! One connection: its handshake, its requests, its time limits and its end.

use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::watch;

use crate::connections::{Answering, Place};
use crate::state::App;
use crate::unstalled::{Unstalled, left};

/// Bytes of a connection's buffer, which the headers of a request must fit into.
pub(crate) const BUFFER: usize = 32 << 10;

/// Who asks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Peer(pub SocketAddr);

/// What a connection is served with.
pub(crate) struct Serving {
    pub app: Arc<App>,
    pub router: Router,
    pub place: Arc<Place>,
    pub peer: Peer,
    /// Becomes true when the server closes.
    pub closing: watch::Receiver<bool>,
}

impl Serving {
    /// Serves one connection until its client leaves, its time is up, another needs its place, or
    /// the server closes and the request that runs on it is answered.
    pub async fn serve(mut self, socket: TcpStream) {
        // Small events must not wait for each other; a socket that refuses is only slower.
        let _ = socket.set_nodelay(true);
        let limits = &self.app.settings.limits;
        let watched = Arc::new(socket);
        let socket = Unstalled::new(watched.clone(), limits.stall_time);
        let Some(tls) = &self.app.settings.tls else { return self.answer(socket, &watched).await };
        let mut closing = self.closing.clone();
        let secured = tokio::select! {
            secured = tls.accept(socket, limits.header_time) => secured,
            () = told(&mut closing) => return,
            () = self.place.closed() => return,
        };
        match secured {
            Ok(socket) => self.answer(socket, &watched).await,
            Err(error) => {
                self.app.metrics.http.handshake_failed();
                tracing::debug!(%error, peer = %self.peer.0, "a TLS handshake failed");
            }
        }
    }

    /// Answers requests on `socket`, which may be a secured form of `watched`.
    async fn answer(&mut self, socket: impl AsyncRead + AsyncWrite + Unpin, watched: &TcpStream) {
        let Self { app, router, place, peer, closing } = self;
        let router = TowerToHyperService::new(router.clone());
        let answer = |mut request: hyper::Request<Incoming>| {
            if hyper::body::Body::is_end_stream(request.body()) {
                place.set_busy();
            }
            request.extensions_mut().insert(place.clone());
            request.extensions_mut().insert(*peer);
            let (answer, place) = (router.call(request), place.clone());
            async move {
                let response = answer.await?;
                place.set_busy();
                let answering = |body| Body::new(Answering { body, place });
                Ok::<_, std::convert::Infallible>(response.map(answering))
            }
        };
        let connection = http1::Builder::new()
            .max_buf_size(BUFFER)
            .timer(TokioTimer::new())
            .header_read_timeout(app.settings.limits.header_time)
            .serve_connection(TokioIo::new(socket), service_fn(answer));
        let mut connection = std::pin::pin!(connection);
        // hyper hears of a client that leaves only while nothing of what it sent is unread.
        let gone = async {
            left(watched).await;
            place.busy().await;
        };
        let mut gone = std::pin::pin!(gone);
        let mut is_closing = false;
        let ended = loop {
            tokio::select! {
                biased;
                ended = connection.as_mut() => break ended,
                () = gone.as_mut() => {
                    tracing::debug!(peer = %peer.0, "a client left before its answer");
                    return;
                }
                () = told(closing), if !is_closing => {
                    connection.as_mut().graceful_shutdown();
                    is_closing = true;
                }
                () = place.closed() => {
                    tracing::debug!("a connection made place for another");
                    return;
                }
            }
        };
        if let Err(error) = ended {
            app.metrics.http.connection_failed(&error);
            tracing::debug!(%error, peer = %peer.0, "a connection ended early");
        }
    }
}

/// Waits until the server closes; a server that is gone has closed.
async fn told(closing: &mut watch::Receiver<bool>) {
    let _ = closing.wait_for(|&closing| closing).await;
}
