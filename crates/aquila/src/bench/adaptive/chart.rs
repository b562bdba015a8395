//! Tokens per second over time, as a picture that any browser shows by itself.
//!
//! Contenders do the same work in times of their own. The one invariant: at one place of the time
//! axis all of them are at the same token of the same phase; the axis says when plain decoding was
//! there.

use std::fmt::Write;

/// A picture: above tokens per second, below the same as a ratio to the first line.
pub struct Chart {
    /// What is shown.
    pub title: String,
    /// How it was measured.
    pub note: String,
    /// With whom the others are compared.
    pub first: String,
    /// The phases, in the order of time.
    pub phases: Vec<Band>,
    /// The contenders, that with which they are compared first.
    pub lines: Vec<Line>,
}

/// A phase.
pub struct Band {
    /// Its name.
    pub label: String,
    /// What it took the first contender.
    pub seconds: f64,
}

/// A contender.
pub struct Line {
    /// Its name.
    pub name: String,
    /// Tokens per second over each phase, as many values for each contender.
    pub courses: Vec<Vec<f64>>,
}

const WIDTH: f64 = 1240.0;
const HEIGHT: f64 = 780.0;
/// Where both panels begin and end, from the left.
const ACROSS: (f64, f64) = (84.0, 1044.0);
/// Where the panels begin and end, from above.
const SPEEDS: (f64, f64) = (104.0, 404.0);
const RATIOS: (f64, f64) = (444.0, 704.0);
/// Colours that people tell apart whose eyes confuse some; the last is for the last line.
const COLOURS: [&str; 7] =
    ["#444444", "#56b4e9", "#0072b2", "#009e73", "#e69f00", "#cc79a7", "#d55e00"];

/// From values to places.
struct Scale {
    values: (f64, f64),
    places: (f64, f64),
    logarithmic: bool,
}

impl Scale {
    fn at(&self, value: f64) -> f64 {
        let (low, high) = self.values;
        let share = match self.logarithmic {
            true => (value / low).ln() / (high / low).ln(),
            false => (value - low) / (high - low),
        };
        // Places are counted from above, values from below.
        self.places.1 - share * (self.places.1 - self.places.0)
    }
}

impl Chart {
    /// The picture.
    pub fn svg(&self) -> String {
        let mut out = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
             font-family=\"sans-serif\" font-size=\"13\" fill=\"#222222\">\n\
             <title>{0}</title>\n\
             <rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"#ffffff\"/>\n",
            escape(&self.title)
        );
        text(&mut out, (ACROSS.0, 34.0), "font-size=\"20\" font-weight=\"bold\"", &self.title);
        text(&mut out, (ACROSS.0, 58.0), "fill=\"#666666\"", &self.note);
        self.bands(&mut out);
        let speeds = self.values(|speed, _| speed);
        let scale = Scale { values: widened(&speeds, 1.1), places: SPEEDS, logarithmic: true };
        axis(&mut out, &scale, &decades(scale.values), "tokens per second (log scale)");
        self.draw(&mut out, &scale, &speeds);
        let ratios = self.values(|speed, plain| speed / plain);
        let (values, ticks) = evenly(widened(&ratios, 1.0));
        let scale = Scale { values, places: RATIOS, logarithmic: false };
        axis(&mut out, &scale, &ticks, &format!("times as fast as {}", self.first));
        self.draw(&mut out, &scale, &ratios);
        self.legend(&mut out);
        out + "</svg>\n"
    }

    fn phase_width(&self) -> f64 {
        (ACROSS.1 - ACROSS.0) / self.phases.len() as f64
    }

    /// The phases, marked through both panels, and the time at their ends.
    fn bands(&self, out: &mut String) {
        let width = self.phase_width();
        let mut seconds = 0.0;
        for (at, phase) in self.phases.iter().enumerate() {
            let left = ACROSS.0 + at as f64 * width;
            let fill = if at % 2 == 0 { "#f3f5f7" } else { "#ffffff" };
            for (top, bottom) in [SPEEDS, RATIOS] {
                let height = bottom - top;
                let _ = writeln!(
                    out,
                    "<rect x=\"{left:.1}\" y=\"{top}\" width=\"{width:.1}\" height=\"{height}\" \
                     fill=\"{fill}\" stroke=\"#d8dce0\"/>"
                );
            }
            let middle = (left + width / 2.0, SPEEDS.0 - 10.0);
            text(out, middle, "text-anchor=\"middle\" font-weight=\"bold\"", &phase.label);
            let place = (left, RATIOS.1 + 20.0);
            text(out, place, "text-anchor=\"middle\"", &format!("{seconds:.1}"));
            seconds += phase.seconds;
        }
        let place = (ACROSS.1, RATIOS.1 + 20.0);
        text(out, place, "text-anchor=\"middle\"", &format!("{seconds:.1}"));
        let middle = ((ACROSS.0 + ACROSS.1) / 2.0, RATIOS.1 + 48.0);
        let first = &self.first;
        let label = format!("time (s) at which {first} is there; phases are drawn equally wide");
        text(out, middle, "text-anchor=\"middle\"", &label);
    }

    /// Something of each value and that of the first line beside it: by line, phase and time.
    fn values(&self, of: impl Fn(f64, f64) -> f64) -> Vec<Vec<Vec<f64>>> {
        let course = |(ours, first): (&Vec<f64>, &Vec<f64>)| -> Vec<f64> {
            ours.iter().zip(first).map(|(&ours, &first)| of(ours, first)).collect()
        };
        let first = &self.lines[0].courses;
        let line = |line: &Line| line.courses.iter().zip(first).map(course).collect();
        self.lines.iter().map(line).collect()
    }

    /// The lines; they break where a phase ends, since nothing goes over from one to the next.
    fn draw(&self, out: &mut String, scale: &Scale, values: &[Vec<Vec<f64>>]) {
        let width = self.phase_width();
        for (at, (line, courses)) in self.lines.iter().zip(values).enumerate() {
            let _ = writeln!(out, "<g {}><title>{}</title>", self.stroke(at), escape(&line.name));
            for (phase, course) in courses.iter().enumerate() {
                let left = ACROSS.0 + phase as f64 * width;
                let step = width / course.len() as f64;
                let points = course.iter().enumerate().map(|(at, &value)| {
                    let x = left + (at as f64 + 0.5) * step;
                    format!("{x:.1},{:.1}", scale.at(value))
                });
                let points: Vec<String> = points.collect();
                let _ = writeln!(out, "<polyline points=\"{}\"/>", points.join(" "));
            }
            *out += "</g>\n";
        }
    }

    fn stroke(&self, at: usize) -> String {
        let last = at + 1 == self.lines.len();
        let colour = COLOURS[if last { COLOURS.len() - 1 } else { at % (COLOURS.len() - 1) }];
        let width = if last { 3.0 } else { 1.6 };
        let dashes = if at == 0 { " stroke-dasharray=\"6 4\"" } else { "" };
        format!("fill=\"none\" stroke=\"{colour}\" stroke-width=\"{width}\"{dashes}")
    }

    fn legend(&self, out: &mut String) {
        for (at, line) in self.lines.iter().enumerate() {
            let (left, y) = (ACROSS.1 + 24.0, SPEEDS.0 + 16.0 + 26.0 * at as f64);
            let stroke = self.stroke(at);
            let _ = writeln!(
                out,
                "<line x1=\"{left}\" y1=\"{y}\" x2=\"{}\" y2=\"{y}\" {stroke}/>",
                left + 34.0
            );
            text(out, (left + 42.0, y + 4.5), "", &line.name);
        }
    }
}

fn axis(out: &mut String, scale: &Scale, ticks: &[f64], title: &str) {
    for &tick in ticks {
        let y = scale.at(tick);
        let stroke = if (tick - 1.0).abs() < 1e-9 { "#888888" } else { "#d8dce0" };
        let _ = writeln!(
            out,
            "<line x1=\"{}\" y1=\"{y:.1}\" x2=\"{}\" y2=\"{y:.1}\" stroke=\"{stroke}\"/>",
            ACROSS.0, ACROSS.1
        );
        // Ticks are multiples of short decimals, give or take the last bits.
        let label = format!("{}", (tick * 1000.0).round() / 1000.0);
        text(out, (ACROSS.0 - 8.0, y + 4.5), "text-anchor=\"end\"", &label);
    }
    let (x, y) = (24.0, (scale.places.0 + scale.places.1) / 2.0);
    let turned = format!("text-anchor=\"middle\" transform=\"rotate(-90 {x} {y})\"");
    text(out, (x, y), &turned, title);
}

fn text(out: &mut String, (x, y): (f64, f64), how: &str, what: &str) {
    let _ = writeln!(out, "<text x=\"{x:.1}\" y=\"{y:.1}\" {how}>{}</text>", escape(what));
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// From the least to the largest value, and so many times further on both sides.
fn widened(values: &[Vec<Vec<f64>>], times: f64) -> (f64, f64) {
    let all = values.iter().flatten().flatten();
    let (low, high) =
        all.fold((f64::INFINITY, 0.0_f64), |(low, high), &v| (low.min(v), high.max(v)));
    (low / times, high * times)
}

/// One, two and five of each power of ten that lies between.
fn decades((low, high): (f64, f64)) -> Vec<f64> {
    let powers = low.log10().floor() as i32..=high.log10().ceil() as i32;
    let ticks = powers.flat_map(|power| [1.0, 2.0, 5.0].map(|n| n * 10_f64.powi(power)));
    ticks.filter(|tick| (low..=high).contains(tick)).collect()
}

/// At most ten round values around 1, and the range from the first to the last of them.
fn evenly((low, high): (f64, f64)) -> ((f64, f64), Vec<f64>) {
    let (low, high) = (low.min(0.9), high.max(1.1));
    let steps = [0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 100.0];
    let step = steps.into_iter().find(|step| (high - low) / step <= 8.0).unwrap_or(1000.0);
    let range = ((low / step).floor() as i64, (high / step).ceil() as i64);
    let ticks: Vec<f64> = (range.0..=range.1).map(|at| at as f64 * step).collect();
    ((ticks[0], ticks[ticks.len() - 1]), ticks)
}
