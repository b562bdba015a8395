//! What is told of the contenders, by phase and overall.

use aquila_spec::SpecStats;
use serde_json::{Value, json};

use super::contender::Chosen;
use super::phase::Totals;
use crate::bench::spread::Spread;

/// A phase, or all of them.
pub struct Section {
    /// Its name.
    pub title: String,
    /// Tokens that each contender brought in a pass.
    pub tokens: u64,
    /// The contenders, plain decoding first.
    pub figures: Vec<Figures>,
}

/// What is told of a contender.
pub struct Figures {
    /// Its name.
    pub name: String,
    /// What the middle pass took.
    pub seconds: f64,
    /// Tokens per second in the middle pass.
    pub speed: f64,
    /// How many times as fast as plain decoding, over passes that ran at the same time.
    pub ratio: Spread,
    chosen: Chosen,
    spec: SpecStats,
}

impl Section {
    /// Of contenders with their passes, plain decoding first.
    pub fn new(title: String, contenders: &[(String, Vec<Totals>)]) -> Self {
        let plain = &contenders[0].1;
        let figures = contenders.iter().map(|(name, ours)| Figures::of(name, ours, plain));
        Self { title, tokens: plain[0].tokens, figures: figures.collect() }
    }

    /// For people.
    pub fn table(&self) -> String {
        let mut text = format!(
            "{:<20} {:>9} {:>7} {:>13} {:>6} {:>6} {:>9} {:>7}\n",
            self.title, "tokens/s", "ratio", "range", "steps", "nodes", "accepted", "right %"
        );
        for f in &self.figures {
            let drafted = f.spec.verify_ct > 0;
            let or_none = |text: String| if drafted { text } else { "-".into() };
            text += &format!(
                "{:<20} {:>9.1} {:>7.3} {:>13} {:>6} {:>6} {:>9} {:>7}\n",
                f.name,
                f.speed,
                f.ratio.median,
                f.ratio,
                or_none(format!("{:.2}", f.chosen.mean_steps())),
                or_none(format!("{:.2}", f.chosen.mean_nodes())),
                or_none(format!("{:.3}", f.spec.accept_length())),
                or_none(format!("{:.1}", 100.0 * f.spec.accept_rate())),
            );
        }
        text
    }

    /// For programs.
    pub fn json(&self) -> Value {
        let figures: Vec<Value> = self.figures.iter().map(Figures::json).collect();
        json!({ "name": self.title, "tokens": self.tokens, "contenders": figures })
    }
}

impl Figures {
    fn of(name: &str, ours: &[Totals], plain: &[Totals]) -> Self {
        let ratios = plain.iter().zip(ours).map(|(plain, ours)| plain.seconds / ours.seconds);
        let mut all = Totals::default();
        ours.iter().for_each(|pass| all.add(pass));
        Self {
            name: name.to_owned(),
            seconds: Spread::of(ours.iter().map(|pass| pass.seconds)).median,
            speed: Spread::of(ours.iter().map(Totals::speed)).median,
            ratio: Spread::of(ratios),
            chosen: all.chosen,
            spec: all.spec,
        }
    }

    fn json(&self) -> Value {
        json!({
            "name": self.name,
            "seconds": self.seconds,
            "tokens_per_second": self.speed,
            "ratio": self.ratio.median,
            "ratio_min": self.ratio.least,
            "ratio_max": self.ratio.most,
            "mean_steps": self.chosen.mean_steps(),
            "mean_nodes": self.chosen.mean_nodes(),
            "accept_length": self.spec.accept_length(),
            "accept_rate": self.spec.accept_rate(),
        })
    }
}
