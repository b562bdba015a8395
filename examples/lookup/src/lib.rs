//! LOOKUP, a draft algorithm of one's own: where the last tokens of a text occurred before, what
//! followed then is drafted now.
//!
//! It needs no model, no hidden states and no keys and values, so it declares none, there is
//! nothing to load, and nothing but a request's tokens has to reach another machine. `src/main.rs` is Aquila with it.

use aquila_compute::Backend;
use aquila_model::{Decoder, Needs, Result};
use aquila_spec::{
    Algorithm, Allowance, AskedShape, Candidate, Declaration, DraftFor, Drafting, Entry, Extending,
    Growth, HiddenStates, LoadOn, Opened, Opening, Seed, Shape, Travels, Tree,
};

/// Tokens that must agree.
const AGREE: usize = 2;

/// LOOKUP by name.
pub struct Lookup;

impl Entry for Lookup {
    fn name(&self) -> &'static str {
        "LOOKUP"
    }

    fn draft_for(&self, _model: &str) -> DraftFor {
        DraftFor::Nothing
    }

    fn shape(&self, asked: AskedShape) -> aquila_spec::Result<Shape> {
        asked.resolve(6, 1)
    }

    fn open(&self, _opening: &Opening<'_>) -> aquila_spec::Result<Box<dyn Opened>> {
        Ok(Box::new(Lookup))
    }
}

impl Opened for Lookup {
    fn needs(&self, _allowance: &Allowance) -> Needs {
        Needs::default()
    }
}

impl<B: Backend> LoadOn<B> for Lookup {
    fn load(
        &self,
        _backend: &B,
        _target: &Decoder<B>,
        _allowance: &Allowance,
    ) -> aquila_spec::Result<Box<dyn Algorithm<B>>> {
        let (hidden, groups, travels) = (HiddenStates::None, Vec::new(), Travels::NOTHING);
        Ok(Box::new(Reader(Declaration { name: "LOOKUP", hidden, groups, travels })))
    }
}

/// Reads texts.
struct Reader(Declaration);

impl<B: Backend> Algorithm<B> for Reader {
    fn declaration(&self) -> &Declaration {
        &self.0
    }

    fn draft(&mut self, _backend: &B, requests: &[Drafting<'_>]) -> Result<Vec<Tree>> {
        let tree = |request: &Drafting<'_>| {
            let mut tokens = continuation(request.tokens).iter();
            let mut next = || -> Vec<Candidate> {
                let candidate = |&token| Candidate { token, probability: 1.0 };
                tokens.next().map(candidate).into_iter().collect()
            };
            let mut growth = Growth::start(request.shape, &next());
            while growth.goes_on() {
                growth.grow(&[next()]);
            }
            growth.finish(request.bonus())
        };
        Ok(requests.iter().map(tree).collect())
    }

    fn extend(
        &mut self,
        _backend: &B,
        requests: &[Extending<'_>],
        _hidden: Option<&B::Rows>,
    ) -> Result<Vec<Option<Seed>>> {
        Ok(requests.iter().map(|r| r.seed.as_ref().map(|_| Seed::default())).collect())
    }
}

/// What followed the last tokens when they last occurred.
pub fn continuation(tokens: &[u32]) -> &[u32] {
    let Some(start) = tokens.len().checked_sub(AGREE) else { return &[] };
    let (before, last) = (&tokens[..tokens.len() - 1], &tokens[start..]);
    let found = before.windows(AGREE).rposition(|window| window == last);
    found.map_or(&[], |at| &tokens[at + AGREE..])
}
