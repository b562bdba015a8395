//! How tokens are drafted.

use aquila_spec::{MOST_STEPS, MOST_TOPK, Shape, Simulate, SimulateMethod};
use clap::{Args, ValueEnum};

use super::number::whole;
use crate::error::{Error, Result};

/// What drafts, and how large its trees are.
#[derive(Args, Debug, Clone, Default)]
#[command(next_help_heading = "Speculation (it changes the speed and never the text)")]
pub struct SpeculativeFlags {
    /// How tokens are drafted [default: EAGLE3 for the shipped model, else NONE]
    #[arg(long, value_enum, ignore_case = true, value_name = "NAME")]
    speculative_algorithm: Option<Algorithm>,

    /// The head (EAGLE3) or model (STANDALONE) that drafts [default: the shipped ones for tiny]
    #[arg(long, value_name = "MODEL")]
    speculative_draft_model_path: Option<String>,

    /// Tokens drafted one after the other [default: 3]
    #[arg(long, value_name = "N", value_parser = whole(0, MOST_STEPS), allow_negative_numbers = true)]
    speculative_num_steps: Option<usize>,

    /// Branches at each step; 1 is a chain [default: 1]
    #[arg(long, value_name = "N", value_parser = whole(1, MOST_TOPK), allow_negative_numbers = true)]
    speculative_eagle_topk: Option<usize>,

    /// Nodes verified in a round, the certain one included [default: steps + 1 for a chain, else
    /// up to four times that]
    #[arg(long, value_name = "N", value_parser = whole(1, 4096), allow_negative_numbers = true)]
    speculative_num_draft_tokens: Option<usize>,

    /// Pretend that rounds yield so many tokens on average, to measure their cost
    #[arg(long, value_name = "TOKENS", allow_negative_numbers = true)]
    simulate_acc_len: Option<f64>,

    /// How pretended lengths vary
    #[arg(long, value_enum, default_value_t = Method::MatchExpected)]
    simulate_acc_method: Method,
}

/// What drafts.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
#[value(rename_all = "UPPER")]
pub enum Algorithm {
    /// Plain decoding
    None,
    /// A head on hidden states of the model
    Eagle3,
    /// A smaller model with the same vocabulary
    Standalone,
}

#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Method {
    #[default]
    MatchExpected,
    Multinomial,
}

/// What the flags come to.
#[derive(Debug, Clone, PartialEq)]
pub struct Speculative {
    /// What drafts; never [`Algorithm::None`].
    pub algorithm: Algorithm,
    /// The head or model.
    pub draft: String,
    /// The trees.
    pub shape: Shape,
    /// Pretended acceptance.
    pub simulate: Option<Simulate>,
    /// What was not taken as given.
    pub warning: Option<String>,
}

impl SpeculativeFlags {
    /// What drafts for `model`, if anything.
    pub fn resolve(&self, model: &str) -> Result<Option<Speculative>> {
        let algorithm = match self.speculative_algorithm {
            Some(algorithm) => algorithm,
            None if model == "tiny" => Algorithm::Eagle3,
            None => Algorithm::None,
        };
        if algorithm == Algorithm::None {
            return self.refuse_without_algorithm();
        }
        let draft = match (&self.speculative_draft_model_path, model, algorithm) {
            (Some(path), ..) => path.clone(),
            (None, "tiny", Algorithm::Eagle3) => "tiny-eagle3".into(),
            (None, "tiny", _) => "draft".into(),
            (None, model, Algorithm::Eagle3) if model.starts_with("preset:") => {
                format!("{model}-eagle3")
            }
            _ => {
                return Err(Error::Usage(format!(
                    "--speculative-algorithm needs --speculative-draft-model-path: nothing that \
                     drafts is shipped for {model}"
                )));
            }
        };
        let (shape, warning) = self.shape()?;
        if shape == Shape::PLAIN {
            return Ok(None);
        }
        Ok(Some(Speculative { algorithm, draft, shape, simulate: self.simulate()?, warning }))
    }

    /// The flags with this algorithm and, unless none is given, these trees.
    pub fn with(&self, algorithm: Algorithm, shape: Option<Shape>) -> Self {
        let mut flags = Self { speculative_algorithm: Some(algorithm), ..self.clone() };
        if let Some(shape) = shape {
            flags.speculative_num_steps = Some(shape.steps());
            flags.speculative_eagle_topk = Some(shape.topk());
            flags.speculative_num_draft_tokens = Some(shape.nodes());
        }
        flags
    }

    /// The flags of an engine that does not draft.
    pub fn plain() -> Self {
        Self { speculative_algorithm: Some(Algorithm::None), ..Self::default() }
    }

    /// The algorithms to compare for `model`: the one that is asked for, or all whose draft is
    /// known.
    pub fn to_compare(&self, model: &str) -> Vec<Algorithm> {
        match (self.speculative_algorithm, &self.speculative_draft_model_path) {
            (Some(Algorithm::None), _) => Vec::new(),
            (Some(algorithm), _) => vec![algorithm],
            (None, None) if model == "tiny" => vec![Algorithm::Eagle3, Algorithm::Standalone],
            (None, _) => vec![Algorithm::Eagle3],
        }
    }

    /// Whether a flag says how large trees are.
    pub fn gives_shape(&self) -> bool {
        self.speculative_num_steps.is_some()
            || self.speculative_eagle_topk.is_some()
            || self.speculative_num_draft_tokens.is_some()
    }

    /// The flag that asks for drafting although nothing drafts.
    fn refuse_without_algorithm(&self) -> Result<Option<Speculative>> {
        let given = [
            ("--speculative-draft-model-path", self.speculative_draft_model_path.is_some()),
            ("--speculative-num-steps", self.speculative_num_steps.is_some()),
            ("--speculative-eagle-topk", self.speculative_eagle_topk.is_some()),
            ("--speculative-num-draft-tokens", self.speculative_num_draft_tokens.is_some()),
            ("--simulate-acc-len", self.simulate_acc_len.is_some()),
        ];
        match given.iter().find(|(_, given)| *given) {
            Some((flag, _)) => Err(Error::Usage(format!(
                "{flag} needs --speculative-algorithm EAGLE3 or STANDALONE"
            ))),
            None => Ok(None),
        }
    }

    fn shape(&self) -> Result<(Shape, Option<String>)> {
        let steps = self.speculative_num_steps.unwrap_or(3);
        let topk = self.speculative_eagle_topk.unwrap_or(1);
        let most = Shape::most_nodes(steps, topk);
        let nodes = self.speculative_num_draft_tokens.unwrap_or((4 * (steps + 1)).min(most));
        let shape = Shape::new(steps, topk, nodes).map_err(|e| Error::Usage(e.to_string()))?;
        let given = self.speculative_num_draft_tokens.filter(|&nodes| nodes != shape.nodes());
        let warning = given.map(|nodes| {
            format!(
                "--speculative-num-draft-tokens {nodes} becomes {}: a chain of {steps} steps has \
                 that many nodes",
                shape.nodes()
            )
        });
        Ok((shape, warning))
    }

    fn simulate(&self) -> Result<Option<Simulate>> {
        let Some(length) = self.simulate_acc_len else { return Ok(None) };
        if !(1.0..=MOST_STEPS as f64 + 1.0).contains(&length) {
            return Err(Error::Usage(format!(
                "--simulate-acc-len counts the bonus: it must be at least 1; found {length}"
            )));
        }
        let method = match self.simulate_acc_method {
            Method::MatchExpected => SimulateMethod::MatchExpected,
            Method::Multinomial => SimulateMethod::Multinomial,
        };
        Ok(Some(Simulate { length, method }))
    }
}
