//! Requests that are received, and those of other priorities: who gives way to whom, and that texts
//! stay what they are.

use std::sync::{Arc, Mutex};

use aquila_engine::{Alter, EngineConfig, EnginePair, Priorities, Request};
use aquila_spec::Shape;

use crate::support::across::{counts, request, run_pair};
use crate::support::answers::*;
use crate::support::shipped::{config, inline};
use crate::support::{Heard, with_overlap};

const TOKENS: usize = 24;

/// Higher priorities go first; the engine that decodes has this many slots and places.
fn ranked_pair(max_total_tokens: usize, max_running_requests: usize) -> EnginePair {
    let roomy = config(Shape::chain(3));
    let small = EngineConfig { max_total_tokens, max_running_requests, ..roomy.clone() };
    let [prefill, decode] = [roomy, small].map(|config| with_overlap(inline("EAGLE3", config)));
    let mut pair = EnginePair::new(prefill, decode);
    for engine in [&mut pair.prefill, &mut pair.decode] {
        engine.prioritize(Priorities::Ranked { low_values_first: false, preemption_threshold: 1 });
    }
    pair
}

/// The rows of the first request never come.
fn first_is_lost() -> Alter {
    Box::new(|number, delivery| if number == 0 { Vec::new() } else { vec![delivery] })
}

/// A prompt that begins as no other does.
fn own(name: u32) -> Vec<u32> {
    (0..80).map(|at| (name * 31 + at * 7) % 300 + 3).collect()
}

fn without_ends(request: &mut Request, index: usize) {
    warm(request, index);
    request.limits.stop_ids.clear();
}

/// Requests by name, and the order in which they ended.
struct Asked {
    pair: EnginePair,
    heard: Vec<(u32, Arc<Mutex<Heard>>)>,
    ended: Vec<u32>,
}

impl Asked {
    fn new(pair: EnginePair) -> Self {
        Self { pair, heard: Vec::new(), ended: Vec::new() }
    }

    fn make(&mut self, name: u32, priority: i64) -> [Request; 2] {
        let (mut first, _) = request(&own(name), TOKENS, without_ends, name as usize);
        let (mut second, heard) = request(&own(name), TOKENS, without_ends, name as usize);
        (first.priority, second.priority) = (Some(priority), Some(priority));
        self.heard.push((name, heard));
        [first, second]
    }

    /// A request whose prompt the other engine processes.
    fn received(&mut self, name: u32, priority: i64) {
        let [first, second] = self.make(name, priority);
        self.pair.submit(first, second).unwrap();
    }

    /// One whose prompt the engine that decodes processes itself.
    fn local(&mut self, name: u32, priority: i64) {
        let [_, request] = self.make(name, priority);
        self.pair.decode.submit(request).unwrap();
    }

    fn step(&mut self) {
        self.pair.step();
        self.pair.decode.check().unwrap();
        for (name, heard) in &self.heard {
            if heard.lock().unwrap().end.is_some() && !self.ended.contains(name) {
                self.ended.push(*name);
            }
        }
    }

    /// Steps until `done`.
    fn until(&mut self, what: &str, done: impl Fn(&Self) -> bool) {
        for _ in 0..1000 {
            if done(self) {
                return;
            }
            self.step();
        }
        panic!("{what} does not come: {:?}", counts(&self.pair.decode));
    }

    fn tokens(&self, name: u32) -> usize {
        let (_, heard) = self.heard.iter().find(|(of, _)| *of == name).unwrap();
        heard.lock().unwrap().tokens.len()
    }

    /// Steps until all have ended; their texts are those of one engine.
    fn finish(mut self) -> (Vec<u32>, EnginePair) {
        let all = self.heard.len();
        self.until("the end of all", |asked| asked.ended.len() == all);
        run_pair(&mut self.pair);
        for (name, heard) in &self.heard {
            let mut one = inline("EAGLE3", config(Shape::chain(3)));
            let (request, want) = request(&own(*name), TOKENS, without_ends, *name as usize);
            one.submit(request).unwrap();
            crate::support::run(&mut one);
            let (heard, want) = (heard.lock().unwrap(), want.lock().unwrap());
            assert_eq!(heard.ids(), want.ids(), "request {name}");
        }
        (self.ended, self.pair)
    }
}

#[test]
fn a_request_being_received_gives_way_to_a_higher_priority() {
    // There are slots for one.
    let mut asked = Asked::new(ranked_pair(130, 8).altered(first_is_lost()));
    asked.received(0, 0);
    asked.until("the reservation", |asked| counts(&asked.pair.decode).receiving == 1);
    asked.local(1, 0);
    (0..20).for_each(|_| asked.step());
    assert_eq!(counts(&asked.pair.decode).receiving, 1, "equals wait");
    asked.local(2, 1);
    let (ended, pair) = asked.finish();
    assert_eq!(ended, [2, 0, 1]);
    assert_eq!(counts(&pair.decode).preemptions, 1);
}

#[test]
fn a_request_to_be_received_takes_slots_of_a_lower_priority() {
    let mut asked = Asked::new(ranked_pair(130, 8));
    asked.received(0, 0);
    asked.until("an answer", |asked| asked.tokens(0) > 2);
    asked.received(1, 1);
    assert_eq!(asked.finish().0, [1, 0]);
}

#[test]
fn a_received_request_takes_the_place_of_a_lower_priority() {
    let mut asked = Asked::new(ranked_pair(2000, 1));
    asked.received(0, 0);
    asked.until("an answer", |asked| asked.tokens(0) > 2);
    asked.received(1, 1);
    asked.received(2, 0);
    let (ended, pair) = asked.finish();
    assert_eq!(ended, [1, 0, 2]);
    assert_eq!(counts(&pair.decode).preemptions, 1);
}

#[test]
fn a_preempted_request_goes_before_later_ones_to_be_received() {
    let mut asked = Asked::new(ranked_pair(130, 8).altered(first_is_lost()));
    asked.received(0, 0);
    asked.until("the reservation", |asked| counts(&asked.pair.decode).receiving == 1);
    asked.local(1, 1);
    (2..6).for_each(|name| asked.received(name, 0));
    assert_eq!(asked.finish().0, [1, 0, 2, 3, 4, 5]);
}
