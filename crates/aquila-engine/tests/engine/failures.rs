//! An engine that can serve no more: its device is lost, or its thread has panicked.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use aquila_engine::executor::{BatchOutput, Executor, ModelExecutor, Profile, ScheduledBatch};
use aquila_engine::{
    EngineConfig, EngineFailure, EngineHandle, FinishReason, Listener, Outcome, Request, Runner,
    Scheduler, SubmitError, Token, Verdict,
};
use aquila_spec::Shape;
use aquila_spec::policy::{
    Decision, Fixed, Policy, PolicyState, PromptRows, RoundOutcome, RoundView,
};

use crate::support::deferring::Deferring;
use crate::support::scripted::Scripted;
use crate::support::shipped::decoder;
use crate::support::simulated::Simulated;
use crate::support::{Heard, config, request, run};

fn lost() -> EngineFailure {
    EngineFailure::DeviceLost("it was told to be".into())
}

fn losing(config: &EngineConfig, overlapped: bool, loses: u64) -> Scheduler {
    let mut compute = Simulated::new(config);
    compute.loses = Some(loses);
    let engine = Scheduler::over(compute, config.clone()).unwrap();
    if overlapped { engine.overlapped().unwrap() } else { engine }
}

/// Sends how its request ended.
struct Ended(Sender<FinishReason>);

impl Listener for Ended {
    fn tokens(&mut self, _: &[Token]) -> Verdict {
        Verdict::Continue
    }

    fn finished(self: Box<Self>, outcome: Outcome) {
        self.0.send(outcome.reason).unwrap();
    }
}

fn ended(tokens: usize) -> (Request, Receiver<FinishReason>) {
    let (tell, told) = channel();
    (Request::new(vec![1, 2, 3], tokens, Box::new(Ended(tell))), told)
}

#[test]
fn a_lost_device_ends_every_request_and_takes_no_more() {
    let config = EngineConfig { max_running_requests: 3, shape: Shape::chain(3), ..config() };
    for overlapped in [false, true] {
        for loses in 0..6 {
            let mut engine = losing(&config, overlapped, loses);
            let prompts = |at: u32| request(&[at, 2, 3], 40);
            let (requests, heard): (Vec<_>, Vec<Arc<Mutex<Heard>>>) = (0..8).map(prompts).unzip();
            for request in requests {
                engine.submit(request).unwrap();
            }
            run(&mut engine);
            for heard in heard {
                let heard = heard.lock().unwrap();
                assert_eq!(heard.reason(), &FinishReason::Abort(lost().to_string()));
            }
            assert_eq!(engine.failure(), Some(&lost()));
            let refused = engine.submit(request(&[1], 1).0);
            assert_eq!(refused, Err(SubmitError::Failed(lost())));
            assert!(!engine.step() && engine.is_idle());
            let stats = engine.stats().snapshot();
            assert_eq!((stats.failed_rounds, stats.running, stats.waiting), (1, 0, 0));
        }
    }
}

#[test]
fn a_backend_that_lost_its_device_says_so_in_the_outcome() {
    let config = EngineConfig { context_length: 64, ..config() };
    let backend = Arc::new(Deferring::new());
    let target = decoder(&*backend, "tiny", config.context_length);
    let runner = Runner::new(backend.clone(), target, None, &config).unwrap();
    let executor = ModelExecutor::new(runner, config.clone());
    let mut engine = Scheduler::over(executor, config).unwrap();
    let (request, heard) = request(&[1, 2, 3], 30);
    engine.submit(request).unwrap();
    engine.step();
    backend.lose();
    run(&mut engine);
    assert_eq!(
        heard.lock().unwrap().reason().failure(),
        Some("the device is lost: it left the bus")
    );
    assert_eq!(engine.failure(), Some(&EngineFailure::DeviceLost("it left the bus".into())));
}

#[test]
fn a_round_that_is_not_enqueued_fails_with_its_cause() {
    let config = EngineConfig { context_length: 64, ..config() };
    let mut backend = Deferring::new();
    backend.refuses_round = Some(3);
    let target = decoder(&backend, "tiny", config.context_length);
    let runner = Runner::new(Arc::new(backend), target, None, &config).unwrap();
    let executor = ModelExecutor::new(runner, config.clone());
    let mut engine = Scheduler::over(executor, config).unwrap().overlapped().unwrap();
    let (fails, heard) = request(&[1, 2, 3], 30);
    engine.submit(fails).unwrap();
    run(&mut engine);
    let heard = heard.lock().unwrap();
    let why = heard.reason().failure().unwrap();
    assert!(why.contains("no room for a round"), "{why}");
    assert_eq!(heard.tokens.len(), 3, "the rounds before it count");
    let (next, heard) = request(&[1, 2, 3], 5);
    engine.submit(next).unwrap();
    run(&mut engine);
    assert_eq!(heard.lock().unwrap().reason(), &FinishReason::Length);
}

#[test]
fn whoever_waits_hears_why_an_engine_failed() {
    let handle = EngineHandle::start(losing(&config(), true, 2)).unwrap();
    let (tell, told) = channel();
    let hears = move |failure: &EngineFailure| tell.send(failure.clone()).unwrap();
    handle.when_failed(hears.clone());
    let (request, end) = ended(100);
    handle.submit(request).unwrap();
    assert_eq!(end.recv().unwrap(), FinishReason::Abort(lost().to_string()));
    // Known before any request ends for it.
    assert_eq!(handle.failure(), Some(&lost()));
    assert_eq!(told.recv().unwrap(), lost());
    handle.when_failed(hears);
    assert_eq!(told.recv().unwrap(), lost());
    let refused = handle.submit(ended(1).0);
    assert_eq!(refused, Err(SubmitError::Failed(lost())));
    assert_eq!(handle.flush_cache(), 0);
    handle.drain();
    assert_eq!(handle.submit(ended(1).0), Err(SubmitError::Failed(lost())));
}

#[test]
fn a_panic_of_the_engines_thread_fails_it() {
    let config = EngineConfig { shape: Shape::chain(3), ..config() };
    for overlapped in [false, true] {
        let mut engine = Scheduler::over(Simulated::new(&config), config.clone()).unwrap();
        let policy = Scripted::new(&[config.shape], |_, _| panic!("the policy is broken"));
        engine.draft_by(Box::new(policy)).unwrap();
        let engine = if overlapped { engine.overlapped().unwrap() } else { engine };
        let handle = EngineHandle::start(engine).unwrap();
        let (request, end) = ended(100);
        handle.submit(request).unwrap();
        let why = EngineFailure::Panicked("the policy is broken".into());
        assert_eq!(end.recv().unwrap(), FinishReason::Abort(why.to_string()));
        assert_eq!(handle.failure(), Some(&why));
        assert_eq!(handle.submit(ended(1).0), Err(SubmitError::Failed(why)));
        handle.drain();
    }
}

/// A policy that panics where it is told of a prompt, or of the end of a request.
struct Panics {
    of_prompts: bool,
}

impl Policy for Panics {
    fn choose(&mut self, round: &RoundView<'_>) -> Decision {
        Fixed::new(Shape::chain(3)).choose(round)
    }

    fn learn(&mut self, _: &RoundOutcome<'_>) {}

    fn leave(&mut self, _: u64) {
        assert!(self.of_prompts, "the policy is broken");
    }

    fn shapes(&self) -> Vec<Shape> {
        vec![Shape::chain(3)]
    }

    fn reads_prompt(&mut self, _: usize, _: PromptRows) -> bool {
        assert!(!self.of_prompts, "the policy is broken");
        true
    }

    fn state(&self) -> PolicyState {
        PolicyState::default()
    }
}

#[test]
fn requests_that_a_panic_lost_hear_of_the_end() {
    let config = EngineConfig { shape: Shape::chain(3), ..config() };
    for overlapped in [false, true] {
        for of_prompts in [false, true] {
            let mut engine = Scheduler::over(Simulated::new(&config), config.clone()).unwrap();
            engine.draft_by(Box::new(Panics { of_prompts })).unwrap();
            let engine = if overlapped { engine.overlapped().unwrap() } else { engine };
            let handle = EngineHandle::start(engine).unwrap();
            let (request, end) = ended(5);
            handle.submit(request).unwrap();
            let why = EngineFailure::Panicked("the policy is broken".into());
            let reason = end.recv_timeout(Duration::from_secs(60));
            assert_eq!(reason, Ok(FinishReason::Abort(why.to_string())));
            handle.drain();
        }
    }
}

#[test]
fn rounds_before_serving_say_that_the_device_is_lost() {
    let mut engine = losing(&config(), false, 1);
    let captured = engine.capture_graphs(&[1, 2], &mut |_| {});
    assert_eq!(captured.unwrap_err().to_string(), lost().to_string());
}

/// Runs a round when it may, and says when it begins.
struct Held {
    compute: Simulated,
    begins: Sender<()>,
    go: Receiver<()>,
}

impl Executor for Held {
    fn profile(&self) -> Profile {
        self.compute.profile()
    }

    fn enqueue(&mut self, batch: ScheduledBatch) {
        if !batch.requests.is_empty() {
            self.begins.send(()).unwrap();
            self.go.recv().unwrap();
        }
        self.compute.enqueue(batch);
    }

    fn finish(&mut self) -> BatchOutput {
        self.compute.finish()
    }
}

#[test]
fn a_round_that_does_not_come_back_is_told_by_its_age() {
    for overlapped in [false, true] {
        let config = config();
        let ((begins, begun), (go, held)) = (channel(), channel());
        let compute = Held { compute: Simulated::new(&config), begins, go: held };
        let engine = Scheduler::over(compute, config).unwrap();
        let engine = if overlapped { engine.overlapped().unwrap() } else { engine };
        let handle = EngineHandle::start(engine).unwrap();
        assert_eq!(handle.stats().awaited(Instant::now()), None);
        let (request, end) = ended(3);
        handle.submit(request).unwrap();
        let mut before = None;
        for _ in 0..3 {
            begun.recv().unwrap();
            let now = Instant::now();
            let since = now - handle.stats().awaited(now).expect("a round is on its way");
            // With overlap, the one before it may not be settled yet.
            let begins_later = |before| before < since || (overlapped && before == since);
            assert!(before.is_none_or(begins_later), "each has its own beginning");
            before = Some(since);
            go.send(()).unwrap();
        }
        end.recv().unwrap();
        handle.drain();
        assert_eq!(handle.stats().awaited(Instant::now()), None);
    }
}

#[test]
fn an_engine_that_fails_while_it_drains_ends() {
    let config = config();
    let ((begins, begun), (go, held)) = (channel(), channel());
    let mut compute = Simulated::new(&config);
    compute.loses = Some(1);
    let engine = Scheduler::over(Held { compute, begins, go: held }, config).unwrap();
    let handle = EngineHandle::start(engine).unwrap();
    let (long, end) = ended(9);
    handle.submit(long).unwrap();
    begun.recv().unwrap();
    let (ends, drained) = channel();
    let drains = handle.clone();
    std::thread::spawn(move || {
        drains.drain();
        ends.send(()).unwrap();
    });
    // From then on it is being drained.
    while handle.submit(request(&[1], 1).0) != Err(SubmitError::ShuttingDown) {
        std::thread::yield_now();
    }
    go.send(()).unwrap();
    go.send(()).unwrap();
    assert_eq!(drained.recv_timeout(Duration::from_secs(60)), Ok(()));
    assert!(end.recv().unwrap().failure().is_some());
}
