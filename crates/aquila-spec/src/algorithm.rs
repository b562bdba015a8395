//! What a draft algorithm is: what it declares that it needs, how it drafts, what it keeps.

use std::ops::Range;
use std::sync::Arc;

use aquila_compute::choose::{Ask, Candidate, History, Sampling, Weights};
use aquila_compute::{Backend, DraftIds, ForwardPlan};
use aquila_model::Result;

use crate::{Growth, Proposal, Shape, Tree};

/// What an algorithm needs. Where it declares none, no buffer exists and no copy happens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Declaration {
    /// The algorithm's name, as `--speculative-algorithm` takes it.
    pub name: &'static str,
    /// The hidden states of the target that it takes.
    pub hidden: HiddenStates,
    /// The groups in which it keeps keys and values of its own, in order.
    pub groups: Vec<DraftGroup>,
    /// What of a request goes along, beside its tokens and its certain rows of every group, when
    /// another machine is to draft for it.
    pub travels: Travels,
}

impl Declaration {
    /// Whether another machine can draft for a request by its tokens alone.
    pub fn by_tokens_alone(&self) -> bool {
        self.groups.is_empty() && self.travels == Travels::NOTHING
    }

    /// How many tokens beyond its position the farthest-seeing row depends on.
    pub fn lookahead(&self) -> usize {
        self.groups.iter().map(|group| group.lookahead).max().unwrap_or(0)
    }
}

/// What the next tree of a request rests on beside its tokens and its certain rows of every group.
///
/// This is what a machine that reads prompts hands to one that goes on. What an algorithm keeps for
/// all requests (weights, corpora, a trie that they share) is each machine's own and stays.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Travels {
    /// Whether the tree begins with the [`Offer`] of the request's seed.
    pub offer: bool,
    /// How many hidden states that the draft has kept it goes on from, at most.
    pub hidden_rows: usize,
    /// How wide each of them is.
    pub hidden_width: usize,
}

impl Travels {
    /// Nothing: what a tree rests on is read out of the tokens again.
    pub const NOTHING: Self = Self { offer: false, hidden_rows: 0, hidden_width: 0 };

    /// What the seed offers, and nothing hidden.
    pub const OFFER: Self = Self { offer: true, ..Self::NOTHING };

    /// What the seed offers, and `rows` hidden states of this width.
    pub fn with_hidden(rows: usize, width: usize) -> Self {
        Self { offer: true, hidden_rows: rows, hidden_width: width }
    }
}

/// Hidden states of the target's rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HiddenStates {
    /// None: no capture, no buffer, no copy.
    None,
    /// The residual stream before each of these layers, side by side: 0 is the embedding, as many
    /// as there are layers what leaves the last.
    Layers(Vec<usize>),
    /// What the target's language-model head reads: the residual stream after the final norm.
    Final,
}

/// Keys and values that a draft keeps for its rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DraftGroup {
    /// How many tokens beyond its position a row depends on: its row p consumes token
    /// p + lookahead, so with n tokens certain it has n - lookahead certain rows.
    pub lookahead: usize,
    /// Rows that a tree takes here while it is drafted.
    pub tree: TreeRows,
}

/// How many rows of a group a tree takes while it is drafted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TreeRows {
    /// One for each node that goes on, at every level.
    EveryLevel,
    /// Those of one level: as many for each node that goes on there as it is deep.
    Level(usize),
}

impl TreeRows {
    /// The rows of a tree of this shape.
    pub fn of(self, shape: Shape) -> usize {
        match self {
            TreeRows::EveryLevel => shape.draft_rows(),
            TreeRows::Level(depth) if depth < shape.steps() => shape.topk() * depth,
            TreeRows::Level(_) => 0,
        }
    }
}

/// The most groups that an algorithm may declare.
pub const MOST_DRAFT_GROUPS: usize = 15;

/// A way to draft. It owns what it keeps: weights, keys and values, tries.
///
/// The engine calls `extend` after every pass of the target and `draft` before the next one, with
/// every request that decodes. What is drafted changes how many rounds an answer takes, never the
/// answer, so a draft may be as wrong as it likes; a tree larger than its shape fails its round.
pub trait Algorithm<B: Backend>: Send {
    /// What it needs.
    fn declaration(&self) -> &Declaration;

    /// A tree for each request, rooted in its last token.
    fn draft(&mut self, backend: &B, requests: &[Drafting<'_>]) -> Result<Vec<Tree>>;

    /// Takes in what has become certain; answers a seed for each request that asks for one.
    /// `hidden` has the rows of the target's last pass, where declared.
    fn extend(
        &mut self,
        backend: &B,
        requests: &[Extending<'_>],
        hidden: Option<&B::Rows>,
    ) -> Result<Vec<Option<Seed>>>;

    /// The request of this number has ended or was retracted, with these tokens.
    fn leave(&mut self, _request: u64, _tokens: &[u32]) {}

    /// Forgets what the texts of requests taught it; there are none now.
    fn begin_anew(&mut self) {}
}

/// What a request asks of every token, wherever it is drafted.
#[derive(Debug, Clone, Copy)]
pub struct Asking<'a> {
    /// The request's settings.
    pub sampling: &'a Sampling,
    /// The tokens that count for penalties, the bonus included.
    pub history: &'a History,
    /// Which of the request's answers this is.
    pub choice: u32,
    /// Tokens of prompt and answer, the bonus included: the index of the next token.
    pub tokens: usize,
    /// Tokens that may not be chosen at depths below `banned_depths`.
    pub banned: &'a [u32],
    /// See `banned`.
    pub banned_depths: usize,
    /// Whether drafts are drawn from the draft's own distribution, for rejection sampling.
    pub drawn: bool,
}

impl<'a> Asking<'a> {
    /// The ask of a draft about row `row`, after `path` below the bonus.
    pub fn draft(&self, path: &'a [u32], row: usize) -> DraftAsk<'a> {
        DraftAsk { ask: self.after(path, row), drawn: self.drawn && !self.sampling.is_greedy() }
    }

    /// The ask about row `row`, after `path` below the bonus.
    pub fn after(&self, path: &'a [u32], row: usize) -> Ask<'a> {
        Ask {
            row,
            sampling: self.sampling,
            history: self.history,
            path,
            position: (self.tokens + path.len()) as u32,
            choice: self.choice,
            banned: if path.len() < self.banned_depths { self.banned } else { &[] },
            top_logprobs: None,
            given: None,
        }
    }
}

/// Where the next tree of a request begins: what follows the bonus.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Seed {
    /// The seed's row, in the extend that left it.
    pub row: u32,
    /// What was offered after the bonus.
    pub offer: Offer,
}

/// What a draft offers after a token.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Offer {
    /// The tokens, best first.
    pub candidates: Vec<Candidate>,
    /// What they were drawn from, if they were.
    pub drawn_from: Option<Arc<Weights>>,
}

impl Offer {
    /// Up to `count` tokens after each row of a draft's logits. `ids` says which tokens a draft
    /// knows, if not all.
    pub fn of<B: Backend>(
        backend: &B,
        logits: &B::Rows,
        asks: &[DraftAsk<'_>],
        count: usize,
        ids: Option<DraftIds<'_>>,
    ) -> aquila_compute::Result<Vec<Offer>> {
        let asked = |drawn: bool| -> Vec<Ask<'_>> {
            asks.iter().filter(|a| a.drawn == drawn).map(|a| a.ask).collect()
        };
        let (likely, drawn) = (asked(false), asked(true));
        let mut likely = match likely.is_empty() {
            true => Vec::new().into_iter(),
            false => backend.offer(logits, &likely, count, ids)?.into_iter(),
        };
        let mut drawn = match drawn.is_empty() {
            true => Vec::new().into_iter(),
            false => backend.weigh(logits, &drawn, ids)?.into_iter(),
        };
        let offer = |asked: &DraftAsk<'_>| {
            if !asked.drawn {
                return likely.next().map(|candidates| Offer { candidates, drawn_from: None });
            }
            let Ask { sampling, choice, position, .. } = asked.ask;
            let proposal = Proposal::draw(drawn.next()?, sampling.seed, choice, position, count);
            let candidate = |(rank, token)| Candidate { token, probability: Proposal::prior(rank) };
            let candidates = proposal.tokens.into_iter().enumerate().map(candidate).collect();
            Some(Offer { candidates, drawn_from: Some(proposal.from) })
        };
        Ok(asks.iter().filter_map(offer).collect())
    }
}

impl Offer {
    /// A tree that begins with what is offered after the bonus.
    pub fn begin(&self, shape: Shape) -> Growth {
        let mut growth = Growth::start(shape, &self.candidates);
        if let Some(from) = &self.drawn_from {
            growth.propose(None, from.clone());
        }
        growth
    }

    /// Adds what is offered after each node of a tree's beam.
    pub fn grow(growth: &mut Growth, offers: Vec<Offer>) {
        for (at, offer) in growth.beam().to_vec().into_iter().zip(&offers) {
            if let Some(from) = &offer.drawn_from {
                growth.propose(Some(at), from.clone());
            }
        }
        let offered: Vec<_> = offers.into_iter().map(|offer| offer.candidates).collect();
        growth.grow(&offered);
    }
}

/// What is asked of a row of a draft's logits.
#[derive(Debug, Clone, Copy)]
pub struct DraftAsk<'a> {
    /// As it is asked of the target.
    pub ask: Ask<'a>,
    /// Whether tokens are drawn.
    pub drawn: bool,
}

/// Rows of one group and where they are.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct GroupRows<'a> {
    /// When drafting, all rows that are certain; when extending, those to run.
    pub rows: Range<usize>,
    /// The slots of the rows from the first on up to those, then room for a tree's.
    pub slots: &'a [u32],
    /// Where the request's block table begins among those of the draft's plans, and how many of
    /// its slots earlier passes of an extend have placed there.
    pub table: BlockTable,
}

/// A request's block table among those of all requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BlockTable {
    /// Where it begins.
    pub start: usize,
    /// How many of its slots are there already.
    pub placed: usize,
}

impl GroupRows<'_> {
    /// Adds to a plan what its block tables lack of the first `rows` rows; answers where the
    /// request's begins.
    pub fn place_table(&self, plan: &mut ForwardPlan, rows: usize) -> u32 {
        let BlockTable { start, placed } = self.table;
        if placed < rows {
            plan.change_table(start + placed, &self.slots[placed..rows]);
        }
        start as u32
    }
}

/// A request whose tree is to be drafted.
#[derive(Clone)]
pub struct Drafting<'a> {
    /// Its number.
    pub request: u64,
    /// Prompt and answer; the last one is the bonus.
    pub tokens: &'a [u32],
    /// How large the tree may be.
    pub shape: Shape,
    /// Where it begins.
    pub seed: &'a Seed,
    /// Its rows in each declared group.
    pub groups: &'a [GroupRows<'a>],
    /// What is asked.
    pub asking: Asking<'a>,
}

impl Drafting<'_> {
    /// The root of the tree: the last token.
    pub fn bonus(&self) -> u32 {
        *self.tokens.last().expect("a request that decodes has tokens")
    }

    /// Whether a tree is one that this request may get: rooted in its bonus, no larger than its
    /// shape, of tokens that there are.
    pub fn admits(&self, tree: &Tree, vocabulary: usize) -> bool {
        let nodes = tree.nodes();
        nodes.len() <= self.shape.nodes()
            && nodes.first().is_some_and(|root| root.token == self.bonus())
            && nodes
                .iter()
                .all(|node| node.depth <= self.shape.steps() && (node.token as usize) < vocabulary)
    }
}

/// A request some of whose tokens have become certain.
#[derive(Clone)]
pub struct Extending<'a> {
    /// Its number.
    pub request: u64,
    /// Prompt and answer.
    pub tokens: &'a [u32],
    /// How many of them were there at its last extend; 0 at the first.
    pub since: usize,
    /// The rows to run in each declared group.
    pub groups: &'a [GroupRows<'a>],
    /// Where the target's rows are.
    pub target: TargetRows,
    /// What its last extend left, if that asked for a seed.
    pub previous: Option<&'a Seed>,
    /// What is asked after the last row, if a tree is to begin there: how many candidates.
    pub seed: Option<(Asking<'a>, usize)>,
}

/// Where the target's rows of a request are among the rows of its last pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TargetRows {
    /// A row of the pass.
    pub row: usize,
    /// The token whose row that is.
    pub token: usize,
}

impl TargetRows {
    /// The row of the pass that holds the target's row of this token.
    pub fn of(&self, token: usize) -> u32 {
        (self.row + token - self.token) as u32
    }
}
