//! What a draft algorithm is: what it declares that it needs, and what drafts.
//!
//! Proposers come in two kinds. On the backend, a model or head enqueues the passes of its levels
//! and never sees a token: a [`Proposer`]. On the host, a [`HostProposer`] gets the tokens and
//! hands in trees: n-grams and plug-ins. An [`Algorithm`] has one of them, or both.

use aquila_compute::Backend;
use aquila_compute::round::{DraftGroup, ExtendRows, Shape, Tree};
use aquila_model::Result;

use crate::packed::{Packer, Unpacker};

/// What an algorithm needs. Where it declares none, no buffer exists and no copy happens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Declaration {
    /// The algorithm's name, by which it is asked for.
    pub name: &'static str,
    /// The hidden states of the target that it takes.
    pub hidden: HiddenStates,
    /// The groups in which it keeps keys and values of its own, in order.
    pub groups: Vec<DraftGroup>,
}

impl Declaration {
    /// That of an algorithm which needs nothing but tokens.
    fn of_tokens(name: &'static str) -> Self {
        Self { name, hidden: HiddenStates::None, groups: Vec::new() }
    }

    /// How many tokens beyond its position the farthest-seeing row depends on.
    pub fn lookahead(&self) -> usize {
        self.groups.iter().map(|group| group.lookahead).max().unwrap_or(0)
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

/// A way to draft: on the backend, on the host, or both.
///
/// What is drafted changes how many rounds an answer takes, never the answer, so a draft may be as
/// wrong as it likes; a tree of the host that is larger than its shape fails its round.
pub struct Algorithm<B: Backend> {
    declaration: Declaration,
    /// What drafts on the backend.
    pub device: Option<Box<dyn Proposer<B>>>,
    /// What drafts on the host, before that.
    pub host: Option<Box<dyn HostProposer>>,
}

impl<B: Backend> Algorithm<B> {
    /// One that drafts on the backend.
    pub fn on_device(proposer: impl Proposer<B> + 'static) -> Self {
        let declaration = proposer.declaration().clone();
        Self { declaration, device: Some(Box::new(proposer)), host: None }
    }

    /// One that drafts on the host, from tokens alone.
    pub fn on_host(name: &'static str, proposer: impl HostProposer + 'static) -> Self {
        let declaration = Declaration::of_tokens(name);
        Self { declaration, device: None, host: Some(Box::new(proposer)) }
    }

    /// This one, under another name, for requests that `proposer` leaves to it.
    pub fn behind(self, name: &'static str, proposer: impl HostProposer + 'static) -> Self {
        let declaration = Declaration { name, ..self.declaration };
        Self { declaration, host: Some(Box::new(proposer)), ..self }
    }

    /// What it needs.
    pub fn declaration(&self) -> &Declaration {
        &self.declaration
    }

    /// What another machine needs to go on drafting for a request whose last round is over, beside
    /// its tokens and its certain rows of every group.
    pub fn pack(&mut self, backend: &B, state: &B::State, request: Placed<'_>) -> Result<Vec<u8>> {
        let device = self.device.as_ref().map(|device| device.pack(backend, state, request.place));
        let host = self.host.as_mut().map(|host| host.pack(request.request));
        let mut packed = Packer::new(VERSION);
        packed.bytes(&device.transpose()?.unwrap_or_default());
        packed.bytes(&host.unwrap_or_default());
        Ok(packed.finish())
    }

    /// Takes what another machine has packed for a request whose rows are all here; false where it
    /// is not of that form, and the request's last rows must be run again.
    pub fn unpack(
        &mut self,
        backend: &B,
        state: &mut B::State,
        request: Placed<'_>,
        packed: &[u8],
    ) -> Result<bool> {
        let parts = Unpacker::read_all(packed, VERSION, |p| Some((p.bytes()?, p.bytes()?)));
        let Some((device, host)) = parts else { return Ok(false) };
        if let Some(proposer) = &mut self.device
            && !proposer.unpack(backend, state, request.place, device)?
        {
            return Ok(false);
        }
        let Placed { request, tokens, .. } = request;
        Ok(self.host.as_mut().is_none_or(|proposer| proposer.unpack(request, tokens, host)))
    }
}

/// The form in which both sides of an algorithm are packed.
const VERSION: u8 = 1;

/// A request of which something is packed or unpacked.
#[derive(Debug, Clone, Copy)]
pub struct Placed<'a> {
    /// Its number.
    pub request: u64,
    /// Its place in the backend's state.
    pub place: usize,
    /// Prompt and answer; the last one is the bonus.
    pub tokens: &'a [u32],
}

/// Bounds on what a proposer's passes have, where nothing is known but what the host has planned.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct DraftBound {
    /// Levels of the deepest tree.
    pub steps: usize,
    /// Nodes that go on at each level, of all requests.
    pub beam: usize,
    /// Rows that become certain.
    pub rows: usize,
    /// Requests.
    pub requests: usize,
}

/// What drafts on the backend. It owns its weights and its keys and values, and enqueues passes
/// over the requests of the round; it learns nothing of what comes of them.
pub trait Proposer<B: Backend>: Send {
    /// What it needs.
    fn declaration(&self) -> &Declaration;

    /// Enqueues the levels of the trees that were started.
    fn draft(&mut self, backend: &B, state: &mut B::State, bound: DraftBound) -> Result<()>;

    /// Enqueues the passes over tokens that are certain, and leaves the seeds of trees. `hidden`
    /// has the rows of the target's last pass, where declared.
    fn extend(
        &mut self,
        backend: &B,
        state: &mut B::State,
        rows: ExtendRows,
        bound: DraftBound,
        hidden: Option<&B::Rows>,
    ) -> Result<()>;

    /// The stores of keys and values of one of its groups.
    fn kv(&self, group: usize) -> &[B::Kv];

    /// The stores of keys and values of one of its groups, to be written.
    fn kv_mut(&mut self, group: usize) -> &mut [B::Kv];

    /// What another machine needs to draft the next tree of the request at `place`, beside its
    /// tokens and its certain rows of every group: bytes of the algorithm's own form, which should
    /// begin with a version. By default nothing, and the request's last rows are run again there.
    fn pack(&self, _backend: &B, _state: &B::State, _place: usize) -> Result<Vec<u8>> {
        Ok(Vec::new())
    }

    /// Takes what another machine has packed, for the request at `place`, which has all certain
    /// rows; false where its last rows must be run again to draft for it.
    fn unpack(
        &mut self,
        _backend: &B,
        _state: &mut B::State,
        _place: usize,
        _packed: &[u8],
    ) -> Result<bool> {
        Ok(false)
    }
}

/// What drafts on the host, from the tokens of requests.
pub trait HostProposer: Send {
    /// A tree for a request that decodes, rooted in its last token; none leaves it to the
    /// algorithm's model, or to plain decoding.
    fn draft(&mut self, request: &DraftRequest<'_>) -> Option<Tree>;

    /// The text of the request of this number has grown to `tokens`.
    fn read(&mut self, _request: u64, _tokens: &[u32]) {}

    /// The request of this number has ended or was preempted, with these tokens.
    fn leave(&mut self, _request: u64, _tokens: &[u32]) {}

    /// Forgets what the texts of requests taught it; there are none now.
    fn begin_anew(&mut self) {}

    /// What another machine needs to go on drafting for the request of this number, beside its
    /// tokens: bytes of the algorithm's own form, which should begin with a version. By default
    /// nothing: what a tree rests on is read out of the tokens again.
    fn pack(&mut self, _request: u64) -> Vec<u8> {
        Vec::new()
    }

    /// Begins with a request whose text is `tokens` so far, and with what another machine has packed
    /// for it; false where that is not of this form.
    fn unpack(&mut self, request: u64, tokens: &[u32], packed: &[u8]) -> bool {
        self.read(request, tokens);
        packed.is_empty()
    }
}

/// A request whose tree is to be drafted on the host.
#[derive(Debug, Clone, Copy)]
pub struct DraftRequest<'a> {
    /// Its number.
    pub request: u64,
    /// Prompt and answer; the last one is the bonus.
    pub tokens: &'a [u32],
    /// How large the tree may be.
    pub shape: Shape,
}

impl DraftRequest<'_> {
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
