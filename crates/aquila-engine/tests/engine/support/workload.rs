//! A random workload: sampled and greedy requests of many lengths that begin alike, cap their
//! drafts or want none, are stopped or given up by their listeners, or aborted from outside.

use std::sync::{Arc, Mutex};

use aquila_engine::{
    FinishReason, Listener, Outcome, Request, RequestId, Scheduler, Speculation, Token, Verdict,
};
use aquila_spec::SpecStats;

use super::answers::{hot, penalized, prompts, warm};
use super::delayed::dawdle;
use super::{Heard, Numbers};

/// What ends a request before its own rules do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ending {
    None,
    /// The listener, as for a stop string.
    Stop(usize),
    /// The listener, as for a client that is gone.
    GiveUp(usize),
    /// Somebody outside, so many steps after it was submitted.
    Abort(u64),
}

/// One request of a workload.
#[derive(Debug, Clone)]
pub struct Case {
    prompt: Vec<u32>,
    tokens: usize,
    mode: u64,
    speculation: Speculation,
    logprobs: Option<usize>,
    stop_ids: Vec<u32>,
    ending: Ending,
    /// Which changes nothing where priorities are off.
    priority: Option<i64>,
}

/// What came of a request, as far as it depends on that request alone.
#[derive(Debug, Clone, PartialEq)]
pub struct Came {
    pub tokens: Vec<Token>,
    pub reason: FinishReason,
    pub spec: SpecStats,
    aborted: bool,
}

impl Came {
    /// Whether this is what `wanted` says, with `drafts` how tokens came too; who was aborted from
    /// outside has a beginning of it.
    pub fn is(&self, wanted: &Came, drafts: bool) -> bool {
        let plain = |token: &Token| Token { drafted: None, ..token.clone() };
        let same = |(one, other): (&Token, &Token)| match drafts {
            true => one == other,
            false => plain(one) == plain(other),
        };
        let begins = self.tokens.iter().zip(&wanted.tokens).all(same);
        if self.aborted {
            return begins && self.tokens.len() <= wanted.tokens.len();
        }
        let ends = self.tokens.len() == wanted.tokens.len() && self.reason == wanted.reason;
        begins && ends && (!drafts || self.spec == wanted.spec)
    }
}

struct Ear {
    heard: Arc<Mutex<Heard>>,
    ending: Ending,
}

impl Listener for Ear {
    fn tokens(&mut self, tokens: &[Token]) -> Verdict {
        let mut heard = self.heard.lock().unwrap();
        for (kept, token) in tokens.iter().enumerate() {
            heard.tokens.push(token.clone());
            match self.ending {
                Ending::Stop(end) if end == heard.tokens.len() => {
                    return Verdict::Stop { kept: kept + 1 };
                }
                Ending::GiveUp(end) if end == heard.tokens.len() => {
                    return Verdict::Abort("gone".into());
                }
                _ => (),
            }
        }
        Verdict::Continue
    }

    fn finished(self: Box<Self>, outcome: Outcome) {
        let mut heard = self.heard.lock().unwrap();
        assert!(heard.end.is_none(), "a request ends once");
        heard.end = Some((outcome.reason, outcome.usage));
    }
}

impl Case {
    fn request(&self, index: usize) -> (Request, Arc<Mutex<Heard>>) {
        let heard = Arc::new(Mutex::new(Heard::default()));
        let ear = Box::new(Ear { heard: heard.clone(), ending: self.ending });
        let mut request = Request::new(self.prompt.clone(), self.tokens, ear);
        match self.mode {
            1 => warm(&mut request, index),
            2 => hot(&mut request, index),
            3 => penalized(&mut request, index),
            _ => (),
        }
        request.limits.stop_ids = self.stop_ids.clone();
        request.speculation = self.speculation;
        request.logprobs = self.logprobs;
        request.priority = self.priority;
        (request, heard)
    }
}

/// How large a workload is.
#[derive(Debug, Clone, Copy)]
pub struct Size {
    pub requests: usize,
    /// The longest beginning that prompts have from a text; a few tokens of their own follow.
    pub prompt: usize,
    /// The longest answer.
    pub tokens: u64,
}

/// Requests as `seed` says.
pub fn workload(size: Size, seed: u64) -> Vec<Case> {
    let Size { requests, prompt: longest, tokens } = size;
    let trunks: Vec<Vec<u32>> = prompts().into_iter().map(|(_, ids)| ids).collect();
    let mut random = Numbers(seed);
    let mut cases: Vec<Case> = Vec::new();
    while cases.len() < requests {
        let again = !cases.is_empty() && random.below(3) == 0;
        let trunk = match again {
            true => cases[random.below(cases.len() as u64) as usize].prompt.clone(),
            false => trunks[random.below(trunks.len() as u64) as usize].clone(),
        };
        let kept = 1 + random.below(trunk.len().min(longest) as u64) as usize;
        let mut prompt = trunk[..kept].to_vec();
        let own = random.below(8) as usize;
        prompt.extend(random.prompt(own));
        let tokens = match random.below(4) {
            0 => 1 + random.below(tokens),
            _ => tokens / 2 + random.below(tokens / 2),
        };
        cases.push(Case {
            prompt,
            tokens: tokens as usize,
            mode: random.below(4),
            speculation: match random.below(6) {
                0 => Speculation::Off,
                1 => Speculation::Steps(1),
                2 => Speculation::Steps(3),
                _ => Speculation::Free,
            },
            logprobs: (random.below(4) == 0).then_some(1),
            // Half of them go on after an end of text, so that they grow as long as they may.
            stop_ids: if random.below(2) == 0 { vec![0, 2] } else { Vec::new() },
            ending: match random.below(8) {
                0 => Ending::Stop(1 + random.below(tokens) as usize),
                1 => Ending::GiveUp(1 + random.below(tokens) as usize),
                2 => Ending::Abort(random.below(24)),
                _ => Ending::None,
            },
            priority: [None, Some(0), Some(5), Some(20)][random.below(4) as usize],
        });
    }
    cases
}

fn came(case: &Case, heard: &Arc<Mutex<Heard>>) -> Came {
    let heard = heard.lock().unwrap();
    let gone = *heard.reason() == FinishReason::Abort("aborted".into());
    Came {
        tokens: heard.tokens.clone(),
        reason: heard.reason().clone(),
        spec: heard.usage().spec,
        aborted: gone && matches!(case.ending, Ending::Abort(_)),
    }
}

/// What each request gets alone, without an abort.
pub fn alone(engine: &mut Scheduler, cases: &[Case]) -> Vec<Came> {
    let run = |(index, case): (usize, &Case)| {
        let (request, heard) = case.request(index);
        engine.submit(request).unwrap();
        super::run(engine);
        came(case, &heard)
    };
    cases.iter().enumerate().map(run).collect()
}

/// Runs all of them, some at a time, as `schedule` says; every slot is counted after each step.
pub fn together(engine: &mut Scheduler, cases: &[Case], schedule: &mut Numbers) -> Vec<Came> {
    let mut all = Vec::new();
    let mut aborts: Vec<(u64, RequestId)> = Vec::new();
    let mut step = 0;
    while all.len() < cases.len() || !engine.is_idle() {
        // Most come in crowds, and the first is larger than what the pool holds.
        let arrive = match (step, schedule.below(4)) {
            (0, _) => 80,
            (_, 0) => schedule.below(60),
            (_, _) => schedule.below(2),
        };
        for _ in 0..arrive {
            if let Some(case) = cases.get(all.len()) {
                let (request, heard) = case.request(all.len());
                let id = engine.submit(request).unwrap();
                if let Ending::Abort(after) = case.ending {
                    aborts.push((step + after, id));
                }
                all.push(heard);
            }
        }
        for (_, id) in aborts.extract_if(.., |(at, _)| *at <= step) {
            engine.abort(id);
        }
        engine.step();
        engine.check().unwrap();
        if engine.overlaps() {
            dawdle(schedule);
        }
        step += 1;
    }
    engine.wait_for_listeners();
    engine.flush_cache();
    engine.check().unwrap();
    assert_eq!(engine.stats().snapshot().used_slots, 0, "no slot is lost");
    cases.iter().zip(&all).map(|(case, heard)| came(case, heard)).collect()
}
