//! The line of the log that says how decoding goes.

use std::time::Duration;

use aquila_spec::{Shape, SpecStats};
use tracing_subscriber::filter::LevelFilter;

use crate::support::logged::logged;
use crate::support::shipped::{Algorithm, config, engine};
use crate::support::{request, run};

/// Decodes two requests; answers the lines of the log, and what speculation did.
fn lines(algorithm: Algorithm, every: Duration) -> (Vec<String>, SpecStats) {
    let mut engine = engine(algorithm, config(Shape::chain(3)));
    engine.report_every(every);
    let ((), text) = logged(LevelFilter::INFO, || {
        for tokens in [24, 40] {
            let (request, _) = request(&[1, 300, 45, 501, 77, 9, 210], tokens);
            engine.submit(request).unwrap();
        }
        run(&mut engine);
    });
    let decode = text.lines().filter(|line| line.contains("Decode batch"));
    (decode.map(str::to_owned).collect(), engine.stats().speculation())
}

/// The number behind a name in a line.
fn number(line: &str, name: &str) -> f64 {
    let (_, rest) = line.split_once(&format!("{name}: ")).unwrap_or_else(|| panic!("{line}"));
    rest.split(',').next().unwrap().parse().unwrap()
}

#[test]
fn decoding_is_reported_with_load_acceptance_and_throughput() {
    let (lines, spec) = lines(Algorithm::Eagle3, Duration::ZERO);
    let drafted: Vec<&String> = lines.iter().filter(|line| line.contains("accept len")).collect();
    assert!(drafted.len() > 5, "{lines:?}");
    for line in &drafted {
        assert!(line.contains(" INFO "), "{line}");
        let running = number(line, "#running-req");
        assert!((1.0..=2.0).contains(&running), "{line}");
        assert!(number(line, "#token") >= 7.0 && number(line, "token usage") < 0.1, "{line}");
        assert_eq!(number(line, "#queue-req"), 0.0, "{line}");
        assert!(number(line, "gen throughput (token/s)") > 0.0, "{line}");
        let (length, rate) = (number(line, "accept len"), number(line, "accept rate"));
        assert!((1.0..=4.0).contains(&length) && (0.0..=1.0).contains(&rate), "{line}");
    }
    assert!(spec.accept_length() > 1.0);
    let lengths = drafted.iter().map(|line| number(line, "accept len"));
    assert!(lengths.fold(0.0, f64::max) >= spec.accept_length(), "no line is above the mean");
}

#[test]
fn plain_decoding_is_reported_without_acceptance() {
    let (plain, _) = lines(Algorithm::None, Duration::ZERO);
    assert!(plain.len() > 20 && plain.iter().all(|line| !line.contains("accept")), "{plain:?}");
    // Shorter than the time between two lines, however slow the machine is.
    let (short, _) = lines(Algorithm::Eagle3, Duration::from_secs(24 * 3600));
    assert!(short.is_empty(), "{short:?}");
}
