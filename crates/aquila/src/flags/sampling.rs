//! How tokens are chosen, where a request does not say.

use aquila_text::SamplingParams;
use clap::Args;

use super::number::{seed, whole};
use crate::error::{Error, Result};

/// Defaults for what a request leaves out.
#[derive(Args, Debug, Clone, Default)]
#[command(next_help_heading = "Sampling (defaults for what a request leaves out)")]
pub struct SamplingFlags {
    /// Tokens of an answer [default: 128; what the context leaves for /v1/chat/completions and
    /// aquila chat, 16 for /v1/completions, as OpenAI has it]
    #[arg(
        long,
        value_parser = whole(0, u32::MAX as usize),
        value_name = "N",
        allow_negative_numbers = true,
    )]
    max_tokens: Option<usize>,

    /// Tokens before which an answer may not end by itself
    #[arg(
        long,
        value_parser = whole(0, u32::MAX as usize),
        value_name = "N",
        allow_negative_numbers = true,
    )]
    min_tokens: Option<usize>,

    /// 0 is greedy [default: the model's, or 1]
    #[arg(long, value_name = "T", allow_negative_numbers = true)]
    temperature: Option<f32>,

    /// Keep the fewest most likely tokens whose probabilities reach this
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    top_p: Option<f32>,

    /// Keep the k most likely tokens; 0 and -1 keep all
    #[arg(long, value_name = "K", allow_negative_numbers = true)]
    top_k: Option<i64>,

    /// Keep tokens at least this fraction as likely as the most likely one
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    min_p: Option<f32>,

    /// The seed of the noise; same seed, same text
    #[arg(long, value_name = "SEED", value_parser = seed, allow_negative_numbers = true)]
    seed: Option<u64>,

    /// A string that ends the text; may be given several times
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,

    /// Token ids that end the text, beside end-of-text
    #[arg(long, value_name = "ID,…", value_delimiter = ',', allow_negative_numbers = true)]
    stop_token_ids: Vec<u32>,

    /// End-of-text does not end the text
    #[arg(long)]
    ignore_eos: bool,

    /// Above 1: tokens seen in prompt or answer become less likely
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    repetition_penalty: Option<f32>,

    /// Subtracted once from tokens seen in the answer
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    presence_penalty: Option<f32>,

    /// Subtracted for each time a token was seen in the answer
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    frequency_penalty: Option<f32>,

    /// Added to the logits of tokens: a JSON object of ids and numbers
    #[arg(long, value_name = "JSON")]
    logit_bias: Option<String>,

    /// Answers to each prompt; above 1 they are listed under "choices"
    #[arg(long, value_parser = whole(1, 128), value_name = "N", allow_negative_numbers = true)]
    n: Option<usize>,

    /// Report log-probabilities of the answer's tokens
    #[arg(long)]
    logprobs: bool,

    /// How many of the most likely tokens to report with each
    #[arg(long, value_parser = whole(0, 100), value_name = "N", allow_negative_numbers = true)]
    top_logprobs: Option<usize>,

    /// Report log-probabilities of the prompt's tokens
    #[arg(long)]
    prompt_logprobs: bool,

    /// Answers are JSON that this schema describes
    #[arg(long, value_name = "JSON", conflicts_with_all = ["regex", "ebnf"])]
    json_schema: Option<String>,

    /// Answers are texts that this regular expression matches as a whole
    #[arg(long, value_name = "REGEX", conflicts_with = "ebnf")]
    regex: Option<String>,

    /// Answers are texts of this grammar, which begin with its rule `root`
    #[arg(long, value_name = "GRAMMAR")]
    ebnf: Option<String>,
}

impl SamplingFlags {
    /// The flags as settings; what was not given stays open.
    pub fn params(&self) -> Result<SamplingParams> {
        let mut params = SamplingParams {
            max_tokens: self.max_tokens,
            min_tokens: self.min_tokens,
            temperature: self.temperature,
            top_p: self.top_p,
            top_k: self.top_k,
            min_p: self.min_p,
            seed: self.seed,
            stop: (!self.stop.is_empty()).then(|| self.stop.clone()),
            stop_token_ids: (!self.stop_token_ids.is_empty()).then(|| self.stop_token_ids.clone()),
            ignore_eos: self.ignore_eos.then_some(true),
            repetition_penalty: self.repetition_penalty,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            logit_bias: None,
            n: self.n.map(|n| n as u32),
            logprobs: self.logprobs.then_some(true),
            top_logprobs: self.top_logprobs,
            prompt_logprobs: self.prompt_logprobs.then_some(true),
            grammar: None,
        };
        let grammars =
            [("json_schema", &self.json_schema), ("regex", &self.regex), ("ebnf", &self.ebnf)];
        for (key, text) in grammars {
            if let Some(text) = text {
                params.set(key, &text.as_str().into())?;
            }
        }
        if let Some(text) = &self.logit_bias {
            let wrong = |e| Error::Usage(format!("--logit-bias: not JSON: {e}"));
            params.set("logit_bias", &serde_json::from_str(text).map_err(wrong)?)?;
        }
        let mut alone = params.clone();
        if alone.max_tokens.is_none() {
            // Each request may say how many tokens it wants.
            alone.min_tokens = None;
        }
        alone.check(&[])?;
        Ok(params)
    }

    /// Refuses what one answer on a terminal has no place for.
    pub fn refuse_for_one_prompt(&self) -> Result<()> {
        let given = [
            ("--n above 1", self.n.is_some_and(|n| n > 1)),
            ("--logprobs", self.logprobs),
            ("--top-logprobs", self.top_logprobs.is_some()),
            ("--prompt-logprobs", self.prompt_logprobs),
        ];
        match given.iter().find(|(_, given)| *given) {
            Some((flag, _)) => Err(Error::Usage(format!(
                "--prompt prints the text of one answer: use --input for {flag}"
            ))),
            None => Ok(()),
        }
    }
}
