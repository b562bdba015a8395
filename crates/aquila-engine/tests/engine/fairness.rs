//! Which request is admitted when: first come first, or the longest cached prefix first, and none waits
//! without end.

use std::sync::{Arc, Mutex};

use aquila_engine::{
    AdmissionOrder, EngineConfig, Listener, Outcome, Request, Scheduler, Token, Verdict,
};

use crate::support::config;
use crate::support::simulated::Simulated;

/// Writes down in which order requests end.
struct Order {
    name: u32,
    ended: Arc<Mutex<Vec<u32>>>,
}

impl Listener for Order {
    fn tokens(&mut self, _: &[Token]) -> Verdict {
        Verdict::Continue
    }

    fn finished(self: Box<Self>, _: Outcome) {
        self.ended.lock().unwrap().push(self.name);
    }
}

/// One request at a time runs; answers an engine and a way to ask it.
fn one_at_a_time(order: AdmissionOrder, overlapped: bool) -> (Scheduler, Arc<Mutex<Vec<u32>>>) {
    let config = EngineConfig { max_running_requests: 1, ..config() };
    let mut engine = Scheduler::over(Simulated::new(&config), config).unwrap();
    engine.admit_by(order);
    (if overlapped { engine.overlapped().unwrap() } else { engine }, Arc::default())
}

fn ask(engine: &mut Scheduler, ended: &Arc<Mutex<Vec<u32>>>, name: u32, prompt: Vec<u32>) {
    let listener = Box::new(Order { name, ended: ended.clone() });
    engine.submit(Request::new(prompt, 3, listener)).unwrap();
}

fn known(last: u32) -> Vec<u32> {
    [vec![9; 20], vec![last]].concat()
}

#[test]
fn the_longest_cached_prefix_goes_first_under_lpm() {
    for overlapped in [false, true] {
        for (order, wanted) in [
            (AdmissionOrder::FirstCome, [0, 1, 2, 3]),
            (AdmissionOrder::LongestPrefix, [0, 3, 1, 2]),
        ] {
            let (mut engine, ended) = one_at_a_time(order, overlapped);
            ask(&mut engine, &ended, 0, known(1));
            crate::support::run(&mut engine);
            ask(&mut engine, &ended, 1, vec![1, 2, 3]);
            ask(&mut engine, &ended, 2, vec![4, 5, 6]);
            ask(&mut engine, &ended, 3, known(2));
            crate::support::run(&mut engine);
            assert_eq!(*ended.lock().unwrap(), wanted, "{order:?}");
        }
    }
}

#[test]
fn a_request_without_a_cached_prefix_does_not_starve() {
    for overlapped in [false, true] {
        let (mut engine, ended) = one_at_a_time(AdmissionOrder::LongestPrefix, overlapped);
        ask(&mut engine, &ended, 0, known(1));
        crate::support::run(&mut engine);
        ask(&mut engine, &ended, 1000, vec![1, 2, 3]);
        // There is always a request whose prompt is better known.
        for name in 1..200 {
            ask(&mut engine, &ended, name, known(name));
            while engine.waiting() > 2 {
                engine.step();
            }
        }
        crate::support::run(&mut engine);
        let ended = ended.lock().unwrap();
        let place = ended.iter().position(|&name| name == 1000).unwrap();
        assert!((10..=70).contains(&place), "it was overtaken {place} times");
    }
}
