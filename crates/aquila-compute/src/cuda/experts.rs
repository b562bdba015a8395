//! A mixture of experts: which experts each row goes to, and what they make of it.
//!
//! The one invariant: the host never learns which experts were chosen. What is launched follows from
//! how many rows and experts there are, so a captured pass serves whatever its rows choose.

use super::Arithmetic;
use super::arguments;
use super::backend::CudaBackend;
use super::contract::PAIR;
use super::device::{Device, Memory};
use super::kernels::Kernel;
use super::rows::CudaRows;
use super::weight::{CudaWeight, Layout, TILE};
use crate::{Accumulate, Activation, Backend, Error, Result};

/// Experts of a layer at most: two words of shared memory for each are there without asking.
const MOST_EXPERTS: usize = 4096;
/// Pairs of one expert that read its weights together; `UNIT_PAIRS` in `experts.cu`.
const UNIT_PAIRS: usize = 8;

/// The matrices of all experts of a layer, of one shape and layout.
struct Matrices {
    weights: Vec<CudaWeight>,
    /// The address of each.
    addresses: Memory,
}

impl Matrices {
    fn new(device: &Device, weights: Vec<CudaWeight>) -> Result<Self> {
        let Some(first) = weights.first() else {
            return Err(Error::Tensor("a mixture needs at least one expert".into()));
        };
        let shape = |w: &CudaWeight| (w.inputs, w.outputs, w.layout);
        if weights.iter().any(|weight| shape(weight) != shape(first)) {
            return Err(Error::Tensor(
                "the experts of a layer must have one shape and one format".into(),
            ));
        }
        let addresses: Vec<u64> = weights.iter().map(|weight| weight.memory.at(0)).collect();
        let memory = device.allocate_uncompared("experts", 8 * addresses.len())?;
        device.write(&memory, 0, &addresses)?;
        Ok(Self { weights, addresses: memory })
    }

    /// What every expert's matrix is like.
    fn shape(&self) -> &CudaWeight {
        &self.weights[0]
    }

    fn memory(&self) -> impl Iterator<Item = &Memory> {
        self.weights.iter().map(|weight| &weight.memory).chain([&self.addresses])
    }
}

/// The experts of one layer on the device.
pub struct CudaExperts {
    gate_up: Matrices,
    down: Matrices,
}

impl CudaExperts {
    pub(super) fn new(
        device: &Device,
        gate_up: Vec<CudaWeight>,
        down: Vec<CudaWeight>,
    ) -> Result<Self> {
        let (gate_up, down) = (Matrices::new(device, gate_up)?, Matrices::new(device, down)?);
        let (up, back) = (gate_up.shape(), down.shape());
        if gate_up.weights.len() != down.weights.len()
            || up.outputs != 2 * back.inputs
            || up.layout != back.layout
        {
            return Err(Error::Tensor(format!(
                "{} projections to {} gates and ups do not go with {} of {} inputs",
                gate_up.weights.len(),
                up.outputs,
                down.weights.len(),
                back.inputs
            )));
        }
        if up.outputs < TILE {
            return Err(Error::Unavailable(format!(
                "experts of {} gates are not available on CUDA: {} at least",
                back.inputs,
                TILE / 2
            )));
        }
        check_count(down.weights.len())?;
        Ok(Self { gate_up, down })
    }

    /// How many experts there are.
    pub fn count(&self) -> usize {
        self.down.weights.len()
    }
}

fn check_count(experts: usize) -> Result<()> {
    if experts <= MOST_EXPERTS {
        return Ok(());
    }
    Err(Error::Unavailable(format!(
        "{experts} experts are not available on CUDA: {MOST_EXPERTS} at most"
    )))
}

/// Which experts each row goes to, and their weights, on the device.
pub struct CudaRouting {
    /// Of each pair a word: experts of each row by probability, and by id; weights; pairs by expert.
    likeliest: Memory,
    ascending: Memory,
    weights: Memory,
    places: Memory,
    /// Pairs of one expert that come together, and how many such units there are.
    units: Memory,
    unit_count: Memory,
    capacity: usize,
    per_token: usize,
    /// Rows that were routed last, and how many experts they were routed to.
    routed: (usize, usize),
}

impl CudaRouting {
    pub(super) fn new(device: &Device, capacity: usize, per_token: usize) -> Result<Self> {
        let pairs = capacity * per_token;
        let words = |count: usize| device.allocate("routing", 4 * count);
        Ok(Self {
            likeliest: words(pairs)?,
            ascending: words(pairs)?,
            weights: words(pairs)?,
            // In an order that depends on that of threads.
            places: device.allocate_uncompared("routing", 4 * pairs)?,
            units: words(2 * pairs)?,
            unit_count: words(1)?,
            capacity,
            per_token,
            routed: (0, 0),
        })
    }

    fn memory(&self) -> [&Memory; 6] {
        let Self { likeliest, ascending, weights, places, units, unit_count, .. } = self;
        [likeliest, ascending, weights, places, units, unit_count]
    }
}

/// One projection of all pairs.
struct PairProjection<'a> {
    matrices: &'a Matrices,
    input: &'a CudaRows,
    /// Pairs that read the same row.
    sharing: usize,
    /// The outputs that are wanted; the first is a multiple of [`TILE`].
    outputs: std::ops::Range<usize>,
}

impl CudaBackend {
    /// [`Backend::route`].
    pub(super) fn choose_experts(
        &self,
        logits: &CudaRows,
        rows: usize,
        normalize: bool,
        out: &mut CudaRouting,
    ) -> Result<()> {
        let (experts, per_token) = (logits.width, out.per_token);
        check_count(experts)?;
        if per_token > experts || rows > out.capacity {
            return Err(Error::Tensor(format!(
                "{per_token} of {experts} experts for {rows} rows do not fit a routing of {}",
                out.capacity
            )));
        }
        logits.hold("logits of experts", rows, experts)?;
        out.routed = (rows, experts);
        let arguments = arguments::Route {
            logits: logits.parts(),
            likeliest: out.likeliest.at(0),
            ascending: out.ascending.at(0),
            weights: out.weights.at(0),
            experts: experts as u32,
            per_token: per_token as u32,
            normalize: u32::from(normalize),
        };
        let names: Vec<_> = logits.memory().chain(out.memory()).collect();
        let shared = 4 * (experts + 2 * per_token);
        let (device, kernels) = (&self.device, &self.kernels);
        // SAFETY: there are logits and room for all rows.
        unsafe { device.launch(&kernels.route, [rows, 1, 1], 32, shared, &arguments, &names) }?;
        if self.arithmetic == Arithmetic::Plain || rows == 0 {
            return Ok(());
        }
        let arguments = arguments::Group {
            ascending: out.ascending.at(0),
            places: out.places.at(0),
            units: out.units.at(0),
            unit_count: out.unit_count.at(0),
            pairs: (rows * per_token) as u32,
            experts: experts as u32,
        };
        let names = out.memory();
        // SAFETY: there is room for all pairs, and for as many units; ids are below `experts`.
        unsafe {
            device.launch(&kernels.group_pairs, [1; 3], 1024, 8 * experts, &arguments, &names)
        }
    }

    /// [`Backend::project_experts`].
    #[allow(clippy::too_many_arguments)]
    pub(super) fn run_experts(
        &self,
        experts: &CudaExperts,
        activation: Activation,
        input: &CudaRows,
        rows: usize,
        routing: &CudaRouting,
        (both, activated): (&mut CudaRows, &mut CudaRows),
        accumulate: Accumulate,
        out: &mut CudaRows,
    ) -> Result<()> {
        if routing.routed != (rows, experts.count()) {
            return Err(Error::Tensor(format!(
                "a routing of {:?} rows and experts is not one of {rows} rows to {}",
                routing.routed,
                experts.count()
            )));
        }
        let (gate_up, down) = (&experts.gate_up, &experts.down);
        let (inputs, width, outputs) =
            (gate_up.shape().inputs, down.shape().inputs, down.shape().outputs);
        let pairs = rows * routing.per_token;
        input.hold("rows of experts", rows, inputs)?;
        out.hold("what experts make", rows, outputs)?;
        both.hold("gates and ups of experts", pairs, 2 * width)?;
        activated.hold("gated values of experts", pairs, width)?;
        if inputs < input.width && !inputs.is_multiple_of(PAIR)
            || (both.width, activated.width) != (2 * width, width)
        {
            return Err(Error::Tensor(format!(
                "experts of {inputs} inputs and {width} gates do not fit rows of {}, {} and {}",
                input.width, both.width, activated.width
            )));
        }
        let sharing = routing.per_token;
        let up = PairProjection { matrices: gate_up, input, sharing, outputs: 0..2 * width };
        self.project_pairs(&up, pairs, routing, both)?;
        self.gate(activation, both, pairs, activated)?;
        // What an expert makes of a row has room where its gates and ups were, some outputs at a time.
        let step = both.width / TILE * TILE;
        for first in (0..outputs).step_by(step) {
            let wanted = first..outputs.min(first + step);
            let columns = wanted.len();
            let input = &*activated;
            let back = PairProjection { matrices: down, input, sharing: 1, outputs: wanted };
            self.project_pairs(&back, pairs, routing, both)?;
            let arguments = arguments::Mix {
                input: both.parts(),
                out: out.parts(),
                weights: routing.weights.at(0),
                per_token: routing.per_token as u32,
                first: first as u32,
                width: columns as u32,
                add: u32::from(accumulate == Accumulate::Add),
            };
            let names = both.memory().chain(out.memory()).chain(routing.memory());
            // SAFETY: all rows, pairs and columns were checked.
            unsafe { self.by_value(&self.kernels.mix_experts, columns, rows, &arguments, names) }?;
        }
        Ok(())
    }

    /// Projects the row of each pair by its expert; `out` gets a row for each pair.
    fn project_pairs(
        &self,
        projection: &PairProjection<'_>,
        pairs: usize,
        routing: &CudaRouting,
        out: &CudaRows,
    ) -> Result<()> {
        let PairProjection { matrices, input, sharing, outputs } = projection;
        let weight = matrices.shape();
        let arguments = arguments::Experts {
            input: input.parts(),
            out: out.parts(),
            matrices: matrices.addresses.at(0),
            ascending: routing.ascending.at(0),
            places: routing.places.at(0),
            units: routing.units.at(0),
            unit_count: routing.unit_count.at(0),
            sharing: *sharing as u32,
            inputs: weight.inputs as u32,
            first: outputs.start as u32,
            end: outputs.end as u32,
        };
        let rows = input.memory().chain(out.memory()).chain(routing.memory());
        let names: Vec<_> = rows.chain(matrices.memory()).collect();
        let (kernel, grid): (&Kernel, _) = match weight.layout {
            Layout::Plain { bf16 } => {
                let kernel = self.kernels.project_experts_plain.of(bf16);
                (kernel, [pairs, outputs.len().div_ceil(256), 1])
            }
            Layout::Tiles => {
                // Of each expert one unit may have fewer pairs than fit.
                let units = pairs.min(pairs / UNIT_PAIRS + matrices.weights.len());
                let kernel = &self.kernels.project_experts_tensor;
                (kernel, [units, outputs.len().div_ceil(TILE), 1])
            }
        };
        // SAFETY: rows were checked by the caller; experts and places are those of `route`.
        unsafe { self.device.launch(kernel, grid, 256, 0, &arguments, &names) }
    }

    /// [`Backend::routed`].
    pub(super) fn tell_experts(
        &self,
        routing: &CudaRouting,
        rows: usize,
        column: usize,
        out: &mut CudaRows,
    ) -> Result<()> {
        let per_token = routing.per_token;
        out.hold("ids of experts", rows, column + per_token)?;
        if rows > routing.routed.0 {
            return Err(Error::Tensor(format!("{rows} rows of {} routed", routing.routed.0)));
        }
        let arguments = arguments::Routed {
            out: out.parts(),
            likeliest: routing.likeliest.at(0),
            column: column as u32,
            per_token: per_token as u32,
        };
        let names = out.memory().chain(routing.memory());
        let kernel = &self.kernels.routed_experts;
        // SAFETY: rows and columns were checked.
        unsafe { self.by_value(kernel, per_token, rows, &arguments, names) }
    }
}
