//! The file of the adaptive policy: slots by batch size, in SGLang's format.
//!
//! Keys of digits are least batch sizes; every other key is a default for all slots. Beyond
//! SGLang, a slot may say `topk` and `draft_tokens`.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value};

use super::PolicyError;
use crate::Shape;

/// What a slot adapts by.
#[derive(Debug, Clone, PartialEq)]
pub struct SlotSettings {
    /// Steps among which it moves, ascending; 0 is plain decoding.
    pub candidate_steps: Vec<usize>,
    /// The weight of a new result.
    pub ema_alpha: f64,
    /// Results between two moves.
    pub update_interval: u64,
    /// Results before the first move is considered.
    pub warmup_batches: u64,
    /// Added to what a rise needs.
    pub up_hysteresis: f64,
    /// Added to what a drop needs.
    pub down_hysteresis: f64,
    /// Steps stay below this many times the drafts accepted; 0: no such bound.
    pub ceiling_coeff: f64,
    /// The tree of its most steps.
    pub largest: Shape,
}

impl SlotSettings {
    /// The tree of this many steps.
    pub fn shape(&self, steps: usize) -> Shape {
        self.largest.capped(steps)
    }
}

/// The settings of all slots.
#[derive(Debug, Clone, PartialEq)]
pub struct AdaptiveTable {
    /// The settings of each slot, by the least batch size that it serves.
    pub slots: BTreeMap<usize, SlotSettings>,
    /// Keys that mean nothing here, in words to be shown at start.
    pub warnings: Vec<String>,
}

const KNOWN: [&str; 9] = [
    "candidate_steps",
    "ema_alpha",
    "update_interval",
    "warmup_batches",
    "up_hysteresis",
    "down_hysteresis",
    "ceiling_coeff",
    "topk",
    "draft_tokens",
];

impl Default for AdaptiveTable {
    /// SGLang's own: more steps for small batches, plain decoding from 64 on.
    fn default() -> Self {
        let slot = |steps: &[usize], down_hysteresis| SlotSettings {
            candidate_steps: steps.to_vec(),
            ema_alpha: 0.2,
            update_interval: 5,
            warmup_batches: 10,
            up_hysteresis: 0.0,
            down_hysteresis,
            ceiling_coeff: 0.0,
            largest: Shape::chain(7).capped(steps[steps.len() - 1]),
        };
        let slots = [
            (1, slot(&[1, 3, 7], -0.25)),
            (8, slot(&[0, 1, 3], 0.0)),
            (32, slot(&[0, 1], 0.0)),
            (64, slot(&[0], 0.0)),
        ];
        Self { slots: slots.into(), warnings: Vec::new() }
    }
}

impl AdaptiveTable {
    /// The table that SGLang's documentation calls its default, which never decodes plainly.
    pub fn published() -> Self {
        let mut table = Self::default();
        table.slots.remove(&64);
        for slot in table.slots.values_mut() {
            slot.candidate_steps.retain(|&steps| steps > 0);
        }
        table
    }

    /// Leaves steps beyond `most` out, down to `most` alone where a slot has no others; says
    /// whether there were any.
    pub fn cap(&mut self, most: usize) -> bool {
        let mut any = false;
        for slot in self.slots.values_mut() {
            let before = slot.candidate_steps.len();
            slot.candidate_steps.retain(|&steps| steps <= most);
            any |= slot.candidate_steps.len() < before;
            if slot.candidate_steps.is_empty() {
                slot.candidate_steps.push(most);
            }
            slot.largest = slot.largest.capped(most);
        }
        any
    }

    /// Reads the text of a file.
    pub fn parse(text: &str) -> Result<Self, PolicyError> {
        let value: Value = serde_json::from_str(text)?;
        let Value::Object(file) = value else {
            return Err(PolicyError::NotAnObject { got: value.to_string() });
        };
        let is_slot = |key: &str| !key.is_empty() && key.bytes().all(|b| b.is_ascii_digit());
        let (entries, globals): (Vec<_>, Vec<_>) =
            file.iter().partition(|(key, _)| is_slot(key.as_str()));
        if entries.is_empty() {
            return Err(no_batch_size(&file));
        }
        let globals: Map<String, Value> =
            globals.into_iter().map(|(key, value)| (key.clone(), value.clone())).collect();
        refuse_other_strategies(&globals)?;
        let mut warnings = unknown(&globals, "the defaults");
        let mut slots = BTreeMap::new();
        for (key, entry) in entries {
            let bad = |key: &str, value: &Value| PolicyError::CandidateSteps {
                key: key.to_owned(),
                got: value.to_string(),
            };
            let bound = key.parse().map_err(|_| PolicyError::Setting {
                place: "its keys".to_owned(),
                key: "a batch size".to_owned(),
                must: "a number of requests",
                got: key.clone(),
            })?;
            let Value::Object(entry) = entry else {
                return Err(bad(key, entry));
            };
            warnings.extend(unknown(entry, &format!("batch size {key}")));
            let steps = entry.get("candidate_steps").unwrap_or(&Value::Null);
            let steps = candidates(steps).ok_or_else(|| bad(key, steps))?;
            slots.insert(bound, Entry { key, entry, globals: &globals }.settings(bound, steps)?);
        }
        Ok(Self { slots, warnings })
    }

    /// The candidates of all slots, ascending.
    pub fn union(&self) -> Vec<usize> {
        let all: BTreeSet<usize> =
            self.slots.values().flat_map(|slot| slot.candidate_steps.iter().copied()).collect();
        all.into_iter().collect()
    }

    /// The steps to start with: those asked for, which must be a candidate somewhere, or the
    /// middle of all candidates.
    pub fn launch_steps(&self, asked: Option<usize>) -> Result<usize, PolicyError> {
        let union = self.union();
        match asked {
            None => Ok(union[union.len() / 2]),
            Some(steps) if union.contains(&steps) => Ok(steps),
            Some(steps) => {
                let union = union.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
                Err(PolicyError::LaunchSteps { steps, union })
            }
        }
    }
}

/// One slot of a file, over the defaults of that file.
struct Entry<'a> {
    key: &'a str,
    entry: &'a Map<String, Value>,
    globals: &'a Map<String, Value>,
}

impl Entry<'_> {
    fn settings(
        &self,
        bound: usize,
        candidate_steps: Vec<usize>,
    ) -> Result<SlotSettings, PolicyError> {
        let most = candidate_steps[candidate_steps.len() - 1];
        let topk = self.count("topk", "a whole number of at least 1", 1, 1)? as usize;
        let nodes = match topk {
            1 => most as u64 + 1,
            _ => {
                self.count("draft_tokens", "given with topk, a whole number of at least 2", 0, 2)?
            }
        };
        let shape = |source| PolicyError::Shape { key: bound, source };
        Ok(SlotSettings {
            largest: Shape::new(most, topk, nodes as usize).map_err(shape)?,
            candidate_steps,
            ema_alpha: self.number("ema_alpha", "a number above 0 and up to 1", 0.2, |a| {
                a > 0.0 && a <= 1.0
            })?,
            update_interval: self.count("update_interval", "a whole number of at least 1", 5, 1)?,
            warmup_batches: self.count("warmup_batches", "a whole number of at least 0", 10, 0)?,
            up_hysteresis: self.number("up_hysteresis", "a number", 0.0, |_| true)?,
            down_hysteresis: self.number("down_hysteresis", "a number", -0.25, |_| true)?,
            ceiling_coeff: self.number("ceiling_coeff", "a number", 0.0, |_| true)?,
        })
    }

    /// The value of a setting, and where it stands.
    fn find(&self, key: &str) -> Option<(&Value, String)> {
        let here = self.entry.get(key).map(|value| (value, format!("batch size {}", self.key)));
        here.or_else(|| self.globals.get(key).map(|value| (value, "the defaults".to_owned())))
    }

    fn number(
        &self,
        key: &str,
        must: &'static str,
        default: f64,
        admits: impl Fn(f64) -> bool,
    ) -> Result<f64, PolicyError> {
        let Some((value, place)) = self.find(key) else { return Ok(default) };
        let number = value.as_f64().filter(|n| n.is_finite() && admits(*n));
        let (key, got) = (key.to_owned(), value.to_string());
        number.ok_or(PolicyError::Setting { place, key, must, got })
    }

    fn count(
        &self,
        key: &str,
        must: &'static str,
        default: u64,
        least: u64,
    ) -> Result<u64, PolicyError> {
        let unset = (&Value::Null, format!("batch size {}", self.key));
        let (value, place) = match self.find(key) {
            None if default >= least => return Ok(default),
            found => found.unwrap_or(unset),
        };
        let number = value.as_u64().filter(|n| *n >= least);
        let (key, got) = (key.to_owned(), value.to_string());
        number.ok_or(PolicyError::Setting { place, key, must, got })
    }
}

/// A non-empty list of steps, ascending and each once.
fn candidates(value: &Value) -> Option<Vec<usize>> {
    let steps: Option<BTreeSet<usize>> = value
        .as_array()?
        .iter()
        .map(|step| step.as_u64().and_then(|s| usize::try_from(s).ok()))
        .collect();
    steps.filter(|steps| !steps.is_empty()).map(|steps| steps.into_iter().collect())
}

fn unknown(map: &Map<String, Value>, place: &str) -> Vec<String> {
    let unknown = |key: &&String| !KNOWN.contains(&key.as_str()) && key.as_str() != "strategy";
    let say = |key| format!("{place}: {key} means nothing here");
    map.keys().filter(unknown).map(say).collect()
}

/// SGLang's newer files may ask for a strategy other than the EMA.
fn refuse_other_strategies(globals: &Map<String, Value>) -> Result<(), PolicyError> {
    match globals.get("strategy") {
        None => Ok(()),
        Some(Value::String(name)) if name == "ema" => Ok(()),
        Some(other) => Err(PolicyError::Setting {
            place: "the defaults".to_owned(),
            key: "strategy".to_owned(),
            must: "\"ema\" (the policy auto is the one that weighs costs)",
            got: other.to_string(),
        }),
    }
}

fn no_batch_size(file: &Map<String, Value>) -> PolicyError {
    let keys = match file.is_empty() {
        true => "there are none".to_owned(),
        false => file.keys().cloned().collect::<Vec<_>>().join(", "),
    };
    let mut slot = file.clone();
    if !slot.contains_key("candidate_steps") {
        slot.insert("candidate_steps".to_owned(), Value::from(vec![1, 3, 7]));
    }
    let today = Value::Object(Map::from_iter([("1".to_owned(), Value::Object(slot))]));
    PolicyError::NoBatchSize { keys, today: format!("{today:#}") }
}
