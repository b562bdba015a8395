//! How long the steps of a round take without its passes: what a round costs beside them.

use std::sync::Arc;
use std::time::Instant;

use aquila_compute::cuda::CudaBackend;
use aquila_compute::round::{
    Admitted, Batch, BatchRow, DraftGroup, DraftLimits, ExtendRows, Extent, PassRows,
    RequestParams, Returned, ReturnedRows, RowWork, Shape, Simulate, SimulateMethod, StateBounds,
    TableChange, TreeRows, Verify,
};
use aquila_compute::sampling::Sampling;
use aquila_compute::{Backend, PlanBounds, Result};

use crate::random::{Kind, Random};

const VOCABULARY: usize = 128_256;
const PROMPT: usize = 448;
const STRIDE: usize = 1024;
const ROUNDS: usize = 40;

/// Times rounds of `requests` requests.
pub fn time(b: &CudaBackend, random: &mut Random) -> Result<()> {
    println!(
        "\n| steps of a round without passes | µs on the device | µs to enqueue | µs in all |"
    );
    println!("|---|---|---|---|");
    let greedy = Sampling::default();
    let seeded = Sampling { temperature: 0.8, seed: 5, ..Sampling::default() };
    let nucleus = Sampling { top_p: 0.9, top_k: 50, ..seeded.clone() };
    let chain = Shape::chain(3);
    let tree = Shape::new(5, 4, 16).expect("it is possible");
    for (what, shape, sampling, requests) in [
        ("plain, greedy", Shape::PLAIN, &greedy, 1),
        ("chain of 3, greedy", chain, &greedy, 1),
        ("chain of 7, greedy", Shape::chain(7), &greedy, 1),
        ("chain of 3, greedy", chain, &greedy, 16),
        ("chain of 3, greedy", chain, &greedy, 64),
        ("chain of 3, seeded", chain, &seeded, 1),
        ("chain of 3, top-k and top-p", chain, &nucleus, 1),
        ("chain of 3, top-k and top-p", chain, &nucleus, 16),
        ("tree, greedy", tree, &greedy, 1),
        ("tree, greedy", tree, &greedy, 16),
        ("tree, seeded", tree, &seeded, 1),
    ] {
        let (mut device, mut host, mut whole) = rounds(b, random, shape, sampling, requests)?;
        let median = |times: &mut Vec<f64>| {
            times.sort_by(f64::total_cmp);
            1e6 * times[times.len() / 2]
        };
        println!(
            "| {what}, {requests} requests | {:.0} | {:.0} | {:.0} |",
            median(&mut device),
            median(&mut host),
            median(&mut whole)
        );
    }
    Ok(())
}

/// Seconds on the device, on the host until all is enqueued, and until the outputs are read.
fn rounds(
    b: &CudaBackend,
    random: &mut Random,
    shape: Shape,
    sampling: &Sampling,
    requests: usize,
) -> Result<(Vec<f64>, Vec<f64>, Vec<f64>)> {
    let drafts = shape != Shape::PLAIN;
    let outputs = requests * shape.nodes();
    let group = DraftGroup { lookahead: 1, tree: TreeRows::EveryLevel };
    let simulate = Simulate::Length {
        mean: 1.0 + 0.6 * shape.steps() as f64,
        method: SimulateMethod::MatchExpected,
    };
    let mut state = b.state(StateBounds {
        places: requests,
        stride: STRIDE,
        drafts,
        groups: if drafts { vec![group] } else { Vec::new() },
        hidden: drafts,
        first_parked: 4096,
        parked_rows: 0,
        chunk: 2048,
        shape,
        verify: Verify::Match,
        vocabulary: VOCABULARY,
        outputs,
        logits: outputs,
        simulate: Some(simulate),
    })?;
    let rows = requests * (PROMPT + 8);
    let bounds = PlanBounds { rows, outputs: outputs.max(requests * shape.topk()), slots: 1 << 17 };
    let (mut plan, mut draft_plan) = (b.plan(bounds)?, b.plan(bounds)?);
    let logits =
        b.rows_of(VOCABULARY, &random.values(bounds.outputs * VOCABULARY, Kind::Outliers))?;
    let limits = match drafts {
        true => DraftLimits {
            shape,
            groups: 1,
            lookahead: 1,
            candidates: shape.topk(),
            verify: Verify::Match,
        },
        false => DraftLimits::NONE,
    };
    let mut batch = Batch::default();
    for place in 0..requests {
        let params = RequestParams {
            id: place as u64,
            sampling: sampling.clone(),
            draft_sampling: None,
            choice: 0,
            stop_ids: Vec::new(),
            min_tokens: 0,
            grammar: None,
            prompt: PROMPT,
            longest: STRIDE,
            logprobs: None,
            prompt_logprobs: None,
            returned: Returned::default(),
            draft_trees: false,
            limits,
        };
        let tokens = (0..PROMPT as u32).collect();
        let params = Arc::new(params);
        batch.admitted.push(Admitted {
            place,
            params,
            tokens,
            matched: 0,
            complete: false,
            rounds: 0,
        });
        for group in 0..if drafts { 2 } else { 1 } {
            batch.tables.push(TableChange { place, group, from: 0, slots: 0..STRIDE });
        }
        let (rows, outputs) = (0..PROMPT, PROMPT - 1..PROMPT);
        let work = RowWork::Prefill { rows, outputs, last: true };
        batch.rows.push(BatchRow { place, work });
    }
    batch.slots = (0..STRIDE as u32).collect();
    let (mut device, mut host, mut whole) = (Vec::new(), Vec::new(), Vec::new());
    for number in 0..ROUNDS {
        let prefill = number == 0;
        let began = Instant::now();
        let start = b.mark()?;
        b.begin_round(&mut state, std::mem::take(&mut batch))?;
        b.start_trees(&mut state, Vec::new())?;
        let beam = requests * shape.topk();
        let ids = None;
        for step in 1..if prefill { 0 } else { shape.steps() } {
            let pass = PassRows::RecurrentLevel { first: step == 1 };
            let bound = Extent { rows: beam, outputs: beam };
            b.plan_rows(&mut state, pass, bound, &mut draft_plan)?;
            b.propose(&mut state, &logits, ids)?;
        }
        b.build_trees(&mut state)?;
        let bound = match prefill {
            true => Extent { rows, outputs: requests },
            false => Extent { rows: outputs, outputs },
        };
        b.plan_rows(&mut state, PassRows::Target, bound, &mut plan)?;
        b.sample(&mut state, &logits, 0)?;
        b.accept(&mut state)?;
        b.publish(&mut state)?;
        if drafts {
            b.begin_extend(&mut state, ExtendRows::Round)?;
            let rows = if prefill { rows } else { outputs };
            let pass = PassRows::RecurrentExtend { hidden: true };
            let bound = Extent { rows, outputs: requests };
            b.plan_rows(&mut state, pass, bound, &mut draft_plan)?;
            b.seed_trees(&mut state, &logits, ids)?;
        }
        let enqueued = began.elapsed().as_secs_f64();
        let end = b.mark()?;
        let returned = ReturnedRows { hidden_states: None, routed_experts: None };
        b.copy_outputs(&mut state, returned)?;
        b.outputs(&mut state)?;
        if number > 5 {
            host.push(enqueued);
            whole.push(began.elapsed().as_secs_f64());
            device.push(start.seconds_until(&end)?);
        }
        batch.round = number as u64 + 1;
        let work = RowWork::Decode { shape, rate: 0.7, pause: false };
        batch.rows = (0..requests).map(|place| BatchRow { place, work: work.clone() }).collect();
    }
    Ok((device, host, whole))
}
