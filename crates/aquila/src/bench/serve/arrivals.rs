//! When requests are sent.
//!
//! The one invariant: the times are known before the first request is sent, so no answer, however
//! late, delays an arrival.

use std::time::Duration;

use clap::ValueEnum;

use super::super::prompts::Random;

/// How arrivals are spread around their rate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Pattern {
    /// Independent of each other: exponential times between them
    Poisson,
    /// Equal times between them
    Constant,
}

/// Requests per second; infinite where all are sent at once.
pub fn rate(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(rate) if rate > 0.0 => Ok(rate),
        _ => Err("expected requests per second, above 0, or inf".into()),
    }
}

/// The times of `count` arrivals, the first of which is at 0.
pub fn times(count: usize, rate: f64, pattern: Pattern, seed: u64) -> Vec<Duration> {
    let mut random = Random { state: seed };
    let mut gap = || match pattern {
        _ if rate.is_infinite() => 0.0,
        Pattern::Constant => 1.0 / rate,
        Pattern::Poisson => -(1.0 - random.unit()).ln() / rate,
    };
    let mut at = 0.0;
    (0..count)
        .map(|index| {
            if index > 0 {
                at += gap();
            }
            Duration::from_secs_f64(at)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn constant_arrivals_are_equally_far_apart() {
        let millis = |ms| Duration::from_millis(ms);
        let expected = [millis(0), millis(250), millis(500), millis(750)];
        assert_eq!(times(4, 4.0, Pattern::Constant, 1), expected);
        assert_eq!(times(3, f64::INFINITY, Pattern::Poisson, 1), [Duration::ZERO; 3]);
    }

    #[test]
    fn poisson_gaps_are_exponential_and_follow_the_seed() {
        let count = 40_000;
        let arrivals = times(count + 1, 8.0, Pattern::Poisson, 7);
        assert_eq!(arrivals, times(count + 1, 8.0, Pattern::Poisson, 7));
        assert_ne!(arrivals[1..], times(count + 1, 8.0, Pattern::Poisson, 8)[1..]);
        let gaps: Vec<f64> =
            arrivals.windows(2).map(|pair| (pair[1] - pair[0]).as_secs_f64()).collect();
        // Mean and standard deviation are both 1/8; the median is ln 2 / 8.
        let mean = gaps.iter().sum::<f64>() / count as f64;
        assert!((mean * 8.0 - 1.0).abs() < 0.03, "{mean}");
        let variance = gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / count as f64;
        assert!((variance.sqrt() * 8.0 - 1.0).abs() < 0.03, "{variance}");
        let short = gaps.iter().filter(|&&gap| gap < 2f64.ln() / 8.0).count();
        assert!((short as f64 / count as f64 - 0.5).abs() < 0.02, "{short}");
    }

    #[test]
    fn a_rate_is_a_number_above_zero_or_inf() {
        assert_eq!(rate("2.5"), Ok(2.5));
        assert_eq!(rate("inf"), Ok(f64::INFINITY));
        for wrong in ["0", "-1", "nan", "fast", ""] {
            assert!(rate(wrong).is_err(), "{wrong}");
        }
    }
}
