//! What replays of graphs leave in memory, against what launches leave.

use aquila_compute::cuda::CudaBackend;
use aquila_engine::executor::GraphSettings;
use aquila_engine::{EngineConfig, FinishReason};

use crate::support::answers::*;
use crate::support::shipped::config;
use crate::{CAPTURED, Device, MODES, graphs_of};

impl Device<CudaBackend> {
    /// Whether a replay leaves other bytes in memory than a launch of what was captured.
    pub fn replays(&self) -> bool {
        let prompts = self.prompts();
        let mut sound = true;
        // Fixtures of families have the others (`families`).
        let few = |&(_, at, _): &(_, usize, _)| !self.small || at == 1;
        for (name, at, shape) in self.shapes().into_iter().filter(few) {
            let (mode, change) = MODES[1 + at];
            // All memory is copied three times for each replay.
            let config = EngineConfig { max_total_tokens: 2_000, ..config(shape) };
            let graphs = GraphSettings { check: true, ..graphs_of(&CAPTURED) };
            let mut engine = self.with_graphs(name, config, graphs);
            let got = answers(&mut engine, &prompts, self.tokens(), change);
            let reasons = got.iter().filter_map(|answer| answer.reason.as_ref());
            let failures: Vec<&str> = reasons.filter_map(FinishReason::failure).collect();
            if let Some(why) = failures.first() {
                println!("{why}");
            }
            let checks: u64 = engine.captured().iter().map(|part| part.checks).sum();
            println!(
                "replays, {name}, {shape}, {mode}: {checks} compared with launches, {} of {} answers \
                 ended by a difference",
                failures.len(),
                got.len()
            );
            sound &= failures.is_empty() && checks > 0;
        }
        sound
    }
}
