//! What speculation did for one request, or for all.

/// Counts over rounds. `accept` counts include the bonus, `correct` counts do not.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SpecStats {
    /// Verifications.
    pub verify_ct: u64,
    /// Drafts that were right.
    pub correct_drafts: u64,
    /// Drafts that were verified: the nodes that each round really had, the bonus apart.
    pub proposed_drafts: u64,
    /// `histogram[i]`: rounds that kept i drafts.
    pub histogram: Vec<u64>,
}

impl SpecStats {
    /// Counts a round that verified `proposed` drafts and kept `correct` of them.
    pub fn round(&mut self, proposed: usize, correct: usize) {
        self.verify_ct += 1;
        self.proposed_drafts += proposed as u64;
        self.correct_drafts += correct as u64;
        if self.histogram.len() <= correct {
            self.histogram.resize(correct + 1, 0);
        }
        self.histogram[correct] += 1;
    }

    /// Takes such a round back, which was counted.
    pub fn take_back(&mut self, proposed: usize, correct: usize) {
        self.verify_ct -= 1;
        self.proposed_drafts -= proposed as u64;
        self.correct_drafts -= correct as u64;
        self.histogram[correct] -= 1;
        while self.histogram.last() == Some(&0) {
            self.histogram.pop();
        }
    }

    /// Adds the counts of another.
    pub fn add(&mut self, other: &SpecStats) {
        self.verify_ct += other.verify_ct;
        self.correct_drafts += other.correct_drafts;
        self.proposed_drafts += other.proposed_drafts;
        self.histogram.resize(self.histogram.len().max(other.histogram.len()), 0);
        for (sum, count) in self.histogram.iter_mut().zip(&other.histogram) {
            *sum += count;
        }
    }

    /// Tokens per verification, the bonus included; 0 before the first.
    pub fn accept_length(&self) -> f64 {
        if self.verify_ct == 0 {
            return 0.0;
        }
        (self.correct_drafts + self.verify_ct) as f64 / self.verify_ct as f64
    }

    /// The share of verified drafts that were right; 0 where there were none.
    pub fn accept_rate(&self) -> f64 {
        if self.proposed_drafts == 0 {
            return 0.0;
        }
        self.correct_drafts as f64 / self.proposed_drafts as f64
    }
}
