//! The figures, as SGLang's and vLLM's clients define them.
//!
//! - TTFT: from sending to the first piece of text.
//! - TPOT: (E2EL - TTFT) / (output tokens - 1), of answers with two tokens or more.
//! - ITL: between pieces of text; under speculation a piece holds several tokens, so ITL is not TPOT.
//! - E2EL: from sending to the last piece.
//! - Goodput: requests per second that meet every objective; an answer of one token has a TPOT of 0.

use std::collections::BTreeMap;
use std::time::Duration;

use super::acceptance::SpecCounts;
use super::answer::Answer;
use super::load::{Interrupted, Measured};

/// A latency that is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Latency {
    /// Time to first token.
    Ttft,
    /// Time per output token.
    Tpot,
    /// Inter-token latency.
    Itl,
    /// End-to-end latency.
    E2el,
}

impl Latency {
    /// All of them, in the order in which they are shown.
    pub const ALL: [Latency; 4] = [Latency::Ttft, Latency::Tpot, Latency::Itl, Latency::E2el];

    /// The name in figures and objectives.
    pub fn name(self) -> &'static str {
        match self {
            Latency::Ttft => "ttft",
            Latency::Tpot => "tpot",
            Latency::Itl => "itl",
            Latency::E2el => "e2el",
        }
    }
}

/// A latency that is not to be exceeded.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Objective {
    /// Which.
    pub latency: Latency,
    /// By how many milliseconds.
    pub limit_ms: f64,
}

/// Reads NAME:MILLISECONDS.
pub fn objective(text: &str) -> Result<Objective, String> {
    let wrong = || "expected ttft:MS, tpot:MS or e2el:MS".to_owned();
    let (name, limit) = text.split_once(':').ok_or_else(wrong)?;
    let of_requests = [Latency::Ttft, Latency::Tpot, Latency::E2el];
    let latency = of_requests.into_iter().find(|latency| latency.name() == name);
    let limit_ms = limit.parse::<f64>().ok().filter(|limit| limit.is_finite() && *limit >= 0.0);
    Ok(Objective { latency: latency.ok_or_else(wrong)?, limit_ms: limit_ms.ok_or_else(wrong)? })
}

impl Objective {
    fn is_met(&self, answer: &Answer) -> bool {
        let value = match self.latency {
            Latency::Ttft => answer.ttft,
            Latency::Tpot => Some(answer.tpot().unwrap_or_default()),
            Latency::E2el => Some(answer.latency),
            Latency::Itl => None,
        };
        value.is_some_and(|value| ms(value) <= self.limit_ms)
    }
}

/// A duration in milliseconds.
pub fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// Values in ascending order.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Series(Vec<f64>);

impl Series {
    /// Of values in any order.
    pub fn of(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        Self(values)
    }

    /// The values.
    pub fn values(&self) -> &[f64] {
        &self.0
    }

    /// The mean; none of no values, as the rest.
    pub fn mean(&self) -> Option<f64> {
        let count = self.0.len();
        (count > 0).then(|| self.0.iter().sum::<f64>() / count as f64)
    }

    /// The standard deviation of the values themselves.
    pub fn std(&self) -> Option<f64> {
        let mean = self.mean()?;
        let squares: f64 = self.0.iter().map(|value| (value - mean).powi(2)).sum();
        Some((squares / self.0.len() as f64).sqrt())
    }

    /// A percentile, between the two nearest values where it falls between them.
    pub fn percentile(&self, percent: f64) -> Option<f64> {
        let last = self.0.len().checked_sub(1)?;
        let at = percent / 100.0 * last as f64;
        let below = (at.floor() as usize).min(last);
        let above = (below + 1).min(last);
        Some(self.0[below] + (self.0[above] - self.0[below]) * (at - below as f64))
    }
}

/// The figures of the prompts of one category.
#[derive(Debug, Default)]
pub struct CategoryFigures {
    /// Answers.
    pub answered: usize,
    /// Times per output token, in milliseconds.
    pub tpot: Series,
    /// What speculation did.
    pub spec: SpecCounts,
}

/// All figures of a run.
#[derive(Debug)]
pub struct Figures {
    /// Seconds from the start to the end of the last request.
    pub seconds: f64,
    /// Requests that were answered.
    pub answered: usize,
    /// Requests that failed, by reason, the most frequent first.
    pub failures: Vec<(String, usize)>,
    /// What an interruption left.
    pub interrupted: Option<Interrupted>,
    /// Tokens of prompts, as far as the server counted them.
    pub input_tokens: u64,
    /// Tokens of answers.
    pub output_tokens: u64,
    /// Answers whose tokens the server did not count: their pieces are.
    pub uncounted: usize,
    /// Answers that met every objective; none where there is no objective.
    pub good: Option<usize>,
    /// Requests that ran at the same time, on average.
    pub concurrency: f64,
    /// What speculation did, and how many answers said so.
    pub spec: SpecCounts,
    /// Answers that said so.
    pub spec_answers: usize,
    /// How late requests were sent, in milliseconds.
    pub lag: Series,
    /// Latencies in milliseconds, in the order of [`Latency::ALL`].
    pub latencies: [Series; 4],
    /// The same by category of prompts, where there are categories.
    pub categories: BTreeMap<String, CategoryFigures>,
}

impl Figures {
    /// Of what was measured.
    pub fn of(measured: &Measured, objectives: &[Objective]) -> Self {
        let mut failures: BTreeMap<&str, usize> = BTreeMap::new();
        let mut latencies: [Vec<f64>; 4] = Default::default();
        let mut by_category: BTreeMap<String, (usize, Vec<f64>, SpecCounts)> = BTreeMap::new();
        let mut good = 0;
        let mut figures = Self {
            seconds: measured.duration.as_secs_f64(),
            answered: 0,
            failures: Vec::new(),
            interrupted: measured.interrupted,
            input_tokens: 0,
            output_tokens: 0,
            uncounted: 0,
            good: None,
            concurrency: 0.0,
            spec: SpecCounts::default(),
            spec_answers: 0,
            lag: Series::of(measured.records.iter().map(|r| ms(r.sent - r.due)).collect()),
            latencies: Default::default(),
            categories: BTreeMap::new(),
        };
        let mut busy = Duration::ZERO;
        for record in &measured.records {
            busy += record.ended - record.sent;
            let answer = match &record.outcome {
                Ok(answer) => answer,
                Err(why) => {
                    *failures.entry(why).or_default() += 1;
                    continue;
                }
            };
            figures.answered += 1;
            figures.input_tokens += answer.prompt_tokens.unwrap_or(0);
            figures.output_tokens += answer.output_tokens;
            figures.uncounted += usize::from(!answer.counted);
            good += usize::from(objectives.iter().all(|objective| objective.is_met(answer)));
            let [ttft, tpot, itl, e2el] = &mut latencies;
            ttft.extend(answer.ttft.map(ms));
            tpot.extend(answer.tpot().map(ms));
            itl.extend(answer.itl.iter().copied().map(ms));
            e2el.push(ms(answer.latency));
            if let Some(spec) = &answer.spec {
                figures.spec.add(spec);
                figures.spec_answers += 1;
            }
            if let Some(category) = &record.category {
                let (answered, tpot, spec) = by_category.entry(category.clone()).or_default();
                *answered += 1;
                tpot.extend(answer.tpot().map(ms));
                spec.add(&answer.spec.unwrap_or_default());
            }
        }
        figures.good = (!objectives.is_empty()).then_some(good);
        figures.concurrency = figures.per_second(busy.as_secs_f64());
        figures.failures = failures.into_iter().map(|(why, n)| (why.to_owned(), n)).collect();
        figures.failures.sort_by_key(|&(_, count)| std::cmp::Reverse(count));
        figures.latencies = latencies.map(Series::of);
        let category = |(name, (answered, tpot, spec))| {
            (name, CategoryFigures { answered, tpot: Series::of(tpot), spec })
        };
        figures.categories = by_category.into_iter().map(category).collect();
        figures
    }

    /// Requests that failed.
    pub fn failed(&self) -> usize {
        self.failures.iter().map(|(_, count)| count).sum()
    }

    /// So much a second.
    pub fn per_second(&self, amount: f64) -> f64 {
        if self.seconds > 0.0 { amount / self.seconds } else { 0.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::super::load::Record;
    use super::*;

    fn millis(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    /// An answer that was sent at `sent` with so much latency to its first and last token.
    fn record(index: usize, sent: u64, ttft: u64, e2el: u64, tokens: u64) -> Record {
        let answer = Answer {
            ttft: Some(millis(ttft)),
            itl: vec![millis(e2el - ttft)],
            latency: millis(e2el),
            prompt_tokens: Some(10),
            output_tokens: tokens,
            counted: true,
            spec: None,
        };
        Record {
            index,
            category: None,
            due: millis(sent),
            sent: millis(sent + 1),
            ended: millis(sent + 1 + e2el),
            outcome: Ok(answer),
        }
    }

    #[test]
    fn percentiles_are_those_of_numpy() {
        let series = Series::of(vec![15.0, 20.0, 35.0, 40.0, 50.0, 1.0]);
        // numpy.percentile([15, 20, 35, 40, 50, 1], [0, 25, 50, 90, 99, 100]), mean and std.
        let expected = [(0.0, 1.0), (25.0, 16.25), (50.0, 27.5), (90.0, 45.0), (99.0, 49.5)];
        for (percent, value) in expected {
            assert!((series.percentile(percent).unwrap() - value).abs() < 1e-9, "{percent}");
        }
        assert_eq!(series.percentile(100.0), Some(50.0));
        assert!((series.mean().unwrap() - 26.833_333_333_333_332).abs() < 1e-9);
        assert!((series.std().unwrap() - 16.486_526_485_453_37).abs() < 1e-9);
        assert_eq!(Series::of(vec![3.0]).percentile(99.0), Some(3.0));
        let none = Series::default();
        assert_eq!((none.mean(), none.std(), none.percentile(50.0)), (None, None, None));
    }

    #[test]
    fn figures_are_those_computed_by_hand() {
        let mut records = vec![
            // TPOT 100, 50, and none.
            record(0, 0, 200, 1100, 10),
            record(1, 500, 400, 600, 5),
            record(2, 900, 300, 300, 1),
        ];
        records.push(Record { outcome: Err("503".into()), ..record(3, 950, 0, 48, 0) });
        let measured = Measured { records, duration: millis(2000), interrupted: None };
        let limits = ["ttft:300", "tpot:100", "e2el:1100"].map(|text| objective(text).unwrap());
        let figures = Figures::of(&measured, &limits);
        assert_eq!((figures.answered, figures.failed()), (3, 1));
        assert_eq!(figures.failures, [("503".to_owned(), 1)]);
        assert_eq!((figures.input_tokens, figures.output_tokens), (30, 16));
        assert_eq!(figures.per_second(3.0), 1.5);
        let [ttft, tpot, itl, e2el] = &figures.latencies;
        assert_eq!(ttft.values(), [200.0, 300.0, 400.0]);
        assert_eq!(tpot.values(), [50.0, 100.0]);
        assert_eq!(itl.values(), [0.0, 200.0, 900.0]);
        assert_eq!(e2el.values(), [300.0, 600.0, 1100.0]);
        // The second is too late; limits are met by what is equal to them.
        assert_eq!(figures.good, Some(2));
        assert_eq!(Figures::of(&measured, &[]).good, None);
        // (1100 + 600 + 300 + 48) / 2000
        assert!((figures.concurrency - 1.024).abs() < 1e-9, "{}", figures.concurrency);
        assert_eq!(figures.lag.values(), [1.0; 4]);
    }

    #[test]
    fn objectives_are_names_and_milliseconds() {
        let expected = Objective { latency: Latency::Tpot, limit_ms: 12.5 };
        assert_eq!(objective("tpot:12.5"), Ok(expected));
        for wrong in ["tpot", "itl:5", "ttft:-1", "ttft:x", "e2el:inf", ":5"] {
            assert!(objective(wrong).is_err(), "{wrong}");
        }
    }
}
