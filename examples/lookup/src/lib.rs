//! LOOKUP, a draft algorithm of one's own: where the last tokens of a text occurred before, what
//! followed then is drafted now.
//!
//! It needs no model, no hidden states and no keys and values, so it declares none, and nothing but
//! a request's tokens has to reach another machine. `src/main.rs` is Aquila with it.

use aquila_compute::Backend;
use aquila_model::{Decoder, Needs};
use aquila_spec::{
    Algorithm, Allowance, AskedShape, DraftFor, DraftOption, DraftRequest, Entry, HostProposer,
    LoadOn, Opened, Opening, Shape, Tree,
};

/// LOOKUP by name.
pub struct Lookup;

impl Entry for Lookup {
    fn name(&self) -> &'static str {
        "LOOKUP"
    }

    fn draft_for(&self, _model: &str) -> DraftFor {
        DraftFor::Nothing
    }

    fn options(&self) -> &'static [DraftOption] {
        &[DraftOption { name: "agree", default: "2", help: "tokens that must agree" }]
    }

    fn shape(&self, asked: AskedShape) -> aquila_spec::Result<Shape> {
        asked.resolve(6, 1)
    }

    fn open(&self, opening: &Opening<'_>) -> aquila_spec::Result<Box<dyn Opened>> {
        Ok(Box::new(Agree(opening.options.number("agree")?)))
    }
}

/// How many tokens must agree.
struct Agree(usize);

impl Opened for Agree {
    fn needs(&self, _allowance: &Allowance) -> Needs {
        Needs::default()
    }
}

impl<B: Backend> LoadOn<B> for Agree {
    fn load(
        &self,
        _backend: &B,
        _target: &Decoder<B>,
        _allowance: &Allowance,
    ) -> aquila_spec::Result<Algorithm<B>> {
        Ok(Algorithm::on_host("LOOKUP", Reader(self.0)))
    }
}

/// Reads texts.
struct Reader(usize);

impl HostProposer for Reader {
    fn draft(&mut self, request: &DraftRequest<'_>) -> Option<Tree> {
        let mut tree = Tree::root(request.bonus());
        let drafts = continuation(request.tokens, self.0).iter().take(request.shape.steps());
        drafts.fold(0, |parent, &token| tree.add(parent, token, 1.0));
        Some(tree)
    }
}

/// What followed the last `agree` tokens when they last occurred.
pub fn continuation(tokens: &[u32], agree: usize) -> &[u32] {
    let Some(start) = tokens.len().checked_sub(agree.max(1)) else { return &[] };
    let (before, last) = (&tokens[..tokens.len() - 1], &tokens[start..]);
    let found = before.windows(last.len()).rposition(|window| window == last);
    found.map_or(&[], |at| &tokens[at + last.len()..])
}
