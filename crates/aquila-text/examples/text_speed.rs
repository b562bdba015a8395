//! How long text takes: encoding, streaming, stop strings, a chat template.
//!
//! `cargo run --release -p aquila-text --example text_speed [FOLDER]`

use std::hint::black_box;
use std::path::PathBuf;
use std::time::Instant;

use aquila_text::{StopStrings, Tokenizer};
use serde_json::{Map, json};

const TEXT: &str = "The scheduler hands each request its pages, and the pages come back when the \
    request is done. fn admit(&mut self, request: Request) -> Result<Slot, Full> { \
    self.free.pop().ok_or(Full) } Grüße, 世界 🌍! 12 + 30 = 42.\n";

/// The best of several timings of `work`, in microseconds.
fn microseconds(mut work: impl FnMut()) -> f64 {
    let mut best = f64::INFINITY;
    for _ in 0..200 {
        let start = Instant::now();
        work();
        best = best.min(start.elapsed().as_secs_f64() * 1e6);
    }
    best
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let shipped = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/tiny"));
    let folder = std::env::args_os().nth(1).map_or(shipped, PathBuf::from);
    let start = Instant::now();
    let tokenizer = Tokenizer::load(&folder)?.ok_or("the folder has no tokenizer.json")?;
    println!("load: {:.1} ms", start.elapsed().as_secs_f64() * 1e3);

    let mut text = TEXT.repeat(1024 / TEXT.len() + 1);
    text.truncate(text.floor_char_boundary(1024));
    let ids = tokenizer.encode(&text, false)?;
    let encode = microseconds(|| drop(black_box(tokenizer.encode(&text, false))));
    println!("encode: {encode:.1} µs for {} bytes, {} tokens", text.len(), ids.len());

    for count in [100, 1000, 10_000] {
        let many: Vec<u32> = ids.iter().copied().cycle().take(count).collect();
        let stream = microseconds(|| {
            let mut stream = tokenizer.stream(true);
            many.iter().for_each(|id| drop(black_box(stream.push(*id))));
        });
        println!("stream: {:.3} µs a token over {count} tokens", stream / count as f64);
    }

    let stops = StopStrings::new(["<|im_end|>", "\n\n", "</answer>", "User:"])?;
    let stop = microseconds(|| {
        let mut matcher = stops.matcher();
        text.split_inclusive(' ').for_each(|word| drop(black_box(matcher.push(word))));
    });
    println!("stop: {:.1} µs for {} bytes in words, 4 stop strings", stop, text.len());

    if let Some(template) = tokenizer.chat_template() {
        let turn = |role: &str| json!({"role": role, "content": TEXT});
        let messages = json!([turn("user"), turn("assistant"), turn("user")]);
        let none = Map::new();
        let render =
            microseconds(|| drop(black_box(template.render(&messages, None, true, &none))));
        println!("template: {render:.1} µs for three turns");
    }
    Ok(())
}
