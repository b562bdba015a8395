//! How n-grams are kept and drafted from.

use std::path::PathBuf;

use aquila_model::Checkpoint;
use aquila_server::add_file;
use aquila_spec::MOST_TOPK;
use aquila_spec::ngram::{
    Corpora, MOST_TRIE_DEPTH, MatchType, NgramScope, NgramSettings, NgramSources,
};
use aquila_text::Tokenizer;
use clap::Args;

use super::named;
use super::number::whole;
use crate::error::{Error, Result};

/// The flags of NGRAM.
#[derive(Args, Debug, Clone, Default)]
pub struct NgramFlags {
    /// NGRAM: branches that the longest matches begin with [default: 1]
    #[arg(long, value_name = "N", value_parser = whole(1, MOST_TOPK), allow_negative_numbers = true)]
    speculative_ngram_min_bfs_breadth: Option<usize>,

    /// NGRAM: branches that the shortest matches begin with [default: 10]
    #[arg(long, value_name = "N", value_parser = whole(1, MOST_TOPK), allow_negative_numbers = true)]
    speculative_ngram_max_bfs_breadth: Option<usize>,

    /// NGRAM: BFS drafts the most recent continuations first, PROB the most frequent [default: BFS]
    #[arg(long, value_name = "TYPE")]
    speculative_ngram_match_type: Option<String>,

    /// NGRAM: tokens of the longest n-gram that is kept [default: 18]
    #[arg(long, value_name = "N", value_parser = whole(2, MOST_TRIE_DEPTH), allow_negative_numbers = true)]
    speculative_ngram_max_trie_depth: Option<usize>,

    /// NGRAM: n-grams that are kept; then those go that were not used for longest [default:
    /// 10000000]
    #[arg(long, value_name = "N")]
    speculative_ngram_capacity: Option<usize>,

    /// NGRAM: draft from the texts of the whole server, or from each request's own [default:
    /// server; request for bench spec, whose prompts repeat]
    #[arg(long, value_name = "SCOPE")]
    speculative_ngram_scope: Option<String>,

    /// NGRAM: a text to draft from: JSON lines of {"text"}, or plain text
    #[arg(long, value_name = "FILE")]
    speculative_ngram_external_corpus_path: Option<PathBuf>,

    /// NGRAM: tokens that all such texts together may have [default: 10000000]
    #[arg(long, value_name = "TOKENS")]
    speculative_ngram_external_corpus_max_tokens: Option<usize>,
}

impl NgramFlags {
    /// A flag that was given, if any.
    pub fn given(&self) -> Option<&'static str> {
        [
            (
                "--speculative-ngram-min-bfs-breadth",
                self.speculative_ngram_min_bfs_breadth.is_some(),
            ),
            (
                "--speculative-ngram-max-bfs-breadth",
                self.speculative_ngram_max_bfs_breadth.is_some(),
            ),
            ("--speculative-ngram-match-type", self.speculative_ngram_match_type.is_some()),
            ("--speculative-ngram-max-trie-depth", self.speculative_ngram_max_trie_depth.is_some()),
            ("--speculative-ngram-capacity", self.speculative_ngram_capacity.is_some()),
            ("--speculative-ngram-scope", self.speculative_ngram_scope.is_some()),
            (
                "--speculative-ngram-external-corpus-path",
                self.speculative_ngram_external_corpus_path.is_some(),
            ),
            (
                "--speculative-ngram-external-corpus-max-tokens",
                self.speculative_ngram_external_corpus_max_tokens.is_some(),
            ),
        ]
        .into_iter()
        .find_map(|(flag, given)| given.then_some(flag))
    }

    /// The flags with each request's own text to draft from, unless they say from what.
    pub fn of_requests_by_default(mut self) -> Self {
        self.speculative_ngram_scope.get_or_insert_with(|| "request".into());
        self
    }

    /// Whether they ask for the texts of the whole server.
    pub fn of_server(&self) -> bool {
        let scope = self.speculative_ngram_scope.as_deref();
        scope.is_some_and(|scope| scope.parse() == Ok(NgramScope::Server))
    }

    /// How wide trees are, where the flag of all algorithms does not say.
    pub fn topk(&self) -> Option<usize> {
        self.speculative_ngram_max_bfs_breadth
    }

    fn settings(&self) -> Result<NgramSettings> {
        let default = NgramSettings::default();
        let match_type = self.speculative_ngram_match_type.as_deref();
        let scope = self.speculative_ngram_scope.as_deref();
        let settings = NgramSettings {
            min_bfs_breadth: self
                .speculative_ngram_min_bfs_breadth
                .unwrap_or(default.min_bfs_breadth),
            max_bfs_breadth: self
                .speculative_ngram_max_bfs_breadth
                .unwrap_or(default.max_bfs_breadth),
            match_type: match_type.map_or(Ok(MatchType::Bfs), str::parse)?,
            max_trie_depth: self.speculative_ngram_max_trie_depth.unwrap_or(default.max_trie_depth),
            capacity: self.speculative_ngram_capacity.unwrap_or(default.capacity),
            scope: scope.map_or(Ok(NgramScope::Server), str::parse)?,
        };
        settings.check()?;
        Ok(settings)
    }

    /// Where n-grams come from, the corpus of a file included. Says what was left out of it.
    pub fn sources(&self, target: &Checkpoint) -> Result<(NgramSources, Option<String>)> {
        let settings = self.settings()?;
        let most = self.speculative_ngram_external_corpus_max_tokens;
        let corpora = Corpora::new(most.unwrap_or(Corpora::MOST_TOKENS), target.spec().vocab_size);
        let mut warning = None;
        if let Some(path) = &self.speculative_ngram_external_corpus_path {
            let tokenizer = target.folder().map(Tokenizer::load).transpose()?.flatten();
            let tokenizer = tokenizer.ok_or_else(|| {
                let why = "needs a tokenizer, which this model does not have";
                Error::Usage(format!("--speculative-ngram-external-corpus-path {why}"))
            })?;
            let name = path.display().to_string();
            let added = add_file(&corpora, &tokenizer, &name, path)
                .map_err(|error| Error::Other(named::corpus(&error)))?;
            let cut = format!(
                "only the first {} tokens of {name} are drafted from: \
                 --speculative-ngram-external-corpus-max-tokens is {}",
                added.tokens,
                corpora.most_tokens()
            );
            warning = added.truncated.then_some(cut);
        }
        Ok((NgramSources { settings, corpora }, warning))
    }
}
