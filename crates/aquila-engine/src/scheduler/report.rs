//! The line of the log that says how decoding goes, in SGLang's words.
//!
//! It tells of the time since the line before, so that idle time never dilutes what it says.

use std::time::{Duration, Instant};

use aquila_spec::SpecStats;

use crate::stats::Snapshot;

/// How often the line comes, unless told otherwise.
pub(crate) const REPORT_EVERY: Duration = Duration::from_secs(5);

/// What happened since the last line.
pub(crate) struct Report {
    every: Duration,
    began: Option<Instant>,
    /// Tokens of answers when it began.
    tokens: u64,
    /// What came of drafting since then.
    pub drafted: SpecStats,
}

impl Report {
    pub fn new(every: Duration) -> Self {
        Self { every, began: None, tokens: 0, drafted: SpecStats::default() }
    }

    /// Begins anew, as after idle time.
    pub fn begin(&mut self, now: Instant, counts: &Snapshot) {
        self.began = Some(now);
        self.tokens = counts.completion_tokens;
        self.drafted = SpecStats::default();
    }

    /// The line, if it is time for one.
    pub fn line(&mut self, now: Instant, counts: &Snapshot) -> Option<String> {
        let elapsed = now.duration_since(self.began?);
        if elapsed < self.every || counts.running == 0 {
            return None;
        }
        let usage = counts.used_slots as f64 / counts.total_slots.max(1) as f64;
        let mut line = format!(
            "Decode batch, #running-req: {}, #token: {}, token usage: {usage:.2}, ",
            counts.running, counts.used_slots
        );
        if self.drafted.verify_ct > 0 {
            let (length, rate) = (self.drafted.accept_length(), self.drafted.accept_rate());
            line += &format!("accept len: {length:.2}, accept rate: {rate:.2}, ");
        }
        let tokens = (counts.completion_tokens - self.tokens) as f64;
        let throughput = tokens / elapsed.as_secs_f64().max(1e-9);
        line +=
            &format!("gen throughput (token/s): {throughput:.2}, #queue-req: {}", counts.waiting);
        self.begin(now, counts);
        Some(line)
    }
}
