//! A phase of the workload, and one run of it.
//!
//! A phase keeps a number of streams busy: each asks for one answer after the other, all for as
//! many tokens. It is cut into turns, which whoever is compared takes one by one: machines change
//! their speed from one second to the next. Prompts are in the prefix cache before the clock starts, since reading them says
//! nothing about who decides well. The one invariant: the requests of a phase are the same for
//! whoever runs it, so runs of it compare by time alone.

use std::collections::BTreeSet;
use std::sync::mpsc::{Sender, channel};
use std::time::Instant;

use aquila_compute::cpu::CpuBackend;
use aquila_engine::{
    Engine, FinishReason, Listener, Outcome, Request, Speculation, Token, Verdict,
};
use aquila_spec::SpecStats;
use aquila_spec::policy::Fixed;

use super::contender::{Chosen, Contender, Observed};
use crate::error::{Error, Result};

/// Tokens of an answer for which a prompt is read by target and draft, and kept.
const READ_TOKENS: usize = 2;
/// Answers of a turn for a stream that is alone, and for each of several: they end one after the
/// other, which leaves fewer and fewer for the last rounds of a turn.
const TURN_ALONE: usize = 4;
const TURN_TOGETHER: usize = 8;

/// What kind of text, for how many requests at a time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Phase {
    /// The kind of its prompts.
    pub kind: String,
    /// Streams.
    pub batch: usize,
}

impl Phase {
    /// From `KIND:BATCH`.
    pub fn parse(text: &str) -> std::result::Result<Self, String> {
        let phase = text.rsplit_once(':').and_then(|(kind, batch)| {
            let batch = batch.parse().ok().filter(|batch| (1..=4096).contains(batch))?;
            Some(Self { kind: kind.to_owned(), batch })
        });
        phase.ok_or("a phase is KIND:BATCH, such as code:8".into())
    }

    /// What each stream asks for: the prompts in turn, each stream beginning with another, so that
    /// all have the same to do.
    pub fn streams(&self, prompts: &[Vec<u32>], tokens: usize, answer: usize) -> Vec<Vec<Ask>> {
        let ask = |stream: usize, number: usize| Ask {
            prompt: prompts[(stream + number) % prompts.len()].clone(),
            tokens: answer.min(tokens - number * answer),
        };
        let asks = |stream| (0..tokens.div_ceil(answer)).map(|n| ask(stream, n)).collect();
        (0..self.batch).map(asks).collect()
    }
}

impl std::fmt::Display for Phase {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}, batch {}", self.kind, self.batch)
    }
}

/// One request.
pub struct Ask {
    prompt: Vec<u32>,
    tokens: usize,
}

/// The state at the end of a round that brought tokens.
#[derive(Debug, Clone, Copy)]
struct Tick {
    /// Of the phase, without what others took.
    seconds: f64,
    /// That have come by then.
    tokens: u64,
}

/// What a run gave and took; those of several phases can be added.
#[derive(Debug, Clone, Default)]
pub struct Totals {
    /// Tokens of answers.
    pub tokens: u64,
    /// The time they took.
    pub seconds: f64,
    /// The trees.
    pub chosen: Chosen,
    /// What came of them.
    pub spec: SpecStats,
}

impl Totals {
    /// Adds those of another run.
    pub fn add(&mut self, other: &Totals) {
        self.tokens += other.tokens;
        self.seconds += other.seconds;
        self.chosen.add(&other.chosen);
        self.spec.add(&other.spec);
    }

    /// Tokens per second.
    pub fn speed(&self) -> f64 {
        self.tokens as f64 / self.seconds.max(f64::MIN_POSITIVE)
    }
}

/// A run of a phase.
pub struct Run {
    /// What it came to.
    pub totals: Totals,
    /// The answers, by stream.
    pub answers: Vec<Vec<u32>>,
    ticks: Vec<Tick>,
}

/// The turns of a phase: what each stream asks for in them.
pub fn turns(streams: &[Vec<Ask>]) -> impl Iterator<Item = Vec<&[Ask]>> {
    let answers = if streams.len() == 1 { TURN_ALONE } else { TURN_TOGETHER };
    let most = streams.iter().map(Vec::len).max().unwrap_or(0);
    (0..most).step_by(answers).map(move |from| {
        let part = |asks: &Vec<Ask>| from.min(asks.len())..asks.len().min(from + answers);
        streams.iter().map(|asks| &asks[part(asks)]).collect()
    })
}

impl Run {
    /// A run that has not begun.
    pub fn new(streams: usize) -> Self {
        Self { totals: Totals::default(), answers: vec![Vec::new(); streams], ticks: Vec::new() }
    }

    /// Runs a turn on `engine`, which is idle; its trees are as `policy` decides. Nothing of it is
    /// left in the prefix cache.
    pub fn go_on(
        &mut self,
        engine: &mut Engine<CpuBackend>,
        turn: &[&[Ask]],
        contender: &Contender,
        policy: &Observed,
    ) -> Result<()> {
        let speculation = contender.speculation();
        // Another policy reads the prompts, lest this one learn from it.
        engine.draft_by(Box::new(Fixed::new(engine.config().shape)))?;
        let prompts: BTreeSet<&Vec<u32>> =
            turn.iter().copied().flatten().map(|ask| &ask.prompt).collect();
        let read = |prompt: &Vec<u32>| Ask { prompt: prompt.clone(), tokens: READ_TOKENS };
        let read: Vec<Ask> = prompts.into_iter().map(read).collect();
        let each: Vec<&[Ask]> = read.chunks(1).collect();
        Self::new(each.len()).ask(engine, &each, speculation)?;
        engine.draft_by(Box::new(policy.clone()))?;
        policy.take_chosen();
        self.ask(engine, turn, speculation)?;
        self.totals.chosen.add(&policy.take_chosen());
        engine.flush_cache();
        Ok(())
    }

    /// Asks everything of `streams`.
    fn ask(
        &mut self,
        engine: &mut Engine<CpuBackend>,
        streams: &[&[Ask]],
        speculation: Speculation,
    ) -> Result<()> {
        let stats = engine.stats();
        let before = stats.snapshot().completion_tokens;
        let (seconds_before, tokens_before) = (self.totals.seconds, self.totals.tokens);
        let (done, ended) = channel();
        let mut waiting: Vec<_> = streams.iter().map(|asks| asks.iter()).collect();
        let mut free: Vec<usize> = (0..streams.len()).collect();
        let began = Instant::now();
        loop {
            for stream in free.drain(..) {
                let Some(ask) = waiting[stream].next() else { continue };
                let submitted = engine.submit(ask.request(stream, speculation, done.clone()));
                submitted.map_err(|e| Error::Other(e.to_string()))?;
            }
            if engine.is_idle() {
                break;
            }
            engine.step();
            let tokens = tokens_before + stats.snapshot().completion_tokens - before;
            if tokens > self.totals.tokens {
                let seconds = seconds_before + began.elapsed().as_secs_f64();
                self.ticks.push(Tick { seconds, tokens });
                (self.totals.seconds, self.totals.tokens) = (seconds, tokens);
            }
            for answer in ended.try_iter() {
                let stream = answer.stream;
                self.take(answer)?;
                free.push(stream);
            }
        }
        Ok(())
    }

    fn take(&mut self, answer: Answer) -> Result<()> {
        let Outcome { reason, usage } = answer.outcome;
        if reason != FinishReason::Length || answer.heard.len() != answer.asked {
            return Err(Error::Other(format!(
                "an answer ended after {} of {} tokens: {reason:?}",
                answer.heard.len(),
                answer.asked
            )));
        }
        self.totals.spec.add(&usage.spec);
        self.answers[answer.stream].extend(answer.heard);
        Ok(())
    }

    /// Tokens per second while each of `parts` equal shares of the tokens came.
    pub fn course(&self, parts: usize) -> Vec<f64> {
        let share = self.totals.tokens as f64 / parts as f64;
        let times: Vec<f64> = (0..=parts).map(|at| self.when(at as f64 * share)).collect();
        let took = times.windows(2).map(|pair| (pair[1] - pair[0]).max(1e-9));
        took.map(|seconds| share / seconds).collect()
    }

    /// When so many tokens had come, as if those of a round came evenly.
    fn when(&self, tokens: f64) -> f64 {
        let mut last = (0.0, 0.0);
        for tick in &self.ticks {
            let next = (tick.tokens as f64, tick.seconds);
            if next.0 >= tokens {
                return last.1 + (next.1 - last.1) * (tokens - last.0) / (next.0 - last.0);
            }
            last = next;
        }
        last.1
    }
}

impl Ask {
    fn request(&self, stream: usize, speculation: Speculation, done: Sender<Answer>) -> Request {
        let heard = Vec::with_capacity(self.tokens);
        let ear = Ear { stream, asked: self.tokens, heard, done };
        let mut request = Request::new(self.prompt.clone(), self.tokens, Box::new(ear));
        request.speculation = speculation;
        request
    }
}

/// An answer that has ended.
struct Answer {
    stream: usize,
    asked: usize,
    heard: Vec<u32>,
    outcome: Outcome,
}

/// Hears one answer.
struct Ear {
    stream: usize,
    asked: usize,
    heard: Vec<u32>,
    done: Sender<Answer>,
}

impl Listener for Ear {
    fn tokens(&mut self, tokens: &[Token]) -> Verdict {
        self.heard.extend(tokens.iter().map(|token| token.id));
        Verdict::Continue
    }

    fn finished(self: Box<Self>, outcome: Outcome) {
        let Ear { stream, asked, heard, done } = *self;
        // If the command gave up, there is nobody to tell.
        let _ = done.send(Answer { stream, asked, heard, outcome });
    }
}
