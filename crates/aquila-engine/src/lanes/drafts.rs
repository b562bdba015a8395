//! What the draft does in a round: trees before the target's pass, catching up behind it.
//!
//! Its one invariant: a draft knows a text without gaps. It takes in what has become certain as
//! soon as that is known, or, where it sat out, before it drafts again. Seeds last until the next
//! time that any draft takes something in, so trees that begin with older ones are drafted first.

use std::ops::Range;

use aquila_compute::Backend;
use aquila_spec::{DraftGroup, Drafting, Extending, GroupRows, Seed, TargetRows};

use super::compute::Lane;
use super::job::Yield;
use super::order::Order;
use super::relay::Track;
use super::round::{Turn, Work};
use crate::config::EngineConfig;
use crate::error::Result;
use crate::request::RequestId;
use crate::times::{Times, timed};

/// A request whose draft goes on after its round.
pub(super) struct Next {
    part: usize,
    request: RequestId,
    target: TargetRows,
    /// What its tree began with.
    previous: Option<Seed>,
    /// Whether all of its text is read.
    whole: bool,
}

impl<B: Backend> Lane<B> {
    /// Drafts the trees that are awaited.
    pub(super) fn draft(&mut self) -> Result<()> {
        let Self { runner, turns, config, .. } = self;
        let declared = runner.declaration().map_or(&[][..], |d| &d.groups);
        let groups: Vec<Vec<GroupRows<'_>>> = turns
            .iter()
            .filter(|turn| turn.awaits_tree)
            .map(|turn| {
                let (track, shape) = (&turn.track, turn.shape);
                let rows = |(at, draft): (usize, &DraftGroup)| {
                    let certain = track.rows[at + 1];
                    let slots = certain + draft.tree.of(shape);
                    group_rows(track, at + 1, 0..certain, slots, config)
                };
                declared.iter().enumerate().map(rows).collect()
            })
            .collect();
        let requests: Vec<Drafting<'_>> = turns
            .iter()
            .filter(|turn| turn.awaits_tree)
            .filter_map(|turn| Some((turn, turn.seed.as_ref()?)))
            .zip(&groups)
            .map(|((turn, seed), groups)| Drafting {
                request: turn.track.order.id.0,
                tokens: &turn.track.tokens,
                shape: turn.shape,
                seed,
                groups,
                asking: turn.track.draft_asking(),
            })
            .collect();
        let trees = runner.draft(&requests)?;
        let drafted = turns.iter_mut().filter(|turn| turn.awaits_tree);
        for (turn, tree) in drafted.zip(trees) {
            turn.take_tree(tree);
        }
        Ok(())
    }

    /// Lets drafts that sat out take in what they missed, if they have something to do now, and
    /// drafts their trees.
    pub(super) fn bring_back(&mut self, times: &mut Times) -> Result<()> {
        let needs_rows = self.runner.captures();
        let mut back: Vec<(usize, TargetRows)> = Vec::new();
        for (at, turn) in self.turns.iter().enumerate().filter(|(_, turn)| turn.drafts()) {
            let rows = turn.track.parked.as_ref().map(|p| self.parking.rows_of(p, needs_rows));
            back.extend(rows.flatten().map(|rows| (at, rows)));
        }
        if back.is_empty() {
            return Ok(());
        }
        timed(&mut times.extend, || self.take_in_missed(&back))?;
        timed(&mut times.draft, || self.draft())
    }

    /// Takes in what was missed: as much as is common after a round last, to leave the seeds, and
    /// what is before that in passes as large as those of prompts.
    fn take_in_missed(&mut self, back: &[(usize, TargetRows)]) -> Result<()> {
        let last = self.config.shape.steps() + 1;
        let mut passes: Vec<Vec<(usize, TargetRows, usize)>> = Vec::new();
        let mut room = 0;
        for &(at, target) in back {
            let track = &self.turns[at].track;
            let (mut known, goal) = (track.extended, track.tokens.len().saturating_sub(last));
            while known < goal {
                if room == 0 {
                    passes.push(Vec::new());
                    room = self.config.chunked_prefill_size;
                }
                let rows = room.min(goal - known);
                (known, room) = (known + rows, room - rows);
                passes.last_mut().expect("one was begun").push((at, target, known));
            }
        }
        for pass in &passes {
            self.take_in(pass, false)?;
        }
        let whole =
            |&(at, target): &(usize, TargetRows)| (at, target, self.turns[at].track.tokens.len());
        let rest: Vec<_> = back.iter().map(whole).collect();
        self.take_in(&rest, true)?;
        for &(at, _) in back {
            self.parking.leave(self.turns[at].track.parked.take());
        }
        Ok(())
    }

    /// Lets the drafts of turns take in their texts up to so many tokens.
    fn take_in(&mut self, turns: &[(usize, TargetRows, usize)], seeds: bool) -> Result<()> {
        let Some(declaration) = self.runner.declaration() else { return Ok(()) };
        let declared = &declaration.groups;
        let config = &self.config;
        let groups: Vec<Vec<GroupRows<'_>>> = turns
            .iter()
            .map(|&(at, _, tokens)| {
                missing_rows(&self.turns[at].track, declared, tokens, true, config)
            })
            .collect();
        let requests: Vec<Extending<'_>> = turns
            .iter()
            .zip(&groups)
            .map(|(&(at, target, tokens), groups)| {
                let track = &self.turns[at].track;
                Extending {
                    request: track.order.id.0,
                    tokens: &track.tokens[..tokens],
                    since: track.extended,
                    groups,
                    target,
                    previous: None,
                    seed: seeds.then(|| (track.draft_asking(), track.order.room.candidates)),
                }
            })
            .collect();
        let taken = self.runner.extend(&requests)?;
        let made: Vec<_> = groups.iter().map(|groups| ranges(groups)).collect();
        for ((&(at, _, tokens), groups), seed) in turns.iter().zip(&made).zip(taken) {
            let turn = &mut self.turns[at];
            turn.track.took_in(groups, tokens);
            if seeds {
                turn.begin(seed);
            }
        }
        Ok(())
    }

    /// Writes the rows of all requests to the relay; answers those whose drafts go on, and parks
    /// what the others miss.
    pub(super) fn publish(&mut self, yields: &mut [Option<Yield>]) -> Result<Vec<Next>> {
        let needs_rows = self.runner.captures();
        let mut next = Vec::with_capacity(self.turns.len());
        let mut moves = Vec::new();
        for turn in self.turns.drain(..) {
            let Turn { part, mut track, shape, pause, seed, first_row, first_token, work, .. } =
                turn;
            let reads = matches!(work, Work::Read { .. });
            if let Some(yielded) = &mut yields[part] {
                yielded.known = track.extended;
            }
            let goes_on = !track.ended && track.order.drafts();
            if goes_on && track.parked.is_none() && (reads || shape.steps() > 0 || !pause) {
                next.push(Next {
                    part,
                    request: track.order.id,
                    target: TargetRows { row: first_row, token: first_token },
                    previous: seed,
                    whole: !matches!(work, Work::Read { last: false, .. }),
                });
            } else if goes_on {
                let place = self.parking.miss(&mut track.parked, first_token, needs_rows);
                moves.extend(place.map(|place| (first_row as u32, place)));
            }
            self.relay.publish(track);
        }
        self.runner.park(&moves)?;
        Ok(next)
    }

    /// Lets the draft catch up with what is certain, and leaves its seeds.
    pub(super) fn extend(&mut self, next: Vec<Next>, yields: &mut [Option<Yield>]) -> Result<()> {
        let Some(declaration) = self.runner.declaration() else { return Ok(()) };
        let config = &self.config;
        let groups: Vec<Vec<GroupRows<'_>>> = next
            .iter()
            .map(|next| {
                let track = self.relay.written(next.request);
                missing_rows(track, &declaration.groups, track.tokens.len(), next.whole, config)
            })
            .collect();
        let requests: Vec<Extending<'_>> = next
            .iter()
            .zip(&groups)
            .map(|(next, groups)| {
                let track = self.relay.written(next.request);
                let begins = next.whole && track.order.most_steps(track.tokens.len()) > 0;
                Extending {
                    request: next.request.0,
                    tokens: &track.tokens,
                    since: track.extended,
                    groups,
                    target: next.target,
                    previous: next.previous.as_ref(),
                    seed: begins.then(|| (track.draft_asking(), track.order.room.candidates)),
                }
            })
            .collect();
        let seeds = self.runner.extend(&requests)?;
        let made: Vec<_> = groups.iter().map(|groups| ranges(groups)).collect();
        for ((next, groups), seed) in next.iter().zip(made).zip(seeds) {
            let track = self.relay.written_mut(next.request);
            track.took_in(&groups, track.tokens.len());
            if let Some(yielded) = &mut yields[next.part] {
                yielded.known = track.extended;
            }
            track.leave_seed(seed);
        }
        Ok(())
    }
}

/// The rows that a draft is to make so that it knows `tokens` of a text; `whole` says whether the
/// target has read all of them.
fn missing_rows<'a>(
    track: &'a Track,
    declared: &[DraftGroup],
    tokens: usize,
    whole: bool,
    config: &EngineConfig,
) -> Vec<GroupRows<'a>> {
    let rows = |(at, draft): (usize, &DraftGroup)| {
        let end = Order::certain_rows(draft, tokens, track.rows[0], whole);
        group_rows(track, at + 1, track.rows[at + 1]..end, end, config)
    };
    declared.iter().enumerate().map(rows).collect()
}

/// Rows of a group, with the first `slots` slots of its table.
fn group_rows<'a>(
    track: &'a Track,
    group: usize,
    rows: Range<usize>,
    slots: usize,
    config: &EngineConfig,
) -> GroupRows<'a> {
    let table = track.table(group, config.max_running_requests, config.longest_sequence());
    GroupRows { rows, slots: &track.tables[group][..slots], table }
}

fn ranges(groups: &[GroupRows<'_>]) -> Vec<Range<usize>> {
    groups.iter().map(|group| group.rows.clone()).collect()
}
