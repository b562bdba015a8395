//! `aquila bench decode`: tokens per second of a batch of equal requests.
//!
//! Decoding is timed over the rounds in which every request decodes and nothing else runs: from
//! the end of the round that read the last prompt to the end of the first answer. Reading is timed
//! from submission to the end of that same round.

use std::io::{Write, stdin, stdout};
use std::process::ExitCode;
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use aquila_engine::{FinishReason, Listener, Outcome, Request, Times, Token, Verdict};
use aquila_spec::SpecStats;
use aquila_text::{Generator, SamplingParams};
use clap::Args;
use serde_json::{Value, json};

use super::prompts::Random;
use crate::Algorithms;
use crate::after_help::AFTER_HELP;
use crate::error::{Error, Result};
use crate::flags::{EngineFlags, ModelFlags};
use crate::start::start;

/// Decode a batch of equal requests; one JSON object a repetition on standard output.
#[derive(Args)]
#[command(after_help = AFTER_HELP)]
pub struct Decode {
    /// Requests that decode together
    #[arg(long, default_value_t = 1, value_name = "N")]
    batch: usize,

    /// Tokens of each prompt, random and different in every request
    #[arg(long, default_value_t = 128, value_name = "N")]
    prompt_tokens: usize,

    /// Tokens of each answer
    #[arg(long, default_value_t = 64, value_name = "N")]
    tokens: usize,

    /// Repetitions, after one that is not counted
    #[arg(long, default_value_t = 5, value_name = "N")]
    repeat: usize,

    /// Wait for a line on standard input before each repetition, to take turns with another
    /// program
    #[arg(long)]
    paced: bool,

    /// Print figures and errors only
    #[arg(long, short)]
    quiet: bool,

    #[command(flatten)]
    model: ModelFlags,

    #[command(flatten)]
    engine: EngineFlags,
}

impl Decode {
    /// Runs the command.
    pub fn run(&self, algorithms: &Algorithms) -> Result<ExitCode> {
        let short = |flag: &str, least| {
            Error::Usage(format!("--{flag} must be at least {least} for a figure"))
        };
        for (flag, value, least) in [
            ("batch", self.batch, 1),
            ("prompt-tokens", self.prompt_tokens, 1),
            ("tokens", self.tokens, 2),
            ("repeat", self.repeat, 1),
        ] {
            if value < least {
                return Err(short(flag, least));
            }
        }
        if self.batch > self.engine.max_running_requests {
            return Err(Error::Usage(format!(
                "--batch {} needs --max-running-requests of at least as much; it is {}",
                self.batch, self.engine.max_running_requests
            )));
        }
        let generator =
            start(&self.model, &self.engine, SamplingParams::default(), algorithms, self.quiet)?;
        let mut prompts = Random { state: self.model.random_seed };
        self.repetition(&generator, &mut prompts)?;
        for repetition in 0..self.repeat {
            if self.paced && !line_came()? {
                break;
            }
            let before = generator.engine().stats().times();
            let (reading, decoding, spec) = self.repetition(&generator, &mut prompts)?;
            let times = generator.engine().stats().times().since(&before);
            let figures = json!({
                "repetition": repetition,
                "batch": self.batch,
                "prompt_tokens": self.prompt_tokens,
                "tokens": self.tokens,
                "prefill_tokens_per_second": reading.per_second(),
                "decode_tokens_per_second": decoding.per_second(),
                "decode_tokens": decoding.tokens,
                "decode_seconds": decoding.seconds,
                // Also where acceptance is simulated: no more drafts are kept than a tree is deep.
                "accept_length": (spec.verify_ct > 0).then(|| spec.accept_length()),
                "round_microseconds": round(&times),
            });
            let mut out = stdout().lock();
            writeln!(out, "{figures}")
                .and_then(|()| out.flush())
                .map_err(|e| Error::file("standard output", e))?;
        }
        Ok(ExitCode::SUCCESS)
    }

    /// One batch, from submission to the last token: how fast it was read, and decoded, and what came of
    /// drafts.
    fn repetition(
        &self,
        generator: &Generator,
        prompts: &mut Random,
    ) -> Result<(Pace, Pace, SpecStats)> {
        let engine = generator.engine();
        let prompts: Vec<Vec<u32>> = (0..self.batch)
            .map(|_| prompts.next(self.prompt_tokens, engine.vocabulary()))
            .collect();
        let (done, ended) = channel();
        let began = Instant::now();
        for prompt in prompts {
            let stopwatch =
                Stopwatch { times: Vec::with_capacity(self.tokens), done: done.clone() };
            engine
                .submit(Request::new(prompt, self.tokens, Box::new(stopwatch)))
                .map_err(|e| Error::Other(e.to_string()))?;
        }
        drop(done);
        let mut times = Vec::with_capacity(self.batch);
        let mut spec = SpecStats::default();
        for (outcome, of_one) in ended {
            Error::check(engine)?;
            if outcome.reason != FinishReason::Length || of_one.len() != self.tokens {
                return Err(Error::Other(format!(
                    "an answer ended after {} of {} tokens: {:?}",
                    of_one.len(),
                    self.tokens,
                    outcome.reason
                )));
            }
            times.push(of_one);
            spec.add(&outcome.usage.spec);
        }
        if times.len() != self.batch {
            return Err(Error::Other("the engine ended before all answers had come".into()));
        }
        // The rounds are counted by the request that began last: tokens of one round come a little
        // apart, so times of different requests do not say which round they belong to.
        let youngest = times.iter().max_by_key(|of_one| of_one[0]).expect("the batch is not empty");
        let first_end = times.iter().map(|of_one| of_one[self.tokens - 1]).min();
        let rounds = youngest.iter().filter(|&&at| Some(at) <= first_end).count().saturating_sub(1);
        if rounds == 0 {
            return Err(Error::Other(
                "the first answer ended before the last prompt was read: raise --tokens or \
                 --chunked-prefill-size"
                    .into(),
            ));
        }
        let reading = Pace {
            tokens: self.batch * self.prompt_tokens,
            seconds: (youngest[0] - began).as_secs_f64(),
        };
        let seconds = (youngest[rounds] - youngest[0]).as_secs_f64();
        Ok((reading, Pace { tokens: rounds * self.batch, seconds }, spec))
    }
}

/// What a round in which every request decodes takes, and each of its steps.
fn round(times: &Times) -> Value {
    let each = |time: Duration| (time.as_secs_f64() * 1e6 / times.rounds.max(1) as f64).round();
    json!({
        "whole": each(times.whole),
        "draft": each(times.draft),
        "verify": each(times.verify),
        "accept": each(times.accept),
        "commit": each(times.commit),
        "extend": each(times.extend),
        "host": each(times.host()),
    })
}

/// Tokens and the time they took.
struct Pace {
    tokens: usize,
    seconds: f64,
}

impl Pace {
    fn per_second(&self) -> f64 {
        self.tokens as f64 / self.seconds
    }
}

/// Notes when the tokens of one request came.
struct Stopwatch {
    times: Vec<Instant>,
    done: Sender<(Outcome, Vec<Instant>)>,
}

impl Listener for Stopwatch {
    fn tokens(&mut self, tokens: &[Token]) -> Verdict {
        self.times.resize(self.times.len() + tokens.len(), Instant::now());
        Verdict::Continue
    }

    fn finished(self: Box<Self>, outcome: Outcome) {
        // If the command gave up, there is nobody to tell.
        let _ = self.done.send((outcome, self.times));
    }
}

/// Waits for a line on standard input; false at its end.
fn line_came() -> Result<bool> {
    let mut line = String::new();
    let read = stdin().read_line(&mut line).map_err(|e| Error::file("standard input", e))?;
    Ok(read > 0)
}
