//! Whether a machine that has a request's tokens and nothing else drafts as the one that has seen
//! the request grow.
//!
//! An algorithm that takes no hidden states and says that none travel is loaded twice. One copy
//! hears of a text piece by piece and drafts after each; the other hears all of it at once, as it
//! would elsewhere or after a retraction. Their trees must be equal: whatever else the first has
//! kept, it would have had to declare.

use aquila_compute::choose::{History, Sampling};
use aquila_compute::cpu::CpuBackend;
use aquila_compute::{KvDtype, PlanBounds, WeightFormat};
use aquila_model::{Checkpoint, Decoder};
use aquila_spec::{
    Algorithm, Allowance, Asking, BlockTable, DraftGroup, Drafting, Extending, GroupRows,
    HiddenStates, MOST_DRAFT_GROUPS, Opened, Shape, TargetRows, Tree,
};

use super::parse;
use crate::Algorithms;
use crate::error::Result;
use crate::start::open_draft;

/// Tokens that become certain after a prompt, piece by piece.
const PIECES: [usize; 5] = [1, 3, 1, 6, 2];

/// What two machines differ in, each in a sentence; nothing where tokens alone do not suffice by
/// what the algorithm declares.
pub(super) fn failures(
    algorithms: &Algorithms,
    flags: &[&str],
    prompts: &[Vec<u32>],
) -> Result<Vec<String>> {
    let (model, engine) = parse(flags)?;
    let Some(mut speculative) = engine.speculative.resolve(model.name(), None, algorithms)? else {
        return Ok(Vec::new());
    };
    let checkpoint = Checkpoint::open(&model.find(true)?, model.load_format())?;
    let (ngram, _) = engine.speculative.ngram.sources(&checkpoint)?;
    let opened = open_draft(&model, &speculative, &checkpoint, Some(&ngram), true)?;
    speculative.fit(opened.most_steps())?;
    let shape = speculative.policy.covering();
    let longest = prompts.iter().map(Vec::len).max().unwrap_or(0) + PIECES.iter().sum::<usize>();
    let format = WeightFormat::Bf16;
    let backend = CpuBackend::new(model.isa(), model.threads)?;
    let decoder = Decoder::load(&backend, &checkpoint, format, longest + 1, &mut |_| ())?;
    let place = Place { backend, decoder, opened, shape, longest };

    let declared = place.machine()?.declaration().clone();
    if declared.hidden != HiddenStates::None || declared.travels.hidden_rows > 0 {
        return Ok(Vec::new());
    }
    let mut failures = Vec::new();
    for (index, prompt) in prompts.iter().enumerate() {
        let mut one = Life::new(place.machine()?);
        let mut tokens = prompt.clone();
        for piece in [0].iter().chain(&PIECES) {
            // A text that repeats itself, so that there is something to draft from.
            tokens.extend_from_within(..(*piece).min(tokens.len()));
            let grown = one.tree(&place, &tokens)?;
            let other = Life::new(place.machine()?).tree(&place, &tokens)?;
            if grown != other {
                failures.push(format!(
                    "prompt {index}, {shape}, {} tokens: another machine that has the tokens alone \
                     drafts otherwise, and nothing else is declared to travel",
                    tokens.len()
                ));
                break;
            }
        }
    }
    Ok(failures)
}

/// Where algorithms are loaded, and what is asked of them.
struct Place {
    backend: CpuBackend,
    decoder: Decoder<CpuBackend>,
    opened: Box<dyn Opened>,
    shape: Shape,
    longest: usize,
}

impl Place {
    /// Rows of the widest level of a tree.
    fn level(&self) -> usize {
        self.shape.topk() * (self.shape.steps() + 1)
    }

    /// Slots of each group.
    fn slots(&self) -> usize {
        self.longest + self.level() * (self.shape.steps() + 1)
    }

    /// The algorithm, as if on a machine of its own.
    fn machine(&self) -> Result<Box<dyn Algorithm<CpuBackend>>> {
        let (level, slots) = (self.level(), self.slots());
        let rows = self.longest + level;
        let allowance = Allowance {
            format: WeightFormat::Bf16,
            kv_dtype: KvDtype::F32,
            slots,
            positions: self.longest + self.shape.steps(),
            bounds: PlanBounds { rows, outputs: level, slots: slots * MOST_DRAFT_GROUPS },
            target_rows: self.longest,
            requests: 1,
            shape: self.shape,
        };
        Ok(self.opened.load(&self.backend, &self.decoder, &allowance)?)
    }
}

/// A request on one machine.
struct Life {
    machine: Box<dyn Algorithm<CpuBackend>>,
    heard: usize,
}

impl Life {
    fn new(machine: Box<dyn Algorithm<CpuBackend>>) -> Self {
        Self { machine, heard: 0 }
    }

    /// Lets the machine hear of `tokens`; what it drafts after them, if it leaves a seed.
    fn tree(&mut self, place: &Place, tokens: &[u32]) -> Result<Option<Tree>> {
        let (backend, shape) = (&place.backend, place.shape);
        let sampling = Sampling { temperature: 0.7, seed: 5, ..Sampling::default() };
        let history = History::of_prompt(tokens);
        let asking = Asking {
            sampling: &sampling,
            history: &history,
            choice: 0,
            tokens: tokens.len(),
            banned: &[],
            banned_depths: 0,
            drawn: false,
        };
        let groups = self.machine.declaration().groups.clone();
        let slots: Vec<u32> = (0..place.slots() as u32).collect();
        let rows = |(at, group): (usize, &DraftGroup)| {
            let end = tokens.len().saturating_sub(group.lookahead);
            let table = BlockTable { start: at * place.slots(), placed: 0 };
            GroupRows { rows: 0..end, slots: &slots[..end + group.tree.of(shape)], table }
        };
        let certain: Vec<GroupRows<'_>> = groups.iter().enumerate().map(rows).collect();
        let new: Vec<GroupRows<'_>> = groups
            .iter()
            .zip(&certain)
            .map(|(group, certain)| {
                let start = self.heard.saturating_sub(group.lookahead);
                GroupRows { rows: start..certain.rows.end, ..certain.clone() }
            })
            .collect();
        let extending = Extending {
            request: 0,
            tokens,
            since: self.heard,
            groups: &new,
            target: TargetRows::default(),
            previous: None,
            seed: Some((asking, shape.topk())),
        };
        self.heard = tokens.len();
        let seed = self.machine.extend(backend, &[extending], None)?.into_iter().next().flatten();
        let Some(seed) = seed else { return Ok(None) };
        let drafting =
            Drafting { request: 0, tokens, shape, seed: &seed, groups: &certain, asking };
        Ok(self.machine.draft(backend, &[drafting])?.into_iter().next())
    }
}
