//! Lines of the log as JSON: an object with `timestamp`, `level`, `target`, `message`, and the
//! values of the event beside them.

use std::fmt::Debug;

use serde_json::{Map, Value, json};
use tracing::field::{Field, Visit};
use tracing::{Event, Level};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};

/// The line of an event, with how many like it were held back.
pub fn event_line(event: &Event<'_>, held_back: u64) -> String {
    let metadata = event.metadata();
    let mut line = Line::new(*metadata.level(), metadata.target());
    event.record(&mut line);
    if held_back > 0 {
        line.0.insert("repeated".into(), held_back.into());
    }
    line.to_string()
}

/// The line of something that a command says beside the log.
pub fn notice_line(text: &str) -> String {
    let mut line = Line::new(Level::INFO, "aquila");
    line.0.insert("message".into(), text.into());
    line.to_string()
}

struct Line(Map<String, Value>);

impl Line {
    fn new(level: Level, target: &str) -> Self {
        let mut time = String::new();
        // Writing to a string cannot fail.
        let _ = SystemTime.format_time(&mut Writer::new(&mut time));
        let head = json!({ "timestamp": time, "level": level.as_str(), "target": target });
        Self(head.as_object().cloned().unwrap_or_default())
    }

    fn put(&mut self, field: &Field, value: impl Into<Value>) {
        self.0.insert(field.name().into(), value.into());
    }
}

impl std::fmt::Display for Line {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let text = serde_json::to_string(&self.0).map_err(|_| std::fmt::Error)?;
        f.write_str(&text)
    }
}

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.put(field, format!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.put(field, value);
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.put(field, value);
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.put(field, value);
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.put(field, value);
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.put(field, value);
    }
}
