//! The compute lane of a model: draft, verify, accept, commit, publish, extend.
//!
//! Its one invariant: what a request gets in a round depends on its row of the relay, its slots
//! and the job's part for it, and on nothing that another request does.

use std::collections::HashMap;
use std::ops::Range;

use aquila_compute::Backend;
use aquila_compute::choose::{Ask, Choice, Weights};
use aquila_spec::{
    Accepted, Asking, Coins, Kept, Simulate, SimulatedRound, Tree, accept, prune_to_rows,
};

#[cfg(feature = "known-bugs")]
use aquila_spec::known_bugs::Bug;

use super::job::{Compute, Done, Job, Lesson, Part, Profile, Yield};
use super::parking::Parking;
use super::relay::{Relay, Track};
use super::round::{PassPlan, Turn, Work};
use super::runner::Runner;
use crate::config::EngineConfig;
use crate::error::Result;
use crate::listener::{FinishReason, Token};
use crate::request::RequestId;
use crate::times::{Times, timed};

/// Runs rounds on a model.
pub struct Lane<B: Backend> {
    pub(super) runner: Runner<B>,
    pub(super) config: EngineConfig,
    /// Places that no request has, and those of the others.
    places: Vec<usize>,
    placed: HashMap<RequestId, usize>,
    pub(super) relay: Relay,
    pub(super) parking: Parking,
    plan: PassPlan,
    /// Of the round that runs, until it publishes them.
    pub(super) turns: Vec<Turn>,
    /// The number of the round that runs.
    round: u64,
    /// The era of a round that did not come to its end.
    broken: Option<u64>,
}

impl<B: Backend> Compute for Lane<B> {
    fn profile(&self) -> Profile {
        Profile {
            vocabulary: self.runner.vocabulary(),
            declaration: self.runner.declaration().cloned(),
        }
    }

    fn begin_anew(&mut self) {
        self.runner.begin_anew();
    }

    fn run(&mut self, mut job: Job) -> Done {
        self.follow(&job);
        let number = job.number;
        self.round = number;
        for admission in std::mem::take(&mut job.admitted) {
            let place = self.places.pop().expect("no more requests hold KV than may run");
            self.placed.insert(admission.order.id, place);
            self.relay.admit(Track::new(admission, place));
        }
        for change in &job.tables {
            self.relay.change_table(change, &job.slots);
        }
        let mut times = Times { rounds: 1, ..Times::default() };
        if self.broken == Some(job.era) {
            let outcome = Err("a round before it failed".into());
            return Done { number, outcome, times };
        }
        self.broken = Some(job.era);
        let outcome = self.round(&job, &mut times).map_err(|error| error.to_string());
        if outcome.is_ok() {
            self.broken = None;
        }
        Done { number, outcome, times }
    }
}

impl<B: Backend> Lane<B> {
    /// A lane over `runner`, which was made with the same settings.
    pub fn new(runner: Runner<B>, config: EngineConfig) -> Self {
        let parking =
            Parking::new(config.max_rows(), config.parked_rows, config.max_running_requests);
        let places = (0..config.max_running_requests).rev().collect();
        Self {
            runner,
            config,
            places,
            placed: HashMap::new(),
            relay: Relay::default(),
            parking,
            plan: PassPlan::default(),
            turns: Vec::new(),
            round: 0,
            broken: None,
        }
    }

    /// Takes leave of the requests that left.
    fn follow(&mut self, job: &Job) {
        // A round that failed may have kept the rows that it took.
        for turn in self.turns.drain(..) {
            self.relay.publish(turn.track);
        }
        for left in &job.left {
            // Be its row lost with a round that failed, its place is free again.
            self.places.extend(self.placed.remove(&left.request));
            if let Some(track) = self.relay.leave(left.request) {
                self.parking.leave(track.parked);
                self.runner.leave(left.request.0, &track.tokens[..left.tokens]);
            }
        }
    }

    fn round(&mut self, job: &Job, times: &mut Times) -> Result<Vec<Option<Yield>>> {
        let mut yields: Vec<Option<Yield>> = job.parts.iter().map(|_| None).collect();
        self.resolve(&job.parts);
        if self.turns.is_empty() {
            return Ok(yields);
        }
        timed(&mut times.draft, || self.draft())?;
        self.bring_back(times)?;
        if job.fill_trees {
            self.turns.iter_mut().for_each(Turn::fill_tree);
        }
        if let Some(rows) = job.row_budget {
            let mut trees: Vec<_> = self.turns.iter_mut().filter_map(Turn::weighted).collect();
            prune_to_rows(&mut trees, rows);
        }
        let Self { runner, config, plan, turns, .. } = self;
        plan.fill(turns, config);
        let (chosen, weighed) = plan.asks(turns);
        let captures = runner.captures();
        let taken_in = |turn: &Turn| {
            turn.track.order.drafts() && Parking::may_return(turn.track.parked.as_ref(), captures)
        };
        let drafts = turns.iter().any(taken_in);
        let (choices, weights) = timed(&mut times.verify, || -> Result<_> {
            runner.run(&plan.forward, drafts)?;
            Ok((runner.choose(&chosen)?, runner.weigh(&weighed)?))
        })?;
        let mut kept = Kept::default();
        timed(&mut times.accept, || self.accept(choices, weights, &mut kept, &mut yields))?;
        timed(&mut times.commit, || self.runner.commit(&kept))?;
        let next = self.publish(&mut yields)?;
        timed(&mut times.extend, || self.extend(next, &mut yields))?;
        Ok(yields)
    }

    /// Takes the rows of the requests that take part; those that ended are void.
    fn resolve(&mut self, parts: &[Part]) {
        for (part, Part { request, task }) in parts.iter().enumerate() {
            let track = self.relay.take(*request);
            if track.ended {
                self.relay.publish(track);
                continue;
            }
            let mut turn = Turn::new(part, track, task);
            turn.take_seed();
            self.turns.push(turn);
        }
    }

    /// Finds out what each turn yields, and adds it to the request's row.
    fn accept(
        &mut self,
        choices: Vec<Choice>,
        weights: Vec<Weights>,
        kept: &mut Kept,
        yields: &mut [Option<Yield>],
    ) -> Result<()> {
        let mut choices = choices.into_iter();
        let mut weights = weights.into_iter();
        let mut first_output = 0;
        for turn in &mut self.turns {
            let outputs = turn.outputs();
            #[cfg(feature = "known-bugs")]
            let outputs = match turn.work {
                Work::Verify { .. } if Bug::ChoiceStride.alive() => self.config.shape.nodes(),
                _ => outputs,
            };
            let weighed = turn.is_weighed();
            let track = &mut *turn.track;
            yields[turn.part] = Some(match &turn.work {
                Work::Read { rows, outputs, last } => {
                    let choices = choices.by_ref().take(outputs.len());
                    read(track, rows, outputs, *last, choices)
                }
                Work::Verify { tree } => {
                    let (accepted, mut tokens) = if weighed {
                        let weights: Vec<Weights> = weights.by_ref().take(outputs).collect();
                        accept_weighed(&self.runner, track, tree, &weights, first_output)?
                    } else {
                        let choices: Vec<Choice> = choices.by_ref().take(outputs).collect();
                        accept_chosen(
                            self.config.simulate.as_ref(),
                            self.round,
                            track,
                            tree,
                            choices,
                        )
                    };
                    let ended = track.take(&mut tokens);
                    let nodes = track.rows[0]..track.rows[0] + tree.len();
                    let slots = &track.tables[0][nodes];
                    kept.path(&accepted.path[..tokens.len()], slots, turn.first_row);
                    track.rows[0] += tokens.len();
                    track.rounds += u64::from(track.order.drafts());
                    Yield {
                        proposed: tree.len() - 1,
                        correct: accepted.correct(),
                        lesson: lesson(tree, &accepted),
                        tokens,
                        ended,
                        ..Yield::default()
                    }
                }
            });
            first_output += outputs;
        }
        Ok(())
    }
}

/// Commits the rows of a chunk; at the end of a fresh prompt, the first token is chosen.
fn read(
    track: &mut Track,
    rows: &Range<usize>,
    outputs: &Range<usize>,
    last: bool,
    choices: impl Iterator<Item = Choice>,
) -> Yield {
    let mut yielded = Yield::default();
    for (at, choice) in outputs.clone().zip(choices) {
        let known = at + 1 < track.tokens.len();
        let tokens = if known { &mut yielded.prompt } else { &mut yielded.tokens };
        tokens.push(token_of(choice));
    }
    track.rows[0] += rows.len();
    if !yielded.tokens.is_empty() {
        yielded.ended = track.take(&mut yielded.tokens);
    } else if last && track.tokens.len() >= track.order.longest {
        // A resumed request has its bonus; one that wanted no answer is done.
        track.ended = true;
        yielded.ended = Some(FinishReason::Length);
    }
    yielded
}

/// What of a tree is the target's own choice.
fn accept_chosen(
    simulate: Option<&Simulate>,
    round: u64,
    track: &Track,
    tree: &Tree,
    choices: Vec<Choice>,
) -> (Accepted, Vec<Token>) {
    let chosen: Vec<u32> = choices.iter().map(|choice| choice.token).collect();
    let accepted = match simulate {
        Some(simulate) => {
            let request = track.order.id.0;
            simulate.accept(
                tree,
                &chosen,
                SimulatedRound { request, verified: track.rounds, round },
            )
        }
        None => accept(tree, &chosen),
    };
    let mut choices: Vec<Option<Choice>> = choices.into_iter().map(Some).collect();
    let tokens: Vec<Token> = accepted
        .path
        .iter()
        .zip(&accepted.tokens)
        .filter_map(|(&node, &id)| Some(Token { id, ..token_of(choices[node].take()?) }))
        .collect();
    (accepted, tokens)
}

/// What of a tree is accepted by the target's distribution at each node.
fn accept_weighed<B: Backend>(
    runner: &Runner<B>,
    track: &Track,
    tree: &Tree,
    weights: &[Weights],
    first_output: usize,
) -> Result<(Accepted, Vec<Token>)> {
    let Asking { sampling, choice, tokens, .. } = track.asking();
    let coins = Coins { seed: sampling.seed, choice, position: tokens as u32 };
    let accepted = track.order.room.verify.accept(tree, weights, coins);
    let token = |&id: &u32| Token { id, logprob: None, top: Vec::new() };
    let mut tokens: Vec<Token> = accepted.tokens.iter().map(token).collect();
    if let Some(top) = track.order.logprobs {
        let given = |(&node, &token): (&usize, &u32)| Ask {
            given: Some(token),
            top_logprobs: Some(top),
            ..track.asking().after(&[], first_output + node)
        };
        let asks: Vec<Ask<'_>> = accepted.path.iter().zip(&accepted.tokens).map(given).collect();
        tokens = runner.choose(&asks)?.into_iter().map(token_of).collect();
    }
    Ok((accepted, tokens))
}

/// What there is to learn from the way through a tree.
fn lesson(tree: &Tree, accepted: &Accepted) -> Lesson {
    let rank = |step: &[usize]| {
        tree.children(step[0]).take_while(|&child| child != step[1]).count().min(255) as u8
    };
    Lesson {
        depth: tree.nodes().iter().map(|node| node.depth).max().unwrap_or(0),
        ranks: accepted.path.windows(2).map(rank).collect(),
        refused: accepted.path.last().map_or(0, |&end| tree.children(end).count()),
    }
}

fn token_of(choice: Choice) -> Token {
    Token { id: choice.token, logprob: choice.logprob, top: choice.top }
}
