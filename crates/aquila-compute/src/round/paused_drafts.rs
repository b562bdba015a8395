//! Paused drafts: in a round without a tree, a draft that would only follow the text is not run.
//!
//! What it misses it processes when it resumes. A draft that takes the target's hidden rows needs
//! those of the rows that it missed, which cannot be computed again: each place has a few rows for
//! them behind the rows of a pass. The one invariant: the kept rows of a request are those of
//! consecutive tokens, first to last.

use super::StateBounds;

/// Where the target's hidden rows of a request are among all hidden rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct TargetRows {
    /// A hidden row.
    pub row: usize,
    /// The token whose row that is.
    pub token: usize,
}

impl TargetRows {
    /// The hidden row of this token.
    pub fn of(&self, token: usize) -> u32 {
        (self.row + token - self.token) as u32
    }
}

/// A draft that is paused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Paused {
    /// The first token whose row it missed.
    token: usize,
    /// Rows that it missed.
    missed: usize,
}

impl Paused {
    /// Notes that the draft of the request at `place` missed the row of `token`; answers where the
    /// hidden row goes, unless there is no room for it, or no need.
    pub fn miss(
        paused: &mut Option<Paused>,
        token: usize,
        place: usize,
        bounds: &StateBounds,
    ) -> Option<u32> {
        let paused = paused.get_or_insert(Paused { token, missed: 0 });
        let at = paused.missed;
        paused.missed += 1;
        let fits = bounds.hidden && at < bounds.parked_rows;
        fits.then(|| (first_row(place, bounds) + at) as u32)
    }

    /// Where the target's rows of what the draft missed are; none if it missed too many to resume.
    pub fn rows(&self, place: usize, bounds: &StateBounds) -> Option<TargetRows> {
        let resumes = !bounds.hidden || self.missed <= bounds.parked_rows;
        let row = if bounds.hidden { first_row(place, bounds) } else { 0 };
        resumes.then_some(TargetRows { row, token: self.token })
    }
}

fn first_row(place: usize, bounds: &StateBounds) -> usize {
    bounds.first_parked + place * bounds.parked_rows
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::round::{Shape, Verify};

    fn bounds(hidden: bool, parked_rows: usize) -> StateBounds {
        StateBounds {
            places: 2,
            stride: 8,
            drafts: true,
            groups: Vec::new(),
            hidden,
            first_parked: 100,
            parked_rows,
            chunk: 8,
            shape: Shape::chain(1),
            verify: Verify::Match,
            vocabulary: 0,
            outputs: 0,
            logits: 0,
            simulate: None,
        }
    }

    #[test]
    fn rows_of_each_place_are_kept_side_by_side() {
        let bounds = bounds(true, 3);
        let (mut a, mut b) = (None, None);
        assert_eq!(Paused::miss(&mut a, 7, 0, &bounds), Some(100));
        assert_eq!(Paused::miss(&mut b, 20, 1, &bounds), Some(103));
        assert_eq!(Paused::miss(&mut a, 8, 0, &bounds), Some(101));
        let rows = a.expect("paused").rows(0, &bounds).expect("in time");
        assert_eq!((rows.of(7), rows.of(8)), (100, 101));
    }

    #[test]
    fn a_head_that_missed_too_many_rows_cannot_resume() {
        let bounds = bounds(true, 2);
        let mut long = None;
        let kept: Vec<_> = (0..4).map(|token| Paused::miss(&mut long, token, 0, &bounds)).collect();
        assert_eq!(kept, [Some(100), Some(101), None, None]);
        assert_eq!(long.expect("paused").rows(0, &bounds), None);
    }

    #[test]
    fn a_draft_without_hidden_rows_always_resumes() {
        let bounds = bounds(false, 2);
        let mut paused = None;
        assert!((0..9).all(|token| Paused::miss(&mut paused, token, 0, &bounds).is_none()));
        assert!(paused.expect("paused").rows(0, &bounds).is_some());
    }
}
