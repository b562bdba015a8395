//! A request as far as the backend knows it: its row of the state.
//!
//! Tokens and lengths are as far as they are chosen, which may be a round further than the host
//! has read. The seed of the next tree is written by the draft and taken once.

use std::sync::Arc;

use super::grammar::GrammarRow;
use super::paused_drafts::Paused;
use super::{
    Admitted, Candidates, DraftGroup, DraftQuery, Ended, RequestParams, SamplingContext, Verify,
};
use crate::ForwardPlan;
use crate::sampling::{Choice, History, TokenSet};

/// A request's row of the state.
#[derive(Debug, Clone)]
pub(super) struct SequenceState {
    pub params: Arc<RequestParams>,
    /// Prompt and answer; while it decodes, the last one is the bonus.
    pub tokens: Vec<u32>,
    /// What penalties count; kept only if there are any.
    pub history: History,
    pub grammar: Option<GrammarRow>,
    /// The slots of its rows in each group, committed ones first, then room.
    pub tables: Vec<Vec<u32>>,
    /// How many slots of each group's table the plans of that group have.
    placed: Vec<usize>,
    /// How many rows it has committed in each group.
    pub rows: Vec<usize>,
    /// How many of its trees were verified.
    pub rounds: u64,
    /// How many tokens the draft knew when it last processed some.
    pub extended: usize,
    /// Whether its draft is paused, and since when.
    pub paused: Option<Paused>,
    /// Whether its own rules ended it: in later rounds it is void.
    pub ended: bool,
    pub seed: TakeOnce<Option<Candidates>>,
}

impl SequenceState {
    /// A request that holds KV from now on; `drafts` are the draft's groups.
    pub fn new(admitted: Admitted, drafts: &[DraftGroup]) -> Self {
        let Admitted { params, tokens, matched, complete, rounds, .. } = admitted;
        let mut history = History::default();
        if params.sampling.has_penalties() {
            history = History::of_prompt(&tokens[..params.prompt]);
            tokens[params.prompt..].iter().for_each(|&token| history.push(token));
        }
        let grammar = params.grammar.clone();
        let grammar = grammar.map(|grammar| GrammarRow::new(grammar, &tokens[params.prompt..]));
        let groups = params.groups();
        let mut rows = vec![matched; groups];
        let (mut extended, mut seed) = (0, TakeOnce::Empty);
        if complete {
            let read = tokens.len() - 1;
            rows[0] = read;
            for (rows, draft) in rows[1..].iter_mut().zip(drafts) {
                *rows = draft.certain_rows(tokens.len(), read, true);
            }
            // Until its draft is told what the next tree begins with, that is nothing.
            (extended, seed) = (tokens.len(), TakeOnce::Full(None));
        }
        Self {
            params,
            tokens,
            history,
            grammar,
            tables: vec![Vec::new(); groups],
            placed: vec![0; groups],
            rows,
            rounds,
            extended,
            paused: None,
            ended: false,
            seed,
        }
    }

    /// What is asked of the tokens after those that are there.
    pub fn context(&self) -> SamplingContext<'_> {
        let params = &*self.params;
        let answered = self.tokens.len() - params.prompt;
        SamplingContext {
            sampling: &params.sampling,
            history: &self.history,
            choice: params.choice,
            tokens: self.tokens.len(),
            banned: &params.stop_ids,
            banned_depths: params.min_tokens.saturating_sub(answered),
            drawn: false,
        }
    }

    /// What the grammar allows after `path`, which it was asked about.
    pub fn allowed(&self, path: &[u32]) -> Option<&TokenSet> {
        self.grammar.as_ref()?.allowed(path)
    }

    /// Finds out what the grammar allows a draft after `path`, where drafts keep to it.
    pub fn ask_for_draft(&mut self, path: &[u32]) {
        if let Some(grammar) = self.grammar.as_mut().filter(|grammar| grammar.guides_drafts()) {
            grammar.ask(path);
        }
    }

    /// What is asked of a draft about row `row`, after `path` below the bonus: what the target
    /// would choose, what it would most likely choose, or a draw, as the verification needs.
    pub fn draft_query<'a>(&'a self, path: &'a [u32], row: usize) -> DraftQuery<'a> {
        let params = &*self.params;
        let context = SamplingContext {
            sampling: params.draft_sampling.as_ref().unwrap_or(&params.sampling),
            drawn: params.limits.verify == Verify::Rejection,
            ..self.context()
        };
        let mut query = context.draft(path, row);
        query.query.allowed = self.allowed(path);
        query
    }

    /// Takes tokens of the answer until its own rules end it; the others are dropped.
    pub fn take(&mut self, tokens: &mut Vec<Choice>) -> Option<Ended> {
        let mut ended = None;
        let mut taken = 0;
        let first = self.tokens.len();
        for &Choice { token, .. } in tokens.iter() {
            if let Some(grammar) = &self.grammar
                && let Some(why) = grammar.failure(&self.tokens[first..])
            {
                ended = Some(Ended::GrammarFailed(why.into()));
                break;
            }
            self.tokens.push(token);
            if self.params.sampling.has_penalties() {
                self.history.push(token);
            }
            taken += 1;
            if self.params.stop_ids.contains(&token) {
                ended = Some(Ended::Token(token));
            } else if self.grammar.as_mut().is_some_and(|grammar| grammar.take(token)) {
                ended = Some(Ended::Grammar);
            } else if self.tokens.len() >= self.params.longest {
                ended = Some(Ended::Length);
            }
            if ended.is_some() {
                break;
            }
        }
        tokens.truncate(taken);
        self.grammar.iter_mut().for_each(GrammarRow::forget);
        self.ended = ended.is_some();
        ended
    }

    /// Changes the slots of a group from the row `from` on.
    pub fn change_table(&mut self, group: usize, from: usize, slots: &[u32]) {
        self.placed[group] = self.placed[group].min(from);
        let table = &mut self.tables[group];
        let known = table.len();
        assert!(from <= known, "slots from {from} were told, {known} are known");
        let replaced = slots.len().min(known - from);
        table[from..from + replaced].copy_from_slice(&slots[..replaced]);
        table.extend_from_slice(&slots[replaced..]);
    }

    /// Adds to a plan what its block tables lack of the first `rows` rows of a group, whose table
    /// begins at `start`.
    pub fn place_table(&mut self, plan: &mut ForwardPlan, group: usize, start: u32, rows: usize) {
        let placed = self.placed[group];
        if placed < rows {
            plan.change_table(start as usize + placed, &self.tables[group][placed..rows]);
            self.placed[group] = rows;
        }
    }

    /// The rows of each of the draft's groups that it lacks to know `tokens` of the text; `whole`
    /// says whether the target has read all of them.
    pub fn missing_rows(
        &self,
        groups: &[DraftGroup],
        tokens: usize,
        whole: bool,
    ) -> Vec<std::ops::Range<usize>> {
        let rows = |(at, group): (usize, &DraftGroup)| {
            self.rows[at + 1]..group.certain_rows(tokens, self.rows[0], whole)
        };
        groups.iter().enumerate().map(rows).collect()
    }
}

/// A value that is written before it is taken, and taken once.
#[derive(Debug, Clone)]
pub(super) enum TakeOnce<T> {
    Empty,
    Full(T),
}

impl<T> TakeOnce<T> {
    /// Takes what was written.
    ///
    /// # Panics
    /// If nothing was written since it was last taken.
    pub fn take(&mut self, what: &str) -> T {
        match std::mem::replace(self, TakeOnce::Empty) {
            TakeOnce::Full(value) => value,
            TakeOnce::Empty => panic!("{what} was read before it was written, or twice"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;

    #[test]
    fn a_seed_is_taken_once_after_it_was_written() {
        let mut seed = TakeOnce::Empty;
        let taken = |seed: &mut TakeOnce<u32>| {
            catch_unwind(AssertUnwindSafe(|| seed.take("the seed"))).ok()
        };
        assert_eq!(taken(&mut seed), None, "it was not written");
        seed = TakeOnce::Full(7);
        assert_eq!(taken(&mut seed), Some(7));
        assert_eq!(taken(&mut seed), None, "it was taken");
    }
}
