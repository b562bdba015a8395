//! Who decides how large the trees of each round are.

use std::path::PathBuf;
use std::time::Duration;

use aquila_spec::policy::{Adaptive, AdaptiveTable, AutoSettings};
use aquila_spec::{AskedShape, Shape};
use clap::{Args, ValueEnum};

use crate::error::{Error, Result};

/// How long measuring costs may take by default.
const MEASURED_SECONDS: f64 = 3.0;

/// The flags of policies.
#[derive(Args, Debug, Clone, Default)]
pub struct PolicyFlags {
    /// Who decides how large trees are, round by round [default: auto; fixed where a flag says how
    /// large they are]
    #[arg(long, value_enum, value_name = "POLICY")]
    speculative_policy: Option<PolicyName>,

    /// The same as --speculative-policy adaptive
    #[arg(long)]
    speculative_adaptive: bool,

    /// adaptive: steps to choose among by batch size: a file in SGLang's format, `sglang` for the
    /// table in its code or `sglang-published` for the one in its documentation [default: sglang]
    #[arg(long, value_name = "FILE")]
    speculative_adaptive_config: Option<PathBuf>,

    /// auto: where what rounds cost is kept; measured at start where it is not there [default: a
    /// file of its own for each machine, model and set of flags in the user's cache folder]
    #[arg(long, value_name = "FILE")]
    speculative_cost_table: Option<PathBuf>,

    /// auto: seconds that measuring costs may take; rounds of one request are always timed, and
    /// what there is no time for is estimated [default: 3]
    #[arg(long, value_name = "SECONDS", value_parser = seconds, allow_negative_numbers = true)]
    speculative_cost_seconds: Option<f64>,
}

#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
enum PolicyName {
    /// The trees that the flags give, in every round
    Fixed,
    /// SGLang's: steps by batch size and by how many drafts were right
    Adaptive,
    /// The trees with the most expected tokens per second, or none
    Auto,
}

/// What the flags come to.
#[derive(Debug, Clone, PartialEq)]
pub enum PolicyPlan {
    /// One shape.
    Fixed(Shape),
    /// SGLang's controller.
    Adaptive {
        /// Its slots.
        table: AdaptiveTable,
        /// The steps to begin with.
        num_steps: Option<usize>,
    },
    /// Ours.
    Auto {
        /// The largest tree, and by what it decides.
        settings: AutoSettings,
        /// Where costs are kept, if not where they are by default.
        costs: Option<PathBuf>,
        /// How long measuring them may take.
        limit: Duration,
    },
}

impl PolicyPlan {
    /// The smallest tree that none of its trees exceeds.
    pub fn covering(&self) -> Shape {
        match self {
            PolicyPlan::Fixed(shape) => *shape,
            PolicyPlan::Adaptive { table, .. } => {
                Shape::covering(table.slots.values().map(|slot| slot.largest))
            }
            PolicyPlan::Auto { settings, .. } => settings.largest,
        }
    }

    /// Leaves deeper trees out; says whether a table of SGLang's had some.
    pub fn cap(&mut self, most: usize) -> bool {
        match self {
            PolicyPlan::Fixed(shape) => *shape = shape.capped(most),
            PolicyPlan::Adaptive { table, .. } => return table.cap(most),
            PolicyPlan::Auto { settings, .. } => settings.largest = settings.largest.capped(most),
        }
        false
    }

    /// Whether drafts are paused while plain decoding is faster.
    pub fn pauses(&self) -> bool {
        matches!(self, PolicyPlan::Auto { .. })
    }
}

impl std::fmt::Display for PolicyPlan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            PolicyPlan::Fixed(shape) => write!(f, "{shape}"),
            PolicyPlan::Adaptive { .. } => write!(f, "up to {}, adaptive", self.covering()),
            PolicyPlan::Auto { .. } => write!(f, "up to {}, auto", self.covering()),
        }
    }
}

impl PolicyFlags {
    /// A flag that was given, if any.
    pub fn given(&self) -> Option<&'static str> {
        [
            ("--speculative-policy", self.speculative_policy.is_some()),
            ("--speculative-adaptive", self.speculative_adaptive),
            ("--speculative-adaptive-config", self.speculative_adaptive_config.is_some()),
            ("--speculative-cost-table", self.speculative_cost_table.is_some()),
            ("--speculative-cost-seconds", self.speculative_cost_seconds.is_some()),
        ]
        .iter()
        .find_map(|(flag, given)| given.then_some(*flag))
    }

    /// The policy: `shape` is the tree that the flags fix, `largest` the one that a policy may
    /// choose, and `asked` are the flags themselves.
    pub fn plan(
        &self,
        shape: Shape,
        largest: Shape,
        asked: AskedShape,
    ) -> Result<(PolicyPlan, Vec<String>)> {
        let AskedShape { steps, topk, nodes } = asked;
        let name = self.name(steps.or(topk).or(nodes).is_some())?;
        if self.speculative_adaptive_config.is_some() && name != PolicyName::Adaptive {
            return Err(only_for("--speculative-adaptive-config", "adaptive"));
        }
        if self.speculative_cost_table.is_some() && name != PolicyName::Auto {
            return Err(only_for("--speculative-cost-table", "auto"));
        }
        if self.speculative_cost_seconds.is_some() && name != PolicyName::Auto {
            return Err(only_for("--speculative-cost-seconds", "auto"));
        }
        match name {
            PolicyName::Fixed => Ok((PolicyPlan::Fixed(shape), Vec::new())),
            PolicyName::Auto => {
                let settings = AutoSettings::new(largest);
                let costs = self.speculative_cost_table.clone();
                let seconds = self.speculative_cost_seconds.unwrap_or(MEASURED_SECONDS);
                let limit = Duration::from_secs_f64(seconds);
                Ok((PolicyPlan::Auto { settings, costs, limit }, Vec::new()))
            }
            // SGLang's own scripts pass the chain that its controller begins with.
            PolicyName::Adaptive
                if topk.is_some_and(|topk| topk != 1)
                    || nodes.is_some_and(|nodes| steps.is_none_or(|s| nodes != s + 1)) =>
            {
                Err(Error::Usage(
                    "--speculative-policy adaptive takes topk and draft_tokens from its config, by \
                     batch size: beside it, --speculative-eagle-topk is 1 and \
                     --speculative-num-draft-tokens is --speculative-num-steps plus 1"
                        .into(),
                ))
            }
            PolicyName::Adaptive => {
                let mut table = self.table()?;
                let of_file = |why: String| format!("--speculative-adaptive-config: {why}");
                let warnings = std::mem::take(&mut table.warnings).into_iter().map(of_file);
                let warnings = warnings.collect();
                // Refused now, before anything is loaded.
                Adaptive::new(table.clone(), steps, Vec::new())?;
                Ok((PolicyPlan::Adaptive { table, num_steps: steps }, warnings))
            }
        }
    }

    fn name(&self, given: bool) -> Result<PolicyName> {
        match (self.speculative_policy, self.speculative_adaptive) {
            (None | Some(PolicyName::Adaptive), true) => Ok(PolicyName::Adaptive),
            (Some(name), false) => Ok(name),
            (Some(_), true) => Err(Error::Usage(
                "--speculative-adaptive is --speculative-policy adaptive: give one of them".into(),
            )),
            (None, false) if given => Ok(PolicyName::Fixed),
            (None, false) => Ok(PolicyName::Auto),
        }
    }

    fn table(&self) -> Result<AdaptiveTable> {
        let Some(path) = &self.speculative_adaptive_config else {
            return Ok(AdaptiveTable::default());
        };
        match path.to_str() {
            Some("sglang") => return Ok(AdaptiveTable::default()),
            Some("sglang-published") => return Ok(AdaptiveTable::published()),
            _ => {}
        }
        let cannot =
            |e| Error::Usage(format!("--speculative-adaptive-config {}: {e}", path.display()));
        let text = std::fs::read_to_string(path).map_err(|e| cannot(e.to_string()))?;
        AdaptiveTable::parse(&text).map_err(|e| cannot(e.to_string()))
    }
}

fn only_for(flag: &str, policy: &str) -> Error {
    Error::Usage(format!("{flag} is for --speculative-policy {policy}"))
}

/// Parses a time of an hour at most.
fn seconds(text: &str) -> std::result::Result<f64, String> {
    match text.parse() {
        Ok(number) if (0.0..=3600.0).contains(&number) => Ok(number),
        _ => Err("expected a number from 0 to 3600".into()),
    }
}
