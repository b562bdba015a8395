//! Races the policies over a workload that changes, in virtual time, and draws what they did:
//! `cargo run --release -p aquila-spec --example policy_race -- race.svg`
//!
//! The costs of the worlds: measured on a CPU, and made in the shape of an H200's.

#[path = "../tests/spec/race/mod.rs"]
#[allow(dead_code)]
mod race;

use std::fmt::Write as _;

use race::{FIXED, Phase, Played, World, play, racers, workload, worlds};

const COLORS: [&str; 7] =
    ["#555555", "#a6cee3", "#6baed6", "#3182bd", "#08519c", "#e6892b", "#c0202a"];
const PARTS: usize = 12;

fn main() -> std::io::Result<()> {
    let phases = workload();
    let mut charts = String::new();
    let mut down = 0;
    for world in worlds() {
        let name = world.name;
        let mut runs = Vec::new();
        for (policy, mut racer) in racers(&world) {
            runs.push((policy, play(racer.as_mut(), &phases, &world, 1)));
        }
        print!("{}", report(name, &phases, &world, &runs));
        charts += &chart(name, &phases, &runs, down);
        down += 360;
    }
    if let Some(path) = std::env::args().nth(1) {
        let open = r#"<svg xmlns="http://www.w3.org/2000/svg" font-family="sans-serif""#;
        let svg = format!("{open} font-size=\"11\" viewBox=\"0 0 1000 {down}\">\n{charts}</svg>\n");
        std::fs::write(&path, svg)?;
        println!("drawn in {path}");
    }
    Ok(())
}

/// Tokens per second by phase and policy, and the whole.
fn report(name: &str, phases: &[Phase], world: &World, runs: &[(String, Vec<Played>)]) -> String {
    let mut out = format!("## {name}: tokens per virtual second\n\n| phase | best fixed |");
    runs.iter().for_each(|(policy, _)| _ = write!(out, " {policy} |"));
    out += "\n|---|---|";
    out += &"---|".repeat(runs.len());
    out.push('\n');
    for (at, phase) in phases.iter().enumerate() {
        let speed = |&steps: &usize| phase.speed(world, steps);
        let best = [0].into_iter().chain(FIXED).max_by(|a, b| speed(a).total_cmp(&speed(b)));
        _ = write!(out, "| {} × {} | {} |", phase.name, phase.batch, best.unwrap_or(0));
        runs.iter().for_each(|(_, run)| _ = write!(out, " {:.1} |", run[at].speed()));
        out.push('\n');
    }
    out += "| all | |";
    for (_, run) in runs {
        let tokens: usize = run.iter().map(Played::tokens).sum();
        let seconds: f64 = run.iter().map(Played::seconds).sum();
        _ = write!(out, " {:.1} |", tokens as f64 / seconds);
    }
    out + "\n\n"
}

/// Speed over the work done, against plain decoding's; every phase is equally wide.
fn chart(name: &str, phases: &[Phase], runs: &[(String, Vec<Played>)], down: usize) -> String {
    let (left, width, bottom, height) = (50.0, 930.0, down as f64 + 320.0, 260.0);
    let wide = width / phases.len() as f64;
    let plain: Vec<f64> = runs[0].1.iter().map(Played::speed).collect();
    let y = |ratio: f64| bottom - ratio.min(4.0) / 4.0 * height;
    let mut out = format!(
        "<text x=\"{left}\" y=\"{}\" font-size=\"14\">Tokens per second against plain decoding, \
         costs {name}</text>\n",
        down + 20
    );
    for (at, phase) in phases.iter().enumerate() {
        let x = left + wide * at as f64;
        let fill = if at % 2 == 0 { "#f5f5f5" } else { "#ffffff" };
        _ = writeln!(
            out,
            "<rect x=\"{x:.1}\" y=\"{:.1}\" width=\"{wide:.1}\" height=\"{height}\" \
             fill=\"{fill}\"/><text x=\"{:.1}\" y=\"{:.1}\">{} × {}</text>",
            bottom - height,
            x + 4.0,
            bottom + 14.0,
            phase.name,
            phase.batch
        );
    }
    for ratio in 0..=4 {
        let at = y(f64::from(ratio));
        _ = writeln!(out, "<text x=\"{}\" y=\"{at:.1}\">{ratio} ×</text>", left - 28.0);
    }
    for (policy, (name, run)) in runs.iter().enumerate() {
        let color = COLORS[policy % COLORS.len()];
        let mut points = String::new();
        for (at, played) in run.iter().enumerate() {
            for part in 0..PARTS {
                let of = played.rounds.len();
                let rounds = of * part / PARTS..of * (part + 1) / PARTS;
                let x = left + wide * (at as f64 + (part as f64 + 0.5) / PARTS as f64);
                let ratio = played.expected_speed(rounds) / plain[at];
                _ = write!(points, "{x:.1},{:.1} ", y(ratio));
            }
        }
        let thick = if name == "auto" { 2.5 } else { 1.2 };
        _ = writeln!(
            out,
            "<polyline points=\"{points}\" fill=\"none\" stroke=\"{color}\" \
             stroke-width=\"{thick}\"/><text x=\"{}\" y=\"{}\" fill=\"{color}\">{name}</text>",
            left + 90.0 * policy as f64,
            down + 42
        );
    }
    out
}
