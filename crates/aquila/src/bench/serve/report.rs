//! What a run came to: a table for people, JSON under the names that vLLM's client gives.

use std::fmt::Write;

use serde_json::{Map, Value, json};

use super::acceptance::SpecCounts;
use super::load::Record;
use super::metrics::{Figures, Latency, Objective, Series, ms};

/// The most reasons for failures that the table lists.
const MOST_REASONS: usize = 8;
/// Lag from which on it is worth a word, in milliseconds.
const LATE_MS: f64 = 10.0;

/// What was asked for, as reports name it.
pub struct Header {
    /// Where requests went.
    pub url: String,
    /// The model.
    pub model: String,
    /// The name of the API.
    pub backend: String,
    /// Requests that were to be sent.
    pub num_prompts: usize,
    /// Requests per second, which may be infinite.
    pub request_rate: f64,
    /// How arrivals are spread.
    pub pattern: String,
    /// The most requests at once.
    pub max_concurrency: Option<usize>,
    /// The seed of arrivals and random prompts.
    pub seed: u64,
    /// Objectives.
    pub goodput: Vec<Objective>,
    /// Percentiles to show.
    pub percentiles: Vec<f64>,
    /// Acceptance by the server, and where it says so, where answers do not.
    pub server_spec: Option<(SpecCounts, &'static str)>,
}

impl Header {
    /// The load in words.
    pub fn load(&self) -> String {
        let rate = self.request_rate;
        let mut text = match rate.is_infinite() {
            true => "all requests at once".to_owned(),
            false => format!("{rate} requests/s, {} (seed {})", self.pattern, self.seed),
        };
        if let Some(most) = self.max_concurrency {
            text = match rate.is_infinite() {
                true => format!("{most} requests at a time"),
                false => format!("{text}, at most {most} at a time"),
            };
        }
        text
    }

    fn spec<'a>(&'a self, figures: &'a Figures) -> Option<(&'a SpecCounts, &'static str)> {
        match figures.spec_answers {
            0 => self.server_spec.as_ref().map(|(spec, source)| (spec, *source)),
            _ => Some((&figures.spec, "the answers")),
        }
    }
}

/// The table.
pub fn table(header: &Header, figures: &Figures) -> String {
    let mut out = String::new();
    let mut line = |name: &str, text: String| {
        // Writing to a string cannot fail.
        let _ = writeln!(out, "{name:<11} {text}");
    };
    line("server", format!("{}, model {}", header.url, header.model));
    line("load", format!("{} requests: {}", header.num_prompts, header.load()));
    let mut ended = format!("{} in {:.2} s", figures.answered, figures.seconds);
    if figures.failed() > 0 {
        ended += &format!("; {} failed", figures.failed());
    }
    if let Some(left) = figures.interrupted {
        ended += &format!("; interrupted: {} given up, {} not sent", left.given_up, left.not_sent);
    }
    line("answered", ended);
    for (why, count) in figures.failures.iter().take(MOST_REASONS) {
        line("failed", format!("{count} × {why}"));
    }
    if let Some(more) = figures.failures.len().checked_sub(MOST_REASONS).filter(|&n| n > 0) {
        line("failed", format!("… and for {more} other reasons"));
    }
    let (input, output) = (figures.input_tokens, figures.output_tokens);
    line("tokens", format!("{input} of prompts, {output} of answers"));
    let rate = |amount: u64| figures.per_second(amount as f64);
    line(
        "throughput",
        format!(
            "{:.3} requests/s, {:.2} output tokens/s, {:.2} tokens/s in all",
            rate(figures.answered as u64),
            rate(output),
            rate(input + output)
        ),
    );
    if let Some(good) = figures.good {
        let limit = |o: &Objective| format!("{} at most {} ms", o.latency.name(), o.limit_ms);
        let limits: Vec<String> = header.goodput.iter().map(limit).collect();
        let per_second = rate(good as u64);
        line("goodput", format!("{per_second:.3} requests/s ({good}) with {}", limits.join(", ")));
    }
    line("concurrency", format!("{:.2} on average", figures.concurrency));
    if let Some((spec, source)) = header.spec(figures)
        && let Some(length) = spec.accept_length()
    {
        let rate = spec.accept_rate().map(|rate| format!(", {:.1} % of drafts", rate * 100.0));
        let rate = rate.unwrap_or_default();
        line("acceptance", format!("{length:.3} tokens per verification{rate}, by {source}"));
    }
    let lag = figures.lag.percentile(99.0).unwrap_or(0.0);
    if header.request_rate.is_finite() {
        let mean = figures.lag.mean().unwrap_or(0.0);
        line("lag", format!("requests were sent {mean:.2} ms late on average, p99 {lag:.2} ms"));
    }
    if let Some(warning) = warning(header, lag) {
        line("note", warning.into());
    }
    if figures.uncounted > 0 {
        let count = figures.uncounted;
        line("note", format!("{count} answers came without usage: their pieces count as tokens"));
    }
    out.push('\n');
    latencies(&mut out, header, figures);
    categories(&mut out, figures);
    out
}

/// What late sending means.
fn warning(header: &Header, lag: f64) -> Option<&'static str> {
    if header.request_rate.is_infinite() || lag < LATE_MS {
        return None;
    }
    Some(match header.max_concurrency {
        Some(_) => {
            "--max-concurrency held requests back: the load was less than the rate asked for"
        }
        None => "this client was behind its schedule: the load was less even than asked for",
    })
}

fn latencies(out: &mut String, header: &Header, figures: &Figures) {
    let mut columns = vec!["mean".to_owned(), "median".into(), "std".into()];
    columns.extend(header.percentiles.iter().map(|&percent| percentile_name(percent)));
    let mut row = |name: &str, cells: &[String]| {
        let cells: String = cells.iter().map(|cell| format!(" {cell:>10}")).collect();
        let _ = writeln!(out, "{name:<11}{cells}");
    };
    row("ms", &columns);
    for (latency, series) in Latency::ALL.iter().zip(&figures.latencies) {
        let cell = |value: Option<f64>| value.map_or("-".into(), |value| format!("{value:.2}"));
        let cells: Vec<String> =
            summary(series, &header.percentiles).into_iter().map(|(_, v)| cell(v)).collect();
        row(&latency.name().to_uppercase(), &cells);
    }
}

fn categories(out: &mut String, figures: &Figures) {
    if figures.categories.len() < 2 {
        return;
    }
    let _ =
        writeln!(out, "\n{:<24} {:>8} {:>10} {:>10}", "category", "answers", "TPOT ms", "accepted");
    for (name, category) in &figures.categories {
        let cell = |value: Option<f64>, digits| match value {
            Some(value) => format!("{value:.digits$}"),
            None => "-".into(),
        };
        let (tpot, length) =
            (cell(category.tpot.mean(), 2), cell(category.spec.accept_length(), 3));
        let _ = writeln!(out, "{name:<24} {:>8} {tpot:>10} {length:>10}", category.answered);
    }
}

/// What is said of a series, by name.
fn summary(series: &Series, percentiles: &[f64]) -> Vec<(String, Option<f64>)> {
    let mut values = vec![
        ("mean".to_owned(), series.mean()),
        ("median".to_owned(), series.percentile(50.0)),
        ("std".to_owned(), series.std()),
    ];
    values.extend(percentiles.iter().map(|&p| (percentile_name(p), series.percentile(p))));
    values
}

fn percentile_name(percent: f64) -> String {
    format!("p{percent}")
}

/// The figures as JSON, with the requests one by one; with their gaps, if `details` are wanted.
pub fn json(header: &Header, figures: &Figures, records: &[Record], details: bool) -> Value {
    let rate = |amount: u64| figures.per_second(amount as f64);
    let finite = Some(header.request_rate).filter(|rate| rate.is_finite());
    let (input, output) = (figures.input_tokens, figures.output_tokens);
    let mut object = Map::new();
    let mut put = |key: &str, value: Value| {
        object.insert(key.to_owned(), value);
    };
    put("url", header.url.as_str().into());
    put("backend", header.backend.as_str().into());
    put("model_id", header.model.as_str().into());
    put("num_prompts", header.num_prompts.into());
    put("request_rate", finite.map_or("inf".into(), Value::from));
    put("arrival_pattern", header.pattern.as_str().into());
    put("max_concurrency", header.max_concurrency.into());
    put("seed", header.seed.into());
    put("duration", figures.seconds.into());
    put("completed", figures.answered.into());
    put("failed", figures.failed().into());
    let reason = |(why, count): &(String, usize)| json!({ "reason": why, "count": count });
    put("failures", figures.failures.iter().map(reason).collect());
    let left = figures.interrupted;
    put("interrupted", left.is_some().into());
    put("given_up", left.map_or(0, |left| left.given_up).into());
    put("not_sent", left.map_or(0, |left| left.not_sent).into());
    put("total_input_tokens", input.into());
    put("total_output_tokens", output.into());
    put("answers_without_usage", figures.uncounted.into());
    put("request_throughput", rate(figures.answered as u64).into());
    put("output_throughput", rate(output).into());
    put("total_token_throughput", rate(input + output).into());
    put("request_goodput", figures.good.map(|good| rate(good as u64)).into());
    let limits = header.goodput.iter().map(|o| (o.latency.name().to_owned(), o.limit_ms.into()));
    put("goodput_config", Value::Object(limits.collect()));
    put("concurrency", figures.concurrency.into());
    let spec = header.spec(figures);
    put("accept_length", spec.and_then(|(spec, _)| spec.accept_length()).into());
    put("accept_rate", spec.and_then(|(spec, _)| spec.accept_rate()).into());
    put("accept_source", spec.map(|(_, source)| source).into());
    for (name, value) in summary(&figures.lag, &header.percentiles) {
        put(&format!("{name}_schedule_lag_ms"), value.into());
    }
    for (latency, series) in Latency::ALL.iter().zip(&figures.latencies) {
        for (name, value) in summary(series, &header.percentiles) {
            put(&format!("{name}_{}_ms", latency.name()), value.into());
        }
    }
    let category = |(name, category): (&String, &super::metrics::CategoryFigures)| {
        let figures = json!({
            "completed": category.answered,
            "mean_tpot_ms": category.tpot.mean(),
            "accept_length": category.spec.accept_length(),
            "accept_rate": category.spec.accept_rate(),
        });
        (name.clone(), figures)
    };
    put("categories", Value::Object(figures.categories.iter().map(category).collect()));
    put("requests", records.iter().map(|record| request(record, details)).collect());
    object.into()
}

fn request(record: &Record, details: bool) -> Value {
    let mut object = json!({
        "index": record.index,
        "category": record.category,
        "due_s": record.due.as_secs_f64(),
        "sent_s": record.sent.as_secs_f64(),
    });
    match &record.outcome {
        Err(why) => object["error"] = why.as_str().into(),
        Ok(answer) => {
            object["ttft_ms"] = answer.ttft.map(ms).into();
            object["tpot_ms"] = answer.tpot().map(ms).into();
            object["e2el_ms"] = ms(answer.latency).into();
            object["input_tokens"] = answer.prompt_tokens.into();
            object["output_tokens"] = answer.output_tokens.into();
            object["accept_length"] = answer.spec.and_then(|spec| spec.accept_length()).into();
            if details {
                object["itl_ms"] = answer.itl.iter().copied().map(ms).collect();
            }
        }
    }
    object
}
