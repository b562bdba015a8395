//! CUDA graphs.

use aquila_engine::executor::GraphSettings;
use clap::Args;

use super::Device;
use super::number::whole;

/// Batch sizes that are captured unless flags name others: close together where padding costs most.
const BATCHES: [usize; 14] = [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256];

/// Which parts of rounds are captured on CUDA.
#[derive(Args, Debug, Clone, Default)]
#[command(next_help_heading = "CUDA graphs")]
pub struct GraphFlags {
    /// Batch sizes that rounds are captured for: smaller batches are padded to the next of them,
    /// larger ones are launched kernel by kernel [default: 1, 2, 4, 8 and so on, up to the requests
    /// that run at a time]
    #[arg(
        long,
        alias = "cuda-graph-bs-decode",
        value_name = "N",
        num_args = 1..,
        value_delimiter = ',',
        value_parser = whole(1, 1 << 16),
        allow_negative_numbers = true,
    )]
    cuda_graph_bs: Vec<usize>,

    /// The largest batch size that rounds are captured for
    #[arg(
        long,
        alias = "cuda-graph-max-bs-decode",
        value_name = "N",
        value_parser = whole(1, 1 << 16),
        allow_negative_numbers = true,
    )]
    cuda_graph_max_bs: Option<usize>,

    /// Launch every kernel by itself
    #[arg(long)]
    disable_cuda_graph: bool,

    /// Compare each replay of a graph with a launch of its kernels from the same memory, and fail
    /// rounds in which they differ: slow, for finding faults
    #[arg(long, conflicts_with = "disable_cuda_graph")]
    debug_cuda_graph: bool,
}

impl GraphFlags {
    /// What is captured where `running` requests run at a time; nothing on the CPU.
    pub fn settings(&self, device: Device, running: usize) -> GraphSettings {
        if device == Device::Cpu || self.disable_cuda_graph {
            return GraphSettings::default();
        }
        let most = self.cuda_graph_max_bs.unwrap_or(usize::MAX).min(running);
        let mut batches = match self.cuda_graph_bs.is_empty() {
            true => BATCHES.iter().copied().chain([most]).collect(),
            false => self.cuda_graph_bs.clone(),
        };
        batches.retain(|&batch| batch <= most);
        batches.sort_unstable();
        batches.dedup();
        GraphSettings { batches, check: self.debug_cuda_graph }
    }

    /// The flags that were given and change nothing on this device.
    pub fn ignored(&self, device: Device) -> Vec<&'static str> {
        let given = [
            ("--cuda-graph-bs", !self.cuda_graph_bs.is_empty()),
            ("--cuda-graph-max-bs", self.cuda_graph_max_bs.is_some()),
            ("--disable-cuda-graph", self.disable_cuda_graph),
            ("--debug-cuda-graph", self.debug_cuda_graph),
        ];
        let of_cpu = |&(_, given): &(_, bool)| given && device == Device::Cpu;
        given.into_iter().filter(of_cpu).map(|(name, _)| name).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batches(flags: GraphFlags, running: usize) -> Vec<usize> {
        flags.settings(Device::Cuda(0), running).batches
    }

    #[test]
    fn batches_reach_what_runs_at_a_time_and_no_further() {
        assert_eq!(batches(GraphFlags::default(), 48), [1, 2, 4, 8, 12, 16, 24, 32, 48]);
        assert_eq!(batches(GraphFlags::default(), 10), [1, 2, 4, 8, 10]);
        let flags = GraphFlags { cuda_graph_max_bs: Some(5), ..GraphFlags::default() };
        assert_eq!(batches(flags, 48), [1, 2, 4, 5]);
        let flags = GraphFlags { cuda_graph_bs: vec![64, 3, 3, 1], ..GraphFlags::default() };
        assert_eq!(batches(flags, 48), [1, 3]);
    }

    #[test]
    fn nothing_is_captured_on_the_cpu() {
        let flags = GraphFlags { cuda_graph_bs: vec![4], ..GraphFlags::default() };
        assert_eq!(flags.settings(Device::Cpu, 48), GraphSettings::default());
        assert_eq!(flags.ignored(Device::Cpu), ["--cuda-graph-bs"]);
        assert!(flags.ignored(Device::Cuda(0)).is_empty());
    }
}
