//! What a check of a replay finds, and leaves.

use aquila_compute::cuda::CudaBackend;
use aquila_compute::{Backend, Result};

use crate::Findings;
use crate::random::{Kind, Random};

/// Rows of the graph, of those that there are.
const CAPTURED: usize = 2;
const ROWS: usize = 3;

/// A graph that adds to some rows, against launches that add to as many, to fewer and to more: what
/// differs is found, and the rows are those of the launch.
pub fn check(b: &CudaBackend, random: &mut Random, findings: &mut Findings) -> Result<()> {
    let width = 40;
    let values = random.values(ROWS * width, Kind::Even);
    let input = b.rows_of(width, &values)?;
    let mut out = b.rows(ROWS, width)?;
    let mut want = vec![0.0; ROWS * width];
    let graph = b.graph_of(|b| b.add(&input, CAPTURED, &mut out))?;
    for rows in [CAPTURED, 1, CAPTURED, ROWS] {
        let found = b.check_replay(&graph, &mut || b.add(&input, rows, &mut out))?;
        want.iter_mut().zip(&values[..rows * width]).for_each(|(sum, value)| *sum += value);
        let what = format!("a replay for {CAPTURED} rows and a launch for {rows}");
        findings.compare(&what, &b.read(&out, ROWS)?, &want);
        if found.is_some() != (rows != CAPTURED) {
            findings.failed.push(format!("{what}: found {found:?}"));
        }
    }
    Ok(())
}
