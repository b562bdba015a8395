//! What lines of the log look like.

use std::fmt;
use std::time::Instant;

use tracing::{Event, Level, Subscriber};
use tracing_subscriber::fmt::format::{Format, Writer};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

use super::json;
use super::repeats::Repeats;
use crate::flags::LogFormat;

/// Writes events as lines, and repeated warnings not too often.
pub struct Lines {
    format: LogFormat,
    text: Format,
    repeats: Repeats,
    now: fn() -> Instant,
}

impl Lines {
    pub fn new(format: LogFormat, colours: bool) -> Self {
        let text = Format::default().with_ansi(colours);
        Self { format, text, repeats: Repeats::default(), now: Instant::now }
    }
}

impl<S, N> FormatEvent<S, N> for Lines
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let metadata = event.metadata();
        let held_back = if *metadata.level() <= Level::WARN {
            match self.repeats.admit(metadata.callsite(), (self.now)()) {
                Some(held_back) => held_back,
                // No text is no line.
                None => return Ok(()),
            }
        } else {
            0
        };
        if self.format == LogFormat::Json {
            return writeln!(writer, "{}", json::event_line(event, held_back));
        }
        if held_back == 0 {
            return self.text.format_event(context, writer, event);
        }
        let mut line = String::new();
        self.text.format_event(context, Writer::new(&mut line), event)?;
        writeln!(writer, "{} ({held_back} more like it since the last)", line.trim_end())
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::io;
    use std::sync::{Arc, Mutex};
    use std::time::Duration;

    use super::*;

    thread_local! {
        static NOW: Cell<Option<Instant>> = const { Cell::new(None) };
    }

    fn pass(time: Duration) {
        NOW.set(Some(now() + time));
    }

    fn now() -> Instant {
        NOW.get().unwrap_or_else(|| {
            let now = Instant::now();
            NOW.set(Some(now));
            now
        })
    }

    #[derive(Clone, Default)]
    struct Written(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Written {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// The lines of a log that `said` writes to.
    fn logged(format: LogFormat, said: impl FnOnce()) -> Vec<String> {
        let written = Written::default();
        let writer = written.clone();
        let subscriber = tracing_subscriber::fmt()
            .event_format(Lines { now, ..Lines::new(format, false) })
            .with_writer(move || writer.clone())
            .finish();
        tracing::subscriber::with_default(subscriber, said);
        let text = String::from_utf8(written.0.lock().unwrap().clone()).unwrap();
        text.lines().map(str::to_owned).collect()
    }

    fn full(number: u32) {
        tracing::warn!(number, "the disk is full");
    }

    #[test]
    fn a_repeated_warning_is_one_line_a_second() {
        let said = || {
            (0..1000).for_each(full);
            // Another kind, and what is no warning, are not held back.
            tracing::error!("the disk is gone");
            (0..3).for_each(|_| tracing::info!("all is well"));
            pass(Duration::from_secs(1));
            full(1000);
            pass(Duration::from_secs(5));
            full(1001);
        };
        let lines = logged(LogFormat::Text, said);
        let ends: Vec<&str> =
            lines.iter().map(|line| line.split_once("tests: ").unwrap().1).collect();
        assert_eq!(
            ends,
            [
                "the disk is full number=0",
                "the disk is gone",
                "all is well",
                "all is well",
                "all is well",
                "the disk is full number=1000 (999 more like it since the last)",
                "the disk is full number=1001",
            ]
        );
        assert!(!lines.concat().contains('\x1b'));
    }

    #[test]
    fn lines_of_json_have_values_of_their_types() {
        let said = || {
            let peer = tracing::field::display("1.2.3.4");
            tracing::warn!(
                status = 200_u16,
                ms = 1.5,
                peer,
                cut = true,
                none = None::<u64>,
                "a \"b\"\n"
            );
            full(0);
            full(1);
            pass(Duration::from_secs(2));
            full(2);
        };
        let lines = logged(LogFormat::Json, said);
        let lines: Vec<serde_json::Value> =
            lines.iter().map(|line| serde_json::from_str(line).unwrap()).collect();
        let first = &lines[0];
        assert_eq!((&first["level"], &first["message"]), (&"WARN".into(), &"a \"b\"\n".into()));
        assert_eq!((&first["status"], &first["ms"]), (&200.into(), &1.5.into()));
        assert_eq!((&first["peer"], &first["cut"]), (&"1.2.3.4".into(), &true.into()));
        assert!(first.get("none").is_none() && first["timestamp"].as_str().unwrap().ends_with('Z'));
        assert!(lines[1].get("repeated").is_none());
        assert_eq!((&lines[2]["number"], &lines[2]["repeated"]), (&2.into(), &1.into()));
        assert_eq!(lines.len(), 3);
    }
}
