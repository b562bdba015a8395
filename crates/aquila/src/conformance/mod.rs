//! What every algorithm must hold to, checked on the shipped model.
//!
//! Whatever is drafted, answers are those of plain decoding, token by token with their
//! log-probabilities: greedy, sampled, with penalties and held by a grammar, for every shape, alone and in company,
//! across page sizes, small pools and aborted neighbours; and no slot is ever lost. What it packs for
//! another machine is unpacked on a second one, which must go on as the first would
//! (`second_machine`).

mod command;
mod second_machine;

pub(crate) use command::Conformance;

use std::sync::{Arc, Mutex};

use aquila_compute::round::Grammar;
use aquila_engine::{Listener, Outcome, Request, Scheduler, Speculation, Token, Verdict};
use aquila_spec::SpecStats;
use aquila_text::{GrammarCompiler, GrammarSpec, Tokenizer};
use clap::{Args, Command, FromArgMatches};

use crate::Algorithms;
use crate::error::{Error, Result};
use crate::flags::{EngineFlags, ModelFlags};
use crate::start::{Built, build};

/// Tokens of each answer.
const TOKENS: usize = 24;

/// What a run found.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Report {
    /// How many answers were compared.
    pub answers: usize,
    /// What went wrong, each in a sentence.
    pub failures: Vec<String>,
    /// Whether what is drafted for a request is the same whatever runs beside it.
    pub invariant: bool,
    /// Tokens per verification over all rounds, the bonus included.
    pub accept_length: f64,
}

/// Runs the suite on the algorithm of this name, with the flags given beside it. Those of the model
/// and its device are those of plain decoding, too.
///
/// # Errors
/// If the algorithm cannot be started at all.
pub fn check(algorithms: &Algorithms, name: &str, flags: &[&str]) -> Result<Report> {
    let drafting = [&["check", "--context-length", "256"], flags].concat();
    let (model, _) = parse(&drafting)?;
    let (report, stats) = (Report { invariant: true, ..Report::default() }, SpecStats::default());
    let mut run = Run { algorithms, name, flags, model, report, stats };
    for mode in [Mode::Greedy, Mode::Sampled, Mode::Constrained] {
        let plain = run.answers(&["--speculative-algorithm", "NONE"], mode, None, false)?;
        let mut alone = None;
        for (shape, engine) in SHAPES.iter().zip(ENGINES.iter().cycle()) {
            run.compare(shape, engine, mode, &plain)?;
        }
        for engine in ENGINES {
            let heard = run.compare(SHAPES[1], engine, mode, &plain)?;
            let drafted: Vec<SpecStats> = heard.into_iter().map(|h| h.spec).collect();
            run.report.invariant &= *alone.get_or_insert(drafted.clone()) == drafted;
        }
    }
    let invariant = run.report.invariant;
    run.report.failures.extend(check_packed(algorithms, name, flags, invariant)?);
    run.report.accept_length = run.stats.accept_length();
    if run.stats.verify_ct == 0 {
        run.report.failures.push("no round verified anything".into());
    }
    Ok(run.report)
}

/// The part of [`check`] that is about another machine: what goes wrong where a request comes to
/// one with its tokens, its rows and what the algorithm has packed. What is drafted there is
/// compared where it is `invariant`, whatever else runs.
///
/// # Errors
/// If the algorithm cannot be started at all.
pub fn check_packed(
    algorithms: &Algorithms,
    name: &str,
    flags: &[&str],
    invariant: bool,
) -> Result<Vec<String>> {
    let mut failures = Vec::new();
    for shape in SHAPES {
        let flags = [&["check", "--speculative-algorithm", name], flags, shape].concat();
        failures.extend(second_machine::failures_of_trees(algorithms, &flags, &prompts())?);
        if shape.is_empty() {
            // Flags leave trees open: what is drafted would depend on what rounds cost.
            continue;
        }
        let flags = [&flags[..], &["--context-length", "256", "--page-size", "4"]].concat();
        let differ =
            second_machine::failures_of_answers(algorithms, &flags, &prompts(), invariant)?;
        failures.extend(differ);
    }
    Ok(failures)
}

/// Trees: what the algorithm takes by itself, chains, and wide trees.
const SHAPES: [&[&str]; 4] = [
    &[],
    &["--speculative-num-steps", "3", "--speculative-eagle-topk", "1"],
    &[
        "--speculative-num-steps",
        "2",
        "--speculative-eagle-topk",
        "4",
        "--speculative-num-draft-tokens",
        "8",
    ],
    &[
        "--speculative-num-steps",
        "1",
        "--speculative-eagle-topk",
        "2",
        "--speculative-num-draft-tokens",
        "3",
    ],
];

/// Engines: alone, in company, with large pages and small chunks, with a pool too small for all.
const ENGINES: [&[&str]; 4] = [
    &["--max-running-requests", "1"],
    &["--max-running-requests", "6"],
    &["--max-running-requests", "6", "--page-size", "16", "--chunked-prefill-size", "5"],
    &["--max-running-requests", "6", "--max-total-tokens", "160", "--page-size", "4"],
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    Greedy,
    Sampled,
    /// With penalties, and every other request held by a grammar.
    Constrained,
}

/// What a request heard.
#[derive(Debug, Clone, Default, PartialEq)]
struct Heard {
    tokens: Vec<(u32, Option<u32>)>,
    ended: Option<String>,
    spec: SpecStats,
}

struct Ear(Arc<Mutex<Heard>>);

impl Ear {
    fn heard(&self) -> std::sync::MutexGuard<'_, Heard> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

impl Listener for Ear {
    fn tokens(&mut self, tokens: &[Token]) -> Verdict {
        let tokens = tokens.iter().map(|t| (t.id, t.logprob.map(f32::to_bits)));
        self.heard().tokens.extend(tokens);
        Verdict::Continue
    }

    fn finished(self: Box<Self>, outcome: Outcome) {
        let mut heard = self.heard();
        heard.ended = Some(format!("{:?}", outcome.reason));
        heard.spec = outcome.usage.spec;
    }
}

struct Run<'a> {
    algorithms: &'a Algorithms,
    name: &'a str,
    flags: &'a [&'a str],
    model: ModelFlags,
    report: Report,
    stats: SpecStats,
}

impl Run<'_> {
    /// Compares the answers of an engine with plain ones, alone and with a request that is given
    /// up and one that opts out beside them.
    fn compare(
        &mut self,
        shape: &[&str],
        engine: &[&str],
        mode: Mode,
        plain: &[Heard],
    ) -> Result<Vec<Heard>> {
        let flags = [&["--speculative-algorithm", self.name], self.flags, shape].concat();
        let calm = self.answers(&flags, mode, Some(engine), false)?;
        let disturbed = self.answers(&flags, mode, Some(engine), true)?;
        for (heard, how) in [(&calm, ""), (&disturbed, ", beside requests that leave")] {
            for (index, (heard, plain)) in heard.iter().zip(plain).enumerate() {
                self.report.answers += 1;
                if (&heard.tokens, &heard.ended) != (&plain.tokens, &plain.ended) {
                    self.report.failures.push(format!(
                        "prompt {index}, {mode:?}, {} {}{how}: {} tokens are right, then it differs \
                         from plain decoding",
                        shape.join(" "),
                        engine.join(" "),
                        heard.tokens.iter().zip(&plain.tokens).take_while(|(a, b)| a == b).count(),
                    ));
                }
            }
        }
        calm.iter().for_each(|heard| self.stats.add(&heard.spec));
        Ok(calm)
    }

    fn answers(
        &mut self,
        speculative: &[&str],
        mode: Mode,
        engine: Option<&[&str]>,
        disturbed: bool,
    ) -> Result<Vec<Heard>> {
        let flags = [&["check"], engine.unwrap_or_default(), speculative].concat();
        let (mut engine, grammar) = self.engine(&flags, mode)?;
        let submit = |engine: &mut Scheduler, at: usize, prompt: &[u32], speculation| {
            let heard = Arc::new(Mutex::new(Heard::default()));
            let mut request = Request::new(prompt.to_vec(), TOKENS, Box::new(Ear(heard.clone())));
            request.logprobs = Some(0);
            request.speculation = speculation;
            request.seeded = true;
            let sampling = &mut request.sampling;
            sampling.seed = at as u64;
            match mode {
                Mode::Greedy => {}
                Mode::Sampled => (sampling.temperature, sampling.top_p) = (0.9, 0.95),
                Mode::Constrained => {
                    sampling.repetition_penalty = 1.2;
                    sampling.frequency_penalty = 0.4;
                    request.grammar = grammar.clone().filter(|_| at % 2 == 1);
                }
            }
            let id = engine.submit(request).map_err(|e| Error::Other(e.to_string()))?;
            Ok::<_, Error>((id, heard))
        };
        let mut all = Vec::new();
        let mut leaving = Vec::new();
        for (at, prompt) in prompts().iter().enumerate() {
            if disturbed {
                let speculation = [Speculation::Off, Speculation::Free][at % 2];
                leaving.push(submit(&mut engine, at + 100, prompt, speculation)?.0);
            }
            all.push(submit(&mut engine, at, prompt, Speculation::Free)?.1);
        }
        let mut rounds = 0;
        while engine.step() {
            rounds += 1;
            if rounds % 3 == 0 {
                leaving.pop().map(|id| engine.abort(id));
            }
            if let Err(lost) = engine.check() {
                self.report.failures.push(format!("after {rounds} rounds: {lost}"));
                break;
            }
        }
        let heard = |heard: Arc<Mutex<Heard>>| {
            heard.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone()
        };
        Ok(all.into_iter().map(heard).collect())
    }

    /// An engine, and a grammar for its vocabulary where requests are to be held by one and the
    /// engine follows grammars.
    fn engine(&self, flags: &[&str], mode: Mode) -> Result<(Scheduler, Option<Arc<dyn Grammar>>)> {
        let (_, engine) = parse(flags)?;
        let Built { engine, checkpoint, .. } = build(&self.model, &engine, self.algorithms, true)?;
        if mode != Mode::Constrained || !engine.follows_grammars() {
            return Ok((engine, None));
        }
        let Some(tokenizer) = checkpoint.folder().map(Tokenizer::load).transpose()?.flatten()
        else {
            return Ok((engine, None));
        };
        let words = GrammarSpec::Regex("([a-z]+ ){2,5}(and so on|the end)\\.".into());
        let grammar = GrammarCompiler::new(&tokenizer, engine.vocabulary(), &[])
            .and_then(|compiler| compiler.compile(&words));
        Ok((engine, Some(grammar.map_err(Error::Other)?)))
    }
}

fn parse(flags: &[&str]) -> Result<(ModelFlags, EngineFlags)> {
    let command = EngineFlags::augment_args(ModelFlags::augment_args(Command::new("check")));
    let wrong = |error: clap::Error| Error::Usage(error.to_string());
    let matches = command.try_get_matches_from(flags).map_err(wrong)?;
    let model = ModelFlags::from_arg_matches(&matches).map_err(wrong)?;
    Ok((model, EngineFlags::from_arg_matches(&matches).map_err(wrong)?))
}

/// Prompts of the shipped model's tokens: some that repeat themselves, some that do not, one of a
/// single token.
fn prompts() -> Vec<Vec<u32>> {
    let repeated: Vec<u32> = [301, 44, 1201, 87, 560].iter().copied().cycle().take(34).collect();
    let counted: Vec<u32> = (0..40).map(|i| 300 + i * 7).collect();
    let alike: Vec<u32> = counted[..24].iter().chain(&repeated[..9]).copied().collect();
    vec![repeated, counted, alike, vec![77], vec![5, 5, 5, 5, 5, 5, 5], vec![900, 12, 900, 12, 900]]
}
