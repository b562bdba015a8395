//! Drafts that sit out: in a round without a tree, a draft that would only follow is not run.
//!
//! What it misses it takes in when it returns. A draft that reads the target's hidden states needs
//! those of the rows that it missed, which cannot be made again: they wait behind the rows of a
//! pass, a few for each request. The one invariant: the parked rows of a request are those of
//! consecutive tokens, first to last.

use aquila_spec::TargetRows;

/// Where hidden rows may wait.
pub(crate) struct Parking {
    /// The first row behind those of a pass.
    first: usize,
    /// Rows of each seat.
    rows: usize,
    free: Vec<usize>,
}

/// A draft that sits out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Parked {
    /// The first token whose row it missed.
    token: usize,
    /// Rows that it missed.
    missed: usize,
    /// Where their hidden rows wait; none where it needs none, or where they were too many.
    seat: Option<usize>,
}

impl Parking {
    /// `rows` for each of `seats` requests, behind the `first` rows of a pass.
    pub fn new(first: usize, rows: usize, seats: usize) -> Self {
        Self { first, rows, free: (0..seats).rev().collect() }
    }

    /// Notes that a draft missed the row of `token`; answers where its hidden row goes, unless
    /// there is no room for it, or no need.
    pub fn miss(
        &mut self,
        parked: &mut Option<Parked>,
        token: usize,
        needs_rows: bool,
    ) -> Option<u32> {
        let parked = parked.get_or_insert_with(|| {
            let seat = if needs_rows && self.rows > 0 { self.free.pop() } else { None };
            Parked { token, missed: 0, seat }
        });
        let place = parked.missed;
        parked.missed += 1;
        let seat = parked.seat?;
        if place == self.rows {
            self.free.extend(parked.seat.take());
            return None;
        }
        Some((self.first + seat * self.rows + place) as u32)
    }

    /// Whether a draft takes part or may do so again.
    pub fn may_return(parked: Option<&Parked>, needs_rows: bool) -> bool {
        parked.is_none_or(|parked| parked.seat.is_some() || !needs_rows)
    }

    /// Where the target's rows of what a draft missed are; none if it cannot return.
    pub fn rows_of(&self, parked: &Parked, needs_rows: bool) -> Option<TargetRows> {
        let row = parked.seat.map_or(0, |seat| self.first + seat * self.rows);
        let rows = TargetRows { row, token: parked.token };
        Self::may_return(Some(parked), needs_rows).then_some(rows)
    }

    /// A draft has returned, or its request has left.
    pub fn leave(&mut self, parked: Option<Parked>) {
        self.free.extend(parked.and_then(|parked| parked.seat));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_wait_side_by_side_until_their_draft_returns() {
        let mut parking = Parking::new(100, 3, 2);
        let (mut a, mut b) = (None, None);
        assert_eq!(parking.miss(&mut a, 7, true), Some(100));
        assert_eq!(parking.miss(&mut b, 20, true), Some(103));
        assert_eq!(parking.miss(&mut a, 8, true), Some(101));
        let rows = parking.rows_of(&a.expect("parked"), true).expect("in time");
        assert_eq!((rows.of(7), rows.of(8)), (100, 101));
        parking.leave(a.take());
        assert_eq!(parking.miss(&mut a, 9, true), Some(100), "its seat is free again");
    }

    #[test]
    fn who_missed_more_rows_than_may_wait_cannot_return_and_holds_no_seat() {
        let mut parking = Parking::new(10, 2, 1);
        let mut long = None;
        let places: Vec<_> = (0..4).map(|token| parking.miss(&mut long, token, true)).collect();
        assert_eq!(places, [Some(10), Some(11), None, None]);
        assert_eq!(parking.rows_of(&long.expect("parked"), true), None);
        assert!(!Parking::may_return(long.as_ref(), true));
        assert_eq!(parking.miss(&mut None, 5, true), Some(10), "its seat serves another");
    }

    #[test]
    fn a_draft_without_hidden_states_returns_after_any_number_of_rows() {
        let mut parking = Parking::new(10, 2, 1);
        let mut parked = None;
        assert!((0..9).all(|token| parking.miss(&mut parked, token, false).is_none()));
        assert!(parking.rows_of(&parked.expect("parked"), false).is_some());
    }
}
