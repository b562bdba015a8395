//! Whether a machine that has a request's tokens and nothing else drafts as the one that has seen
//! the request grow.
//!
//! An algorithm that takes no hidden states and says that none travel is loaded twice. One copy
//! hears of a text piece by piece and drafts after each; the other hears all of it at once, as it
//! would elsewhere or after a retraction. Their trees must be equal: whatever else the first has
//! kept, it would have had to declare.

use std::sync::Arc;

use aquila_compute::cpu::CpuBackend;
use aquila_compute::round::{
    Admitted, Batch, BatchRow, DraftLimits, ExtendRows, RequestParams, Returned, RoundState,
    RowWork, StateBounds, TableChange,
};
use aquila_compute::sampling::Sampling;
use aquila_compute::{KvDtype, PlanBounds, WeightFormat};
use aquila_model::{Checkpoint, Decoder};
use aquila_spec::{
    Algorithm, Allowance, DraftBound, DraftRequest, HiddenStates, MOST_DRAFT_GROUPS, Opened, Shape,
    Tree, Verify,
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
    fn machine(&self) -> Result<Algorithm<CpuBackend>> {
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
    machine: Algorithm<CpuBackend>,
    /// How many tokens it had heard of each time.
    heard: Vec<usize>,
}

impl Life {
    fn new(machine: Algorithm<CpuBackend>) -> Self {
        Self { machine, heard: Vec::new() }
    }

    /// Lets the machine hear of `tokens`; what it drafts after them.
    fn tree(&mut self, place: &Place, tokens: &[u32]) -> Result<Option<Tree>> {
        let (request, shape) = (0, place.shape);
        self.heard.push(tokens.len());
        if let Some(host) = &mut self.machine.host {
            host.read(request, tokens);
            if let Some(tree) = host.draft(&DraftRequest { request, tokens, shape }) {
                return Ok(Some(tree));
            }
        }
        self.tree_of_model(place, tokens)
    }

    /// What its model drafts, when it hears of a text in as many pieces as the machine has.
    fn tree_of_model(&mut self, place: &Place, tokens: &[u32]) -> Result<Option<Tree>> {
        let Algorithm { device: Some(device), .. } = &mut self.machine else { return Ok(None) };
        let (backend, shape) = (&place.backend, place.shape);
        let groups = device.declaration().groups.clone();
        let bound = DraftBound {
            steps: shape.steps(),
            beam: shape.topk(),
            rows: tokens.len() + 1,
            requests: 1,
        };
        let mut state = RoundState::new(StateBounds {
            places: 1,
            stride: place.slots(),
            drafts: true,
            groups: groups.clone(),
            hidden: false,
            first_parked: 0,
            parked_rows: 0,
            chunk: tokens.len(),
            steps: shape.steps(),
        });
        let limits = DraftLimits {
            shape,
            groups: groups.len(),
            lookahead: 0,
            candidates: shape.topk(),
            verify: Verify::Match,
        };
        let params = RequestParams {
            id: 0,
            sampling: Sampling { temperature: 0.7, seed: 5, ..Sampling::default() },
            draft_sampling: None,
            choice: 0,
            stop_ids: Vec::new(),
            min_tokens: 0,
            prompt: tokens.len(),
            longest: usize::MAX,
            logprobs: None,
            prompt_logprobs: None,
            returned: Returned::default(),
            limits,
        };
        let slots: Vec<u32> = (0..place.slots() as u32).collect();
        let table = |group| TableChange { place: 0, group, from: 0, slots: 0..slots.len() };
        let mut batch = Batch {
            admitted: vec![Admitted {
                place: 0,
                params: Arc::new(params),
                tokens: tokens.to_vec(),
                matched: 0,
                rounds: 0,
            }],
            tables: (0..=groups.len()).map(table).collect(),
            slots,
            ..Batch::default()
        };
        // All but the bonus has rows.
        let (goal, mut read) = (tokens.len() - 1, 0);
        for &heard in &self.heard {
            let end = heard.min(goal);
            let work = RowWork::Prefill { rows: read..end, outputs: end..end, last: end == goal };
            batch.rows = vec![BatchRow { place: 0, work }];
            state.begin(std::mem::take(&mut batch));
            state.accept(None, |_| unreachable!("nothing is sampled"));
            state.publish();
            device.extend(backend, &mut state, ExtendRows::Round, bound, None)?;
            read = end;
            if end == goal {
                break;
            }
        }
        let work = RowWork::Decode { shape, rate: 1.0, pause: false };
        state.begin(Batch { rows: vec![BatchRow { place: 0, work }], ..Batch::default() });
        state.start_trees(Vec::new());
        device.draft(backend, &mut state, bound)?;
        state.finish_trees();
        Ok(state.tree(0).map(|(_, tree)| tree.clone()))
    }
}
