//! Algorithms by name, from the flag to something that drafts.
//!
//! An [`Entry`] is found by its name in any case, opened on a target and loaded once memory is
//! known to suffice. The built-in algorithms are entries as any other.

use std::str::FromStr;
use std::sync::Arc;

use aquila_compute::cpu::CpuBackend;
use aquila_compute::cuda::CudaBackend;
use aquila_compute::{Backend, KvDtype, PlanBounds, WeightFormat};
use aquila_model::{Checkpoint, Decoder, HeadOptions, LoadFormat, Location, Needs};

use crate::error::{Error, Result};
use crate::mixed_entry::MixedEntry;
use crate::ngram::{NgramEntry, NgramSources};
use crate::{Algorithm, Shape, eagle, eagle3, mtp_entry, standalone};

/// The name under which nothing drafts.
pub const NONE: &str = "NONE";
/// Algorithms of SGLang's that are not here yet; no other algorithm may take their names.
const NOT_YET: [&str; 3] = ["FROZEN_KV_MTP", "DFLASH", "DSPARK"];

/// The deepest tree that is tried where no flag says: beyond it, drafts are hardly ever right.
const MOST_WORTH: usize = 5;

/// An algorithm that may be asked for by name.
pub trait Entry: Send + Sync {
    /// What it is asked for by.
    fn name(&self) -> &'static str;

    /// Other names for it.
    fn aliases(&self) -> &'static [&'static str] {
        &[]
    }

    /// What drafts for `model` where no flag says.
    fn draft_for(&self, model: &str) -> DraftFor;

    /// The flags about what drafts that it has a use for; any other is refused.
    fn takes(&self) -> &'static [DraftFlag] {
        &[]
    }

    /// Options of its own; any other is refused.
    fn options(&self) -> &'static [DraftOption] {
        &[]
    }

    /// Whether it drafts from n-grams, alone or among others.
    fn drafts_from_ngrams(&self) -> bool {
        false
    }

    /// The tree, where flags leave it open and what drafts is not known yet.
    fn shape(&self, asked: AskedShape) -> Result<Shape> {
        asked.resolve(3, 1)
    }

    /// The largest tree that a policy may choose where flags leave it open.
    fn largest(&self, asked: AskedShape) -> Result<Shape> {
        AskedShape { steps: asked.steps.or(Some(MOST_WORTH)), ..asked }.resolve(MOST_WORTH, 1)
    }

    /// Opens what the flags name; what does not fit the target is refused by name.
    fn open(&self, opening: &Opening<'_>) -> Result<Box<dyn Opened>>;
}

/// A flag about what drafts that not every algorithm has a use for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DraftFlag {
    /// Which tokens may be drafted, for a head without a vocabulary of its own.
    TokenMap,
    /// How a head that reads several layers of the target numbers them.
    AuxLayerConvention,
    /// The base of a head's rotary positions.
    RopeTheta,
    /// That there is a layer for each step.
    MultiLayer,
    /// What a head takes for the embedding of the first token.
    FirstEmbedding,
}

/// An option of an algorithm's own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DraftOption {
    /// Its name.
    pub name: &'static str,
    /// The value where none is given.
    pub default: &'static str,
    /// What it does, in a line.
    pub help: &'static str,
}

/// The options of an algorithm with their values.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DraftOptions(Vec<(&'static str, String)>);

impl DraftOptions {
    /// The options of `entry` with what was given, each as `NAME=VALUE`.
    ///
    /// # Errors
    /// If a name is not one of the entry's, or comes twice, or has no value.
    pub fn of(entry: &dyn Entry, given: &[String]) -> Result<Self> {
        let mut options: Vec<(&'static str, Option<String>)> =
            entry.options().iter().map(|option| (option.name, None)).collect();
        for text in given {
            let refused = |why: &str| Error::Option { option: text.clone(), why: why.into() };
            let (name, value) =
                text.split_once('=').ok_or_else(|| refused("expected NAME=VALUE"))?;
            let Some((_, option)) = options.iter_mut().find(|(known, _)| *known == name) else {
                let why = format!("{} takes {}", entry.name(), Self::list(entry));
                return Err(refused(&why));
            };
            if option.replace(value.to_owned()).is_some() {
                return Err(refused("it is given twice"));
            }
        }
        let defaults = entry.options().iter().map(|option| option.default.to_owned());
        let value = |((name, given), default): ((&'static str, Option<String>), String)| {
            (name, given.unwrap_or(default))
        };
        Ok(Self(options.into_iter().zip(defaults).map(value).collect()))
    }

    /// The options of an algorithm, a line for each.
    pub fn list(entry: &dyn Entry) -> String {
        if entry.options().is_empty() {
            return "no options".to_owned();
        }
        let line = |option: &DraftOption| {
            format!("\n  {}={}  {}", option.name, option.default, option.help)
        };
        entry.options().iter().map(line).collect()
    }

    /// The value of an option.
    pub fn get(&self, name: &str) -> &str {
        let option = self.0.iter().find(|(known, _)| *known == name);
        option.map_or("", |(_, value)| value)
    }

    /// The value of an option that is a number.
    ///
    /// # Errors
    /// If it is none, or not one of its kind.
    pub fn number<T: FromStr>(&self, name: &str) -> Result<T> {
        let value = self.get(name);
        let why = "not such a number".to_owned();
        value.parse().map_err(|_| Error::Option { option: format!("{name}={value}"), why })
    }
}

/// What drafts for a model where no flag says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DraftFor {
    /// Nothing needs to be loaded.
    Nothing,
    /// This model or head.
    Model(String),
    /// The model itself, if its checkpoint holds what drafts.
    Itself,
    /// None that is known: it must be given.
    Unknown,
}

impl DraftFor {
    /// The head of this kind that comes with the tiny model and with every preset.
    pub(crate) fn shipped_head(model: &str, kind: &str) -> Option<Self> {
        let is_shipped = model == "tiny" || model.starts_with("preset:");
        is_shipped.then(|| Self::Model(format!("{model}-{kind}")))
    }
}

/// What flags say about trees.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct AskedShape {
    /// Tokens drafted one after the other.
    pub steps: Option<usize>,
    /// Branches at each step.
    pub topk: Option<usize>,
    /// Nodes verified in a round, the bonus included.
    pub nodes: Option<usize>,
}

impl AskedShape {
    /// The tree that was asked for, `steps` deep and `topk` wide where that was left open, with
    /// four nodes a step where their number was.
    pub fn resolve(self, steps: usize, topk: usize) -> Result<Shape> {
        let steps = self.steps.unwrap_or(steps);
        let topk = self.topk.unwrap_or(topk);
        let most = Shape::most_nodes(steps, topk);
        Ok(Shape::new(steps, topk, self.nodes.unwrap_or((4 * (steps + 1)).min(most)))?)
    }
}

/// What an algorithm is opened on.
pub struct Opening<'a> {
    /// The model to draft for.
    pub target: &'a Checkpoint,
    /// What drafts: its name as given, and where it is; nothing where nothing is needed.
    pub draft: Option<(&'a str, &'a Location)>,
    /// How its weights are found.
    pub load: LoadFormat,
    /// The only tokens that a head without a vocabulary of its own may draft, if not all.
    pub token_map: Option<&'a [u32]>,
    /// What users decide of a head where its config may mislead.
    pub head: HeadOptions,
    /// Where n-grams come from, if not from the default.
    pub ngram: Option<&'a NgramSources>,
    /// The algorithm's own options.
    pub options: DraftOptions,
}

impl<'a> Opening<'a> {
    /// On a target, with defaults for everything else.
    pub fn new(target: &'a Checkpoint) -> Self {
        let (load, head) = (LoadFormat::Auto, HeadOptions::default());
        let options = DraftOptions::default();
        Self { target, draft: None, load, token_map: None, head, ngram: None, options }
    }

    /// What drafts, for an algorithm that cannot do without.
    pub fn draft(&self) -> Result<(&'a str, &'a Location)> {
        self.draft.ok_or(Error::NoDraft)
    }
}

/// What an algorithm may use.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Allowance {
    /// How weights are kept.
    pub format: WeightFormat,
    /// How keys and values are kept.
    pub kv_dtype: KvDtype,
    /// Rows of keys and values of each group.
    pub slots: usize,
    /// Tokens of the longest sequence.
    pub positions: usize,
    /// The largest pass of a draft model.
    pub bounds: PlanBounds,
    /// Rows of the largest pass of the target.
    pub target_rows: usize,
    /// Requests that run at a time.
    pub requests: usize,
    /// The largest tree.
    pub shape: Shape,
}

/// An algorithm whose draft fits its target, before it takes any memory. It can be put on every
/// backend that there is: one implementation of [`LoadOn`] for any backend serves them all.
pub trait Opened: LoadOn<CpuBackend> + LoadOn<CudaBackend> {
    /// How many steps its trees may have, where what drafts bounds them.
    fn most_steps(&self) -> Option<usize> {
        None
    }

    /// What it takes, for the budget; `allowance.slots` are not known yet.
    fn needs(&self, allowance: &Allowance) -> Needs;
}

/// How an algorithm is put on a backend.
pub trait LoadOn<B: Backend> {
    /// Puts it on the backend.
    fn load(&self, backend: &B, target: &Decoder<B>, allowance: &Allowance)
    -> Result<Algorithm<B>>;
}

/// The algorithms of a build.
pub struct Registry {
    entries: Vec<Arc<dyn Entry>>,
    /// Each entry that does not draft from n-grams, mixed with them.
    mixes: Vec<MixedEntry>,
}

impl Registry {
    /// The algorithms that Aquila brings.
    pub fn built_in() -> Self {
        let mut registry = Self { entries: Vec::new(), mixes: Vec::new() };
        let built_in: [Box<dyn Entry>; 5] = [
            Box::new(eagle3::Eagle3Entry),
            Box::new(eagle::EagleEntry),
            Box::new(mtp_entry::MtpEntry),
            Box::new(standalone::StandaloneEntry),
            Box::new(NgramEntry),
        ];
        for entry in built_in {
            registry.register(entry).expect("the built-in names are different");
        }
        registry
    }

    /// Adds an algorithm, unless one of its names is taken.
    pub fn register(&mut self, entry: Box<dyn Entry>) -> Result<()> {
        for name in names_of(&*entry) {
            let plain = |c: char| c.is_ascii_alphanumeric() || "_-".contains(c);
            if name.is_empty() || !name.chars().all(plain) {
                return Err(Error::BadName(name.to_owned()));
            }
            let reserved = [NONE].iter().chain(&NOT_YET).any(|r| r.eq_ignore_ascii_case(name));
            if reserved || self.get(name).is_some() {
                return Err(Error::NameTaken(name.to_owned()));
            }
        }
        let entry: Arc<dyn Entry> = Arc::from(entry);
        if !entry.drafts_from_ngrams() {
            self.mixes.push(MixedEntry::of(entry.clone()));
        }
        self.entries.push(entry);
        Ok(())
    }

    /// The algorithm of this name, in any case; nothing for `NONE`. `NAME+NGRAM` is the mix of an
    /// algorithm and n-grams.
    pub fn find(&self, name: &str) -> Result<Option<&dyn Entry>> {
        if name.eq_ignore_ascii_case(NONE) {
            return Ok(None);
        }
        if let Some(entry) = self.get(name) {
            return Ok(Some(entry));
        }
        if let Some((model, other)) = name.split_once('+') {
            return self.mix(name, model, other).map(Some);
        }
        let known = self.names().collect::<Vec<_>>().join(", ");
        if NOT_YET.iter().any(|n| n.eq_ignore_ascii_case(name)) {
            return Err(Error::NotYet { name: name.to_ascii_uppercase(), known });
        }
        Err(Error::Unknown { name: name.to_owned(), known })
    }

    fn mix(&self, name: &str, model: &str, other: &str) -> Result<&dyn Entry> {
        let known = || self.mixes.iter().map(MixedEntry::model).collect::<Vec<_>>().join(", ");
        let refused = |why| Error::NoMix { name: name.to_owned(), why, known: known() };
        let (model, other) = (model.trim(), other.trim());
        if !self.get(other).is_some_and(|other| other.drafts_from_ngrams()) {
            return Err(refused(format!("{other:?} cannot be mixed into another algorithm")));
        }
        let model = self.find(model)?.map(Entry::name);
        let mix = self.mixes.iter().find(|mix| Some(mix.model()) == model);
        let why = || refused(format!("{} has no model", model.unwrap_or(NONE)));
        mix.map(|mix| mix as &dyn Entry).ok_or_else(why)
    }

    fn get(&self, name: &str) -> Option<&dyn Entry> {
        self.entries().find(|&entry| names_of(entry).any(|n| n.eq_ignore_ascii_case(name)))
    }

    /// The algorithms, in the order in which they came.
    pub fn entries(&self) -> impl Iterator<Item = &dyn Entry> {
        self.entries.iter().map(|entry| &**entry)
    }

    /// Every name that may be given.
    pub fn names(&self) -> impl Iterator<Item = &'static str> {
        [NONE].into_iter().chain(self.entries().flat_map(names_of))
    }
}

fn names_of(entry: &dyn Entry) -> impl Iterator<Item = &'static str> + use<> {
    [entry.name()].into_iter().chain(entry.aliases().iter().copied())
}
