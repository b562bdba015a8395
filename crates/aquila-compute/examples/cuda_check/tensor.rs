//! Tensor cores: each operation against the contract.

use std::thread;

use aquila_compute::cuda::{
    CudaBackend, CudaRows, CudaVector, CudaWeight, ProjectionKernel, TILE_SHAPES, contract,
};
use aquila_compute::{
    Accumulate, Activation, Backend, HeadShape, HostTensor, Normed, PlanBounds, Result,
    WeightFormat, reference,
};
use half::bf16;

use crate::Findings;
use crate::random::{Kind, Random};

const ACTIVATIONS: [Activation; 2] = [Activation::Silu, Activation::GeluTanh];
const EPSILON: f32 = 1e-5;
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

/// Norms of rows, by the contract.
fn normed_rows(x: &[f32], weight: &[f32]) -> Vec<f32> {
    let mut out = vec![0.0; x.len()];
    for (x, out) in x.chunks(weight.len()).zip(out.chunks_mut(weight.len())) {
        contract::rms_norm(x, weight, EPSILON, contract::NORM_LANES, out);
    }
    out
}

/// A projection that is compared.
struct Projected {
    outputs: usize,
    inputs: usize,
    rows: usize,
    weight: CudaWeight,
    bias: Vec<f32>,
    bias_vector: CudaVector,
    norm: CudaVector,
    input: CudaRows,
    /// What the result is added to.
    before: Vec<f32>,
}

impl Projected {
    fn normed<'a>(&'a self, room: &'a mut CudaRows) -> Normed<'a, CudaBackend> {
        Normed { input: &self.input, weight: &self.norm, epsilon: EPSILON, room }
    }
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

    /// All outputs of projections of `counts` rows, as they are and normed.
    fn projection(&mut self, outputs: usize, inputs: usize, counts: &[usize]) -> Result<()> {
        let b = self.b;
        for (i, &rows) in counts.iter().enumerate() {
            let kind = KINDS[i % KINDS.len()];
            let weights = halves(&self.random.values(outputs * inputs, kind));
            let x = self.random.values(rows * inputs, kind);
            let norm = self.random.values(inputs, Kind::Even);
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
            let case = Projected {
                outputs,
                inputs,
                rows,
                weight: b.pack(&parts, WeightFormat::Bf16)?,
                bias_vector: b.vector(&[HostTensor::from_f32("b", vec![outputs], &bias)?])?,
                norm: b.vector(&[HostTensor::from_f32("n", vec![inputs], &norm)?])?,
                input: b.rows_of(inputs, &x)?,
                bias,
                before,
            };
            let what = format!("{outputs} by {inputs}, {rows} rows, {kind:?}");
            let sums = |x: &[f32]| -> Vec<Vec<f32>> {
                let x = halves(x);
                parallel(rows, |row| {
                    let x = &x[row * inputs..][..inputs];
                    weights.chunks(inputs).map(|w| contract::project(x, w)).collect()
                })
            };
            self.projected(&case, &format!("project {what}"), false, &sums(&x))?;
            if rows <= 17 {
                let x = normed_rows(&x, &norm);
                self.projected(&case, &format!("project normed {what}"), true, &sums(&x))?;
            }
        }
        Ok(())
    }

    /// One projection in all ways, which are to make `sums` of its rows, or of their norms.
    fn projected(
        &mut self,
        case: &Projected,
        what: &str,
        normed: bool,
        sums: &[Vec<f32>],
    ) -> Result<()> {
        let b = self.b;
        let Projected { outputs, inputs, rows, weight, bias, bias_vector, input, .. } = case;
        let (&outputs, &rows, bias_vector) = (outputs, rows, Some(bias_vector));
        let mut room = poisoned(b, rows, *inputs)?;
        let mut project = |bias, accumulate, out: &mut CudaRows| match normed {
            true => b.project_normed(weight, bias, case.normed(&mut room), rows, accumulate, out),
            false => b.project(weight, bias, input, rows, accumulate, out),
        };

        let mut out = poisoned(b, rows, outputs)?;
        project(None, Accumulate::Set, &mut out)?;
        self.compare(what, &out, rows, &sums.concat())?;

        let mut out = b.rows_of(outputs, &case.before)?;
        project(bias_vector, Accumulate::Add, &mut out)?;
        let want: Vec<f32> = sums
            .iter()
            .enumerate()
            .flat_map(|(row, sums)| {
                let before = &case.before[row * outputs..];
                sums.iter().enumerate().map(move |(n, sum)| before[n] + (sum + bias[n]))
            })
            .collect();
        self.compare(&format!("{what}, bias, added"), &out, rows, &want)?;

        if outputs.is_multiple_of(2) {
            let half = outputs / 2;
            for activation in ACTIVATIONS {
                let mut out = poisoned(b, rows, half)?;
                let (both, to) = (&mut poisoned(b, rows, outputs)?, &mut out);
                match normed {
                    true => b.project_gated_normed(
                        weight,
                        bias_vector,
                        activation,
                        case.normed(&mut room),
                        rows,
                        both,
                        to,
                    )?,
                    false => {
                        b.project_gated(weight, bias_vector, activation, input, rows, both, to)?
                    }
                }
                let gated = |sums: &Vec<f32>| -> Vec<f32> {
                    let value = |n: usize| sums[n] + bias[n];
                    let gate = |n: usize| reference::activate(activation, value(n));
                    (0..half).map(|n| gate(n) * value(half + n)).collect()
                };
                let want: Vec<f32> = sums.iter().flat_map(gated).collect();
                self.compare(&format!("{what}, {activation:?}"), &out, rows, &want)?;
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

    fn norm(&mut self, width: usize, rows: usize, kind: Kind) -> Result<()> {
        let b = self.b;
        let x = self.random.values(rows * width, kind);
        let w = self.random.values(width, Kind::Even);
        let weight = b.vector(&[HostTensor::from_f32("w", vec![width], &w)?])?;
        let (mut out, input) = (poisoned(b, rows, width)?, b.rows_of(width, &x)?);
        b.rms_norm(&input, &weight, EPSILON, rows, &mut out)?;
        let want = normed_rows(&x, &w);
        self.compare(&format!("rms_norm of {rows} rows of {width}, {kind:?}"), &out, rows, &want)?;

        // Into columns of wider rows, of which the others stay.
        let (wide, column) = (width + 12, 5);
        let mut joined = self.random.values(rows * wide, Kind::Wide);
        let mut out = b.rows_of(wide, &joined)?;
        b.rms_norm_columns(&input, &weight, EPSILON, rows, column, &mut out)?;
        for (joined, want) in joined.chunks_mut(wide).zip(want.chunks(width)) {
            joined[column..][..width].copy_from_slice(want);
        }
        self.compare(
            &format!("rms_norm_columns of {rows} rows of {width}, {kind:?}"),
            &out,
            rows,
            &joined,
        )
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

/// Projections by each kernel that this device has, whatever would be chosen.
pub fn check_kernels(
    b: &mut CudaBackend,
    random: &mut Random,
    small: bool,
    findings: &mut Findings,
) -> Result<()> {
    use ProjectionKernel::{Many, Middle, Tiles, Wide};
    // All rows that a kernel can norm where it projects them.
    b.norm_where_projected(8);
    Checks { b, random, findings }.projection(96, 301, &[5, 8])?;
    b.norm_where_projected(4);
    let tiles = TILE_SHAPES.into_iter().map(Tiles);
    // GPUs before Hopper have the last one alone.
    let hopper = b.clusters_of_tiles().next().is_some();
    for kernel in tiles.chain([Middle, Many]).filter(|_| hopper).chain([Wide]) {
        b.prefer_projection(Some(kernel));
        let mut checks = Checks { b, random, findings };
        let tiles = matches!(kernel, Tiles(_));
        if small && tiles {
            // Tiles that several clusters have parts of: of one group of inputs, and of two.
            checks.projection(100, 264, &[20, 70])?;
            checks.projection(330, 264, &[270])?;
            checks.projection(130, 4136, &[40])?;
            // Gates and ups, of units that are not whole; slices of three blocks, and of four and five.
            checks.projection(288, 768, &[40, 150])?;
            checks.projection(96, 4136, &[130])?;
            continue;
        }
        if small {
            checks.projection(301, 100, &[1, 129])?;
            checks.projection(32, 4200, &[7])?;
            // So many tiles that each cluster has several.
            checks.projection(544, 40, &[300])?;
            continue;
        }
        for (outputs, inputs) in
            [(16, 32), (6, 8), (301, 1000), (160, 4096), (544, 4128), (96, 14336)]
        {
            checks.projection(outputs, inputs, &[1, 17, 64, 129, 257, 600])?;
        }
        let of_tiles = [(128, 256), (100, 4096), (700, 512), (300, 8232), (1000, 14336)];
        for (outputs, inputs) in of_tiles.into_iter().filter(|_| tiles) {
            checks.projection(outputs, inputs, &[20, 40, 70, 130, 300])?;
        }
        for (outputs, inputs) in [(6144, 4096), (4096, 14336)] {
            checks.large_projection(
                outputs,
                inputs,
                &[1, 16, 100, 128, 129, 256, 300, 512, 2048],
            )?;
        }
    }
    Ok(())
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
        checks.projection(96, 301, &[1, 8, 13, 17, 70, 150, 400])?;
        checks.projection(64, 4128, &[2, 5, 16, 20, 66, 390])?;
        // So many units that rings go around and warpgroups take turns.
        checks.projection(400, 4096, &[20, 40, 66])?;
        checks.projection(32, 264, &(1..=17).collect::<Vec<_>>())?;
        checks.projection(32, 264, &[4; 12])?;
        checks.projection(32, 4088, &[1, 3, 4])?;
        checks.projection(32, 4096, &[4])?;
        for width in [301, 4096, 4104, 8200] {
            checks.norm(width, 3, Kind::Outliers)?;
        }
        // Few rows have other bits where lanes are added in another order.
        checks.norm(301, 100, Kind::Even)?;
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
    let few = [1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16];
    let many = [17, 31, 32, 33, 64, 65, 100, 128, 129, 300, 400];
    for (outputs, inputs) in [(16, 32), (17, 40), (64, 64), (6, 8), (96, 301), (129, 1000)] {
        checks.projection(outputs, inputs, &few)?;
        checks.projection(outputs, inputs, &many)?;
    }
    checks.projection(96, 1000, &(1..=17).collect::<Vec<_>>())?;
    checks.projection(32, 264, &[4; 100])?;
    for (outputs, inputs) in
        [(160, 4096), (64, 4088), (64, 2056), (64, 4128), (96, 9000), (32, 14336)]
    {
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
    for width in [8, 64, 301, 4096, 5000, 8200] {
        for rows in [1, 7, 1024] {
            checks.norm(width, rows, Kind::Outliers)?;
            checks.norm(width, rows, Kind::Even)?;
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
