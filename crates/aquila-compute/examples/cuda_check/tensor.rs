//! Tensor cores: each operation against the contract.

use std::thread;

use aquila_compute::cuda::{CudaBackend, CudaRows, contract};
use aquila_compute::{
    Accumulate, Activation, Backend, HeadShape, HostTensor, PlanBounds, Result, WeightFormat,
    reference,
};
use half::bf16;

use crate::Findings;
use crate::random::{Kind, Random};

const ACTIVATIONS: [Activation; 2] = [Activation::Silu, Activation::GeluTanh];
const KINDS: [Kind; 3] = [Kind::Even, Kind::Wide, Kind::Outliers];

/// Rounded to bfloat16.
pub fn halves(values: &[f32]) -> Vec<bf16> {
    values.iter().map(|&x| bf16::from_f32(x)).collect()
}

/// `f` of every index, on all cores.
pub fn parallel<T: Send>(count: usize, f: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let threads = thread::available_parallelism().map_or(1, usize::from).min(count.max(1));
    let f = &f;
    let mut parts: Vec<Vec<(usize, T)>> = Vec::new();
    thread::scope(|scope| {
        let work = |t: usize| move || (t..count).step_by(threads).map(|i| (i, f(i))).collect();
        let running: Vec<_> = (0..threads).map(|t| scope.spawn(work(t))).collect();
        parts = running.into_iter().map(|one| one.join().expect("no panic")).collect();
    });
    let mut all: Vec<(usize, T)> = parts.into_iter().flatten().collect();
    all.sort_by_key(|(i, _)| *i);
    all.into_iter().map(|(_, value)| value).collect()
}

/// Rows of NaN: what an operation leaves out stays one.
pub fn poisoned(b: &CudaBackend, rows: usize, width: usize) -> Result<CudaRows> {
    b.rows_of(width, &vec![f32::NAN; rows * width])
}

/// A backend, and what is compared on it.
pub struct Checks<'a> {
    pub b: &'a CudaBackend,
    pub random: &'a mut Random,
    pub findings: &'a mut Findings,
}

impl Checks<'_> {
    /// Both forms of the first `rows` rows.
    pub fn compare(
        &mut self,
        what: &str,
        rows_of: &CudaRows,
        rows: usize,
        want: &[f32],
    ) -> Result<()> {
        self.findings.compare(what, &self.b.read(rows_of, rows)?, want);
        let got: Vec<f32> = self.b.read_halves(rows_of, rows)?.iter().map(|x| x.to_f32()).collect();
        let want: Vec<f32> = want.iter().map(|&x| bf16::from_f32(x).to_f32()).collect();
        self.findings.compare(&format!("{what}, halves"), &got, &want);
        Ok(())
    }

    /// All outputs of a projection of `counts` rows.
    fn projection(&mut self, outputs: usize, inputs: usize, counts: &[usize]) -> Result<()> {
        let b = self.b;
        for (i, &rows) in counts.iter().enumerate() {
            let kind = KINDS[i % KINDS.len()];
            let weights = halves(&self.random.values(outputs * inputs, kind));
            let x = self.random.values(rows * inputs, kind);
            let bias = self.random.values(outputs, kind);
            let before = self.random.values(rows * outputs, kind);
            let wide: Vec<f32> = weights.iter().map(|w| w.to_f32()).collect();
            // As two matrices, of which neither need be whole tiles.
            let cut = outputs / 3;
            let parts = [(0, cut), (cut, outputs)].map(|(from, to)| {
                let values = &wide[from * inputs..to * inputs];
                HostTensor::from_f32("w", vec![to - from, inputs], values)
            });
            let parts: Vec<HostTensor> = parts.into_iter().collect::<Result<_>>()?;
            let weight = b.pack(&parts, WeightFormat::Bf16)?;
            let bias_vector = b.vector(&[HostTensor::from_f32("b", vec![outputs], &bias)?])?;
            let (input, x) = (b.rows_of(inputs, &x)?, halves(&x));
            let sums: Vec<Vec<f32>> = parallel(rows, |row| {
                let x = &x[row * inputs..][..inputs];
                weights.chunks(inputs).map(|w| contract::project(x, w)).collect()
            });
            let what = format!("project {outputs} by {inputs}, {rows} rows, {kind:?}");

            let mut out = poisoned(b, rows, outputs)?;
            b.project(&weight, None, &input, rows, Accumulate::Set, &mut out)?;
            self.compare(&what, &out, rows, &sums.concat())?;

            let mut out = b.rows_of(outputs, &before)?;
            b.project(&weight, Some(&bias_vector), &input, rows, Accumulate::Add, &mut out)?;
            let want: Vec<f32> = sums
                .iter()
                .enumerate()
                .flat_map(|(row, sums)| {
                    let (before, bias) = (&before[row * outputs..], &bias);
                    sums.iter().enumerate().map(move |(n, sum)| before[n] + (sum + bias[n]))
                })
                .collect();
            self.compare(&format!("{what}, bias, added"), &out, rows, &want)?;

            if outputs.is_multiple_of(2) {
                let half = outputs / 2;
                for activation in ACTIVATIONS {
                    let mut out = poisoned(b, rows, half)?;
                    let mut both = poisoned(b, rows, outputs)?;
                    let bias_vector = Some(&bias_vector);
                    b.project_gated(
                        &weight,
                        bias_vector,
                        activation,
                        &input,
                        rows,
                        &mut both,
                        &mut out,
                    )?;
                    let gated = |sums: &Vec<f32>| -> Vec<f32> {
                        let value = |n: usize| sums[n] + bias[n];
                        let gate = |n: usize| reference::activate(activation, value(n));
                        (0..half).map(|n| gate(n) * value(half + n)).collect()
                    };
                    let want: Vec<f32> = sums.iter().flat_map(gated).collect();
                    self.compare(&format!("{what}, {activation:?}"), &out, rows, &want)?;
                }
            }
        }
        Ok(())
    }

    /// Some outputs of projections as large as those of models; rows are the same in all counts, so
    /// that they are compared with themselves in other company too.
    fn large_projection(&mut self, outputs: usize, inputs: usize, counts: &[usize]) -> Result<()> {
        let b = self.b;
        let tensor = self.random.tensor(&[outputs, inputs], 1.0)?;
        let weight = b.pack(std::slice::from_ref(&tensor), WeightFormat::Bf16)?;
        let most = counts.iter().max().copied().unwrap_or(0);
        let values = self.random.values(most * inputs, Kind::Outliers);
        let input = b.rows_of(inputs, &values)?;
        let x = halves(&values);
        let samples: Vec<(usize, usize)> =
            (0..4000).map(|_| (self.random.below(most), self.random.below(outputs))).collect();
        let sums = parallel(samples.len(), |i| {
            let (row, n) = samples[i];
            let mut w = vec![0.0; inputs];
            tensor.read_f32(n * inputs, &mut w).expect("bfloat16");
            contract::project(&x[row * inputs..][..inputs], &halves(&w))
        });
        let mut first: Option<Vec<f32>> = None;
        for &rows in counts {
            let mut out = poisoned(b, most, outputs)?;
            b.project(&weight, None, &input, rows, Accumulate::Set, &mut out)?;
            let got = b.read(&out, rows)?;
            let picked = samples.iter().zip(&sums).filter(|((row, _), _)| *row < rows);
            let (got_picked, want): (Vec<f32>, Vec<f32>) =
                picked.map(|((row, n), sum)| (got[row * outputs + n], *sum)).unzip();
            let what = format!("project {outputs} by {inputs}, {rows} rows");
            self.findings.compare(&what, &got_picked, &want);
            match &first {
                None => first = Some(got),
                Some(first) => {
                    let common = first.len().min(got.len());
                    let what = format!("{what}, in other company");
                    self.findings.compare(&what, &got[..common], &first[..common]);
                }
            }
        }
        Ok(())
    }

    fn norm(&mut self, width: usize, rows: usize) -> Result<()> {
        let b = self.b;
        let x = self.random.values(rows * width, Kind::Outliers);
        let w = self.random.values(width, Kind::Even);
        let weight = b.vector(&[HostTensor::from_f32("w", vec![width], &w)?])?;
        let mut out = poisoned(b, rows, width)?;
        b.rms_norm(&b.rows_of(width, &x)?, &weight, 1e-5, rows, &mut out)?;
        let mut want = vec![0.0; rows * width];
        for (x, out) in x.chunks(width).zip(want.chunks_mut(width)) {
            contract::rms_norm(x, &w, 1e-5, contract::NORM_LANES, out);
        }
        self.compare(&format!("rms_norm of {rows} rows of {width}"), &out, rows, &want)
    }

    /// Gates, sums and caps of rows.
    fn by_value(&mut self, width: usize, rows: usize) -> Result<()> {
        let b = self.b;
        let x: Vec<f32> =
            self.random.values(rows * 2 * width, Kind::Even).iter().map(|x| x * 100.0).collect();
        for activation in ACTIVATIONS {
            let mut out = poisoned(b, rows, width)?;
            b.gate(activation, &b.rows_of(2 * width, &x)?, rows, &mut out)?;
            let mut want = vec![0.0; rows * width];
            for (x, out) in x.chunks(2 * width).zip(want.chunks_mut(width)) {
                reference::gate(activation, x, out);
            }
            self.compare(&format!("{activation:?}, {rows} rows of {width}"), &out, rows, &want)?;
        }
        let (left, right) = x.split_at(rows * width);
        let mut out = b.rows_of(width, left)?;
        b.add(&b.rows_of(width, right)?, rows, &mut out)?;
        let sums: Vec<f32> = left.iter().zip(right).map(|(a, b)| a + b).collect();
        self.compare(&format!("add, {rows} rows of {width}"), &out, rows, &sums)?;
        b.soft_cap(&mut out, rows, 50.0)?;
        let want: Vec<f32> = sums.iter().map(|&x| reference::soft_cap(x, 50.0)).collect();
        self.compare(&format!("soft_cap, {rows} rows of {width}"), &out, rows, &want)
    }

    /// Operations that copy: every value in both its forms.
    fn copies(&mut self, width: usize, contexts: &[usize]) -> Result<()> {
        const TOKENS: usize = 41;
        let b = self.b;
        let (plan, _) = self.random.plan(contexts, TOKENS);
        let rows = plan.rows();
        let table = self.random.values(TOKENS * width, Kind::Wide);
        let tensor = HostTensor::from_f32("table", vec![TOKENS, width], &table)?;
        let slots = plan.slots.len() + plan.tree_slots.len() + 1;
        let mut placed = b.plan(PlanBounds { rows, outputs: rows, slots })?;
        b.place(&plan, &mut placed)?;
        let row_of = |token: u32| -> Vec<f32> {
            table[token as usize * width..][..width].iter().map(|x| x * 0.3).collect()
        };
        let embedded: Vec<Vec<f32>> = plan.tokens.iter().map(|&token| row_of(token)).collect();
        let mut input = poisoned(b, rows, width)?;
        b.embed(&b.table(&tensor)?, 0.3, &placed, &mut input)?;
        self.compare("embed", &input, rows, &embedded.concat())?;

        let mut out = poisoned(b, rows, width)?;
        b.gather_sources(&input, &placed, &mut out)?;
        let mut gathered: Vec<Vec<f32>> =
            plan.sources.iter().map(|&source| embedded[source as usize].clone()).collect();
        self.compare("gather_sources", &out, rows, &gathered.concat())?;
        let mut outputs = poisoned(b, rows, width)?;
        b.gather_outputs(&input, &placed, 0, &mut outputs)?;
        let wanted: Vec<Vec<f32>> =
            plan.outputs.iter().map(|&row| embedded[row as usize].clone()).collect();
        self.compare("gather_outputs", &outputs, wanted.len(), &wanted.concat())?;
        b.scatter_outputs(&outputs, &placed, &mut out)?;
        for (row, &to) in wanted.iter().zip(&plan.destinations) {
            gathered[to as usize] = row.clone();
        }
        self.compare("scatter_outputs", &out, rows, &gathered.concat())?;
        b.clear_first(&placed, &mut out)?;
        let first = plan.positions.iter().zip(&mut gathered).filter(|(at, _)| **at == 0);
        first.for_each(|(_, row)| row.fill(0.0));
        self.compare("clear_first", &out, rows, &gathered.concat())?;
        let last = rows as u32 - 1;
        let moves = [(last, 0), (0, last / 2), (last / 3, last)];
        b.move_rows(&mut out, &moves)?;
        for (from, to) in moves {
            gathered[to as usize] = gathered[from as usize].clone();
        }
        self.compare("move_rows", &out, rows, &gathered.concat())?;
        let mut joined = poisoned(b, rows, 2 * width)?;
        b.copy_columns(&input, rows, width, &mut joined)?;
        b.copy_columns(&out, rows, 0, &mut joined)?;
        let both: Vec<Vec<f32>> = gathered
            .iter()
            .zip(&embedded)
            .map(|(left, right)| [left.clone(), right.clone()].concat())
            .collect();
        self.compare("copy_columns", &joined, rows, &both.concat())?;
        b.take_columns(&joined, rows, width / 2, &mut out)?;
        let taken: Vec<f32> =
            both.iter().flat_map(|row| row[width / 2..][..width].to_vec()).collect();
        self.compare("take_columns", &out, rows, &taken)
    }
}

/// Compares all operations of a CUDA backend with the contract.
pub fn check(
    b: &CudaBackend,
    random: &mut Random,
    small: bool,
    findings: &mut Findings,
) -> Result<()> {
    let mut checks = Checks { b, random, findings };
    let heads = |heads, kv_heads, head_dim| HeadShape { heads, kv_heads, head_dim };
    if small {
        checks.projection(96, 301, &[1, 8, 13, 17, 70])?;
        checks.projection(64, 4128, &[5, 16, 20, 66])?;
        checks.norm(301, 3)?;
        checks.by_value(301, 3)?;
        for window in [None, Some(1), Some(100), Some(130)] {
            checks.attention(heads(6, 2, 24), true, window, &[130, 3, 257])?;
        }
        let shapes = [heads(2, 2, 40), heads(8, 2, 64), heads(7, 1, 128), heads(16, 1, 64)];
        for (i, shape) in shapes.into_iter().enumerate() {
            checks.attention_together(shape, None)?;
            checks.attention_together(shape, Some([1, 100, 130, 128][i]))?;
        }
        checks.attention_together(heads(4, 2, 128), Some(150))?;
        checks.attention_together(heads(20, 1, 64), None)?;
        checks.attention_together(heads(3, 1, 256), None)?;
        // So many blocks that a second launch merges them.
        checks.attention(heads(2, 1, 16), false, Some(8250), &[8300])?;
        checks.attention(heads(4, 1, 64), false, None, &[4200, 10])?;
        return checks.copies(301, &[0, 3, 0, 7]);
    }
    let few = [1, 2, 3, 5, 7, 8, 9, 12, 15, 16];
    let many = [17, 31, 32, 33, 64, 65, 100, 128, 129, 300, 400];
    for (outputs, inputs) in [(16, 32), (17, 40), (64, 64), (6, 8), (96, 301), (129, 1000)] {
        checks.projection(outputs, inputs, &few)?;
        checks.projection(outputs, inputs, &many)?;
    }
    for (outputs, inputs) in [(160, 4096), (64, 4128), (96, 9000), (32, 14336)] {
        checks.projection(outputs, inputs, &few)?;
        checks.projection(outputs, inputs, &[17, 32, 64, 65, 130, 390])?;
    }
    checks.projection(50, 256, &[1024])?;
    for (outputs, inputs) in [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)] {
        checks.large_projection(
            outputs,
            inputs,
            &[1024, 1, 2, 4, 8, 11, 16, 24, 32, 48, 64, 100, 256, 512],
        )?;
    }
    for width in [8, 64, 301, 4096, 5000] {
        for rows in [1, 7, 1024] {
            checks.norm(width, rows)?;
            checks.by_value(width, rows)?;
        }
    }
    let shapes = [
        heads(4, 2, 16),
        heads(6, 2, 24),
        heads(11, 1, 40),
        heads(8, 8, 64),
        heads(32, 8, 128),
        heads(20, 1, 128),
        heads(4, 2, 256),
        heads(7, 1, 96),
    ];
    for (i, shape) in shapes.into_iter().enumerate() {
        for contexts in [&[0usize][..], &[5], &[127, 128, 1], &[130, 700, 257, 0]] {
            checks.attention(shape, i % 2 == 1, None, contexts)?;
        }
        for window in [1, 2, 16, 127, 128, 129, 200, 512, 5000] {
            checks.attention(shape, i % 2 == 1, Some(window), &[130, 700, 257, 0])?;
        }
    }
    for shape in [
        heads(2, 2, 40),
        heads(8, 8, 64),
        heads(8, 2, 64),
        heads(20, 1, 64),
        heads(80, 1, 64),
        heads(32, 8, 128),
        heads(7, 1, 128),
        heads(16, 1, 128),
        heads(4, 2, 256),
        heads(2, 1, 512),
    ] {
        for window in [None, Some(1), Some(17), Some(100), Some(128), Some(130), Some(300)] {
            checks.attention_together(shape, window)?;
        }
    }
    checks.attention(heads(8, 2, 64), false, None, &[30; 64])?;
    checks.attention(heads(8, 2, 128), false, None, &[510; 100])?;
    checks.attention(heads(8, 2, 64), false, Some(20), &[30; 64])?;
    checks.attention(heads(4, 1, 128), true, None, &[2500])?;
    // So many blocks that a second launch merges them.
    checks.attention(heads(4, 1, 64), false, None, &[9000])?;
    checks.attention(heads(4, 1, 64), false, Some(8250), &[9000])?;
    checks.attention(heads(4, 1, 128), false, None, &[4500; 12])?;
    for width in [1, 32, 301, 4096] {
        checks.copies(width, &[0, 3, 0, 7])?;
        checks.copies(width, &[2; 100])?;
    }
    Ok(())
}
