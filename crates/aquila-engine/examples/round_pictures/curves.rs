//! How often the draft at each depth is accepted, a curve for each algorithm.

use std::fmt::Write;

use super::svg::Picture;

const LEFT: f64 = 62.0;
const TOP: f64 = 44.0;
const STEP: f64 = 78.0;
const TALL: f64 = 240.0;

/// Draws the shares of rounds, by depth.
pub fn picture(curves: &[(&str, Vec<f64>)]) -> String {
    let depths = curves.iter().map(|(_, rates)| rates.len()).max().unwrap_or(1);
    let right = LEFT + STEP * (depths - 1) as f64 + 20.0;
    let mut picture = Picture::new(
        right + 150.0,
        TOP + TALL + 50.0,
        "Share of rounds that accept a draft, by its depth",
    );
    picture.text(14.0, 20.0, "", "Share of rounds that accept a draft, by its depth (chains)");
    let x = |depth: usize| LEFT + STEP * (depth - 1) as f64;
    let y = |rate: f64| TOP + TALL * (1.0 - rate);
    for percent in [0, 25, 50, 75, 100] {
        let at = y(f64::from(percent) / 100.0);
        picture.path(&format!("M{LEFT} {at}H{right}"), "axis");
        picture.text(14.0, at + 4.0, "note", &format!("{percent:>3} %"));
    }
    for depth in 1..=depths {
        picture.centred(x(depth), TOP + TALL + 20.0, "note", &depth.to_string());
    }
    picture.centred(
        (LEFT + right) / 2.0,
        TOP + TALL + 40.0,
        "note",
        "depth: drafted tokens after the bonus",
    );
    for (index, (name, rates)) in curves.iter().enumerate() {
        let colour = format!("c{}", index % 5);
        let mut points = String::new();
        for (at, &rate) in rates.iter().enumerate() {
            let command = if at == 0 { 'M' } else { 'L' };
            // Writing to a string cannot fail.
            let _ = write!(points, "{command}{:.1} {:.1}", x(at + 1), y(rate));
            picture.dot(x(at + 1), y(rate), &format!("{colour} fill"));
        }
        picture.path(&points, &format!("{colour} line"));
        let at = TOP + 14.0 + index as f64 * 24.0;
        picture.dot(right + 20.0, at, &format!("{colour} fill"));
        picture.text(right + 32.0, at + 4.0, "", name);
    }
    picture.finish()
}
