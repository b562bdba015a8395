//! Mixtures of experts: by plain arithmetic against the CPU backend, by tensor cores against the
//! contract, launched and replayed.

use aquila_compute::cpu::{CpuBackend, IsaChoice};
use aquila_compute::cuda::{CudaBackend, CudaRows, contract};
use aquila_compute::{
    Accumulate, Activation, Backend, HostTensor, Result, WeightFormat, reference,
};
use half::bf16;

use crate::Findings;
use crate::random::{Kind, Random};
use crate::tensor::{halves, parallel};

/// Where the ids of experts begin in their rows.
const COLUMN: usize = 2;

#[derive(Debug, Clone, Copy)]
struct Case {
    experts: usize,
    per_token: usize,
    inputs: usize,
    gates: usize,
    outputs: usize,
    rows: usize,
    normalize: bool,
    activation: Activation,
    accumulate: Accumulate,
}

/// Rows of one pass.
struct Inputs {
    logits: Vec<f32>,
    x: Vec<f32>,
    before: Vec<f32>,
}

/// Values that all backends start from.
struct Values {
    gate_up: Vec<Vec<bf16>>,
    down: Vec<Vec<bf16>>,
}

impl Case {
    fn values(&self, random: &mut Random) -> Values {
        let mut all = |count: usize| -> Vec<Vec<bf16>> {
            (0..self.experts).map(|_| halves(&random.values(count, Kind::Even))).collect()
        };
        Values { gate_up: all(2 * self.gates * self.inputs), down: all(self.outputs * self.gates) }
    }

    fn inputs(&self, random: &mut Random) -> Inputs {
        let mut logits: Vec<f32> =
            random.values(self.rows * self.experts, Kind::Even).iter().map(|x| 5.0 * x).collect();
        // Every third row has many equal logits.
        for row in logits.chunks_mut(self.experts).step_by(3) {
            row.iter_mut().for_each(|x| *x = x.round());
        }
        Inputs {
            logits,
            x: random.values(self.rows * self.inputs, Kind::Outliers),
            before: random.values(self.rows * self.outputs, Kind::Even),
        }
    }

    /// The experts of a row and their weights.
    fn chosen(&self, inputs: &Inputs, row: usize) -> Vec<(u32, f32)> {
        let mut probabilities = vec![0.0; self.experts];
        let logits = &inputs.logits[row * self.experts..][..self.experts];
        reference::softmax(logits, &mut probabilities);
        let mut chosen = vec![(0, 0.0); self.per_token];
        reference::choose_experts(&probabilities, self.normalize, &mut chosen);
        chosen
    }

    /// What the contract says of all rows.
    fn expected(&self, values: &Values, inputs: &Inputs) -> Vec<f32> {
        let x = halves(&inputs.x);
        let rows = parallel(self.rows, |row| {
            let x = &x[row * self.inputs..][..self.inputs];
            let expert = |id: u32| {
                let (gate_up, down) = (&values.gate_up[id as usize], &values.down[id as usize]);
                contract::expert(x, self.activation, gate_up, down)
            };
            let mut sum = vec![0.0; self.outputs];
            reference::mix_experts(&self.chosen(inputs, row), expert, &mut sum);
            let mut out = inputs.before[row * self.outputs..][..self.outputs].to_vec();
            for (out, &sum) in out.iter_mut().zip(&sum) {
                reference::accumulate(sum, None, self.accumulate, out);
            }
            out
        });
        rows.concat()
    }

    /// The ids of all rows' experts, and what stood around them.
    fn expected_ids(&self, inputs: &Inputs) -> Vec<f32> {
        let of_row = |row: usize| {
            let ids = self.chosen(inputs, row).into_iter().map(|(id, _)| id as f32);
            [7.0; COLUMN].into_iter().chain(ids).chain([7.0])
        };
        (0..self.rows).flat_map(of_row).collect()
    }
}

/// A mixture on a backend, with its buffers.
struct Mixture<B: Backend> {
    case: Case,
    experts: B::Experts,
    logits: B::Rows,
    x: B::Rows,
    out: B::Rows,
    ids: B::Rows,
    routing: B::Routing,
    both: B::Rows,
    activated: B::Rows,
}

/// Replaces rows from the first on.
fn fill<B: Backend>(b: &B, rows: &mut B::Rows, width: usize, values: &[f32]) -> Result<()> {
    values.chunks(width).enumerate().try_for_each(|(row, values)| b.write_row(rows, row, values))
}

impl<B: Backend> Mixture<B> {
    fn new(b: &B, case: Case, values: &Values, format: WeightFormat) -> Result<Self> {
        let Case { experts, per_token, inputs, gates, outputs, rows, .. } = case;
        let pack = |outputs: usize, inputs: usize, all: &[Vec<bf16>]| -> Result<Vec<B::Weight>> {
            let one = |values: &Vec<bf16>| {
                let values: Vec<f32> = values.iter().map(|x| x.to_f32()).collect();
                b.pack(&[HostTensor::from_f32("w", vec![outputs, inputs], &values)?], format)
            };
            all.iter().map(one).collect()
        };
        // Buffers of more rows than there are.
        let (capacity, pairs) = (rows + 3, (rows + 3) * per_token);
        let poisoned = |count: usize, width: usize| -> Result<B::Rows> {
            let mut made = b.rows(count, width)?;
            fill(b, &mut made, width, &vec![f32::NAN; count * width])?;
            Ok(made)
        };
        Ok(Self {
            case,
            logits: poisoned(capacity, experts)?,
            x: poisoned(capacity, inputs)?,
            out: poisoned(capacity, outputs)?,
            ids: poisoned(capacity, COLUMN + per_token + 1)?,
            both: poisoned(pairs, 2 * gates)?,
            activated: poisoned(pairs, gates)?,
            routing: b.routing(capacity, per_token)?,
            experts: b.experts(
                pack(2 * gates, inputs, &values.gate_up)?,
                pack(outputs, gates, &values.down)?,
            )?,
        })
    }

    fn place(&mut self, b: &B, inputs: &Inputs) -> Result<()> {
        let Case { experts, inputs: width, outputs, per_token, rows, .. } = self.case;
        fill(b, &mut self.logits, experts, &inputs.logits)?;
        fill(b, &mut self.x, width, &inputs.x)?;
        fill(b, &mut self.out, outputs, &inputs.before)?;
        let columns = COLUMN + per_token + 1;
        fill(b, &mut self.ids, columns, &vec![7.0; rows * columns])
    }

    fn run(&mut self, b: &B) -> Result<()> {
        let Case { rows, normalize, activation, accumulate, .. } = self.case;
        b.route(&self.logits, rows, normalize, &mut self.routing)?;
        b.routed(&self.routing, rows, COLUMN, &mut self.ids)?;
        b.project_experts(
            &self.experts,
            activation,
            &self.x,
            rows,
            &self.routing,
            &mut self.both,
            &mut self.activated,
            accumulate,
            &mut self.out,
        )
    }
}

/// Cases that differ in everything; `few` for a slow device.
fn cases(few: bool) -> Vec<Case> {
    let sizes: &[[usize; 6]] = &[
        // Experts, experts of a row, inputs, gates, outputs, rows.
        [8, 2, 64, 48, 64, 5],
        [5, 5, 50, 9, 37, 3],
        [70, 3, 96, 16, 100, 40],
        [1, 1, 33, 8, 16, 9],
        [40, 8, 4128, 24, 48, 2],
        [128, 8, 2048, 768, 2048, 33],
        [128, 8, 256, 64, 256, 500],
    ];
    let of =
        |(i, &[experts, per_token, inputs, gates, outputs, rows]): (usize, &[usize; 6])| Case {
            experts,
            per_token,
            inputs,
            gates,
            outputs,
            rows,
            normalize: i % 2 == 0,
            activation: if i % 3 == 1 { Activation::GeluTanh } else { Activation::Silu },
            accumulate: if i % 4 < 2 { Accumulate::Add } else { Accumulate::Set },
        };
    sizes.iter().take(if few { 5 } else { sizes.len() }).enumerate().map(of).collect()
}

/// Plain arithmetic against the CPU backend.
pub fn check_plain(
    cuda: &CudaBackend,
    random: &mut Random,
    small: bool,
    findings: &mut Findings,
) -> Result<()> {
    let cpu = CpuBackend::new(IsaChoice::Auto, 0)?;
    for case in cases(small) {
        let (values, inputs) = (case.values(random), case.inputs(random));
        for format in [WeightFormat::F32, WeightFormat::Bf16] {
            let mut want = Mixture::new(&cpu, case, &values, format)?;
            let mut got = Mixture::new(cuda, case, &values, format)?;
            want.place(&cpu, &inputs)?;
            got.place(cuda, &inputs)?;
            want.run(&cpu)?;
            got.run(cuda)?;
            for (what, got, want) in [("ids", &got.ids, &want.ids), ("sums", &got.out, &want.out)] {
                let (got, want) = (cuda.read(got, case.rows)?, cpu.read(want, case.rows)?);
                findings.compare(&format!("experts, {what}, {format:?}, {case:?}"), &got, &want);
            }
        }
    }
    Ok(())
}

/// Tensor cores against the contract: launched, and replayed with rows that choose other experts.
pub fn check_tensor(
    b: &CudaBackend,
    random: &mut Random,
    small: bool,
    findings: &mut Findings,
) -> Result<()> {
    for case in cases(small) {
        let values = case.values(random);
        let mut mixture = Mixture::new(b, case, &values, WeightFormat::Bf16)?;
        let mut compare = |mixture: &Mixture<CudaBackend>, inputs: &Inputs, how: &str| {
            let want = case.expected(&values, inputs);
            let rounded: Vec<f32> = want.iter().map(|&x| bf16::from_f32(x).to_f32()).collect();
            let of = |rows_of: &CudaRows| -> Result<Vec<f32>> { b.read(rows_of, case.rows) };
            let in_halves = b.read_halves(&mixture.out, case.rows)?;
            let in_halves: Vec<f32> = in_halves.iter().map(|x| x.to_f32()).collect();
            let what = format!("{how}, {case:?}");
            findings.compare(&format!("experts, sums, {what}"), &of(&mixture.out)?, &want);
            findings.compare(&format!("experts, halves, {what}"), &in_halves, &rounded);
            let ids = case.expected_ids(inputs);
            findings.compare(&format!("experts, ids, {what}"), &of(&mixture.ids)?, &ids);
            Ok::<_, aquila_compute::Error>(())
        };
        let inputs = case.inputs(random);
        mixture.place(b, &inputs)?;
        mixture.run(b)?;
        compare(&mixture, &inputs, "launched")?;
        let graph = b.graph_of(|b| mixture.run(b))?;
        let inputs = case.inputs(random);
        mixture.place(b, &inputs)?;
        graph.replay()?;
        compare(&mixture, &inputs, "replayed")?;
    }
    rows_that_are_no_numbers(b, findings)
}

/// Rows whose logits are no numbers, as padding rows may be, go to the lowest ids.
fn rows_that_are_no_numbers(b: &CudaBackend, findings: &mut Findings) -> Result<()> {
    let logits = [[f32::NAN; 9], [f32::INFINITY; 9], [f32::NEG_INFINITY; 9]];
    let mut routing = b.routing(3, 4)?;
    b.route(&b.rows_of(9, &logits.concat())?, 3, true, &mut routing)?;
    let mut ids = b.rows(3, 4)?;
    b.routed(&routing, 3, 0, &mut ids)?;
    let want = [0.0, 1.0, 2.0, 3.0].repeat(3);
    findings.compare("experts of rows that are no numbers", &b.read(&ids, 3)?, &want);
    Ok(())
}
