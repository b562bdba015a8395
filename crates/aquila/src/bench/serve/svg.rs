//! A picture of a run: latencies over time, and how they are distributed.

use std::fmt::Write;

use super::load::Record;
use super::metrics::{Figures, Latency, Objective, ms};
use super::report::Header;

const WIDTH: f64 = 960.0;
const HEIGHT: f64 = 660.0;
/// The most points of a curve: more than can be told apart.
const MOST_POINTS: usize = 240;

const STYLE: &str = "\
svg{background:#fff;font:12px system-ui,sans-serif;fill:#222}\
.grid{stroke:#ddd}.axis{stroke:#888}.small{fill:#666;font-size:11px}.head{font-weight:600}\
.ttft{stroke:#0b6bcb}.e2el{stroke:#c2410c}.tpot{stroke:#0f766e}.itl{stroke:#7c3aed}\
.dots{stroke-width:4;stroke-linecap:round;stroke-opacity:.65;fill:none}\
.curve{fill:none;stroke-width:2}.fail{stroke:#b91c1c;stroke-width:2;fill:none}\
.limit{stroke:#b91c1c;stroke-dasharray:4 3}\
@media(prefers-color-scheme:dark){svg{background:#16181d;fill:#e6e6e6}.grid{stroke:#333}\
.axis{stroke:#777}.small{fill:#aaa}.ttft{stroke:#58a6ff}.e2el{stroke:#fb923c}\
.tpot{stroke:#2dd4bf}.itl{stroke:#a78bfa}.fail,.limit{stroke:#f87171}}";

/// A rectangle with axes, whose values run from 0.
struct Panel {
    left: f64,
    top: f64,
    width: f64,
    height: f64,
    x_most: f64,
    y_most: f64,
}

impl Panel {
    fn x(&self, value: f64) -> f64 {
        self.left + (value / self.x_most).clamp(0.0, 1.0) * self.width
    }

    fn y(&self, value: f64) -> f64 {
        self.top + self.height - (value / self.y_most).clamp(0.0, 1.0) * self.height
    }

    /// Lines of the grid with their values.
    fn grid(&self, out: &mut String, x_unit: &str, y_label: impl Fn(f64) -> String) {
        let (right, bottom) = (self.left + self.width, self.top + self.height);
        for value in ticks(self.y_most) {
            let (y, left) = (self.y(value), self.left);
            let text = y_label(value);
            let _ = write!(
                out,
                "<path class=\"grid\" d=\"M{left:.1} {y:.1}H{right:.1}\"/><text class=\"small\" \
                 x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{text}</text>",
                left - 6.0,
                y + 4.0
            );
        }
        for value in ticks(self.x_most) {
            let _ = write!(
                out,
                "<text class=\"small\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
                self.x(value),
                bottom + 15.0,
                short(value)
            );
        }
        let _ = writeln!(
            out,
            "<path class=\"axis\" d=\"M{:.1} {bottom:.1}H{right:.1}\"/><text class=\"small\" \
             x=\"{right:.1}\" y=\"{:.1}\" text-anchor=\"end\">{x_unit}</text>",
            self.left,
            bottom + 29.0
        );
    }
}

/// The picture.
pub fn draw(header: &Header, figures: &Figures, records: &[Record]) -> String {
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
         width=\"{WIDTH}\" height=\"{HEIGHT}\"><style>{STYLE}</style>\n"
    );
    let title = format!("{}: {} requests, {}", header.model, header.num_prompts, header.load());
    text(&mut out, 24.0, 28.0, "head", &title);
    let rate = |amount: u64| figures.per_second(amount as f64);
    let mut below = format!(
        "{} answered, {} failed in {:.1} s; {:.2} requests/s, {:.1} output tokens/s",
        figures.answered,
        figures.failed(),
        figures.seconds,
        rate(figures.answered as u64),
        rate(figures.output_tokens)
    );
    if let Some(length) = figures.spec.accept_length() {
        below += &format!("; {length:.2} tokens per verification");
    }
    text(&mut out, 24.0, 46.0, "small", &below);
    over_time(&mut out, figures, records);
    for (index, &latency) in Latency::ALL.iter().enumerate() {
        let limit = header.goodput.iter().find(|objective| objective.latency == latency);
        distribution(&mut out, index, latency, figures, limit);
    }
    out.push_str("</svg>\n");
    out
}

/// TTFT and E2EL of each request, at the time when it was sent; failures at the bottom.
fn over_time(out: &mut String, figures: &Figures, records: &[Record]) {
    let most = figures.latencies[3].percentile(100.0).unwrap_or(1.0);
    let panel = Panel {
        left: 72.0,
        top: 92.0,
        width: WIDTH - 96.0,
        height: 240.0,
        x_most: figures.seconds.max(1e-3),
        y_most: most.max(1e-3) * 1.05,
    };
    text(out, 24.0, 78.0, "head", "Latency by time of sending (ms)");
    for (x, class, name) in [(266.0, "ttft", "TTFT"), (326.0, "e2el", "E2EL")] {
        let _ = write!(out, "<path class=\"dots {class}\" d=\"M{x} 74h0\"/>");
        text(out, x + 8.0, 78.0, "small", name);
    }
    panel.grid(out, "s", short);
    let (mut first, mut whole, mut failed) = (String::new(), String::new(), String::new());
    for record in records {
        let x = panel.x(record.sent.as_secs_f64());
        match &record.outcome {
            Ok(answer) => {
                if let Some(ttft) = answer.ttft {
                    let _ = write!(first, "M{x:.1} {:.1}h0", panel.y(ms(ttft)));
                }
                let _ = write!(whole, "M{x:.1} {:.1}h0", panel.y(ms(answer.latency)));
            }
            Err(_) => {
                let y = panel.y(0.0) - 5.0;
                let _ = write!(failed, "M{:.1} {:.1}l6 6m0 -6l-6 6", x - 3.0, y - 3.0);
            }
        }
    }
    for (class, path) in [("dots e2el", whole), ("dots ttft", first), ("fail", failed)] {
        if !path.is_empty() {
            let _ = writeln!(out, "<path class=\"{class}\" d=\"{path}\"/>");
        }
    }
}

/// The share of values at or below each value.
fn distribution(
    out: &mut String,
    index: usize,
    latency: Latency,
    figures: &Figures,
    limit: Option<&Objective>,
) {
    let series = &figures.latencies[index];
    let values = series.values();
    let step = (WIDTH - 24.0) / 4.0;
    let left = 24.0 + step * index as f64;
    let x_most = values.last().copied().unwrap_or(1.0).max(1e-3) * 1.05;
    let panel = Panel {
        left: left + 40.0,
        top: 424.0,
        width: step - 64.0,
        height: 170.0,
        x_most,
        y_most: 1.0,
    };
    let name = latency.name().to_uppercase();
    text(out, left, 392.0, "head", &name);
    let cell = |percent| series.percentile(percent).map_or("-".into(), short);
    let about = format!("p50 {}  p90 {}  p99 {}", cell(50.0), cell(90.0), cell(99.0));
    text(out, left, 409.0, "small", &about);
    panel.grid(out, "ms", |share| format!("{:.0} %", share * 100.0));
    let count = values.len();
    let points = count.min(MOST_POINTS);
    let mut path = String::new();
    for point in 0..points {
        // The last point is the largest value.
        let at = ((point + 1) * count).div_ceil(points) - 1;
        let command = if path.is_empty() { 'M' } else { 'L' };
        let share = (at + 1) as f64 / count as f64;
        let _ = write!(path, "{command}{:.1} {:.1}", panel.x(values[at]), panel.y(share));
    }
    if !path.is_empty() {
        let class = latency.name();
        let _ = writeln!(out, "<path class=\"curve {class}\" d=\"{path}\"/>");
    }
    if let Some(limit) = limit.filter(|limit| limit.limit_ms <= panel.x_most) {
        let (x, top, height) = (panel.x(limit.limit_ms), panel.top, panel.height);
        let _ = writeln!(out, "<path class=\"limit\" d=\"M{x:.1} {top}v{height}\"/>");
    }
}

fn text(out: &mut String, x: f64, y: f64, class: &str, text: &str) {
    let text = text.replace('&', "&amp;").replace('<', "&lt;");
    let _ = writeln!(out, "<text class=\"{class}\" x=\"{x}\" y=\"{y}\">{text}</text>");
}

/// Round values from 0 up to `most`, about four of them.
fn ticks(most: f64) -> Vec<f64> {
    let rough = most / 4.0;
    let power = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 2.5, 5.0, 10.0]
        .into_iter()
        .map(|factor| factor * power)
        .find(|&step| step >= rough * (1.0 - 1e-9))
        .unwrap_or(power * 10.0);
    (0..=(most / step * (1.0 + 1e-9)) as usize).map(|index| index as f64 * step).collect()
}

/// A value in as many digits as tell it from its neighbours.
fn short(value: f64) -> String {
    let digits = match value.abs() {
        v if v >= 100.0 || v == 0.0 => 0,
        v if v >= 10.0 => 1,
        v if v >= 1.0 => 2,
        _ => 3,
    };
    let text = format!("{value:.digits$}");
    match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_within_the_panel() {
        assert_eq!(ticks(1.0), [0.0, 0.25, 0.5, 0.75, 1.0]);
        assert_eq!(ticks(105.0), [0.0, 50.0, 100.0]);
        assert_eq!(ticks(40.0), [0.0, 10.0, 20.0, 30.0, 40.0]);
        for most in [1e-3, 0.7, 3.3, 17.0, 999.0, 1e6] {
            let ticks = ticks(most);
            assert!((3..=6).contains(&ticks.len()), "{most}: {ticks:?}");
            assert!(ticks.iter().all(|&tick| tick <= most * 1.000_001));
        }
    }

    #[test]
    fn names_with_markup_stay_text() {
        let mut out = String::new();
        text(&mut out, 1.0, 2.0, "head", "a<b>&c");
        assert!(out.contains(">a&lt;b>&amp;c</text>"), "{out}");
    }
}
