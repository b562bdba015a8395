//! What is logged while something runs.

use std::io::Write;
use std::sync::{Arc, Mutex, OnceLock};

use tracing::Dispatch;
use tracing_subscriber::filter::LevelFilter;

#[derive(Clone, Default)]
struct Page(Arc<Mutex<Vec<u8>>>);

impl Write for Page {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Runs `what`; answers what came of it, and the log of its thread up to `level`.
pub fn logged<T>(level: LevelFilter, what: impl FnOnce() -> T) -> (T, String) {
    // While there is but one subscriber, a line that another thread comes to first counts as one
    // that nobody wants.
    static ANOTHER: OnceLock<Dispatch> = OnceLock::new();
    let nowhere = || tracing_subscriber::fmt().with_writer(std::io::sink);
    ANOTHER.get_or_init(|| Dispatch::new(nowhere().with_max_level(LevelFilter::TRACE).finish()));
    let page = Page::default();
    let writer = page.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(level)
        .with_ansi(false)
        .with_writer(move || writer.clone())
        .finish();
    let came = tracing::subscriber::with_default(subscriber, what);
    let text = String::from_utf8(page.0.lock().unwrap().clone()).unwrap();
    (came, text)
}
