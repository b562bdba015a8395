//! One connection: its requests, its time limits and its end.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::{Instant, Sleep};

use crate::connections::{Answering, Place};
use crate::settings::Limits;

/// Bytes of a connection's buffer, which the headers of a request must fit into.
pub(crate) const BUFFER: usize = 32 << 10;

/// Serves one connection until its client leaves, its time is up, another needs its place, or
/// `closing` becomes true and the request that runs on it is answered.
pub(crate) async fn serve(
    socket: TcpStream,
    place: Arc<Place>,
    router: Router,
    limits: Limits,
    mut closing: watch::Receiver<bool>,
) {
    // Small events must not wait for each other; a socket that refuses is only slower.
    let _ = socket.set_nodelay(true);
    let io = TokioIo::new(Unstalled { socket, stall_time: limits.stall_time, stalled: None });
    let router = TowerToHyperService::new(router);
    let answer = |mut request: hyper::Request<Incoming>| {
        if hyper::body::Body::is_end_stream(request.body()) {
            place.set_busy();
        }
        request.extensions_mut().insert(place.clone());
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
        .header_read_timeout(limits.header_time)
        .serve_connection(io, service_fn(answer));
    let mut connection = std::pin::pin!(connection);
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = told(&mut closing) => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
        () = place.closed() => {
            tracing::debug!("a connection made place for another");
            return;
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "a connection ended early");
    }
}

/// Waits until the server closes; a server that is gone has closed.
async fn told(closing: &mut watch::Receiver<bool>) {
    let _ = closing.wait_for(|&closing| closing).await;
}

/// A socket that fails when its peer takes nothing for too long.
struct Unstalled {
    socket: TcpStream,
    stall_time: Duration,
    /// Runs while something waits to be sent.
    stalled: Option<Pin<Box<Sleep>>>,
}

impl Unstalled {
    fn watch<T>(
        &mut self,
        context: &mut Context<'_>,
        result: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if result.is_ready() {
            self.stalled = None;
            return result;
        }
        let until = Instant::now() + self.stall_time;
        let stalled = self.stalled.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(until)));
        match stalled.as_mut().poll(context) {
            Poll::Ready(()) => Poll::Ready(Err(io::ErrorKind::TimedOut.into())),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl AsyncRead for Unstalled {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_read(context, buffer)
    }
}

impl AsyncWrite for Unstalled {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.socket).poll_write(context, bytes);
        self.watch(context, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.socket).poll_write_vectored(context, slices);
        self.watch(context, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.socket.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_shutdown(context)
    }
}
