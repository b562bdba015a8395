//! Which rows of a round are kept, and where they belong.

/// The rows that a round keeps. Moves are made in order, and none overwrites what a later one
/// reads.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Kept {
    /// From slot to slot, for what is kept in slots.
    pub slots: Vec<(u32, u32)>,
    /// From row to row of the pass, for what has a row for each row of it.
    pub rows: Vec<(u32, u32)>,
}

impl Kept {
    /// Keeps the nodes of `path`: the i-th goes to the place of node i. `slots` has the slot of
    /// each node, `first_row` is the row of the root.
    pub fn path(&mut self, path: &[usize], slots: &[u32], first_row: usize) {
        for (to, &from) in path.iter().enumerate().filter(|&(to, &from)| to != from) {
            self.slots.push((slots[from], slots[to]));
            self.rows.push(((first_row + from) as u32, (first_row + to) as u32));
        }
    }

    /// Forgets all of them.
    pub fn clear(&mut self) {
        self.slots.clear();
        self.rows.clear();
    }
}
