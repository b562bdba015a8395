//! What several passes come to: the middle of them, and how far they lie apart.

/// A figure over passes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Spread {
    /// The middle one.
    pub median: f64,
    /// The least.
    pub least: f64,
    /// The largest.
    pub most: f64,
}

impl Spread {
    /// Of figures of which there is at least one.
    pub fn of(values: impl Iterator<Item = f64>) -> Self {
        let mut values: Vec<f64> = values.collect();
        values.sort_by(f64::total_cmp);
        let last = values.len() - 1;
        let median = (values[last / 2] + values[values.len() / 2]) / 2.0;
        Self { median, least: values[0], most: values[last] }
    }
}

impl std::fmt::Display for Spread {
    /// From the least to the largest.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(&format!("{:.3}-{:.3}", self.least, self.most))
    }
}
