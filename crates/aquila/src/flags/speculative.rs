//! How tokens are drafted.

use std::path::PathBuf;

use aquila_model::{HeadOptions, holds_mtp_layers};
use aquila_spec::{
    AskedShape, DraftFor, DraftOptions, Entry, MOST_STEPS, MOST_TOPK, NONE, RateSchedule, Shape,
    Simulate, SimulateMethod, Verify,
};
use clap::{Args, ValueEnum};

use super::head::HeadFlags;
use super::named;
use super::ngram::NgramFlags;
use super::number::whole;
use super::policy::{PolicyFlags, PolicyPlan};
use super::verify::VerifyFlags;
use crate::Algorithms;
use crate::error::{Error, Result};
use crate::find::find;

/// What SGLang calls EAGLE, also where MTP layers draft; the names with n-grams and without.
const EAGLE_AS_MTP: [(&str, &str); 2] = [("EAGLE", "MTP"), ("EAGLE+NGRAM", "MTP+NGRAM")];

/// The algorithm that the flags about n-grams are for.
const NGRAM: &str = "NGRAM";

/// What drafts, and how large its trees are.
#[derive(Args, Debug, Clone, Default)]
#[command(next_help_heading = "Speculation (it changes the speed and never the text)")]
pub struct SpeculativeFlags {
    /// How tokens are drafted: NONE, EAGLE, EAGLE3, MTP (or NEXTN), STANDALONE, NGRAM, another that
    /// this build has, or one with +NGRAM, which drafts from n-grams where they promise more
    /// [default: EAGLE3 for the shipped model, else NONE]
    #[arg(long, value_name = "NAME", alias = "speculative-algo")]
    speculative_algorithm: Option<String>,

    /// The head (EAGLE, EAGLE3, MTP) or model (STANDALONE) that drafts [default: the shipped ones
    /// for tiny; MTP layers in the model's own checkpoint]
    #[arg(long, value_name = "MODEL", aliases = ["speculative-draft-model", "speculative-draft"])]
    speculative_draft_model_path: Option<String>,

    /// The branch, tag or commit of what drafts, where that is on the hub [default: main]
    #[arg(long, value_name = "REVISION", requires = "speculative_draft_model_path")]
    speculative_draft_model_revision: Option<String>,

    /// Tokens drafted one after the other [default: as the policy decides; no more than the layers of
    /// an MTP head that has one for each]
    #[arg(long, value_name = "N", value_parser = whole(0, MOST_STEPS), allow_negative_numbers = true)]
    speculative_num_steps: Option<usize>,

    /// Branches at each step; 1 is a chain [default: 1]
    #[arg(long, value_name = "N", value_parser = whole(1, MOST_TOPK), allow_negative_numbers = true)]
    speculative_eagle_topk: Option<usize>,

    /// Nodes verified in a round, the certain one included [default: steps + 1 for a chain, else
    /// up to four times that]
    #[arg(long, value_name = "N", value_parser = whole(1, 4096), allow_negative_numbers = true)]
    speculative_num_draft_tokens: Option<usize>,

    /// An option of the algorithm's own, as NAME=VALUE; `help` lists those that it takes
    #[arg(long = "speculative-option", value_name = "NAME=VALUE")]
    speculative_options: Vec<String>,

    /// How drafts are verified.
    #[command(flatten)]
    verify: VerifyFlags,

    /// Flags about heads.
    #[command(flatten)]
    head: HeadFlags,

    /// Pretend that rounds yield so many tokens on average, to measure their cost
    #[arg(long, value_name = "TOKENS", allow_negative_numbers = true)]
    simulate_acc_len: Option<f64>,

    /// Pretend that each draft is right with this probability where those before it were; with
    /// RATE:ROUNDS,RATE:ROUNDS,… one rate after the other, over and over
    #[arg(long, value_name = "RATE", value_delimiter = ',', value_parser = rate,
        conflicts_with_all = ["simulate_acc_len", "simulate_acc_method"])]
    simulate_acc_rate: Vec<(f64, Option<u64>)>,

    /// How pretended lengths vary
    #[arg(long, value_enum, default_value_t = Method::MatchExpected)]
    simulate_acc_method: Method,

    /// Flags about policies.
    #[command(flatten)]
    policy: PolicyFlags,

    /// Flags about n-grams.
    #[command(flatten)]
    pub ngram: NgramFlags,
}

#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Method {
    #[default]
    MatchExpected,
    Multinomial,
}

/// What the flags come to.
pub struct Speculative<'a> {
    /// What drafts.
    pub entry: &'a dyn Entry,
    /// The head or model, where one is needed.
    pub draft: Option<String>,
    /// Its revision, where it is one of the hub.
    pub draft_revision: Option<String>,
    /// The file that names the only tokens to draft.
    pub token_map: Option<PathBuf>,
    /// What the flags decide of a head.
    pub head: HeadOptions,
    /// What flags say about trees.
    pub asked: AskedShape,
    /// Who decides how large trees are.
    pub policy: PolicyPlan,
    /// How drafts are verified.
    pub verify: Verify,
    /// Pretended acceptance.
    pub simulate: Option<Simulate>,
    /// The algorithm's own options.
    pub options: DraftOptions,
    /// What else the name of the algorithm means than it says, if so.
    pub note: Option<String>,
    warnings: Vec<String>,
}

impl Speculative<'_> {
    /// Takes trees no deeper than what drafts can make them; refuses a flag that asks for more.
    pub fn fit(&mut self, most_steps: Option<usize>) -> Result<()> {
        let Some(most) = most_steps else { return Ok(()) };
        if let Some(steps) = self.asked.steps.filter(|&steps| steps > most) {
            return Err(Error::Usage(format!(
                "--speculative-num-steps {steps}: what drafts has {most} layers, one for each \
                 step: at most {most} steps"
            )));
        }
        if let PolicyPlan::Fixed(shape) = &mut self.policy
            && shape.steps() > most
        {
            *shape = self.entry.shape(AskedShape { steps: Some(most), ..self.asked })?;
        }
        if self.policy.cap(most) {
            self.warnings.push(format!(
                "steps beyond {most} are left out of --speculative-policy adaptive: what drafts \
                 has {most} layers, one for each step"
            ));
        }
        Ok(())
    }

    /// What was not taken as given.
    pub fn warnings(&self) -> Vec<String> {
        let mut warnings = self.warnings.clone();
        if let (PolicyPlan::Fixed(shape), Some(given)) = (&self.policy, self.asked.nodes)
            && shape.nodes() != given
        {
            warnings.push(format!(
                "--speculative-num-draft-tokens {given} becomes {}: a chain of {} steps has that \
                 many nodes",
                shape.nodes(),
                shape.steps()
            ));
        }
        warnings
    }
}

impl SpeculativeFlags {
    /// What drafts for `model`, taken at this revision, if anything.
    pub fn resolve<'a>(
        &self,
        model: &str,
        revision: Option<&str>,
        algorithms: &'a Algorithms,
    ) -> Result<Option<Speculative<'a>>> {
        let name = match &self.speculative_algorithm {
            Some(name) => name,
            None if model == "tiny" => "EAGLE3",
            None => NONE,
        };
        let Some(entry) = algorithms.find(name)? else {
            self.refuse_without_algorithm(algorithms)?;
            return Ok(None);
        };
        let (entry, note) = match self.eagle_as_mtp(entry, model, revision, algorithms)? {
            Some((entry, note)) => (entry, Some(note)),
            None => (entry, None),
        };
        if let Some(flag) = self.ngram.given().filter(|_| !entry.drafts_from_ngrams()) {
            return Err(Error::Usage(format!(
                "{flag} is for --speculative-algorithm {NGRAM}, alone or mixed (EAGLE3+{NGRAM})"
            )));
        }
        if let Some(flag) = self.head.given().find(|flag| !entry.takes().contains(flag)) {
            let takers = algorithms.entries().filter(|entry| entry.takes().contains(&flag));
            let takers: Vec<&str> = takers.map(Entry::name).collect();
            return Err(Error::Usage(format!(
                "{} is for --speculative-algorithm {}, not for {}",
                named::draft_flag(flag),
                takers.join(" or "),
                entry.name()
            )));
        }
        if self.speculative_options.iter().any(|option| option == "help") {
            return Err(Error::Listed(format!(
                "{} takes {}",
                entry.name(),
                DraftOptions::list(entry)
            )));
        }
        let options = DraftOptions::of(entry, &self.speculative_options)?;
        let given = self.speculative_draft_model_path.clone();
        let draft = match entry.draft_for(model) {
            DraftFor::Nothing if given.is_some() => {
                return Err(Error::Usage(format!(
                    "--speculative-draft-model-path is not for {}: no model drafts",
                    entry.name()
                )));
            }
            DraftFor::Nothing => None,
            DraftFor::Model(shipped) => Some(given.unwrap_or(shipped)),
            DraftFor::Itself => Some(given.unwrap_or_else(|| model.into())),
            DraftFor::Unknown => Some(given.ok_or_else(|| {
                Error::Usage(format!(
                    "--speculative-algorithm {} needs --speculative-draft-model-path: neither is \
                     something that drafts so shipped for {model}, nor in its checkpoint",
                    entry.name()
                ))
            })?),
        };
        let draft_revision = match &self.speculative_draft_model_path {
            None if draft.as_deref() == Some(model) => revision.map(str::to_owned),
            _ => self.speculative_draft_model_revision.clone(),
        };
        let asked = self.asked(entry);
        let shape = entry.shape(asked)?;
        let flags = AskedShape { topk: self.speculative_eagle_topk, ..asked };
        let (policy, warnings) = self.policy.plan(shape, entry.largest(asked)?, flags)?;
        let shape = policy.covering();
        if shape == Shape::PLAIN {
            return Ok(None);
        }
        let (token_map, head) = (self.head.token_map(), self.head.options());
        let (verify, simulate) = (self.verify.resolve()?, self.simulate()?);
        Ok(Some(Speculative {
            entry,
            draft,
            draft_revision,
            token_map,
            head,
            asked,
            policy,
            verify,
            simulate,
            options,
            note,
            warnings,
        }))
    }

    /// MTP in place of EAGLE, and a line about it, where what drafts is MTP layers: those that a
    /// draft path names, or those in the model's own checkpoint.
    fn eagle_as_mtp<'a>(
        &self,
        entry: &dyn Entry,
        model: &str,
        revision: Option<&str>,
        algorithms: &'a Algorithms,
    ) -> Result<Option<(&'a dyn Entry, String)>> {
        let Some((eagle, mtp)) = EAGLE_AS_MTP.iter().find(|(eagle, _)| *eagle == entry.name())
        else {
            return Ok(None);
        };
        let (draft, revision) = match &self.speculative_draft_model_path {
            Some(given) => (given.as_str(), self.speculative_draft_model_revision.as_deref()),
            None if entry.draft_for(model) == DraftFor::Unknown => (model, revision),
            None => return Ok(None),
        };
        if !holds_mtp_layers(&find(draft, revision, false)?) {
            return Ok(None);
        }
        let note = format!(
            "--speculative-algorithm {eagle} means {mtp} here, since {draft} holds MTP layers"
        );
        Ok(algorithms.find(mtp)?.map(|entry| (entry, note)))
    }

    /// The flags with this algorithm and, unless none is given, these trees.
    pub fn with(&self, algorithm: &str, shape: Option<Shape>) -> Self {
        let mut flags = Self { speculative_algorithm: Some(algorithm.into()), ..self.clone() };
        if let Some(shape) = shape {
            flags.speculative_num_steps = Some(shape.steps());
            flags.speculative_eagle_topk = Some(shape.topk());
            flags.speculative_num_draft_tokens = Some(shape.nodes());
        }
        flags
    }

    /// The flags of an engine that does not draft.
    pub fn plain() -> Self {
        Self { speculative_algorithm: Some(NONE.into()), ..Self::default() }
    }

    /// The algorithms to compare for `model`: the one that is asked for, or all whose draft is
    /// known.
    pub fn to_compare(&self, model: &str, algorithms: &Algorithms) -> Result<Vec<&'static str>> {
        if let Some(name) = &self.speculative_algorithm {
            return Ok(algorithms.find(name)?.map(Entry::name).into_iter().collect());
        }
        let known = |entry: &&dyn Entry| {
            !matches!(entry.draft_for(model), DraftFor::Unknown | DraftFor::Itself)
        };
        Ok(algorithms.entries().filter(known).map(Entry::name).collect())
    }

    /// Whether a flag says who or what decides how large trees are.
    pub fn decides_trees(&self) -> bool {
        self.gives_shape() || self.policy.given().is_some()
    }

    /// Whether a flag says how large trees are.
    pub fn gives_shape(&self) -> bool {
        self.speculative_num_steps.is_some()
            || self.speculative_eagle_topk.is_some()
            || self.speculative_num_draft_tokens.is_some()
    }

    /// Refuses the flag that asks for drafting although nothing drafts.
    fn refuse_without_algorithm(&self, algorithms: &Algorithms) -> Result<()> {
        let given = [
            ("--speculative-draft-model-path", self.speculative_draft_model_path.is_some()),
            ("--speculative-num-steps", self.speculative_num_steps.is_some()),
            ("--speculative-eagle-topk", self.speculative_eagle_topk.is_some()),
            ("--speculative-num-draft-tokens", self.speculative_num_draft_tokens.is_some()),
            ("--simulate-acc-len", self.simulate_acc_len.is_some()),
            ("--simulate-acc-rate", !self.simulate_acc_rate.is_empty()),
            ("--speculative-option", !self.speculative_options.is_empty()),
        ];
        let names: Vec<&str> = algorithms.entries().map(Entry::name).collect();
        let given = given.iter().find_map(|(flag, given)| given.then_some(*flag));
        let of_head = self.head.given().next().map(named::draft_flag);
        let given = given.or(of_head).or(self.verify.given());
        match given.or(self.policy.given()).or(self.ngram.given()) {
            Some(flag) => Err(Error::Usage(format!(
                "{flag} needs --speculative-algorithm, one of {}",
                names.join(", ")
            ))),
            None => Ok(()),
        }
    }

    fn asked(&self, entry: &dyn Entry) -> AskedShape {
        AskedShape {
            steps: self.speculative_num_steps,
            topk: self
                .speculative_eagle_topk
                .or(self.ngram.topk().filter(|_| entry.name() == NGRAM)),
            nodes: self.speculative_num_draft_tokens,
        }
    }

    fn simulate(&self) -> Result<Option<Simulate>> {
        match &self.simulate_acc_rate[..] {
            [] => {}
            [(rate, None)] => {
                return Ok(Some(Simulate::Rate(RateSchedule { rates: vec![(*rate, 1)] })));
            }
            rates => {
                let lasts = |&(rate, rounds): &(f64, Option<u64>)| Some((rate, rounds?));
                let rates = rates.iter().map(lasts).collect::<Option<_>>().ok_or_else(|| {
                    Error::Usage(
                        "--simulate-acc-rate: each of several rates needs its rounds, as in \
                         0.25:500,0.7:500"
                            .into(),
                    )
                })?;
                return Ok(Some(Simulate::Rate(RateSchedule { rates })));
            }
        }
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
        Ok(Some(Simulate::Length { mean: length, method }))
    }
}

/// A rate, and how many rounds it lasts.
fn rate(text: &str) -> std::result::Result<(f64, Option<u64>), String> {
    let (rate, rounds) = match text.split_once(':') {
        Some((rate, rounds)) => (rate, Some(rounds)),
        None => (text, None),
    };
    let rounds = rounds.map(|rounds| rounds.parse().ok().filter(|&rounds: &u64| rounds > 0));
    match (rate.parse(), rounds) {
        (Ok(rate), rounds) if (0.0..=1.0).contains(&rate) && rounds != Some(None) => {
            Ok((rate, rounds.flatten()))
        }
        _ => Err("expected a probability from 0 to 1, or one with rounds, such as 0.7:500".into()),
    }
}
