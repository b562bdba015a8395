//! Priorities: who goes first, who takes whose place, and that nothing else changes.

use std::sync::{Arc, Mutex};

use aquila_engine::{
    AdmissionOrder, EngineConfig, FinishReason, Priorities, RequestId, Scheduler, SubmitError,
};
use aquila_spec::Shape;
use proptest::prelude::*;

use crate::support::simulated::Simulated;
use crate::support::{Heard, config, request};

/// Higher first; a difference of `threshold` preempts.
fn ranked(threshold: u64) -> Priorities {
    Priorities::Ranked { low_values_first: false, preemption_threshold: threshold }
}

/// An engine, those who asked it, and in which order they ended.
struct Desk {
    engine: Scheduler,
    asked: Vec<Arc<Mutex<Heard>>>,
    ended: Vec<usize>,
}

impl Desk {
    fn new(config: EngineConfig, priorities: Priorities, overlapped: bool) -> Self {
        let mut engine = Scheduler::over(Simulated::new(&config), config).unwrap();
        engine.prioritize(priorities);
        let engine = if overlapped { engine.overlapped().unwrap() } else { engine };
        Self { engine, asked: Vec::new(), ended: Vec::new() }
    }

    /// One request at a time.
    fn narrow(priorities: Priorities, overlapped: bool) -> Self {
        Self::new(EngineConfig { max_running_requests: 1, ..config() }, priorities, overlapped)
    }

    /// Asks for `tokens` tokens; answers the number of who asks.
    fn ask(&mut self, prompt: &[u32], tokens: usize, priority: Option<i64>) -> usize {
        self.try_ask(prompt, tokens, priority).unwrap();
        self.asked.len() - 1
    }

    fn try_ask(
        &mut self,
        prompt: &[u32],
        tokens: usize,
        priority: Option<i64>,
    ) -> Result<RequestId, SubmitError> {
        let (mut request, heard) = request(prompt, tokens);
        request.priority = priority;
        let id = self.engine.submit(request)?;
        self.asked.push(heard);
        Ok(id)
    }

    fn step(&mut self) {
        self.engine.step();
        self.engine.check().unwrap();
        let has_ended = |at: &usize| self.asked[*at].lock().unwrap().end.is_some();
        let new = (0..self.asked.len()).filter(|at| has_ended(at) && !self.ended.contains(at));
        let new: Vec<usize> = new.collect();
        self.ended.extend(new);
    }

    fn steps(&mut self, count: usize) {
        (0..count).for_each(|_| self.step());
    }

    fn run(&mut self) {
        while !self.engine.is_idle() {
            self.step();
        }
    }

    fn preemptions(&self, who: usize) -> usize {
        self.asked[who].lock().unwrap().usage().preemptions
    }
}

/// A prompt that begins as no other does.
fn own(name: u32, tokens: usize) -> Vec<u32> {
    (0..tokens as u32).map(|at| (name * 31 + at * 7) % crate::support::VOCABULARY).collect()
}

#[test]
fn higher_priorities_go_first_and_equals_by_arrival() {
    let given = [None, Some(0), Some(5), Some(5), Some(-3), None];
    for (low_values_first, wanted) in
        [(false, [0, 3, 4, 2, 5, 1, 6]), (true, [0, 5, 2, 3, 4, 1, 6])]
    {
        for order in [AdmissionOrder::FirstCome, AdmissionOrder::LongestPrefix] {
            for overlapped in [false, true] {
                let priorities =
                    Priorities::Ranked { low_values_first, preemption_threshold: 1000 };
                let mut desk = Desk::narrow(priorities, overlapped);
                desk.engine.admit_by(order);
                desk.ask(&own(0, 4), 3, Some(0));
                desk.step();
                for (name, priority) in given.into_iter().enumerate() {
                    desk.ask(&own(name as u32 + 1, 4), 3, priority);
                }
                desk.run();
                assert_eq!(desk.ended, wanted, "low first: {low_values_first}, {order:?}");
            }
        }
    }
}

#[test]
fn cached_prefixes_decide_among_those_of_the_highest_priority_alone() {
    let mut desk = Desk::narrow(ranked(1000), false);
    desk.engine.admit_by(AdmissionOrder::LongestPrefix);
    let stem = own(1, 20);
    desk.ask(&stem, 3, None);
    desk.run();
    desk.ask(&[&stem[..], &[1]].concat(), 3, Some(1));
    desk.ask(&own(2, 20), 3, Some(2));
    desk.ask(&[&stem[..9], &[3]].concat(), 3, Some(2));
    desk.ask(&[&stem[..], &[2]].concat(), 3, Some(2));
    desk.run();
    assert_eq!(desk.ended, [0, 4, 3, 2, 1]);
}

#[test]
fn where_priorities_are_off_they_are_ignored_or_refused() {
    let mut desk = Desk::narrow(Priorities::Ignored, false);
    for (name, priority) in [None, Some(-9), Some(50)].into_iter().enumerate() {
        desk.ask(&own(name as u32, 4), 3, priority);
    }
    desk.run();
    assert_eq!(desk.ended, [0, 1, 2]);
    let mut desk = Desk::narrow(Priorities::Refused, false);
    desk.ask(&own(0, 4), 3, None);
    let refused = desk.try_ask(&own(1, 4), 3, Some(0)).unwrap_err();
    assert_eq!(refused, SubmitError::NoPriorities);
}

#[test]
fn a_priority_higher_by_the_threshold_preempts() {
    let alone = |prompt: &[u32], tokens| {
        let mut desk = Desk::narrow(Priorities::Ignored, false);
        desk.ask(prompt, tokens, None);
        desk.run();
        desk.asked[0].lock().unwrap().ids()
    };
    let wanted = [alone(&own(1, 9), 30), alone(&own(2, 9), 10)];
    let cases = [
        (10, Some(0), Some(9), [0, 1]),
        (10, Some(0), Some(10), [1, 0]),
        (10, None, Some(-1000), [1, 0]),
        (0, Some(3), Some(3), [0, 1]),
        (0, Some(3), Some(4), [1, 0]),
        (10, Some(i64::MIN), Some(i64::MAX), [1, 0]),
        (10, Some(i64::MAX), Some(i64::MIN), [0, 1]),
    ];
    for (threshold, runs, waits, order) in cases {
        for overlapped in [false, true] {
            let mut desk = Desk::narrow(ranked(threshold), overlapped);
            desk.ask(&own(1, 9), 30, runs);
            desk.steps(5);
            desk.ask(&own(2, 9), 10, waits);
            desk.run();
            let what = format!("{waits:?} waits, {runs:?} runs, threshold {threshold}");
            assert_eq!(desk.ended, order, "{what}");
            assert_eq!(desk.preemptions(0), usize::from(order == [1, 0]), "{what}");
            for (heard, wanted) in desk.asked.iter().zip(&wanted) {
                assert_eq!(heard.lock().unwrap().ids(), *wanted, "{what}");
            }
        }
    }
}

#[test]
fn as_few_as_needed_are_preempted_lowest_and_youngest_first() {
    for overlapped in [false, true] {
        // With one of them gone the larger one would fit, but leave too little to those who run.
        for (tokens, lost) in [(90, [0, 1, 0]), (110, [1, 1, 0])] {
            let config = EngineConfig { max_total_tokens: 200, ..config() };
            let mut desk = Desk::new(config, ranked(10), overlapped);
            let older = desk.ask(&own(1, 30), 30, Some(0));
            let younger = desk.ask(&own(2, 30), 30, Some(0));
            desk.step();
            // The last to be admitted, but of a higher priority.
            let kept = desk.ask(&own(3, 30), 30, Some(1));
            desk.steps(3);
            let urgent = desk.ask(&own(4, tokens), 5, Some(50));
            desk.run();
            assert_eq!([older, younger, kept].map(|who| desk.preemptions(who)), lost);
            assert_eq!(desk.preemptions(urgent), 0);
        }
    }
}

#[test]
fn no_request_is_preempted_where_that_would_not_do() {
    for overlapped in [false, true] {
        let config = EngineConfig { max_total_tokens: 200, ..config() };
        let mut desk = Desk::new(config, ranked(20), overlapped);
        let stem = own(1, 60);
        let large = desk.ask(&[&stem[..], &own(2, 60)].concat(), 30, Some(50));
        desk.steps(4);
        // Most of what it holds is the other's as well.
        let small = desk.ask(&[&stem[..], &own(3, 5)].concat(), 30, Some(0));
        desk.steps(2);
        let urgent = desk.ask(&own(4, 64), 5, Some(60));
        desk.run();
        assert_eq!([large, small, urgent].map(|who| desk.preemptions(who)), [0, 0, 0]);
    }
}

#[test]
fn where_memory_runs_out_the_lowest_priority_is_preempted() {
    for overlapped in [false, true] {
        let config = EngineConfig { max_total_tokens: 100, ..config() };
        let mut desk = Desk::new(config, ranked(1000), overlapped);
        let low = desk.ask(&own(1, 10), 60, Some(0));
        desk.step();
        let older = desk.ask(&own(2, 10), 60, Some(10));
        let younger = desk.ask(&own(3, 10), 60, Some(10));
        desk.run();
        assert_eq!(desk.ended, [older, younger, low]);
        assert_eq!(desk.preemptions(older), 0);
        assert!(desk.preemptions(low) > 0 && desk.preemptions(younger) > 0);
    }
}

#[test]
fn the_lowest_priority_ends_although_higher_ones_never_stop_coming() {
    for order in [AdmissionOrder::FirstCome, AdmissionOrder::LongestPrefix] {
        for (overlapped, every) in [(false, 2), (true, 2), (false, 8), (true, 8)] {
            let mut desk = Desk::narrow(ranked(10), overlapped);
            desk.engine.admit_by(order);
            let low = desk.ask(&own(1, 20), 400, None);
            desk.steps(3);
            // Every other time a request always waits; else it runs a little in between.
            for name in 0..300 {
                desk.ask(&own(name, 20), 3, Some(50));
                desk.steps(every);
            }
            desk.run();
            let before = desk.ended.iter().position(|&who| who == low).unwrap();
            assert!(
                (60..=70).contains(&before),
                "{before} went before it, one every {every} steps"
            );
            assert!(desk.preemptions(low) <= 64);
        }
    }
}

#[test]
fn many_low_priorities_do_not_hold_up_higher_ones() {
    let mut desk = Desk::narrow(ranked(10), false);
    for name in 0..200 {
        desk.ask(&own(name, 8), 3, None);
    }
    desk.steps(2);
    for name in 200..400 {
        desk.ask(&own(name, 8), 3, Some(50));
    }
    desk.run();
    let crowd = desk.ended.iter().take(203).filter(|&&who| who < 200).count();
    assert!((2..=4).contains(&crowd), "{crowd} of the crowd went before the last of the others");
}

/// One request of a random workload, and when it comes and goes.
#[derive(Debug, Clone)]
struct Visit {
    /// Which stem it shares with others, how much of it, and what follows.
    stem: u32,
    kept: usize,
    tail: u32,
    tokens: usize,
    priority: Option<i64>,
    after: usize,
    aborted: Option<usize>,
}

impl Visit {
    fn prompt(&self) -> Vec<u32> {
        [&own(self.stem, 40)[..self.kept], &[self.tail, 300]].concat()
    }
}

fn visit() -> impl Strategy<Value = Visit> {
    let priority = prop_oneof![Just(None), (-30_i64..30).prop_map(Some)];
    let aborted = prop_oneof![4 => Just(None), 1 => (0_usize..12).prop_map(Some)];
    (0_u32..3, 0_usize..40, 0_u32..8, 1_usize..40, priority, 0_usize..6, aborted).prop_map(
        |(stem, kept, tail, tokens, priority, after, aborted)| Visit {
            stem,
            kept,
            tail,
            tokens,
            priority,
            after,
            aborted,
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..Default::default() })]

    #[test]
    fn priorities_change_no_text_and_lose_no_slot(
        visits in proptest::collection::vec(visit(), 1..30),
        (page_size, running, threshold) in (prop_oneof![Just(1), Just(4)], 1_usize..6, 0_u64..40),
        (low_values_first, longest_prefix, overlapped) in any::<(bool, bool, bool)>(),
        shape in prop_oneof![
            Just(Shape::PLAIN), Just(Shape::chain(3)), Just(Shape::new(3, 4, 12).unwrap())
        ],
    ) {
        let roomy = EngineConfig { page_size, shape, chunked_prefill_size: 32, ..config() };
        let small =
            EngineConfig { max_total_tokens: 128, max_running_requests: running, ..roomy.clone() };
        let priorities =
            Priorities::Ranked { low_values_first, preemption_threshold: threshold };
        let mut desk = Desk::new(small, priorities, overlapped);
        if longest_prefix {
            desk.engine.admit_by(AdmissionOrder::LongestPrefix);
        }
        let mut step = 0;
        let mut aborts: Vec<(usize, RequestId)> = Vec::new();
        let mut visiting = visits.iter().peekable();
        let mut next = visits[0].after;
        while visiting.peek().is_some() || !desk.engine.is_idle() {
            while let Some(visit) = visiting.next_if(|_| next <= step) {
                let id = desk.try_ask(&visit.prompt(), visit.tokens, visit.priority).unwrap();
                aborts.extend(visit.aborted.map(|after| (step + after, id)));
                next = step + visiting.peek().map_or(0, |visit| visit.after);
            }
            for (_, id) in aborts.extract_if(.., |(at, _)| *at <= step) {
                desk.engine.abort(id);
            }
            // Every slot is counted after each step.
            desk.step();
            step += 1;
        }
        desk.engine.flush_cache();
        desk.engine.check().unwrap();
        prop_assert_eq!(desk.engine.stats().snapshot().used_slots, 0);
        for (visit, heard) in visits.iter().zip(&desk.asked) {
            let mut alone = Desk::new(roomy.clone(), Priorities::Ignored, false);
            alone.ask(&visit.prompt(), visit.tokens, None);
            alone.run();
            let (wanted, heard) = (alone.asked[0].lock().unwrap(), heard.lock().unwrap());
            if *heard.reason() == FinishReason::Abort("aborted".into()) {
                prop_assert!(visit.aborted.is_some());
                prop_assert!(wanted.tokens.starts_with(&heard.tokens));
            } else {
                prop_assert_eq!(heard.reason(), wanted.reason());
                prop_assert_eq!(&heard.tokens, &wanted.tokens);
                prop_assert_eq!(&heard.spec, &wanted.spec);
            }
        }
    }
}
