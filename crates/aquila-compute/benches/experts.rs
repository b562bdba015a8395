//! A mixture of experts against a projection of the same bytes, at the sizes of a layer of
//! Qwen3-30B-A3B: hidden 2048, 128 experts of 768, 8 a token.
//!
//! `cargo bench -p aquila-compute --bench experts -- [--isa NAME] [--threads N] [--rows 1,16]
//! [--format bf16|int8] [--repeat N]`
//!
//! Rows go to other experts each time. The projections are as large as the experts that were
//! chosen, and are given one row for every row that an expert has on average.

use std::time::Instant;

use aquila_compute::cpu::{CpuBackend, CpuRows, CpuWeight, Isa, IsaChoice};
use aquila_compute::{Accumulate, Activation, Backend, HostTensor, WeightFormat};

mod machine;
use machine::Machine;

const HIDDEN: usize = 2048;
const EXPERTS: usize = 128;
const GATES: usize = 768;
const PER_TOKEN: usize = 8;

struct Bench<'a> {
    backend: &'a CpuBackend,
    format: WeightFormat,
    /// Of each expert, for the mixture; of eight at a time, for projections.
    experts: <CpuBackend as Backend>::Experts,
    dense: Vec<(CpuWeight, CpuWeight)>,
}

fn main() {
    let mut isas: Vec<Isa> =
        Isa::available().into_iter().filter(|isa| *isa != Isa::Portable).collect();
    let (mut threads, mut repeat, mut all_rows) = (0, 40, vec![1, 16]);
    let mut formats = vec![WeightFormat::Bf16, WeightFormat::Int8];
    let mut args = std::env::args().skip(1);
    while let Some(flag) = args.next() {
        let mut value = || args.next().unwrap_or_else(|| panic!("{flag} needs a value"));
        match flag.as_str() {
            "--isa" => {
                let name = value();
                isas.retain(|isa| isa.to_string() == name);
            }
            "--threads" => threads = value().parse().expect("a number"),
            "--repeat" => repeat = value().parse().expect("a number"),
            "--rows" => {
                all_rows = value().split(',').map(|r| r.parse().expect("a number")).collect();
            }
            "--format" => {
                formats = vec![match value().as_str() {
                    "bf16" => WeightFormat::Bf16,
                    "int8" => WeightFormat::Int8,
                    other => panic!("no format {other}"),
                }];
            }
            _ => {}
        }
    }
    for isa in isas {
        let backend = CpuBackend::new(IsaChoice::Only(isa), threads).expect("available");
        let bandwidth = Machine::measure(isa, backend.threads()).bandwidth;
        println!("{}: reads {:.1} GB/s", backend.describe(), bandwidth / 1e9);
        for &format in &formats {
            let bench = Bench::new(&backend, format);
            println!(
                "\n{format:?}     experts used     MB    experts µs    GB/s   projections µs    GB/s   ratio"
            );
            for &rows in &all_rows {
                bench.rows(rows, repeat);
            }
        }
    }
}

impl<'a> Bench<'a> {
    fn new(backend: &'a CpuBackend, format: WeightFormat) -> Self {
        let tensor = |outputs: usize, inputs: usize| {
            let values: Vec<f32> = (0..outputs * inputs)
                .map(|i| ((i * 2_654_435_761) % 1009) as f32 / 1009.0 - 0.5)
                .collect();
            HostTensor::from_f32_as_bf16("w", vec![outputs, inputs], &values).expect("fits")
        };
        let pack_all = |tensor: HostTensor, count: usize| -> Vec<CpuWeight> {
            let one = std::slice::from_ref(&tensor);
            (0..count).map(|_| backend.pack(one, format).expect("memory")).collect()
        };
        let gate_up = pack_all(tensor(2 * GATES, HIDDEN), EXPERTS);
        let experts = backend.experts(gate_up, pack_all(tensor(HIDDEN, GATES), EXPERTS));
        let (wide, count) = (PER_TOKEN * GATES, EXPERTS / PER_TOKEN);
        let gate_up = pack_all(tensor(2 * wide, HIDDEN), count);
        let down = pack_all(tensor(HIDDEN, wide), count);
        let dense = gate_up.into_iter().zip(down).collect();
        Self { backend, format, experts: experts.expect("alike"), dense }
    }

    fn rows_of(&self, rows: usize, width: usize) -> CpuRows {
        let mut made = self.backend.rows(rows, width).expect("memory");
        for row in 0..rows {
            for (i, x) in made.row_mut(row).iter_mut().enumerate() {
                *x = ((i * 7 + row) % 23) as f32 / 23.0 - 0.5;
            }
        }
        made
    }

    fn rows(&self, rows: usize, repeat: usize) {
        let (backend, pairs) = (self.backend, rows * PER_TOKEN);
        let bytes_of = |outputs, inputs| CpuBackend::packed_bytes(outputs, inputs, self.format);
        let expert_bytes = bytes_of(2 * GATES, HIDDEN) + bytes_of(HIDDEN, GATES);
        let input = self.rows_of(rows, HIDDEN);
        let mut logits = self.rows_of(rows, EXPERTS);
        let mut routing = backend.routing(rows, PER_TOKEN).expect("memory");
        let mut both = self.rows_of(pairs, 2 * GATES);
        let mut activated = self.rows_of(pairs, GATES);
        let mut wide = self.rows_of(rows, 2 * PER_TOKEN * GATES);
        let mut narrow = self.rows_of(rows, PER_TOKEN * GATES);
        let mut out = self.rows_of(rows, HIDDEN);
        let (mut state, mut next) = (1u64, 0);
        let (mut mixed, mut dense) = (Vec::new(), Vec::new());
        let mut used = 0;
        for repetition in 0..=repeat {
            for row in 0..rows {
                for x in logits.row_mut(row) {
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    *x = (state >> 40) as f32 / (1u64 << 24) as f32;
                }
            }
            let since = Instant::now();
            backend.route(&logits, rows, true, &mut routing).expect("fits");
            backend
                .project_experts(
                    &self.experts,
                    Activation::Silu,
                    &input,
                    rows,
                    &routing,
                    &mut both,
                    &mut activated,
                    Accumulate::Set,
                    &mut out,
                )
                .expect("fits");
            let took = since.elapsed().as_secs_f64();
            let mut ids: Vec<u32> =
                (0..rows).flat_map(|row| routing.row(row)).map(|&(id, _)| id).collect();
            ids.sort_unstable();
            ids.dedup();
            let (groups, share) = (ids.len().div_ceil(PER_TOKEN), pairs.div_ceil(ids.len()));
            let since = Instant::now();
            for _ in 0..groups {
                let (gate_up, down) = &self.dense[next % self.dense.len()];
                let silu = Activation::Silu;
                backend
                    .project_gated(gate_up, None, silu, &input, share, &mut wide, &mut narrow)
                    .expect("fits");
                backend
                    .project(down, None, &narrow, share, Accumulate::Set, &mut out)
                    .expect("fits");
                next += 1;
            }
            if repetition > 0 {
                let of_experts = (ids.len() * expert_bytes) as f64;
                let of_groups = (groups * PER_TOKEN * expert_bytes) as f64;
                used += ids.len();
                mixed.push((took, of_experts / took));
                dense.push((
                    since.elapsed().as_secs_f64(),
                    of_groups / since.elapsed().as_secs_f64(),
                ));
            }
        }
        let median = |times: &mut Vec<(f64, f64)>| {
            times.sort_by(|a, b| a.1.total_cmp(&b.1));
            times[times.len() / 2]
        };
        let ((mixed, fast), (dense, faster)) = (median(&mut mixed), median(&mut dense));
        let used = used as f64 / repeat as f64;
        println!(
            "{rows:4} rows {used:12.1} {:6.0} {:13.0} {:7.1} {:16.0} {:7.1} {:7.2}",
            used * expert_bytes as f64 / 1e6,
            mixed * 1e6,
            fast / 1e9,
            dense * 1e6,
            faster / 1e9,
            fast / faster
        );
    }
}
