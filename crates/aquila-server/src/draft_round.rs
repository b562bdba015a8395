//! What `return_draft_trees` adds to a stream: with the tokens of a round how each of them came,
//! and the tree that was verified.

use aquila_engine::Token;
use aquila_text::{CheckedParams, Delta, TextStream, Tokenizer};
use serde::Serialize;

use crate::fields::Fields;
use crate::refusal::Refusal;
use crate::state::App;

/// The field that asks for it.
const FIELD: &str = "return_draft_trees";

/// Takes whether a request asks for draft trees. They come with the pieces of a stream alone: an
/// answer that is kept until it is whole would have to keep them all.
pub(crate) fn take(fields: &mut Fields, stream: bool) -> Result<bool, Refusal> {
    let asked = fields.flag(FIELD)?;
    if asked && !stream {
        return Err(Refusal::param(FIELD, "is only allowed if `stream` is true"));
    }
    Ok(asked)
}

/// Reports the rounds of one answer.
pub(crate) struct RoundReporter {
    tokenizer: Option<Tokenizer>,
    text: Option<TextStream>,
    stop_ids: Vec<u32>,
}

/// One round of an answer.
#[derive(Debug, Serialize)]
pub(crate) struct DraftRound {
    tokens: Vec<RoundToken>,
    /// Absent for the token that the prompt's own pass chose.
    #[serde(skip_serializing_if = "Option::is_none")]
    tree: Option<Vec<RoundNode>>,
}

#[derive(Debug, Serialize)]
struct RoundToken {
    id: u32,
    /// What the token adds to the text: nothing where a character is incomplete.
    text: String,
    /// The depth of the accepted draft that it was, or null for the target's own choice.
    drafted: Option<u8>,
}

#[derive(Debug, Serialize)]
struct RoundNode {
    token: u32,
    text: String,
    parent: Option<usize>,
    depth: usize,
    score: f32,
    accepted: bool,
}

impl RoundReporter {
    /// One for each answer of a stream; none where nothing is asked for.
    pub fn for_answers(app: &App, params: &CheckedParams, answers: usize) -> Vec<Self> {
        let tokenizer = app.generator.tokenizer();
        let new = || Self {
            tokenizer: tokenizer.cloned(),
            text: tokenizer.map(|tokenizer| tokenizer.stream(params.skip_special_tokens)),
            stop_ids: params.limits.stop_ids.clone(),
        };
        (0..if params.draft_trees { answers } else { 0 }).map(|_| new()).collect()
    }

    /// The round that a piece of the answer comes from.
    pub fn report(&mut self, delta: &Delta) -> DraftRound {
        let tokens = delta.tokens.iter().map(|token| self.token(token)).collect();
        let tree = delta.tree.as_ref().map(|tree| {
            // A text may end before its round's accepted drafts do.
            let accepted = &tree.accepted[..tree.accepted.len().min(1 + delta.tokens.len())];
            let node = |(at, node): (usize, &aquila_engine::TreeNode)| RoundNode {
                token: node.token,
                text: self.token_text(node.token),
                parent: (at > 0).then_some(node.parent),
                depth: node.depth,
                score: node.score,
                accepted: accepted.contains(&at),
            };
            tree.nodes.iter().enumerate().map(node).collect()
        });
        DraftRound { tokens, tree }
    }

    fn token(&mut self, token: &Token) -> RoundToken {
        // The token that ends a text is not part of it.
        let text = match &mut self.text {
            Some(text) if self.stop_ids.binary_search(&token.id).is_err() => text.push(token.id),
            _ => Ok(String::new()),
        };
        RoundToken {
            id: token.id,
            // What cannot be decoded has ended the answer itself.
            text: text.unwrap_or_default(),
            drafted: token.drafted.map(std::num::NonZeroU8::get),
        }
    }

    fn token_text(&self, id: u32) -> String {
        let text = self.tokenizer.as_ref().and_then(|t| t.token_text(id).ok().flatten());
        text.unwrap_or_default()
    }
}
