//! Which thing a token leads to from another: a table that keeps numbers alone.
//!
//! Its one invariant: from the slot that a key hashes to, no slot is empty up to the one with that
//! key's number. What a number's key is, its owner says.

/// A way from one thing to another: where from, and the token.
pub(super) type Key = (u32, u32);

/// Numbers by their keys; 0 is no number.
#[derive(Debug, Default)]
pub(super) struct Links {
    slots: Vec<u32>,
    len: usize,
}

impl Links {
    /// With room for `count` numbers. Memory is taken as it is used.
    pub fn with_room(count: usize) -> Self {
        Self { slots: vec![0; slots_for(count)], len: 0 }
    }

    /// The number with this key.
    pub fn find(&self, key: Key, key_of: impl Fn(u32) -> Key) -> Option<u32> {
        if self.slots.is_empty() {
            return None;
        }
        let mut at = self.home(key);
        while self.slots[at] != 0 {
            if key_of(self.slots[at]) == key {
                return Some(self.slots[at]);
            }
            at = self.after(at);
        }
        None
    }

    /// Adds a number whose key is not there yet.
    pub fn insert(&mut self, number: u32, key_of: impl Fn(u32) -> Key) {
        if (self.len + 1) * 4 > self.slots.len() * 3 {
            let grown = vec![0; slots_for(self.len + 1) * 2];
            let old = std::mem::replace(&mut self.slots, grown);
            for number in old.into_iter().filter(|&number| number != 0) {
                self.place(number, key_of(number));
            }
        }
        self.place(number, key_of(number));
        self.len += 1;
    }

    fn place(&mut self, number: u32, key: Key) {
        let mut at = self.home(key);
        while self.slots[at] != 0 {
            at = self.after(at);
        }
        self.slots[at] = number;
    }

    /// Takes out a number that is there.
    pub fn remove(&mut self, number: u32, key_of: impl Fn(u32) -> Key) {
        let mut hole = self.home(key_of(number));
        while self.slots[hole] != number {
            hole = self.after(hole);
        }
        let mut at = hole;
        loop {
            at = self.after(at);
            if self.slots[at] == 0 {
                break;
            }
            // What was pushed on past the hole moves into it; what is at home before it stays.
            let home = self.home(key_of(self.slots[at]));
            let from_home = at.wrapping_sub(home) & (self.slots.len() - 1);
            let from_hole = at.wrapping_sub(hole) & (self.slots.len() - 1);
            if from_home >= from_hole {
                self.slots[hole] = self.slots[at];
                hole = at;
            }
        }
        self.slots[hole] = 0;
        self.len -= 1;
    }

    /// Bytes that it takes.
    pub fn bytes(&self) -> usize {
        self.slots.capacity() * size_of::<u32>()
    }

    fn home(&self, (from, token): Key) -> usize {
        let mut hash = u64::from(from) << 32 | u64::from(token);
        hash = (hash ^ hash >> 29).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        hash = (hash ^ hash >> 32).wrapping_mul(0xd6e8_feb8_6659_fd93);
        (hash >> 32) as usize & (self.slots.len() - 1)
    }

    fn after(&self, at: usize) -> usize {
        (at + 1) & (self.slots.len() - 1)
    }
}

/// Slots that are at most three quarters full.
fn slots_for(count: usize) -> usize {
    (count * 4 / 3 + 1).next_power_of_two().max(16)
}
