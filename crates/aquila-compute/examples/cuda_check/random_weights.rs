//! Random weights drawn on the device against those that the host draws.

use std::ops::Range;

use aquila_compute::cuda::{Arithmetic, CudaBackend};
use aquila_compute::{
    Accumulate, Backend, HostTensor, PlanBounds, RandomWeights, Result, WeightFormat,
};

use crate::Findings;
use crate::random::{Kind, Random, Request, RowKind};

/// What memory holds before.
const POISON: u8 = 0xa5;
/// Rows and columns of a matrix that the backend takes in several pieces, which begin within a number
/// of the sequence, kept as bfloat16 and as f32.
const IN_PIECES: (usize, usize) = (2030, 8311);

struct Check<'a> {
    b: &'a CudaBackend,
    random: &'a mut Random,
    findings: &'a mut Findings,
}

/// Compares what the device draws with what the host draws: stretches of tensors, then tables and
/// projections as operations read them.
pub fn check(
    b: &CudaBackend,
    random: &mut Random,
    small: bool,
    findings: &mut Findings,
) -> Result<()> {
    let mut check = Check { b, random, findings };
    for shape in [[1, 1], [1, 5], [2, 2], [3, 7], [37, 83], [64, 96], [129, 1000]] {
        check.stretches(shape)?;
        check.table(shape)?;
        check.projection(shape, &(0..shape[1]).collect::<Vec<_>>())?;
    }
    let (outputs, inputs) = IN_PIECES;
    let columns = [0, 1, inputs / 2, inputs - 1];
    check.projection([outputs, inputs], &columns[..if small { 2 } else { 4 }])
}

/// What bytes are as bfloat16, widened, or as f32.
fn values(bytes: &[u8], bf16: bool) -> Vec<f32> {
    let word = |bytes: &[u8]| bytes.iter().rev().fold(0, |bits, &b| bits << 8 | u32::from(b));
    let (size, shift) = if bf16 { (2, 16) } else { (4, 0) };
    bytes.chunks(size).map(|bytes| f32::from_bits(word(bytes) << shift)).collect()
}

impl Check<'_> {
    /// A tensor that no other check has.
    fn tensor(&mut self, shape: [usize; 2]) -> Result<HostTensor> {
        let name = format!("model.layers.{}.weight", self.random.below(1000));
        RandomWeights::new(self.random.next()).tensor(&name, shape.into())
    }

    /// Elements from every place within a number of the sequence on, and random ones; what lies before
    /// and behind them must stay.
    fn stretches(&mut self, shape: [usize; 2]) -> Result<()> {
        let tensor = self.tensor(shape)?;
        let mut stretches: Vec<Range<usize>> = Vec::new();
        for first in (0..tensor.len()).take(11) {
            let last = first + self.random.below(tensor.len() - first + 1);
            stretches.extend([first..first, first..first + 1, first..last, first..tensor.len()]);
        }
        stretches.extend((0..8).map(|_| {
            let first = self.random.below(tensor.len());
            first..first + self.random.below(tensor.len() - first + 1)
        }));
        for stretch in stretches {
            for bf16 in [true, false] {
                let size = if bf16 { 2 } else { 4 };
                let (before, behind) = (self.random.below(9), self.random.below(9));
                let range = before * size..(before + stretch.len()) * size;
                let mut got = vec![POISON; range.end + behind * size];
                let mut want = values(&got, bf16);
                tensor.read_f32(stretch.start, &mut want[before..before + stretch.len()])?;
                self.b.draw_random(&tensor, stretch.start, bf16, &mut got, range)?;
                let what = format!("elements {stretch:?} of {shape:?}, bfloat16: {bf16}");
                self.findings.compare(&what, &values(&got, bf16), &want);
            }
        }
        Ok(())
    }

    /// All rows of an embedding table.
    fn table(&mut self, shape: [usize; 2]) -> Result<()> {
        let tensor = self.tensor(shape)?;
        let [tokens, width] = shape;
        let request = Request { context: 0, rows: tokens, kind: RowKind::Chunk };
        let (mut plan, slots) = self.random.plan_of(&[request], tokens);
        plan.tokens = (0..tokens as u32).collect();
        let mut placed = self.b.plan(PlanBounds { rows: tokens, outputs: tokens, slots })?;
        self.b.place(&plan, &mut placed)?;
        let mut out = self.b.rows_of(width, &vec![f32::NAN; tokens * width])?;
        self.b.embed(&self.b.table(&tensor)?, 1.0, &placed, &mut out)?;
        let got = self.b.read(&out, tokens)?;
        self.findings.compare(&format!("table of {shape:?}"), &got, &tensor.to_f32()?);
        Ok(())
    }

    /// Columns of a projection: a row that is one at an input and zero elsewhere gives its weights. The
    /// projection is of random weights, of others, and of random weights again.
    fn projection(&mut self, shape: [usize; 2], columns: &[usize]) -> Result<()> {
        let [outputs, inputs] = shape;
        let others = self.random.values(3 * inputs, Kind::Even);
        let others = HostTensor::from_f32_as_bf16("others", vec![3, inputs], &others)?;
        let parts = [self.tensor(shape)?, others, self.tensor([5, inputs])?];
        let mut ones = vec![0.0; columns.len() * inputs];
        columns.iter().enumerate().for_each(|(row, column)| ones[row * inputs + column] = 1.0);
        let input = self.b.rows_of(inputs, &ones)?;
        let mut want = Vec::new();
        for &column in columns {
            for part in &parts {
                for row in 0..part.matrix()?.0 {
                    let mut weight = [0.0];
                    part.read_f32(row * inputs + column, &mut weight)?;
                    want.extend(weight);
                }
            }
        }
        let formats = match self.b.arithmetic() {
            Arithmetic::Tensor => &[WeightFormat::Bf16][..],
            Arithmetic::Plain => &[WeightFormat::Bf16, WeightFormat::F32],
        };
        for &format in formats {
            let weight = self.b.pack(&parts, format)?;
            let (rows, width) = (columns.len(), outputs + 8);
            let mut out = self.b.rows_of(width, &vec![f32::NAN; rows * width])?;
            self.b.project(&weight, None, &input, rows, Accumulate::Set, &mut out)?;
            let got = self.b.read(&out, rows)?;
            self.findings.compare(&format!("projection of {shape:?}, {format:?}"), &got, &want);
        }
        Ok(())
    }
}
