//! Grammars: what an answer must be like, as a JSON schema, a regular expression, a grammar or a
//! list of texts.
//!
//! llguidance compiles them and says which tokens may follow; the engine asks it about every node
//! of a draft tree.

mod ebnf;
mod reasoning;
mod schema;
mod size;
mod vocabulary;

use std::sync::Arc;

pub use aquila_compute::round::Grammar;
use aquila_compute::round::GrammarState;
use aquila_compute::sampling::TokenSet;
use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{InferenceCapabilities, TokEnv};
use llguidance::{Matcher, ParserFactory};
use serde::Serialize;
use serde_json::Value;

use crate::Tokenizer;

pub use schema::{check_schema_bytes, held_schema, held_schemas};

/// What an answer must be like, as it was asked for.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub enum GrammarSpec {
    /// JSON that this schema describes.
    JsonSchema(Value),
    /// A text that this regular expression matches as a whole.
    Regex(String),
    /// A text of this grammar in the notation of SGLang's `ebnf`; it begins with the rule `root`.
    Ebnf(String),
    /// The answer is one of these texts.
    Choice(Vec<String>),
    /// A text of this grammar in llguidance's notation; it begins with the rule `start`.
    Lark(String),
    /// Reasoning, which is free, then what another grammar says.
    AfterReasoning {
        /// Whether the prompt has begun the reasoning; else the answer begins with it or has none.
        begun: bool,
        /// What stands behind it.
        answer: Box<GrammarSpec>,
    },
}

impl GrammarSpec {
    /// The name of its kind.
    pub fn name(&self) -> &'static str {
        match self {
            GrammarSpec::JsonSchema(_) => "json_schema",
            GrammarSpec::Regex(_) => "regex",
            GrammarSpec::Ebnf(_) => "ebnf",
            GrammarSpec::Choice(_) => "choice",
            GrammarSpec::Lark(_) => "grammar",
            GrammarSpec::AfterReasoning { answer, .. } => answer.name(),
        }
    }
}

/// Bytes of a regular expression, a grammar, a schema, or of all texts to choose from. Large schemas
/// of real clients have half of it.
pub(crate) const MOST_BYTES: usize = 256 << 10;

/// Bytes of a grammar in llguidance's notation, which may have several schemas in it.
pub const MOST_LARK_BYTES: usize = 1 << 20;

/// Symbols of a compiled grammar, of about 600 bytes each. FHIR's schema, of several megabytes, has
/// 200,000.
const MOST_SYMBOLS: usize = 150_000;

/// States of the lexer of one answer, of about 800 bytes each. Dates, addresses and the like need
/// hundreds; strings of bounded length need four to seven for each byte that is written.
const MOST_STATES: usize = 50_000;

/// The stack of the thread that compiles a grammar. Levels of schemas and rules take up to 8 KiB
/// each; memory is taken only for those that there are.
const STACK: usize = 256 << 20;

/// Runs what calls itself for each level of a grammar.
fn on_deep_stack<T: Send>(work: impl FnOnce() -> T + Send) -> Result<T, String> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().stack_size(STACK).spawn_scoped(scope, work);
        let joined = thread.map_err(|e| e.to_string())?.join();
        joined.map_err(|_| "llguidance failed to compile it: it may be too large".to_owned())
    })
}

/// Compiles grammars for the vocabulary of one model.
pub struct GrammarCompiler {
    factory: ParserFactory,
    /// Whether the marks of reasoning are special tokens, and not texts.
    special_marks: bool,
}

impl std::fmt::Debug for GrammarCompiler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GrammarCompiler").finish_non_exhaustive()
    }
}

impl GrammarCompiler {
    /// For a model of so many logits that ends texts with one of `eos`; or why its tokens cannot
    /// be told apart by their texts.
    pub fn new(tokenizer: &Tokenizer, logits: usize, eos: &[u32]) -> Result<Self, String> {
        let vocabulary: TokEnv = Arc::new(vocabulary::Vocabulary::new(tokenizer, logits, eos)?);
        let slices = llguidance::earley::SlicedBiasComputer::general_slices();
        let mut factory =
            ParserFactory::new(&vocabulary, InferenceCapabilities::default(), &slices)
                .map_err(|e| e.to_string())?;
        factory.quiet();
        let limits = factory.limits_mut();
        limits.verbose_errors = false;
        limits.max_grammar_size = MOST_SYMBOLS;
        limits.max_lexer_states = MOST_STATES;
        let mark = tokenizer.token_id(reasoning::CLOSE);
        let special_marks = mark.is_some_and(|id| tokenizer.is_special(id));
        Ok(Self { factory, special_marks })
    }

    /// Compiles a grammar, or says what is wrong with it.
    pub fn compile(&self, spec: &GrammarSpec) -> Result<Arc<CompiledGrammar>, String> {
        let grammar = self.source(spec)?;
        let parser = on_deep_stack(|| self.factory.create_parser(grammar))?.map_err(message)?;
        let bytes = size::bytes_of(&parser.parser);
        Ok(Arc::new(CompiledGrammar { matcher: Matcher::new(Ok(parser)), bytes }))
    }

    /// A grammar as llguidance takes it.
    fn source(&self, spec: &GrammarSpec) -> Result<TopLevelGrammar, String> {
        check_bytes(spec)?;
        Ok(match spec {
            GrammarSpec::JsonSchema(schema) => {
                TopLevelGrammar::from_json_schema(held_schema(schema.clone())?)
            }
            GrammarSpec::Regex(regex) => TopLevelGrammar::from_regex(regex),
            GrammarSpec::Ebnf(ebnf) => TopLevelGrammar::from_lark(ebnf::to_lark(ebnf)?),
            GrammarSpec::Choice(texts) => TopLevelGrammar::from_lark(one_of(texts)?),
            GrammarSpec::Lark(lark) => TopLevelGrammar::from_lark(lark.clone()),
            GrammarSpec::AfterReasoning { begun, answer } => {
                let lark = reasoning::before(*begun, self.special_marks);
                let mut whole = TopLevelGrammar::from_lark(lark);
                for mut grammar in self.source(answer)?.grammars {
                    grammar.name = Some(reasoning::ANSWER.to_owned());
                    whole.grammars.push(grammar);
                }
                whole
            }
        })
    }
}

/// Refuses texts that are too long.
fn check_bytes(spec: &GrammarSpec) -> Result<(), String> {
    let (bytes, most) = match spec {
        GrammarSpec::Regex(text) | GrammarSpec::Ebnf(text) => (text.len(), MOST_BYTES),
        GrammarSpec::Choice(texts) => (texts.iter().map(String::len).sum(), MOST_BYTES),
        GrammarSpec::Lark(text) => (text.len(), MOST_LARK_BYTES),
        GrammarSpec::JsonSchema(schema) => return check_schema_bytes(schema).map(drop),
        GrammarSpec::AfterReasoning { .. } => return Ok(()),
    };
    match bytes > most {
        true => Err(format!("it has {bytes} bytes: at most {most} are allowed")),
        false => Ok(()),
    }
}

fn one_of(texts: &[String]) -> Result<String, String> {
    if texts.is_empty() {
        return Err("there must be at least one text to choose".into());
    }
    let texts: Vec<String> =
        texts.iter().map(|text| Value::from(text.as_str()).to_string()).collect();
    Ok(format!("start: {}", texts.join(" | ")))
}

/// What llguidance says, without its own state, in one line of bounded length.
fn in_one_line(why: &str) -> String {
    let why = why.split("<non-verbose/>").next().unwrap_or(why);
    let words: Vec<&str> = why.split_whitespace().collect();
    let line = words.join(" ");
    match line.char_indices().nth(300) {
        Some((end, _)) => format!("{}…", &line[..end]),
        None => line,
    }
}

/// A compiled grammar: a matcher at the beginning of an answer.
pub struct CompiledGrammar {
    matcher: Matcher,
    bytes: usize,
}

impl CompiledGrammar {
    /// Bytes that it takes, about; those of answers that begin with it are not counted.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl std::fmt::Debug for CompiledGrammar {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CompiledGrammar").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

impl Grammar for CompiledGrammar {
    fn begin(&self) -> Box<dyn GrammarState> {
        Box::new(Answer(self.matcher.deep_clone()))
    }
}

/// An answer, as far as it has come.
struct Answer(Matcher);

impl std::fmt::Debug for Answer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Answer").field(&self.0.stop_reason()).finish()
    }
}

fn message(error: impl std::fmt::Display) -> String {
    in_one_line(&error.to_string())
}

impl GrammarState for Answer {
    // A matcher that takes tokens back may not be where it was: llguidance 1.9 allows other tokens
    // after "[[        ]" if tokens after the spaces were taken back before the last bracket.
    fn branch(&self) -> Box<dyn GrammarState> {
        Box::new(Answer(self.0.clone()))
    }

    fn push(&mut self, token: u32) -> Result<bool, String> {
        Ok(self.0.try_consume_tokens(&[token]).map_err(message)? == 1)
    }

    fn allowed(&mut self) -> Result<TokenSet, String> {
        let mask = self.0.compute_mask().map_err(message)?;
        Ok(TokenSet::from_words(mask.as_slice().to_vec()))
    }

    fn is_complete(&self) -> bool {
        self.0.is_stopped() && !self.0.is_error()
    }

    fn forced(&mut self) -> Result<Vec<u32>, String> {
        let vocabulary = self.0.tok_env().map_err(message)?;
        if vocabulary.tokenize_is_canonical() {
            return Ok(self.0.compute_ff_tokens());
        }
        let bytes = self.0.compute_ff_bytes();
        Ok(vocabulary.tok_trie().greedy_tokenize(&bytes))
    }
}
