//! The relay: what a round leaves for the next one, a row for each request that holds KV.
//!
//! A row is taken by the round that uses it, and written again as soon as that round knows what
//! it accepts, before the draft extends; the seed follows when the draft has. Each is taken once:
//! a round that reads what was not written yet, or reads it twice, panics and fails.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use aquila_compute::choose::History;
use aquila_spec::{Asking, BlockTable, Seed, Verify};

use super::Order;
use super::job::{Admission, TableChange};
use super::parking::Parked;
use crate::listener::{FinishReason, StopCause, Token};
use crate::request::RequestId;

/// A request as far as the compute lane knows it.
#[derive(Debug)]
pub(crate) struct Track {
    pub order: Arc<Order>,
    /// Prompt and answer; while it decodes, the last one is the bonus.
    pub tokens: Vec<u32>,
    /// What penalties count; kept only if there are any.
    pub history: History,
    /// Its place among the requests that hold KV: where its block tables are in plans.
    pub place: usize,
    /// The slots of its rows in each group, committed ones first, then room.
    pub tables: Vec<Vec<u32>>,
    /// How many slots of each group's table the plans of that group have.
    pub placed: Vec<usize>,
    /// How many rows it has committed in each group.
    pub rows: Vec<usize>,
    /// How many of its trees were verified.
    pub rounds: u64,
    /// How many tokens the draft knew when it last took some in.
    pub extended: usize,
    /// Whether its draft sits out, and since when.
    pub parked: Option<Parked>,
    /// Whether its own rules ended it: in later rounds it is void.
    pub ended: bool,
    seed: Once<Option<Seed>>,
}

impl Track {
    /// The row of a request that begins, or goes on, at this place.
    pub fn new(admission: Admission, place: usize) -> Self {
        let Admission { order, tokens, matched, rounds } = admission;
        let mut history = History::default();
        if order.sampling.has_penalties() {
            history = History::of_prompt(&tokens[..order.prompt]);
            tokens[order.prompt..].iter().for_each(|&token| history.push(token));
        }
        let groups = order.groups();
        Self {
            order,
            tokens,
            history,
            place,
            tables: vec![Vec::new(); groups],
            placed: vec![0; groups],
            rows: vec![matched; groups],
            rounds,
            extended: 0,
            parked: None,
            ended: false,
            seed: Once::Empty,
        }
    }

    /// Tokens of the answer so far.
    pub fn answered(&self) -> usize {
        self.tokens.len() - self.order.prompt
    }

    /// What is asked of the tokens after those that are there.
    pub fn asking(&self) -> Asking<'_> {
        let order = &*self.order;
        Asking {
            sampling: &order.sampling,
            history: &self.history,
            choice: order.choice,
            tokens: self.tokens.len(),
            banned: &order.limits.stop_ids,
            banned_depths: order.limits.min_tokens.saturating_sub(self.answered()),
            drawn: false,
        }
    }

    /// What is asked of a draft: what the target would choose, what it would most likely choose,
    /// or a draw, as the verification needs.
    pub fn draft_asking(&self) -> Asking<'_> {
        let order = &*self.order;
        Asking {
            sampling: order.draft_sampling.as_ref().unwrap_or(&order.sampling),
            drawn: order.room.verify == Verify::Rejection,
            ..self.asking()
        }
    }

    /// Takes tokens of the answer until its own rules end it; the others are dropped.
    pub fn take(&mut self, tokens: &mut Vec<Token>) -> Option<FinishReason> {
        let mut reason = None;
        let mut taken = 0;
        for token in tokens.iter() {
            self.tokens.push(token.id);
            if self.order.sampling.has_penalties() {
                self.history.push(token.id);
            }
            taken += 1;
            if self.order.limits.stop_ids.contains(&token.id) {
                reason = Some(FinishReason::Stop(StopCause::Token(token.id)));
            } else if self.tokens.len() >= self.order.longest {
                reason = Some(FinishReason::Length);
            }
            if reason.is_some() {
                break;
            }
        }
        tokens.truncate(taken);
        self.ended = reason.is_some();
        reason
    }

    /// Where its block table of a group is in plans that have one of `stride` slots for each of
    /// `requests`; those of a draft's groups lie behind each other.
    pub fn table(&self, group: usize, requests: usize, stride: usize) -> BlockTable {
        let start = (group.saturating_sub(1) * requests + self.place) * stride;
        BlockTable { start, placed: self.placed[group] }
    }

    /// Notes that the draft knows `tokens` of the text now, and made these rows of it.
    pub fn took_in(&mut self, made: &[Range<usize>], tokens: usize) {
        for (at, made) in made.iter().enumerate() {
            self.rows[at + 1] += made.len();
            self.placed[at + 1] = self.placed[at + 1].max(made.end);
        }
        self.extended = tokens;
    }

    /// What the draft left for this round's tree.
    pub fn take_seed(&mut self) -> Option<Seed> {
        self.seed.take("the draft's seed")
    }

    /// Leaves what the next round's tree begins with.
    pub fn leave_seed(&mut self, seed: Option<Seed>) {
        self.seed = Once::Full(seed);
    }
}

/// A value that is written before it is taken, and taken once.
#[derive(Debug)]
enum Once<T> {
    Empty,
    Full(T),
}

impl<T> Once<T> {
    fn take(&mut self, what: &str) -> T {
        match std::mem::replace(self, Once::Empty) {
            Once::Full(value) => value,
            Once::Empty => panic!("{what} was read before it was written, or twice"),
        }
    }
}

/// The rows of all requests that hold KV.
#[derive(Default)]
pub(crate) struct Relay {
    rows: HashMap<RequestId, Once<Box<Track>>>,
}

impl Relay {
    /// Makes a row for a request.
    pub fn admit(&mut self, track: Track) {
        let id = track.order.id;
        let before = self.rows.insert(id, Once::Full(Box::new(track)));
        assert!(before.is_none(), "request {id} was admitted, but never left");
    }

    /// Takes what the last round of a request left.
    pub fn take(&mut self, id: RequestId) -> Box<Track> {
        let row = self.rows.get_mut(&id);
        row.unwrap_or_else(|| panic!("request {id} has no row")).take("a row of the relay")
    }

    /// Writes what a round leaves for the next one.
    pub fn publish(&mut self, track: Box<Track>) {
        let id = track.order.id;
        match self.rows.get_mut(&id) {
            Some(row @ Once::Empty) => *row = Once::Full(track),
            Some(Once::Full(_)) => panic!("the row of request {id} was written twice"),
            None => panic!("request {id} has no row"),
        }
    }

    /// A row that is written.
    pub fn written(&self, id: RequestId) -> &Track {
        match self.rows.get(&id) {
            Some(Once::Full(track)) => track,
            _ => panic!("the row of request {id} is not written"),
        }
    }

    /// A row that is written, to leave more in it.
    pub fn written_mut(&mut self, id: RequestId) -> &mut Track {
        match self.rows.get_mut(&id) {
            Some(Once::Full(track)) => track,
            _ => panic!("the row of request {id} is not written"),
        }
    }

    /// Changes the slots of a request.
    pub fn change_table(&mut self, change: &TableChange, slots: &[u32]) {
        let track = self.written_mut(change.request);
        track.placed[change.group] = track.placed[change.group].min(change.from);
        let table = &mut track.tables[change.group];
        let new = &slots[change.slots.clone()];
        let known = table.len();
        assert!(change.from <= known, "slots from {} were told, {known} are known", change.from);
        let replaced = new.len().min(known - change.from);
        table[change.from..change.from + replaced].copy_from_slice(&new[..replaced]);
        table.extend_from_slice(&new[replaced..]);
    }

    /// Drops the row of a request that left; none if a failed round took it with it.
    pub fn leave(&mut self, id: RequestId) -> Option<Box<Track>> {
        match self.rows.remove(&id) {
            Some(Once::Full(track)) => Some(track),
            Some(Once::Empty) | None => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use aquila_compute::choose::Sampling;

    use super::*;
    use crate::lanes::DraftRoom;
    use crate::request::Limits;

    /// What can happen to a row.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    enum Event {
        Admit,
        Take,
        TakeSeed,
        Publish,
        LeaveSeed,
        ChangeTable,
        Leave,
    }

    const EVENTS: [Event; 7] = [
        Event::Admit,
        Event::Take,
        Event::TakeSeed,
        Event::Publish,
        Event::LeaveSeed,
        Event::ChangeTable,
        Event::Leave,
    ];

    /// The rule: what a row is, and whether the seed in it is written.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    enum Row {
        Absent,
        Written(bool),
        Taken,
    }

    #[derive(Debug, Clone, Copy)]
    struct Model {
        row: Row,
        /// The row that a round has taken, if one has.
        hand: Option<bool>,
    }

    impl Model {
        /// What follows; none where the event is a mistake.
        fn after(self, event: Event) -> Option<Model> {
            let Model { row, hand } = self;
            let model = |row, hand| Some(Model { row, hand });
            match (event, row, hand) {
                (Event::Admit, Row::Absent, _) => model(Row::Written(false), hand),
                (Event::Take, Row::Written(seed), None) => model(Row::Taken, Some(seed)),
                (Event::TakeSeed, _, Some(true)) => model(row, Some(false)),
                (Event::Publish, Row::Taken, Some(seed)) => model(Row::Written(seed), None),
                (Event::LeaveSeed, Row::Written(_), _) => model(Row::Written(true), hand),
                (Event::ChangeTable, Row::Written(_), _) => model(row, hand),
                (Event::Leave, ..) => model(Row::Absent, hand),
                _ => None,
            }
        }

        /// Whether anybody could do it: what is not in hand is neither published nor read, and a
        /// round takes a row for itself once.
        fn can_be_tried(self, event: Event) -> bool {
            match event {
                Event::TakeSeed | Event::Publish => self.hand.is_some(),
                Event::Take => self.hand.is_none() || self.row == Row::Taken,
                _ => true,
            }
        }
    }

    const ID: RequestId = RequestId(7);

    fn track() -> Track {
        let order = Order {
            id: ID,
            sampling: Sampling::default(),
            draft_sampling: None,
            choice: 0,
            limits: Limits::default(),
            prompt: 2,
            longest: 9,
            logprobs: None,
            prompt_logprobs: None,
            room: DraftRoom::NONE,
        };
        let tokens = vec![1, 2];
        Track::new(Admission { order: Arc::new(order), tokens, matched: 0, rounds: 0 }, 0)
    }

    fn apply(relay: &mut Relay, hand: &mut Option<Box<Track>>, event: Event) {
        match event {
            Event::Admit => relay.admit(track()),
            Event::Take => *hand = Some(relay.take(ID)),
            Event::TakeSeed => drop(hand.as_mut().expect("in hand").take_seed()),
            Event::Publish => relay.publish(hand.take().expect("in hand")),
            Event::LeaveSeed => relay.written_mut(ID).leave_seed(None),
            Event::ChangeTable => {
                let change = TableChange { request: ID, group: 0, from: 0, slots: 0..2 };
                relay.change_table(&change, &[4, 5]);
            }
            Event::Leave => drop(relay.leave(ID)),
        }
    }

    /// Goes through every order of events behind `past`; answers how many were mistakes.
    fn explore(past: &mut Vec<Event>, model: Model, depth: usize) -> usize {
        if depth == 0 {
            return 0;
        }
        let mut mistakes = 0;
        for event in EVENTS.into_iter().filter(|&event| model.can_be_tried(event)) {
            let (mut relay, mut hand) = (Relay::default(), None);
            past.iter().for_each(|&event| apply(&mut relay, &mut hand, event));
            let went = catch_unwind(AssertUnwindSafe(|| apply(&mut relay, &mut hand, event)));
            let next = model.after(event);
            assert_eq!(went.is_ok(), next.is_some(), "{event:?} after {past:?}");
            match next {
                Some(next) => {
                    past.push(event);
                    mistakes += explore(past, next, depth - 1);
                    past.pop();
                }
                None => mistakes += 1,
            }
        }
        mistakes
    }

    #[test]
    fn a_row_is_taken_once_after_it_was_written_in_every_order_of_events() {
        let hook = std::panic::take_hook();
        std::panic::set_hook(Box::new(|_| ()));
        let begin = Model { row: Row::Absent, hand: None };
        let mistakes = catch_unwind(|| explore(&mut Vec::new(), begin, 7));
        std::panic::set_hook(hook);
        let mistakes = mistakes.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        assert!(mistakes > 1000, "orders that are mistakes were tried: {mistakes}");
    }
}
