//! Microseconds per row for the choice of a token: `cargo bench -p aquila-compute --bench choose`.

use std::hint::black_box;
use std::time::Instant;

use aquila_compute::sampling::{History, SampleQuery, Sampling, choose, noise};

/// Calls of which the median is told: single calls, since other work may share the machine.
const CALLS: u32 = 500;

/// Logits like a model's: a bell around zero, and `peaks` tokens that stand out.
fn row(tokens: usize, row: u32, deviation: f64, peaks: u32) -> Vec<f32> {
    let key = noise::key(42, 0, row);
    let bell = |v: u32| (0..12).map(|i| noise::uniform(key, v * 12 + i)).sum::<f64>() - 6.0;
    let mut logits: Vec<f32> = (0..tokens as u32).map(|v| (deviation * bell(v)) as f32).collect();
    for i in 0..peaks {
        let v = (noise::uniform(key ^ 1, i) * tokens as f64) as usize;
        logits[v] = 18.0 - 2.0 * f32::from(i as u16 + 1).ln();
    }
    logits
}

fn main() {
    let plain = Sampling::default();
    let warm = Sampling { temperature: 1.0, ..plain.clone() };
    let nucleus = Sampling { temperature: 0.7, top_p: 0.9, ..plain.clone() };
    let top_k = Sampling { temperature: 1.0, top_k: 50, ..plain.clone() };
    let penalized = Sampling { repetition_penalty: 1.1, ..plain.clone() };
    let mut history = History::of_prompt(&(0..1000).collect::<Vec<_>>());
    (500..800).for_each(|token| history.push(token));
    let cases = [
        ("greedy", &plain, None),
        ("greedy, 5 logprobs", &plain, Some(5)),
        ("greedy, repetition 1.1", &penalized, None),
        ("temperature 1", &warm, None),
        ("0.7, top-p 0.9", &nucleus, None),
        ("top-k 50", &top_k, None),
    ];
    for (kind, deviation, peaks) in [("peaked", 2.5, 40), ("flat", 1.0, 0)] {
        println!("{kind}: microseconds per row, median of {CALLS}");
        println!("{:>26} {:>9} {:>9} {:>9}", "tokens", 8192, 32000, 128_256);
        let rows: Vec<Vec<Vec<f32>>> = [8192, 32000, 128_256]
            .iter()
            .map(|&tokens| (0..8).map(|r| row(tokens, r, deviation, peaks)).collect())
            .collect();
        for (name, sampling, top_logprobs) in cases {
            let times: Vec<String> = rows
                .iter()
                .map(|rows| format!("{:9.1}", median(rows, sampling, &history, top_logprobs)))
                .collect();
            println!("{name:>26} {}", times.join(" "));
        }
    }
}

fn median(rows: &[Vec<f32>], sampling: &Sampling, history: &History, top: Option<usize>) -> f64 {
    let mut times: Vec<f64> = (0..CALLS)
        .map(|position| {
            let query = SampleQuery {
                row: 0,
                sampling,
                history,
                path: &[],
                position,
                choice: 0,
                banned: &[],
                allowed: None,
                top_logprobs: top,
                given: None,
            };
            let row = black_box(&rows[position as usize % rows.len()]);
            let start = Instant::now();
            black_box(choose(row, &query));
            start.elapsed().as_secs_f64() * 1e6
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}
