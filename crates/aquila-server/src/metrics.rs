//! Counters and histograms, in Prometheus' text form, under SGLang's names where it has them.

use std::fmt::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use aquila_engine::{DraftingState, Snapshot};
use aquila_spec::{Shape, SpecStats};
use aquila_text::End;

use crate::disaggregation::Role;
use crate::grammars::GrammarStore;
use crate::http_metrics::HttpMetrics;

/// Upper bounds in seconds, for what users wait for.
const WAITS: &[f64] = &[
    0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 20.0, 40.0,
    60.0, 80.0, 100.0, 200.0, 400.0,
];
/// Upper bounds in seconds, for what comes between two tokens.
const GAPS: &[f64] = &[
    0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.06, 0.08,
    0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 4.0, 6.0, 8.0,
];

/// A distribution of times.
#[derive(Debug)]
struct Histogram {
    bounds: &'static [f64],
    counts: Vec<AtomicU64>,
    nanoseconds: AtomicU64,
}

impl Histogram {
    fn new(bounds: &'static [f64]) -> Self {
        let counts = (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect();
        Self { bounds, counts, nanoseconds: AtomicU64::new(0) }
    }

    fn observe(&self, time: Duration, times: u64) {
        let seconds = time.as_secs_f64();
        let at = self.bounds.partition_point(|&bound| bound < seconds);
        self.counts[at].fetch_add(times, Relaxed);
        self.nanoseconds.fetch_add(time.as_nanos() as u64 * times, Relaxed);
    }

    fn write(&self, page: &mut Page, name: &str, help: &str) {
        page.head(name, "histogram", help);
        let mut total = 0;
        for (count, bound) in self.counts.iter().zip(self.bounds) {
            total += count.load(Relaxed);
            page.line(&format!("{name}_bucket"), &format!(",le=\"{bound}\""), total as f64);
        }
        total += self.counts[self.bounds.len()].load(Relaxed);
        page.line(&format!("{name}_bucket"), ",le=\"+Inf\"", total as f64);
        page.line(&format!("{name}_sum"), "", self.nanoseconds.load(Relaxed) as f64 / 1e9);
        page.line(&format!("{name}_count"), "", total as f64);
    }
}

/// What the server counts; the engine counts the rest.
#[derive(Debug)]
pub(crate) struct Metrics {
    requests: AtomicU64,
    aborted: AtomicU64,
    refused: AtomicU64,
    prompt_tokens: AtomicU64,
    first_token: Histogram,
    token_gap: Histogram,
    per_token: Histogram,
    whole: Histogram,
    /// Tokens per second of the last second or so, in thousandths.
    throughput: AtomicU64,
    pub http: Arc<HttpMetrics>,
}

impl Default for Metrics {
    fn default() -> Self {
        Self {
            requests: AtomicU64::new(0),
            aborted: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            prompt_tokens: AtomicU64::new(0),
            first_token: Histogram::new(WAITS),
            token_gap: Histogram::new(GAPS),
            per_token: Histogram::new(GAPS),
            whole: Histogram::new(WAITS),
            throughput: AtomicU64::new(0),
            http: Arc::default(),
        }
    }
}

/// Times one answer, on the engine's thread.
#[derive(Debug)]
pub(crate) struct Stopwatch {
    metrics: Arc<Metrics>,
    asked: Instant,
    /// Whether the prompt, which several answers share, is counted with this one.
    counts_prompt: bool,
    first: Option<Instant>,
    last: Instant,
}

impl Stopwatch {
    /// Notes that tokens came; those of one round share the time since the last.
    pub fn tokens(&mut self, count: usize) {
        let now = Instant::now();
        if self.first.is_none() {
            self.first = Some(now);
            self.metrics.first_token.observe(now - self.asked, 1);
        } else if count > 0 {
            let gap = (now - self.last) / count as u32;
            self.metrics.token_gap.observe(gap, count as u64);
        }
        self.last = now;
    }

    /// Notes the end.
    pub fn end(&self, end: &End) {
        let metrics = &self.metrics;
        let now = Instant::now();
        metrics.requests.fetch_add(1, Relaxed);
        if self.counts_prompt {
            metrics.prompt_tokens.fetch_add(end.usage.prompt_tokens as u64, Relaxed);
        }
        if end.reason.failure().is_some() {
            metrics.aborted.fetch_add(1, Relaxed);
            return;
        }
        metrics.whole.observe(now - self.asked, 1);
        if let (Some(first), Some(gaps)) =
            (self.first, end.usage.completion_tokens.checked_sub(1).filter(|&gaps| gaps > 0))
        {
            metrics.per_token.observe((self.last - first) / gaps as u32, 1);
        }
    }
}

impl Metrics {
    /// Times an answer that was asked for at `asked`.
    pub fn stopwatch(self: &Arc<Self>, asked: Instant, counts_prompt: bool) -> Stopwatch {
        Stopwatch { metrics: self.clone(), asked, counts_prompt, first: None, last: asked }
    }

    /// Notes a request that the engine did not take.
    pub fn refused(&self) {
        self.refused.fetch_add(1, Relaxed);
    }

    /// Tokens per second of late.
    pub fn throughput(&self) -> f64 {
        self.throughput.load(Relaxed) as f64 / 1e3
    }

    /// Notes the tokens per second of late.
    pub fn set_throughput(&self, tokens_per_second: f64) {
        self.throughput.store((tokens_per_second * 1e3) as u64, Relaxed);
    }

    /// All of it, for a server of the model `name` whose engine counted `engine`.
    pub fn page(
        &self,
        name: &str,
        engine: &Snapshot,
        spec: &SpecStats,
        drafting: &DraftingState,
        grammars: &GrammarStore,
        role: Option<&Role>,
    ) -> String {
        let mut page = Page { text: String::with_capacity(8 << 10), model: escaped(name) };
        let read = |counter: &AtomicU64| counter.load(Relaxed) as f64;
        let shape = drafting.setting.map_or(Shape::PLAIN, |setting| setting.shape);
        let rounds = drafting.rounds.max(1) as f64;
        let pool = engine.total_slots.max(1) as f64;
        let known = (engine.prompt_tokens + engine.cached_tokens).max(1) as f64;
        for (name, help, value) in [
            ("num_running_reqs", "Requests that hold KV", engine.running as f64),
            ("num_queue_reqs", "Requests that wait", engine.waiting as f64),
            ("num_used_tokens", "KV slots that requests hold", engine.used_slots as f64),
            ("max_total_num_tokens", "KV slots of the pool", engine.total_slots as f64),
            (
                "token_usage",
                "Share of the pool that requests hold",
                engine.used_slots as f64 / pool,
            ),
            (
                "cache_hit_rate",
                "Share of prompt tokens found in the prefix cache",
                engine.cached_tokens as f64 / known,
            ),
            ("gen_throughput", "Tokens per second", self.throughput()),
            (
                "spec_accept_length",
                "Tokens per verification, the bonus included",
                spec.accept_length(),
            ),
            ("spec_accept_rate", "Share of verified drafts that were right", spec.accept_rate()),
            ("spec_num_steps", "Steps of the last round's largest tree", shape.steps() as f64),
            (
                "spec_num_draft_tokens",
                "Nodes of the last round's largest tree, the bonus included",
                shape.nodes() as f64,
            ),
        ] {
            page.single(&format!("sglang:{name}"), "gauge", help, value);
        }
        for (name, help, value) in [
            ("spec_topk", "Width of the last round's largest tree", shape.topk() as f64),
            (
                "spec_expected_tokens_per_round",
                "Tokens that the policy expected of a round, on average",
                drafting.expected_tokens / rounds,
            ),
            (
                "spec_tokens_per_round",
                "Tokens that those rounds yielded, on average",
                drafting.real_tokens as f64 / rounds,
            ),
        ] {
            page.single(&format!("aquila:{name}"), "gauge", help, value);
        }
        for (name, help, value) in [
            ("sglang:num_requests_total", "Answers that ended", read(&self.requests)),
            ("sglang:num_aborted_requests_total", "Answers given up", read(&self.aborted)),
            ("sglang:prompt_tokens_total", "Tokens of prompts", read(&self.prompt_tokens)),
            (
                "sglang:generation_tokens_total",
                "Tokens of answers",
                engine.completion_tokens as f64,
            ),
            (
                "sglang:cached_tokens_total",
                "Prompt tokens found in the prefix cache",
                engine.cached_tokens as f64,
            ),
            (
                "sglang:num_retracted_requests_total",
                "Requests that lost their KV to others and were resumed",
                engine.preemptions as f64,
            ),
            ("sglang:spec_verify_calls_total", "Verifications", spec.verify_ct as f64),
            (
                "aquila:spec_proposed_drafts_total",
                "Drafts that were verified",
                spec.proposed_drafts as f64,
            ),
            (
                "aquila:spec_policy_switches_total",
                "How often the policy changed its trees",
                drafting.policy.switches as f64,
            ),
            (
                "aquila:spec_policy_probes_total",
                "Runs of verified drafts among plain rounds",
                drafting.policy.probes as f64,
            ),
            (
                "aquila:spec_left_plain_total",
                "Requests whose draft was paused for too long to resume",
                drafting.left_plain as f64,
            ),
            ("aquila:refused_requests_total", "Requests not taken", read(&self.refused)),
            ("aquila:rounds_total", "Rounds run", engine.rounds as f64),
            ("aquila:failed_rounds_total", "Rounds that failed", engine.failed_rounds as f64),
        ] {
            page.single(name, "counter", help, value);
        }
        let name = "aquila:spec_correct_drafts_total";
        page.head(name, "counter", "Drafts that were right, by their place after the bonus");
        for position in 1..spec.histogram.len() {
            let right: u64 = spec.histogram[position..].iter().sum();
            page.line(name, &format!(",position=\"{position}\""), right as f64);
        }
        let histograms = [
            (&self.first_token, "time_to_first_token_seconds", "From asking to the first token"),
            (&self.token_gap, "inter_token_latency_seconds", "Between two tokens"),
            (&self.per_token, "time_per_output_token_seconds", "Mean between tokens, by answer"),
            (&self.whole, "e2e_request_latency_seconds", "From asking to the last token"),
        ];
        for (histogram, name, help) in histograms {
            histogram.write(&mut page, &format!("sglang:{name}"), help);
        }
        grammars.write_metrics(&mut page);
        self.http.write(&mut page);
        if let Some(role) = role {
            role.write_metrics(&mut page, engine);
        }
        if let Some(bytes) = resident_bytes() {
            let help = "Resident memory size in bytes";
            page.single("process_resident_memory_bytes", "gauge", help, bytes as f64);
        }
        page.text
    }
}

/// Prometheus' text form.
pub(crate) struct Page {
    text: String,
    model: String,
}

impl Page {
    pub fn head(&mut self, name: &str, kind: &str, help: &str) {
        // Writing to a string cannot fail.
        let _ = writeln!(self.text, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    pub fn line(&mut self, name: &str, labels: &str, value: f64) {
        let model = &self.model;
        // Writing to a string cannot fail.
        let _ = writeln!(self.text, "{name}{{model_name=\"{model}\"{labels}}} {value}");
    }

    pub fn single(&mut self, name: &str, kind: &str, help: &str, value: f64) {
        self.head(name, kind, help);
        self.line(name, "", value);
    }
}

/// A label's value.
pub(crate) fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

/// Memory that this process has, where the system says so.
fn resident_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    Some(line.trim().trim_end_matches(" kB").parse::<u64>().ok()? * 1024)
}
