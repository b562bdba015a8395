//! `aquila bench spec`: what speculation gives over plain decoding.
//!
//! Plain decoding and every algorithm with every tree take turns in one process, one batch of
//! prompts each, so that whatever else the machine does falls on all of them alike; a ratio
//! compares passes that ran at the same time. Only decoding is timed, from the end of the round
//! that read the last prompt of a batch on. Unless acceptance is simulated, every answer must be plain
//! decoding's. N-grams are of each request alone, since every pass has the same prompts.

mod contender;
mod figures;

use std::io::{Write, stdout};
use std::process::ExitCode;

use aquila_spec::Shape;
use aquila_text::{Generator, Prompt, SamplingParams};
use clap::Args;
use serde_json::{Value, json};

use self::contender::{Contender, Pass};
use self::figures::{Figures, table};
use super::prompts::{self, Random};
use crate::Algorithms;
use crate::after_help::AFTER_HELP;
use crate::error::{Error, Result};
use crate::flags::{EngineFlags, ModelFlags, PolicyPlan, SamplingFlags, SpeculativeFlags};
use crate::notice::notice;
use crate::start::start;

/// Prompts for models without a tokenizer: how many, and their tokens.
const RANDOM_PROMPTS: (usize, usize) = (2, 64);

/// Compare speculation with plain decoding, on the same prompts and in turns.
#[derive(Args)]
#[command(after_help = AFTER_HELP)]
pub struct Spec {
    /// Trees to compare, as steps/topk/nodes, `auto` for the policy, or `plain` for plain decoding
    /// once more, which shows the noise [default: auto,3/1/4,5/1/6,5/4/16, or what the
    /// --speculative flags give]
    #[arg(long, value_delimiter = ',', value_name = "S/K/N", value_parser = tree)]
    shapes: Vec<Tree>,

    /// A file of JSON lines with "prompt" and "kind" [default: a few beginnings of programs;
    /// random tokens where the model has no tokenizer]
    #[arg(long, value_name = "FILE")]
    prompts: Option<String>,

    /// Only prompts of this kind
    #[arg(long, value_name = "KIND")]
    kind: Option<String>,

    /// Requests that decode together
    #[arg(long, default_value_t = 1, value_name = "N")]
    batch: usize,

    /// Passes over the prompts, after one that is not counted
    #[arg(long, default_value_t = 5, value_name = "N")]
    repeat: usize,

    /// Print JSON instead of a table
    #[arg(long)]
    json: bool,

    /// Print figures and errors only
    #[arg(long, short)]
    quiet: bool,

    #[command(flatten)]
    model: ModelFlags,

    #[command(flatten)]
    sampling: SamplingFlags,

    #[command(flatten)]
    engine: EngineFlags,
}

impl Spec {
    /// Runs the command.
    pub fn run(&self, algorithms: &Algorithms) -> Result<ExitCode> {
        for (flag, value) in [("batch", self.batch), ("repeat", self.repeat)] {
            if value == 0 {
                return Err(Error::Usage(format!("--{flag} must be at least 1 for a figure")));
            }
        }
        let mut contenders = self.contenders(algorithms)?;
        let prompts = self.prompts(&contenders[0].generator)?;
        for turn in 0..=self.repeat {
            let mut passes: Vec<Pass> = contenders.iter().map(|_| Pass::default()).collect();
            for prompts in prompts.chunks(self.batch) {
                for (contender, pass) in contenders.iter().zip(&mut passes) {
                    contender.answer(prompts, pass)?;
                }
            }
            for (contender, pass) in contenders.iter().zip(&passes) {
                if !contender.pretends && pass.answers != passes[0].answers {
                    return Err(Error::Other(format!(
                        "{} changed an answer, which speculation must never do",
                        contender.name
                    )));
                }
            }
            if turn > 0 {
                contenders.iter_mut().zip(passes).for_each(|(c, pass)| c.passes.push(pass));
            }
            if !self.quiet {
                notice(format_args!("pass      {turn} of {}", self.repeat));
            }
        }
        let figures: Vec<Figures> =
            contenders.iter().map(|c| Figures::of(c, &contenders[0])).collect();
        let text = if self.json {
            let list: Vec<Value> = figures.iter().map(Figures::json).collect();
            json!({
                "model": self.model.name(),
                "batch": self.batch,
                "repeat": self.repeat,
                "prompts": prompts.len(),
                "contenders": list,
            })
            .to_string()
        } else {
            table(&figures)
        };
        writeln!(stdout(), "{text}").map_err(|e| Error::output("standard output", e))?;
        Ok(ExitCode::SUCCESS)
    }

    /// Plain decoding first, then every algorithm with every tree.
    fn contenders(&self, algorithms: &Algorithms) -> Result<Vec<Contender>> {
        let flags = &self.engine.speculative;
        let model = self.model.name();
        // Where nobody says, the policy's own choice and some trees to compare it with.
        let by_default = self.shapes.is_empty() && !flags.decides_trees();
        let shapes: Vec<Option<Shape>> = match (&self.shapes[..], flags.gives_shape()) {
            ([], _) if by_default => {
                [None, shape("3/1/4").ok(), shape("5/1/6").ok(), shape("5/4/16").ok()].to_vec()
            }
            ([], _) => vec![None],
            (trees, false) => {
                let drafted = |tree: &Tree| match *tree {
                    Tree::Plain => None,
                    Tree::Auto => Some(None),
                    Tree::Fixed(shape) => Some(Some(shape)),
                };
                trees.iter().filter_map(drafted).collect()
            }
            (_, true) => {
                return Err(Error::Usage(
                    "--shapes says how large trees are: leave out --speculative-num-steps, \
                     --speculative-eagle-topk and --speculative-num-draft-tokens"
                        .into(),
                ));
            }
        };
        let plain = |name: &str| self.contender(name.into(), SpeculativeFlags::plain(), algorithms);
        let mut all = vec![plain("plain")?];
        if self.shapes.contains(&Tree::Plain) {
            all.push(plain("plain again")?);
        }
        let mut ngrams = false;
        for algorithm in flags.to_compare(model, algorithms)? {
            for &shape in &shapes {
                let mut flags = flags.with(algorithm, shape);
                let Some(resolved) = flags.resolve(model, self.model.revision(), algorithms)?
                else {
                    continue;
                };
                if resolved.entry.drafts_from_ngrams() {
                    ngrams = true;
                    flags.ngram = flags.ngram.of_requests_by_default();
                }
                let tree = match &resolved.policy {
                    PolicyPlan::Fixed(shape) => short(*shape),
                    PolicyPlan::Adaptive { .. } => "adaptive".into(),
                    PolicyPlan::Auto { .. } => "auto".into(),
                };
                let name = format!("{algorithm} {tree}");
                match self.contender(name.clone(), flags, algorithms) {
                    Ok(contender) => all.push(contender),
                    Err(Error::Usage(why)) if by_default => {
                        notice(format_args!("without   {name}: {why}"));
                    }
                    Err(error) => return Err(error),
                }
            }
        }
        if ngrams && !self.quiet {
            // Every pass has the same prompts, and answers them alike.
            let scope = match flags.ngram.of_server() {
                true => "of texts that earlier passes answered too, which flatters them",
                false => {
                    "of each request's own text: passes repeat, and find nothing of each other"
                }
            };
            notice(format_args!("n-grams   {scope}"));
        }
        if all.len() == 1 {
            return Err(Error::Usage(
                "nothing to compare with plain decoding: give --speculative-algorithm".into(),
            ));
        }
        Ok(all)
    }

    fn contender(
        &self,
        name: String,
        speculative: SpeculativeFlags,
        algorithms: &Algorithms,
    ) -> Result<Contender> {
        let mut engine = self.engine.clone();
        engine.max_running_requests = self.batch;
        engine.speculative = speculative;
        // The first engine tells how all of them are set up.
        let quiet = self.quiet || name != "plain";
        let generator = start(&self.model, &engine, SamplingParams::default(), algorithms, quiet)?;
        let mut params = self.sampling.params()?;
        params.temperature = params.temperature.or(Some(0.0));
        if generator.tokenizer().is_none() {
            params.ignore_eos = params.ignore_eos.or(Some(true));
        }
        let params = generator.check(params)?;
        let pretends = generator.engine().config().simulate.is_some();
        Ok(Contender { name, generator, params, pretends, passes: Vec::new() })
    }

    fn prompts(&self, generator: &Generator) -> Result<Vec<Vec<u32>>> {
        let text = match &self.prompts {
            Some(path) => std::fs::read_to_string(path).map_err(|e| Error::file(path, e))?,
            None if generator.tokenizer().is_none() => {
                let mut random = Random { state: self.model.random_seed };
                let (count, tokens) = RANDOM_PROMPTS;
                let count = count.max(self.batch);
                let vocabulary = generator.engine().vocabulary();
                return Ok((0..count).map(|_| random.next(tokens, vocabulary)).collect());
            }
            None => prompts::CODE.to_owned(),
        };
        let mut prompts = Vec::new();
        for written in prompts::read(&text)? {
            if self.kind.is_none() || self.kind == written.kind {
                prompts.push(generator.tokens(Prompt::Text(written.prompt))?);
            }
        }
        if prompts.is_empty() {
            return Err(Error::Other("there is no prompt to measure with".into()));
        }
        Ok(prompts)
    }
}

/// What is compared with plain decoding.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Tree {
    Plain,
    Auto,
    Fixed(Shape),
}

fn tree(text: &str) -> std::result::Result<Tree, String> {
    match text {
        "plain" => Ok(Tree::Plain),
        "auto" => Ok(Tree::Auto),
        _ => Ok(Tree::Fixed(shape(text)?)),
    }
}

/// A tree as `--shapes` takes it.
fn short(shape: Shape) -> String {
    format!("{}/{}/{}", shape.steps(), shape.topk(), shape.nodes())
}

fn shape(text: &str) -> std::result::Result<Shape, String> {
    let numbers: Vec<usize> = text
        .split('/')
        .map(|number| number.parse().map_err(|_| format!("{number:?} is no number")))
        .collect::<std::result::Result<_, _>>()?;
    match numbers[..] {
        [steps, topk, nodes] if steps > 0 => {
            Shape::new(steps, topk, nodes).map_err(|e| e.to_string())
        }
        _ => Err("a tree is steps/topk/nodes, such as 3/1/4".into()),
    }
}
