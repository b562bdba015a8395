//! A mixture of experts gives the bits of the reference, whatever the rows, threads and
//! instructions, and chooses experts as a plain sort does.

use aquila_compute::cpu::CpuBackend;
use aquila_compute::{Accumulate, Activation, Backend, HostTensor, WeightFormat, reference};
use proptest::prelude::*;

use crate::made::{backends, bits, made};
use crate::projections::{FORMATS, expected};

type Experts = <CpuBackend as Backend>::Experts;

#[derive(Clone)]
struct Case {
    experts: usize,
    per_token: usize,
    inputs: usize,
    gates: usize,
    outputs: usize,
    format: WeightFormat,
    activation: Activation,
    normalize: bool,
    accumulate: Accumulate,
    seed: u64,
    /// One for each expert, a row after the other.
    logits: Vec<f32>,
}

impl Case {
    fn small(format: WeightFormat, experts: usize, per_token: usize, rows: usize) -> Self {
        let seed = (1000 * experts + 100 * per_token + rows) as u64;
        Self {
            experts,
            per_token,
            inputs: 50,
            gates: 32,
            outputs: 37,
            format,
            activation: if rows.is_multiple_of(2) {
                Activation::Silu
            } else {
                Activation::GeluTanh
            },
            normalize: rows % 5 < 2,
            accumulate: if rows % 4 < 2 { Accumulate::Set } else { Accumulate::Add },
            seed,
            logits: made(seed + 1, rows * experts).iter().map(|x| 5.0 * x).collect(),
        }
    }

    fn rows(&self) -> usize {
        self.logits.len() / self.experts
    }

    /// Weights of an expert: gates and ups, then back.
    fn weights(&self, expert: u32) -> (Vec<f32>, Vec<f32>) {
        let seed = self.seed + 10 + 2 * u64::from(expert);
        let both = made(seed, 2 * self.gates * self.inputs);
        (both, made(seed + 1, self.outputs * self.gates))
    }

    fn input(&self) -> Vec<f32> {
        made(self.seed + 2, self.rows() * self.inputs)
    }

    fn before(&self) -> Vec<f32> {
        made(self.seed + 3, self.rows() * self.outputs)
    }

    /// The experts of a row, as the reference chooses them.
    fn chosen(&self, row: usize) -> Vec<(u32, f32)> {
        let mut probabilities = vec![0.0; self.experts];
        reference::softmax(&self.logits[row * self.experts..][..self.experts], &mut probabilities);
        let mut chosen = vec![(0, 0.0); self.per_token];
        reference::choose_experts(&probabilities, self.normalize, &mut chosen);
        chosen
    }

    fn expected(&self) -> Vec<Vec<f32>> {
        let (x, set) = (self.input(), Accumulate::Set);
        let project = |weights: &[f32], x: &[f32]| {
            let zeros = vec![0.0; weights.len() / x.len()];
            expected(weights, x.len(), self.format, x, None, set, &zeros)
        };
        let mut out: Vec<_> = self.before().chunks(self.outputs).map(<[f32]>::to_vec).collect();
        for (row, out) in out.iter_mut().enumerate() {
            let expert = |id: u32| {
                let (both, down) = self.weights(id);
                let both = project(&both, &x[row * self.inputs..][..self.inputs]);
                let mut activated = vec![0.0; self.gates];
                reference::gate(self.activation, &both, &mut activated);
                project(&down, &activated)
            };
            let mut sum = vec![0.0; self.outputs];
            reference::mix_experts(&self.chosen(row), expert, &mut sum);
            for (out, &sum) in out.iter_mut().zip(&sum) {
                reference::accumulate(sum, None, self.accumulate, out);
            }
        }
        out
    }

    fn pack(&self, backend: &CpuBackend) -> Experts {
        let pack = |outputs: usize, inputs: usize, values: &[f32]| {
            let tensor = HostTensor::from_f32("expert", vec![outputs, inputs], values).unwrap();
            backend.pack(&[tensor], self.format).unwrap()
        };
        let all: Vec<_> = (0..self.experts as u32).map(|id| self.weights(id)).collect();
        let gate_up = all.iter().map(|(w, _)| pack(2 * self.gates, self.inputs, w)).collect();
        let down = all.iter().map(|(_, w)| pack(self.outputs, self.gates, w)).collect();
        backend.experts(gate_up, down).unwrap()
    }

    /// What a backend makes of some of the rows, and which experts it says they went to.
    fn got(
        &self,
        backend: &CpuBackend,
        experts: &Experts,
        rows: &[usize],
    ) -> (Vec<Vec<f32>>, Vec<Vec<f32>>) {
        let (count, pairs) = (rows.len(), rows.len() * self.per_token);
        let filled = |values: &[f32], width: usize| {
            let mut to = backend.rows(count, width).unwrap();
            for (to_row, &row) in rows.iter().enumerate() {
                to.row_mut(to_row).copy_from_slice(&values[row * width..][..width]);
            }
            to
        };
        let logits = filled(&self.logits, self.experts);
        let (input, mut out) =
            (filled(&self.input(), self.inputs), filled(&self.before(), self.outputs));
        let mut routing = backend.routing(count, self.per_token).unwrap();
        let mut both = backend.rows(pairs, 2 * self.gates).unwrap();
        let mut activated = backend.rows(pairs, self.gates).unwrap();
        let mut routed = backend.rows(count, self.per_token + 3).unwrap();
        backend.route(&logits, count, self.normalize, &mut routing).unwrap();
        backend
            .project_experts(
                experts,
                self.activation,
                &input,
                count,
                &routing,
                &mut both,
                &mut activated,
                self.accumulate,
                &mut out,
            )
            .unwrap();
        backend.routed(&routing, count, 2, &mut routed).unwrap();
        let rows_of = |from: &<CpuBackend as Backend>::Rows| {
            (0..count).map(|row| from.row(row).to_vec()).collect()
        };
        (rows_of(&out), rows_of(&routed))
    }

    /// All rows at once and some of them alone, on all backends, against the reference.
    fn compare(&self) {
        let (expected, rows) = (self.expected(), self.rows());
        for backend in backends() {
            let experts = self.pack(&backend);
            let all: Vec<usize> = (0..rows).collect();
            let alone = [0, rows / 2, rows - 1].map(|row| vec![row]);
            for rows in std::iter::once(all).chain(alone) {
                let (got, routed) = self.got(&backend, &experts, &rows);
                for ((row, got), routed) in rows.iter().zip(&got).zip(&routed) {
                    let who = format!("row {row} of {}, {}", rows.len(), backend.describe());
                    assert_eq!(bits(got), bits(&expected[*row]), "{who}");
                    let ids = self.chosen(*row).into_iter().map(|(id, _)| id as f32);
                    let ids: Vec<f32> = [0.0; 2].into_iter().chain(ids).chain([0.0]).collect();
                    assert_eq!(routed, &ids, "{who}");
                }
            }
        }
    }
}

#[test]
fn up_to_70_rows_give_the_bits_of_the_reference() {
    for rows in 1..=70 {
        for format in FORMATS {
            Case::small(format, 11, 3, rows).compare();
        }
    }
}

#[test]
fn one_expert_to_all_experts_give_the_references_bits() {
    for per_token in 1..=6 {
        for format in FORMATS {
            Case::small(format, 6, per_token, 9).compare();
        }
    }
}

#[test]
fn rows_that_share_one_expert_give_the_references_bits() {
    for format in FORMATS {
        let mut case = Case::small(format, 5, 1, 30);
        for logits in case.logits.chunks_mut(5) {
            logits.copy_from_slice(&[0.0, 0.5, 0.0, 3.0, 0.0]);
        }
        case.compare();
    }
}

#[test]
fn gates_that_fill_no_panel_give_the_references_bits() {
    for format in FORMATS {
        for gates in [1, 15, 17, 40] {
            Case { gates, ..Case::small(format, 4, 2, 13) }.compare();
        }
    }
}

#[test]
fn experts_over_all_threads_give_the_references_bits() {
    for format in FORMATS {
        for rows in [1, 19] {
            let sizes =
                Case { inputs: 130, gates: 224, outputs: 531, ..Case::small(format, 7, 4, rows) };
            sizes.compare();
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn odd_sizes_of_experts_give_the_references_bits(
        inputs in 1usize..80,
        gates in 1usize..50,
        outputs in 1usize..60,
        experts in 1usize..20,
        wanted in 1usize..20,
        rows in 1usize..20,
        format in prop::sample::select(&FORMATS),
    ) {
        let case = Case::small(format, experts, wanted.min(experts), rows);
        Case { inputs, gates, outputs, ..case }.compare();
    }

    #[test]
    fn experts_are_chosen_as_a_stable_sort_does(
        levels in prop::collection::vec(0u8..6, 1..40),
        per_token in 1usize..40,
        normalize: bool,
    ) {
        // Few levels, so that many are equal.
        let experts = levels.len();
        let per_token = per_token.min(experts);
        let logits: Vec<f32> = levels.iter().map(|&level| f32::from(level) * 1.5).collect();
        let exact: Vec<f64> = logits.iter().map(|&x| f64::from(x).exp()).collect();
        let mut order: Vec<usize> = (0..experts).collect();
        order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
        order.truncate(per_token);
        let of = if normalize { order.clone() } else { (0..experts).collect() };
        let total: f64 = of.iter().map(|&id| exact[id]).sum();
        for backend in backends() {
            let mut rows = backend.rows(1, experts).unwrap();
            rows.row_mut(0).copy_from_slice(&logits);
            let mut routing = backend.routing(1, per_token).unwrap();
            backend.route(&rows, 1, normalize, &mut routing).unwrap();
            let ids: Vec<usize> = routing.row(0).iter().map(|&(id, _)| id as usize).collect();
            prop_assert_eq!(&ids, &order);
            for &(id, weight) in routing.row(0) {
                let want = exact[id as usize] / total;
                prop_assert!((f64::from(weight) / want - 1.0).abs() < 2e-6);
            }
        }
    }
}

#[test]
fn rows_that_hold_no_numbers_go_to_the_first_experts() {
    // What is in rows beyond those of a plan is undefined, and must not stop the others.
    for backend in backends() {
        let mut logits = backend.rows(2, 20).unwrap();
        logits.row_mut(0)[7] = f32::NAN;
        logits.row_mut(1)[5] = 2.0;
        let mut routing = backend.routing(2, 3).unwrap();
        backend.route(&logits, 2, true, &mut routing).unwrap();
        let ids = |row| routing.row(row).iter().map(|&(id, _)| id).collect::<Vec<_>>();
        assert_eq!((ids(0), ids(1)), (vec![0, 1, 2], vec![5, 0, 1]));
    }
}

#[test]
fn experts_that_do_not_go_together_are_refused() {
    let backend = &backends()[0];
    let pack = |outputs: usize, inputs: usize, format| {
        let values = vec![0.0; outputs * inputs];
        let tensor = HostTensor::from_f32("expert", vec![outputs, inputs], &values).unwrap();
        backend.pack(&[tensor], format).unwrap()
    };
    let bf16 = WeightFormat::Bf16;
    assert!(backend.experts(Vec::new(), Vec::new()).is_err());
    assert!(backend.experts(vec![pack(8, 5, bf16)], vec![pack(5, 3, bf16)]).is_err());
    assert!(backend.experts(vec![pack(8, 5, bf16)], vec![pack(5, 4, WeightFormat::F32)]).is_err());
    let different = vec![pack(8, 5, bf16), pack(8, 6, bf16)];
    assert!(backend.experts(different, vec![pack(5, 4, bf16), pack(5, 4, bf16)]).is_err());

    let experts = backend.experts(vec![pack(8, 5, bf16)], vec![pack(5, 4, bf16)]).unwrap();
    let rows = |width: usize| backend.rows(2, width).unwrap();
    let mut routing = backend.routing(2, 2).unwrap();
    let error = backend.route(&rows(1), 2, false, &mut routing).unwrap_err().to_string();
    assert!(error.contains("2 of 1 experts"), "{error}");
    // Routed to two experts, of which the layer has one.
    backend.route(&rows(2), 2, false, &mut routing).unwrap();
    let (silu, set) = (Activation::Silu, Accumulate::Set);
    let (mut both, mut activated, mut out) =
        (backend.rows(4, 8).unwrap(), backend.rows(4, 4).unwrap(), rows(5));
    let refused = backend
        .project_experts(
            &experts,
            silu,
            &rows(5),
            2,
            &routing,
            &mut both,
            &mut activated,
            set,
            &mut out,
        )
        .unwrap_err()
        .to_string();
    assert!(refused.contains("experts"), "{refused}");
}
