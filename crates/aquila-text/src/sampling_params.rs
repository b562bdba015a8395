//! Sampling settings as users write them: the keys of JSON bodies, the flags of commands.
//!
//! A key left out takes the command's default, then the model's, then ours.

use aquila_engine::Speculation;
use serde_json::{Map, Value};

use crate::GrammarSpec;

/// A setting that cannot be used: which, what it was, and why.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{name}: {why}")]
pub struct ParamError {
    /// The key at fault.
    pub name: String,
    /// What is wrong with its value.
    pub why: String,
}

/// Sampling settings; what is `None` was left out.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SamplingParams {
    /// Tokens of the answer.
    pub max_tokens: Option<usize>,
    /// Tokens before which the answer may not end by itself.
    pub min_tokens: Option<usize>,
    /// 0 is greedy.
    pub temperature: Option<f32>,
    /// Keep the fewest most likely tokens whose probabilities reach this.
    pub top_p: Option<f32>,
    /// Keep the k most likely tokens; 0 and -1 keep all.
    pub top_k: Option<i64>,
    /// Keep tokens at least this fraction as likely as the most likely one.
    pub min_p: Option<f32>,
    /// The seed of the noise.
    pub seed: Option<u64>,
    /// Strings that end the text; they are not part of it.
    pub stop: Option<Vec<String>>,
    /// Tokens that end the text, beside end-of-text.
    pub stop_token_ids: Option<Vec<u32>>,
    /// Whether end-of-text does not end the text.
    pub ignore_eos: Option<bool>,
    /// Divides positive and multiplies negative logits of tokens seen in prompt or output.
    pub repetition_penalty: Option<f32>,
    /// Subtracted once from tokens seen in the output.
    pub presence_penalty: Option<f32>,
    /// Subtracted for each time a token was seen in the output.
    pub frequency_penalty: Option<f32>,
    /// Added to the logits of these tokens.
    pub logit_bias: Option<Vec<(u32, f32)>>,
    /// How many answers.
    pub n: Option<u32>,
    /// Whether to report log-probabilities of the answer's tokens.
    pub logprobs: Option<bool>,
    /// How many of the most likely tokens to report with each.
    pub top_logprobs: Option<usize>,
    /// Whether to report log-probabilities of the prompt's tokens.
    pub prompt_logprobs: Option<bool>,
    /// What the answer must be like.
    pub grammar: Option<GrammarSpec>,
}

/// The keys, in the order in which they are documented.
const KEYS: [&str; 21] = [
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "n",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "json_schema",
    "regex",
    "ebnf",
];

macro_rules! take_default {
    ($self:ident, $defaults:ident, $($field:ident)*) => {
        SamplingParams { $($field: $self.$field.or_else(|| $defaults.$field.clone()),)* }
    };
}

impl SamplingParams {
    /// These settings, with what they leave out from `defaults`.
    pub fn or(self, defaults: &SamplingParams) -> SamplingParams {
        take_default!(self, defaults, max_tokens min_tokens temperature top_p top_k min_p seed stop
            stop_token_ids ignore_eos repetition_penalty presence_penalty frequency_penalty
            logit_bias n logprobs top_logprobs prompt_logprobs grammar)
    }

    /// Reads the keys of a JSON object; an unknown key or a value of the wrong type is an error.
    pub fn from_json(object: &Map<String, Value>) -> Result<Self, ParamError> {
        let mut params = Self::default();
        for (key, value) in object {
            if !value.is_null() && !params.set(key, value)? {
                let why = format!("no such setting; there are {}", KEYS.join(", "));
                return Err(ParamError { name: key.clone(), why });
            }
        }
        Ok(params)
    }

    /// Sets one key; false if there is none of that name.
    pub fn set(&mut self, key: &str, value: &Value) -> Result<bool, ParamError> {
        let wrong = |expected: &str| wrong(key, expected, value);
        let count =
            || value.as_u64().map(|n| n as usize).ok_or_else(|| wrong("a whole number from 0 up"));
        let number = || value.as_f64().map(|x| x as f32).ok_or_else(|| wrong("a number"));
        let truth = || value.as_bool().ok_or_else(|| wrong("true or false"));
        match key {
            "max_tokens" => self.max_tokens = Some(count()?),
            "min_tokens" => self.min_tokens = Some(count()?),
            "temperature" => self.temperature = Some(number()?),
            "top_p" => self.top_p = Some(number()?),
            "top_k" => self.top_k = Some(value.as_i64().ok_or_else(|| wrong("a whole number"))?),
            "min_p" => self.min_p = Some(number()?),
            "seed" => self.seed = Some(seed(value).ok_or_else(|| wrong("a whole number"))?),
            "stop" => {
                self.stop =
                    Some(strings(value).ok_or_else(|| wrong("a string or a list of strings"))?)
            }
            "stop_token_ids" => {
                let ids = serde_json::from_value(value.clone());
                self.stop_token_ids = Some(ids.map_err(|_| wrong("a list of token ids"))?);
            }
            "ignore_eos" => self.ignore_eos = Some(truth()?),
            "repetition_penalty" => self.repetition_penalty = Some(number()?),
            "presence_penalty" => self.presence_penalty = Some(number()?),
            "frequency_penalty" => self.frequency_penalty = Some(number()?),
            "logit_bias" => {
                let pairs =
                    bias(value).ok_or_else(|| wrong("an object of token ids and numbers"))?;
                self.logit_bias = Some(pairs);
            }
            "n" => {
                let n = value.as_u64().and_then(|n| u32::try_from(n).ok());
                self.n = Some(n.ok_or_else(|| wrong("a whole number from 1 up"))?);
            }
            "logprobs" => self.logprobs = Some(truth()?),
            "top_logprobs" => self.top_logprobs = Some(count()?),
            "prompt_logprobs" => self.prompt_logprobs = Some(truth()?),
            "json_schema" => self.set_grammar(key, GrammarSpec::JsonSchema(schema(value)?))?,
            "regex" | "ebnf" => {
                let text = value.as_str().ok_or_else(|| wrong("a string"))?.to_owned();
                let spec = if key == "regex" { GrammarSpec::Regex } else { GrammarSpec::Ebnf };
                self.set_grammar(key, spec(text))?;
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Sets what the answer must be like, which came as `key`; an answer is held by one grammar.
    fn set_grammar(&mut self, key: &str, spec: GrammarSpec) -> Result<(), ParamError> {
        if self.grammar.is_some() {
            let why = "an answer cannot be held by two grammars: leave one out";
            return Err(ParamError { name: key.into(), why: why.into() });
        }
        self.grammar = Some(spec);
        Ok(())
    }

    /// What `generation_config.json` says about sampling; a value of the wrong type is an error.
    /// Where it says that nothing is sampled, the temperature is 0 whatever else it says.
    pub fn from_generation_config(config: &Value) -> Result<Self, ParamError> {
        let mut params = Self::default();
        for key in ["temperature", "top_p", "top_k", "min_p", "repetition_penalty"] {
            if let Some(value) = config.get(key).filter(|value| !value.is_null()) {
                params.set(key, value)?;
            }
        }
        match config.get("do_sample") {
            None | Some(Value::Null | Value::Bool(true)) => {}
            Some(Value::Bool(false)) => params.temperature = Some(0.0),
            Some(value) => return Err(wrong("do_sample", "true or false", value)),
        }
        Ok(params)
    }
}

/// A JSON schema: an object, true or false, or a string that holds one.
fn schema(value: &Value) -> Result<Value, ParamError> {
    let parsed = match value {
        Value::String(text) => serde_json::from_str(text).map_err(|e| ParamError {
            name: "json_schema".into(),
            why: format!("is not JSON: {e}"),
        })?,
        other => other.clone(),
    };
    match parsed {
        Value::Object(_) | Value::Bool(_) => Ok(parsed),
        _ => Err(wrong("json_schema", "a JSON schema, which is an object", value)),
    }
}

fn wrong(key: &str, expected: &str, value: &Value) -> ParamError {
    let why = format!("expected {expected}, found {}", shortened(value));
    ParamError { name: key.into(), why }
}

/// A seed; negative ones are as good as any.
fn seed(value: &Value) -> Option<u64> {
    value.as_u64().or_else(|| value.as_i64().map(|n| n as u64))
}

/// A string, or a list of strings.
fn strings(value: &Value) -> Option<Vec<String>> {
    match value {
        Value::String(one) => Some(vec![one.clone()]),
        Value::Array(many) => many.iter().map(|v| v.as_str().map(str::to_owned)).collect(),
        _ => None,
    }
}

/// An object whose keys are token ids, in the order of the ids.
fn bias(value: &Value) -> Option<Vec<(u32, f32)>> {
    let pairs = value
        .as_object()?
        .iter()
        .map(|(id, bias)| Some((id.parse::<u32>().ok()?, bias.as_f64()? as f32)));
    let mut pairs = pairs.collect::<Option<Vec<_>>>()?;
    pairs.sort_by_key(|&(id, _)| id);
    Some(pairs)
}

/// A JSON value, cut where it is long.
fn shortened(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text,
    }
}

/// Reads a request's `speculative` key: false, true, or `{"num_steps": n}`.
pub fn speculation(value: &Value) -> Result<Speculation, ParamError> {
    let wrong = || ParamError {
        name: "speculative".into(),
        why: format!("expected true, false or {{\"num_steps\": n}}, found {}", shortened(value)),
    };
    match value {
        Value::Null | Value::Bool(true) => Ok(Speculation::Free),
        Value::Bool(false) => Ok(Speculation::Off),
        Value::Object(object) if object.len() == 1 => {
            let steps = object.get("num_steps").and_then(Value::as_u64).ok_or_else(wrong)?;
            Ok(if steps == 0 { Speculation::Off } else { Speculation::Steps(steps as usize) })
        }
        _ => Err(wrong()),
    }
}
