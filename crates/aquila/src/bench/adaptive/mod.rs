//! `aquila bench adaptive`: what it gives to decide the trees of each round anew.
//!
//! A workload that changes (easy and hard texts, few and many requests) is run with plain decoding,
//! with trees that never change, with SGLang's policy and with `auto`. They take turns in one engine,
//! a few answers at a time, so that whatever else the machine does falls on all of them alike; a
//! policy that learns starts each pass anew and goes on learning from turn to turn. Unless acceptance is
//! simulated, every answer must be plain decoding's.

mod chart;
mod contender;
mod figures;
mod phase;

use std::io::{Write, stdout};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use aquila_compute::cpu::CpuBackend;
use aquila_engine::Engine;
use aquila_spec::Shape;
use aquila_text::Tokenizer;
use clap::Args;
use serde_json::{Value, json};

use self::chart::{Band, Chart, Line};
use self::contender::{Contender, MOST_STEPS, Observed};
use self::figures::Section;
use self::phase::{Ask, Phase, Run, Totals};
use super::prompts::{self, Random};
use super::spread::Spread;
use crate::Algorithms;
use crate::error::{Error, Result};
use crate::flags::{EngineFlags, ModelFlags, PolicyPlan};
use crate::notice::notice;
use crate::start::{Built, build};

/// Prompts of each kind for models without a tokenizer: how many, and their tokens.
const RANDOM_PROMPTS: (usize, usize) = (6, 64);
/// Into how many parts the time of a phase is cut for the picture.
const PARTS: usize = 16;

/// Compare policies with plain decoding on a workload that changes.
#[derive(Args)]
pub struct Adaptive {
    /// The workload: kinds of prompts, and how many requests decode together
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "KIND:BATCH",
        value_parser = Phase::parse,
        default_value = "code:1,prose:1,code:8,prose:8,prose:32,code:32,code:1,prose:1",
    )]
    phases: Vec<Phase>,

    /// Tokens of a phase for each of the requests that decode together
    #[arg(long, default_value_t = 384, value_name = "N")]
    phase_tokens: usize,

    /// Tokens of each answer; the next one begins where one ends
    #[arg(long, default_value_t = 64, value_name = "N")]
    answer_tokens: usize,

    /// A file of JSON lines with "prompt" and "kind" [default: beginnings of programs (code) and
    /// of stories (prose); random tokens where the model has no tokenizer]
    #[arg(long, value_name = "FILE")]
    prompts: Option<String>,

    /// Passes over the workload, after a first phase that is not counted
    #[arg(long, default_value_t = 3, value_name = "N")]
    repeat: usize,

    /// Also write the figures as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,

    /// Also draw tokens per second over time
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,

    /// Print figures and errors only
    #[arg(long, short)]
    quiet: bool,

    #[command(flatten)]
    model: ModelFlags,

    #[command(flatten)]
    engine: EngineFlags,
}

/// What a contender did in a phase.
#[derive(Default)]
struct Record {
    /// Of each pass.
    totals: Vec<Totals>,
    /// Tokens per second over each pass.
    courses: Vec<Vec<f64>>,
}

impl Adaptive {
    /// Runs the command.
    pub fn run(&self, algorithms: &Algorithms) -> Result<ExitCode> {
        for (flag, value, least) in [
            ("phase-tokens", self.phase_tokens, 2),
            ("answer-tokens", self.answer_tokens, 2),
            ("repeat", self.repeat, 1),
        ] {
            if value < least {
                let why = format!("--{flag} must be at least {least} for a figure");
                return Err(Error::Usage(why));
            }
        }
        let mut flags = self.engine.clone();
        let batches = self.phases.iter().map(|phase| phase.batch);
        flags.max_running_requests = batches.max().unwrap_or(1);
        let Some(resolved) = flags.speculative.resolve(self.model.name(), algorithms)? else {
            return Err(Error::Usage("nothing drafts: give --speculative-algorithm".into()));
        };
        let room = resolved.policy.covering();
        let PolicyPlan::Auto { settings, .. } = resolved.policy else { return Err(policy_given()) };
        let built = self.build(&flags, room, algorithms)?;
        let costs = built.engine.stats().drafting().costs.ok_or_else(policy_given)?;
        let room = built.engine.config().shape;
        let (contenders, left_out) = Contender::all(room, settings, costs)?;
        if !left_out.is_empty() && !self.quiet {
            notice(format_args!("left out  {}: trees are up to {room}", left_out.join(", ")));
        }
        let workload = self.workload(&built)?;
        let records = self.measure(built.engine, &contenders, &workload)?;
        self.report(&contenders, &records)
    }

    /// An engine that has room for what `auto` chooses among, which is `room`, and for the others
    /// where something drafts so far ahead.
    fn build(&self, flags: &EngineFlags, room: Shape, algorithms: &Algorithms) -> Result<Built> {
        let build = |flags: &EngineFlags| build(&self.model, flags, algorithms, self.quiet);
        if room.steps() >= MOST_STEPS {
            return build(flags);
        }
        let mut roomy = flags.clone();
        roomy.speculative = flags.speculative.with_auto(MOST_STEPS);
        // A head with a layer for each step has as many as it has. Whatever else is wrong with the
        // flags is said of those that were given.
        build(&roomy).or_else(|_| build(flags))
    }

    /// The requests of each phase, by stream.
    fn workload(&self, built: &Built) -> Result<Vec<Vec<Vec<Ask>>>> {
        let tokenizer = built.checkpoint.folder().map(Tokenizer::load).transpose()?.flatten();
        let text = match &self.prompts {
            Some(path) => std::fs::read_to_string(path).map_err(|e| Error::file(path, e))?,
            None => [prompts::CODE, prompts::PROSE].concat(),
        };
        let written = prompts::read(&text)?;
        let mut random = Random { state: self.model.random_seed };
        let streams = |phase: &Phase| {
            let mut of_kind = Vec::new();
            match &tokenizer {
                Some(tokenizer) => {
                    for one in written.iter().filter(|one| one.kind.as_ref() == Some(&phase.kind)) {
                        of_kind.push(tokenizer.encode(&one.prompt, true)?);
                    }
                }
                None => {
                    let (count, tokens) = RANDOM_PROMPTS;
                    let vocabulary = built.engine.vocabulary();
                    of_kind.extend((0..count).map(|_| random.next(tokens, vocabulary)));
                }
            }
            if of_kind.is_empty() {
                let kind = &phase.kind;
                return Err(Error::Usage(format!(
                    "--phases {phase}: no prompt is of kind {kind:?}"
                )));
            }
            Ok(phase.streams(&of_kind, self.phase_tokens, self.answer_tokens))
        };
        self.phases.iter().map(streams).collect()
    }

    /// Runs all passes: what each contender did, by phase.
    fn measure(
        &self,
        mut engine: Engine<CpuBackend>,
        contenders: &[Contender],
        workload: &[Vec<Vec<Ask>>],
    ) -> Result<Vec<Vec<Record>>> {
        let config = engine.config();
        let exact = config.simulate.is_none() && config.verify.is_lossless();
        let mut records: Vec<Vec<Record>> = workload
            .iter()
            .map(|_| contenders.iter().map(|_| Record::default()).collect())
            .collect();
        for pass in 0..=self.repeat {
            let begun: Result<Vec<Observed>> = contenders.iter().map(Contender::begin).collect();
            let policies = begun?;
            // The pass before the first warms the machine up, for which one phase is enough.
            let phases = if pass == 0 { 1 } else { workload.len() };
            for (at, streams) in workload.iter().enumerate().take(phases) {
                let mut runs: Vec<Run> =
                    contenders.iter().map(|_| Run::new(streams.len())).collect();
                for (number, turn) in phase::turns(streams).enumerate() {
                    for after in 0..contenders.len() {
                        // Nobody always follows the same one.
                        let who = (after + pass + at + number) % contenders.len();
                        runs[who].go_on(&mut engine, &turn, &contenders[who], &policies[who])?;
                    }
                }
                for (contender, run) in contenders.iter().zip(&runs) {
                    if exact && run.answers != runs[0].answers {
                        return Err(Error::Other(format!(
                            "{} changed an answer, which speculation must never do",
                            contender.name()
                        )));
                    }
                }
                if pass > 0 {
                    for (record, run) in records[at].iter_mut().zip(runs) {
                        record.courses.push(run.course(PARTS));
                        record.totals.push(run.totals);
                    }
                }
            }
            if !self.quiet {
                notice(format_args!("pass      {pass} of {}", self.repeat));
            }
        }
        Ok(records)
    }

    /// Prints and writes what the passes came to.
    fn report(&self, contenders: &[Contender], records: &[Vec<Record>]) -> Result<ExitCode> {
        let names: Vec<String> = contenders.iter().map(Contender::name).collect();
        let of_all = |totals: &dyn Fn(usize) -> Vec<Totals>| -> Vec<(String, Vec<Totals>)> {
            names.iter().enumerate().map(|(who, name)| (name.clone(), totals(who))).collect()
        };
        let phases = self.phases.iter().zip(records).map(|(phase, records)| {
            Section::new(phase.to_string(), &of_all(&|who| records[who].totals.clone()))
        });
        let phases: Vec<Section> = phases.collect();
        let whole_pass = |who: usize, pass: usize| {
            let mut sum = Totals::default();
            records.iter().for_each(|records| sum.add(&records[who].totals[pass]));
            sum
        };
        let overall = Section::new(
            "overall".into(),
            &of_all(&|who| (0..self.repeat).map(|pass| whole_pass(who, pass)).collect()),
        );
        let tables = phases.iter().chain([&overall]).map(Section::table);
        let tables = tables.collect::<Vec<_>>().join("\n");
        write!(stdout(), "{tables}").map_err(|e| Error::output("standard output", e))?;
        if let Some(path) = &self.json {
            let json = self.to_json(&names, records, &phases, &overall);
            write_file(path, &format!("{json:#}\n"))?;
        }
        if let Some(path) = &self.svg {
            write_file(path, &self.chart(&names, records, &phases, &overall).svg())?;
        }
        Ok(ExitCode::SUCCESS)
    }

    fn to_json(
        &self,
        names: &[String],
        records: &[Vec<Record>],
        phases: &[Section],
        overall: &Section,
    ) -> Value {
        let phase = |((section, records), phase): ((&Section, &Vec<Record>), &Phase)| {
            let courses: Vec<Value> = names
                .iter()
                .zip(records)
                .map(|(name, record)| json!({ "name": name, "tokens_per_second": record.course() }))
                .collect();
            let mut json = section.json();
            json["kind"] = json!(phase.kind);
            json["batch"] = json!(phase.batch);
            json["over_time"] = courses.into();
            json
        };
        let phases = phases.iter().zip(records).zip(&self.phases).map(phase);
        json!({
            "model": self.model.name(),
            "repeat": self.repeat,
            "phase_tokens": self.phase_tokens,
            "answer_tokens": self.answer_tokens,
            "phases": phases.collect::<Vec<_>>(),
            "overall": overall.json(),
        })
    }

    fn chart(
        &self,
        names: &[String],
        records: &[Vec<Record>],
        phases: &[Section],
        overall: &Section,
    ) -> Chart {
        let lines = names.iter().enumerate().map(|(who, name)| Line {
            name: format!("{name} ({:.2}×)", overall.figures[who].ratio.median),
            courses: records.iter().map(|records| records[who].course()).collect(),
        });
        let bands = phases.iter().map(|section| Band {
            label: section.title.clone(),
            seconds: section.figures[0].seconds,
        });
        let passes = if self.repeat == 1 {
            "one pass".into()
        } else {
            format!("median of {} passes", self.repeat)
        };
        Chart {
            title: format!("{}: tokens per second while the workload changes", self.model.name()),
            note: format!(
                "{passes}, in turns; answers of {} tokens, {} for each request of a batch and phase; \
                 in brackets how many times as fast as plain overall",
                self.answer_tokens, self.phase_tokens
            ),
            first: names[0].clone(),
            phases: bands.collect(),
            lines: lines.collect(),
        }
    }
}

impl Record {
    /// Tokens per second over the phase: at each time, the middle pass.
    fn course(&self) -> Vec<f64> {
        let middle = |at| Spread::of(self.courses.iter().map(|course| course[at])).median;
        (0..PARTS).map(middle).collect()
    }
}

fn policy_given() -> Error {
    Error::Usage(
        "every policy and size of trees has its turn: leave --speculative-policy and flags that \
         fix trees away"
            .into(),
    )
}

fn write_file(path: &Path, text: &str) -> Result<()> {
    std::fs::write(path, text).map_err(|e| Error::file(path.display(), e))
}
