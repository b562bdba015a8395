//! Algorithms whose first pass is the last: one loses the device, one never returns.

use aquila_compute::Backend;
use aquila_compute::round::ExtendRows;
use aquila_model::{Decoder, Needs};
use aquila_spec::{
    Algorithm, Allowance, Declaration, DraftBound, DraftFor, Entry, HiddenStates, LoadOn, Opened,
    Opening, Proposer, Result,
};

/// What the first pass does.
#[derive(Clone, Copy)]
pub enum Broken {
    /// Reports that the device is lost.
    Loses,
    /// Never returns.
    Hangs,
}

impl Entry for Broken {
    fn name(&self) -> &'static str {
        match self {
            Broken::Loses => "LOSES",
            Broken::Hangs => "HANGS",
        }
    }

    fn draft_for(&self, _model: &str) -> DraftFor {
        DraftFor::Nothing
    }

    fn open(&self, _opening: &Opening<'_>) -> Result<Box<dyn Opened>> {
        Ok(Box::new(*self))
    }
}

impl Opened for Broken {
    fn needs(&self, _allowance: &Allowance) -> Needs {
        Needs::default()
    }
}

impl<B: Backend> LoadOn<B> for Broken {
    fn load(&self, _: &B, _: &Decoder<B>, _: &Allowance) -> Result<Algorithm<B>> {
        let (name, hidden, groups) = (self.name(), HiddenStates::None, Vec::new());
        let declaration = Declaration { name, hidden, groups };
        Ok(Algorithm::on_device(Drafts { declaration, broken: *self }))
    }
}

struct Drafts {
    declaration: Declaration,
    broken: Broken,
}

impl Drafts {
    fn pass(&self) -> aquila_model::Result<()> {
        match self.broken {
            Broken::Loses => {
                Err(aquila_compute::Error::DeviceLost("it was told to be".into()).into())
            }
            Broken::Hangs => loop {
                std::thread::park();
            },
        }
    }
}

impl<B: Backend> Proposer<B> for Drafts {
    fn declaration(&self) -> &Declaration {
        &self.declaration
    }

    fn draft(&mut self, _: &B, _: &mut B::State, _: DraftBound) -> aquila_model::Result<()> {
        self.pass()
    }

    fn extend(
        &mut self,
        _: &B,
        _: &mut B::State,
        _: ExtendRows,
        _: DraftBound,
        _: Option<&B::Rows>,
    ) -> aquila_model::Result<()> {
        self.pass()
    }

    fn kv(&self, _: usize) -> &[B::Kv] {
        &[]
    }

    fn kv_mut(&mut self, _: usize) -> &mut [B::Kv] {
        &mut []
    }
}
