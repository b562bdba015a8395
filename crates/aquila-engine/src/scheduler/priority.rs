//! Priorities: which requests go before others, and which may take the place of others.
//!
//! A priority is a wish of the client's; its *rank* is what the scheduler compares, higher first
//! whichever way values are counted. Where priorities are off every rank is the same, and nothing
//! but the order of arrival (or cached prefixes) decides.

/// What becomes of the priorities that requests bring.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Priorities {
    /// Priorities change nothing.
    #[default]
    Ignored,
    /// A request that brings one is refused.
    Refused,
    /// They decide which request is admitted first, and which is preempted first.
    Ranked {
        /// Whether low values go before high ones.
        low_values_first: bool,
        /// By how much a waiting request must outrank a running one to take its place.
        preemption_threshold: u64,
    },
}

impl Priorities {
    /// Where a request of this priority stands, higher first; one without comes last.
    pub(crate) fn rank(self, priority: Option<i64>) -> i64 {
        match (self, priority) {
            (Self::Ignored | Self::Refused, _) => 0,
            (Self::Ranked { .. }, None) => i64::MIN,
            (Self::Ranked { low_values_first: false, .. }, Some(value)) => value,
            (Self::Ranked { low_values_first: true, .. }, Some(value)) => value.saturating_neg(),
        }
    }

    /// Whether requests differ in rank.
    pub(crate) fn are_ranked(self) -> bool {
        matches!(self, Self::Ranked { .. })
    }

    /// Whether a request that waits with one rank may take the place of one that runs with the other. Equals never
    /// may, whatever the threshold: they would take it from each other without end.
    pub(crate) fn may_displace(self, waiting: i64, running: i64) -> bool {
        match self {
            Self::Ignored | Self::Refused => false,
            Self::Ranked { preemption_threshold, .. } => {
                waiting > running && waiting.abs_diff(running) >= preemption_threshold
            }
        }
    }
}
