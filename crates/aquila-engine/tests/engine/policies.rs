//! Trees that change from round to round: whoever decides, the text is that of plain decoding, and
//! what a draft offers depends on the text alone, however long it sat out.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use aquila_engine::{EngineConfig, Request, Scheduler, Speculation};
use aquila_spec::Shape;
use aquila_spec::policy::{
    Adaptive, AdaptiveTable, Decision, Fixed, Policy, PolicyState, PromptRows, RequestOutcome,
    RequestView, RoundOutcome, RoundView,
};
use tracing_subscriber::filter::LevelFilter;

use crate::support::answers::*;
use crate::support::logged::logged;
use crate::support::scripted::{Round, Script, Scripted};
use crate::support::shipped::{Algorithm, config, engine, named};
use crate::support::simulated::Simulated;
use crate::support::{Notes, Numbers};

fn switching(parked_rows: usize) -> EngineConfig {
    EngineConfig { parked_rows, ..config(Shape::chain(3)) }
}

fn always(_: u64, _: usize) -> Shape {
    Shape::chain(3)
}

/// Anything, with rounds now and then in which the draft is paused.
fn anything(request: u64, round: usize) -> Shape {
    let mut numbers = Numbers(request * 1000 + round as u64 / 2 + 1);
    match numbers.below(6) {
        0 => Shape::chain(1),
        1 => Shape::chain(2),
        2 => Shape::PLAIN,
        3 => Shape::chain(3),
        _ => Shape::PLAIN,
    }
}

/// The same, paused at other places.
fn otherwise(request: u64, round: usize) -> Shape {
    anything(request + 77, round)
}

/// Paused for ten rounds.
fn late(_: u64, round: usize) -> Shape {
    if round < 10 { Shape::PLAIN } else { Shape::chain(3) }
}

fn run(
    mut engine: Scheduler,
    script: Script,
    prompts: &[Vec<u32>],
    change: Change,
) -> (Vec<Answer>, Vec<Round>) {
    let shapes = [1, 2, 3].map(Shape::chain);
    let policy = Scripted::new(&shapes, script);
    let heard = policy.heard.clone();
    engine.draft_by(Box::new(policy)).unwrap();
    let answers = answers(&mut engine, prompts, 48, change);
    let rounds = heard.lock().unwrap().clone();
    (answers, rounds)
}

/// How many drafts would be right at a place of a text, as far as rounds have shown.
#[derive(Debug, Clone, Copy)]
struct Right {
    least: usize,
    most: usize,
}

#[derive(Default)]
struct Places {
    right: HashMap<(u64, usize), Right>,
    /// Places that more than one round spoke about.
    compared: usize,
}

impl Places {
    fn note(&mut self, rounds: &[Round], what: &str) {
        let mut tokens: HashMap<u64, usize> = HashMap::new();
        for round in rounds {
            let place = tokens.entry(round.request).or_insert(1);
            let said = match (round.shape.steps(), round.refused) {
                (0, _) => None,
                (_, true) => Some(Right { least: round.correct, most: round.correct }),
                (_, false) => Some(Right { least: round.correct, most: usize::MAX }),
            };
            if let Some(said) = said {
                let key = (round.request, *place);
                self.compared += usize::from(self.right.contains_key(&key));
                let known = self.right.entry(key).or_insert(Right { least: 0, most: usize::MAX });
                known.least = known.least.max(said.least);
                known.most = known.most.min(said.most);
                assert!(known.least <= known.most, "{what}: {round:?} at token {place}");
            }
            *place += round.correct + 1;
        }
    }
}

#[test]
fn drafts_depend_on_the_text_however_long_they_were_paused() {
    let prompts: Vec<Vec<u32>> = prompts().into_iter().map(|(_, ids)| ids).step_by(3).collect();
    for (mode, change) in [("greedy", greedy as Change), ("hot", hot)] {
        let plain =
            answers(&mut engine(Algorithm::None, config(Shape::PLAIN)), &prompts, 48, change);
        for algorithm in ["EAGLE3", "STANDALONE", "EAGLE", "MTP"] {
            let mut places = Places::default();
            for (name, script) in
                [("always", always as Script), ("anything", anything), ("otherwise", otherwise)]
            {
                let what = format!("{algorithm}, {mode}, {name}");
                let (got, rounds) = run(named(algorithm, switching(64)), script, &prompts, change);
                assert_eq!(texts(&got), texts(&plain), "{what}");
                assert!(rounds.iter().any(|round| round.correct > 0), "{what}");
                places.note(&rounds, &what);
            }
            assert!(places.compared > 100, "{algorithm}: {} places", places.compared);
        }
    }
}

#[test]
fn trees_and_lookups_may_come_and_go() {
    fn trees(request: u64, round: usize) -> Shape {
        match Numbers(request * 100 + round as u64 + 1).below(5) {
            0 => shape(3, 4, 12),
            1 => Shape::chain(3),
            2 => shape(2, 2, 5),
            3 => Shape::PLAIN,
            _ => Shape::PLAIN,
        }
    }
    let prompts: Vec<Vec<u32>> = prompts().into_iter().map(|(_, ids)| ids).step_by(4).collect();
    let plain = answers(&mut engine(Algorithm::None, config(Shape::PLAIN)), &prompts, 48, hot);
    for algorithm in ["EAGLE3", "STANDALONE", "EAGLE", "MTP", "NGRAM"] {
        let config = EngineConfig { parked_rows: 64, ..config(shape(3, 4, 12)) };
        let mut engine = named(algorithm, config);
        let shapes = [Shape::chain(3), shape(3, 4, 12), shape(2, 2, 5)];
        engine.draft_by(Box::new(Scripted::new(&shapes, trees))).unwrap();
        let got = answers(&mut engine, &prompts, 48, hot);
        assert_eq!(texts(&got), texts(&plain), "{algorithm}");
        let correct: u64 = got.iter().map(|answer| answer.spec.correct_drafts).sum();
        assert!(correct > 50, "{algorithm}: {correct} drafts were right");
    }
}

#[test]
fn a_head_paused_too_long_stays_plain() {
    let prompts: Vec<Vec<u32>> = prompts().into_iter().map(|(_, ids)| ids).step_by(5).collect();
    let plain = answers(&mut engine(Algorithm::None, config(Shape::PLAIN)), &prompts, 48, greedy);
    for (algorithm, parked, returns) in
        [("EAGLE3", 4, false), ("EAGLE3", 10, true), ("MTP", 9, false), ("STANDALONE", 0, true)]
    {
        let engine = named(algorithm, switching(parked));
        let stats = engine.stats();
        let (got, _) = run(engine, late, &prompts, greedy);
        let left = stats.drafting().left_plain;
        assert_eq!(texts(&got), texts(&plain), "{algorithm}");
        let proposed: u64 = got.iter().map(|answer| answer.spec.proposed_drafts).sum();
        assert_eq!(proposed > 0, returns, "{algorithm}, {parked} rows: {proposed} drafts");
        assert_eq!(left > 0, !returns, "{algorithm}, {parked} rows: {left} requests left plain");
    }
}

#[test]
fn a_row_budget_prunes_trees_and_never_the_text() {
    let prompts: Vec<Vec<u32>> = prompts().into_iter().map(|(_, ids)| ids).step_by(4).collect();
    let plain = answers(&mut engine(Algorithm::None, config(Shape::PLAIN)), &prompts, 48, hot);
    for algorithm in ["EAGLE3", "STANDALONE", "EAGLE", "MTP", "NGRAM"] {
        let mut engine = named(algorithm, config(shape(3, 4, 12)));
        let mut policy = Scripted::new(&[shape(3, 4, 12)], |_, _| shape(3, 4, 12));
        policy.rows_each = Some(3);
        let (heard, granted) = (policy.heard.clone(), policy.granted.clone());
        engine.draft_by(Box::new(policy)).unwrap();
        let got = answers(&mut engine, &prompts, 48, hot);
        assert_eq!(texts(&got), texts(&plain), "{algorithm}");
        let granted = granted.load(Ordering::Relaxed);
        let rows = |round: &Round| round.shape.nodes();
        let rounds = heard.lock().unwrap();
        let all: usize = rounds.iter().map(rows).sum();
        assert!(all <= granted, "{algorithm}: {all} rows of {granted}");
        let most = rounds.iter().map(rows).max();
        assert!(most > Some(3), "{algorithm}: some requests get more than others: {most:?}");
    }
}

#[test]
fn a_draft_that_is_not_paused_follows_plain_rounds() {
    fn late(_: u64, round: usize) -> Shape {
        if round < 10 { Shape::PLAIN } else { Shape::chain(3) }
    }
    let prompts: Vec<Vec<u32>> = prompts().into_iter().map(|(_, ids)| ids).step_by(5).collect();
    for algorithm in ["EAGLE3", "MTP"] {
        let drafts = |pause| {
            let mut engine = named(algorithm, switching(0));
            let mut policy = Scripted::new(&[Shape::chain(3)], late);
            policy.pause = pause;
            engine.draft_by(Box::new(policy)).unwrap();
            let got = answers(&mut engine, &prompts, 48, greedy);
            got.iter().map(|answer| answer.spec.correct_drafts).sum::<u64>()
        };
        assert_eq!(drafts(true), 0, "{algorithm}: no hidden states were kept");
        assert!(drafts(false) > 10, "{algorithm}");
    }
}

#[test]
fn requests_not_admitted_by_a_policy_are_decoded_plainly() {
    let prompts: Vec<Vec<u32>> = prompts().into_iter().map(|(_, ids)| ids).step_by(3).collect();
    let plain = answers(&mut engine(Algorithm::None, config(Shape::PLAIN)), &prompts, 48, hot);
    for algorithm in ["EAGLE3", "STANDALONE", "EAGLE", "MTP", "NGRAM"] {
        let mut engine = named(algorithm, switching(64));
        let mut policy = Scripted::new(&[Shape::chain(3)], always);
        policy.most = 3;
        engine.draft_by(Box::new(policy)).unwrap();
        let got = answers(&mut engine, &prompts, 48, hot);
        assert_eq!(texts(&got), texts(&plain), "{algorithm}");
        // All came at once, so the first three did to a batch of that size at most.
        let drafted = |answer: &Answer| answer.spec.proposed_drafts > 0;
        let drafted: Vec<bool> = got.iter().map(drafted).collect();
        let first = |at: usize| at < 3;
        assert_eq!(drafted, (0..got.len()).map(first).collect::<Vec<_>>(), "{algorithm}");
        // What was decoded plainly says so.
        assert!(got.iter().all(|answer| answer.spec.verify_ct > 0), "{algorithm}");
    }
}

#[test]
fn a_policy_is_told_which_prompt_tokens_are_cached() {
    let prompt: Vec<u32> = (10..30).collect();
    for algorithm in ["EAGLE3", "STANDALONE"] {
        let mut engine = named(algorithm, switching(64));
        let policy = Scripted::new(&[Shape::chain(3)], always);
        let asked = policy.asked.clone();
        engine.draft_by(Box::new(policy)).unwrap();
        let mut ask = |speculation, others: &[u32]| {
            let text = [others, &prompt].concat();
            let (mut request, _) = crate::support::request(&text, 4);
            request.speculation = speculation;
            engine.submit(request).unwrap();
            crate::support::run(&mut engine);
        };
        // Nobody asks about a request that wants no drafts; its text is cached for the target.
        ask(Speculation::Off, &[]);
        assert_eq!(asked.lock().unwrap().len(), 0, "{algorithm}");
        ask(Speculation::Free, &[]);
        ask(Speculation::Free, &[]);
        ask(Speculation::Free, &[5]);
        // The last row is always made anew.
        let readings = [(20, 19), (1, 0), (21, 0)];
        let readings = readings.map(|(draft, target)| PromptRows { draft, target });
        assert_eq!(*asked.lock().unwrap(), readings, "{algorithm}");
    }
}

#[test]
fn a_policy_for_which_there_is_no_room_is_refused() {
    let mut engine = engine(Algorithm::Standalone, switching(0));
    let policy = Scripted::new(&[Shape::chain(4)], always);
    let why = engine.draft_by(Box::new(policy)).unwrap_err().to_string();
    assert!(why.contains("a chain of 4") && why.contains("a chain of 3"), "{why}");
}

/// A request's part of a round, as the log tells it: its number, steps and right drafts.
type Kept = (u64, usize, usize);

/// A round as the log tells it: steps, and what its requests kept.
fn round_of(line: &str) -> Option<(usize, Vec<Kept>)> {
    let (head, kept) = line.split_once("; kept ")?;
    let steps = head.rsplit_once("steps ")?.1.parse().ok()?;
    let request = |text: &str| {
        let (id, rest) = text.split_once(':')?;
        let (steps, correct) = rest.split_once('/')?;
        Some((id.parse().ok()?, steps.parse().ok()?, correct.parse().ok()?))
    };
    Some((steps, kept.split_whitespace().map(request).collect::<Option<_>>()?))
}

#[test]
fn the_shapes_of_sglangs_policy_are_reproduced_from_the_log() {
    let prompts: Vec<Vec<u32>> = prompts().into_iter().map(|(_, ids)| ids).step_by(2).collect();
    let config = EngineConfig { parked_rows: 64, ..config(Shape::chain(7)) };
    let runner = crate::support::shipped::runner(Algorithm::Standalone, &config);
    let mut engine = Scheduler::new(runner, config).unwrap();
    let policy = || Adaptive::new(AdaptiveTable::default(), Some(1), Vec::new()).unwrap();
    engine.draft_by(Box::new(policy())).unwrap();
    let (got, text) = logged(LevelFilter::DEBUG, || answers(&mut engine, &prompts, 96, greedy));
    let plain = crate::support::shipped::config(Shape::PLAIN);
    let plain =
        answers(&mut crate::support::shipped::engine(Algorithm::None, plain), &prompts, 96, greedy);
    assert_eq!(texts(&got), texts(&plain));

    let rounds: Vec<_> = text
        .lines()
        .filter(|line| line.contains("aquila_engine::policy"))
        .flat_map(round_of)
        .collect();
    assert!(rounds.len() > 50, "{} rounds", rounds.len());
    let mut again = policy();
    let mut seen = HashSet::new();
    for (steps, requests) in &rounds {
        let views: Vec<RequestView> =
            requests.iter().map(|&(id, ..)| RequestView::new(id)).collect();
        let decision = again.choose(&RoundView { requests: &views });
        assert_eq!(decision.setting.shape.steps(), *steps);
        seen.insert(*steps);
        let outcomes: Vec<_> = requests
            .iter()
            .map(|&(id, steps, correct)| RequestOutcome::chain(id, Shape::chain(steps), correct))
            .collect();
        let setting = decision.setting;
        again.learn(&RoundOutcome { setting, requests: &outcomes, seconds: None });
    }
    assert!(seen.len() > 1, "it switched among {seen:?}");
}

/// What a policy heard of requests, in order.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Note {
    Learned(u64),
    Left(u64),
}

/// A policy of one shape that writes down what it hears.
struct Noting {
    shape: Shape,
    notes: Arc<Mutex<Vec<Note>>>,
}

impl Policy for Noting {
    fn choose(&mut self, round: &RoundView<'_>) -> Decision {
        Fixed::new(self.shape).choose(round)
    }

    fn learn(&mut self, outcome: &RoundOutcome<'_>) {
        let learned = outcome.requests.iter().map(|request| Note::Learned(request.id));
        self.notes.lock().unwrap().extend(learned);
    }

    fn leave(&mut self, request: u64) {
        self.notes.lock().unwrap().push(Note::Left(request));
    }

    fn shapes(&self) -> Vec<Shape> {
        vec![self.shape]
    }

    fn state(&self) -> PolicyState {
        PolicyState::default()
    }
}

#[test]
fn a_policy_hears_nothing_of_requests_that_have_left() {
    let config = EngineConfig { max_running_requests: 12, ..config(Shape::chain(3)) };
    let mut engine = Scheduler::over(Simulated::new(&config), config).unwrap();
    engine = engine.overlapped().unwrap();
    let notes: Arc<Mutex<Vec<Note>>> = Arc::default();
    let policy = Noting { shape: Shape::chain(3), notes: notes.clone() };
    engine.draft_by(Box::new(policy)).unwrap();
    let mut aborted = Vec::new();
    for index in 0..12 {
        let heard = Arc::default();
        // Some end by their listener, some are aborted, and some come to their end.
        let stop_after = (index % 3 == 0).then_some(7 + index as usize);
        let listener = Box::new(Notes { heard, stop_after });
        let request = Request::new(vec![5, 6, 7 + index], 40, listener);
        let id = engine.submit(request).unwrap();
        aborted.extend((index % 3 == 1).then_some(id));
    }
    for _ in 0..6 {
        engine.step();
    }
    aborted.into_iter().for_each(|id| assert!(engine.abort(id)));
    crate::support::run(&mut engine);
    let notes = notes.lock().unwrap();
    for request in 0..12 {
        let left = notes.iter().position(|&note| note == Note::Left(request)).unwrap();
        assert!(notes[..left].contains(&Note::Learned(request)), "request {request} has run");
        let late = notes[left..].iter().filter(|&&note| note == Note::Learned(request));
        assert_eq!(late.count(), 0, "rounds of request {request} after it had left");
    }
}
