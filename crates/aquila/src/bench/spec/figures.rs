//! What is told of each way of decoding: its speed, and where the time of a round goes.

use std::time::Duration;

use aquila_engine::Times;
use aquila_spec::SpecStats;
use serde_json::{Value, json};

use super::contender::{Contender, Pass};
use crate::bench::spread::Spread;

/// What is told of a contender.
pub(super) struct Figures {
    name: String,
    speed: f64,
    /// To plain decoding, over passes that ran at the same time.
    ratio: Spread,
    spec: SpecStats,
    times: Times,
}

impl Figures {
    pub fn of(contender: &Contender, plain: &Contender) -> Self {
        let pairs = contender.passes.iter().zip(&plain.passes);
        let (mut spec, mut times) = (SpecStats::default(), Times::default());
        for pass in &contender.passes {
            spec.add(&pass.spec);
            times.add(&pass.times);
        }
        Self {
            name: contender.name.clone(),
            speed: Spread::of(contender.passes.iter().map(Pass::speed)).median,
            ratio: Spread::of(pairs.map(|(ours, plain)| ours.speed() / plain.speed())),
            spec,
            times,
        }
    }

    /// Microseconds of a round, and the share of it, of every step.
    fn steps(&self) -> [(&'static str, f64, f64); 6] {
        let times = &self.times;
        let rounds = times.rounds.max(1) as f64;
        let step = |name, time: Duration| {
            let share = time.as_secs_f64() / times.whole.as_secs_f64().max(f64::MIN_POSITIVE);
            (name, time.as_secs_f64() * 1e6 / rounds, 100.0 * share)
        };
        [
            step("draft", times.draft),
            step("verify", times.verify),
            step("accept", times.accept),
            step("commit", times.commit),
            step("extend", times.extend),
            step("host", times.host()),
        ]
    }

    fn round(&self) -> f64 {
        self.times.whole.as_secs_f64() * 1e6 / self.times.rounds.max(1) as f64
    }

    pub fn json(&self) -> Value {
        let steps = self.steps();
        let of = |figure: fn(&(&'static str, f64, f64)) -> f64| -> Value {
            steps.iter().map(|step| (step.0.to_owned(), json!(figure(step)))).collect()
        };
        json!({
            "name": self.name,
            "tokens_per_second": self.speed,
            "ratio": self.ratio.median,
            "ratio_min": self.ratio.least,
            "ratio_max": self.ratio.most,
            "accept_length": self.spec.accept_length(),
            "accept_rate": self.spec.accept_rate(),
            "rounds": self.times.rounds,
            "round_microseconds": self.round(),
            "microseconds": of(|step| step.1),
            "percent": of(|step| step.2),
        })
    }
}

/// The figures for people: speeds, then where the time of a round goes.
pub(super) fn table(figures: &[Figures]) -> String {
    let mut text = format!(
        "{:<20} {:>9} {:>7} {:>13} {:>9} {:>10}\n",
        "", "tokens/s", "ratio", "range", "accepted", "round µs"
    );
    for f in figures {
        let accepted = match f.spec.verify_ct {
            0 => "-".into(),
            _ => format!("{:.3}", f.spec.accept_length()),
        };
        text += &format!(
            "{:<20} {:>9.1} {:>7.3} {:>13} {accepted:>9} {:>10.0}\n",
            f.name,
            f.speed,
            f.ratio.median,
            f.ratio,
            f.round(),
        );
    }
    text += &format!("\n{:<20}", "µs of a round (%)");
    for (name, ..) in figures[0].steps() {
        text += &format!(" {name:>16}");
    }
    for f in figures {
        text += &format!("\n{:<20}", f.name);
        for (_, time, share) in f.steps() {
            text += &format!(" {:>16}", format!("{time:.1} ({share:.1})"));
        }
    }
    text
}
