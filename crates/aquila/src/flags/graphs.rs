//! CUDA graphs.

use aquila_engine::executor::GraphSettings;
use clap::Args;

use super::Device;
use super::number::whole;

/// The least batch sizes that are captured unless flags name others.
const BATCHES: [usize; 7] = [1, 2, 4, 8, 12, 16, 24];
/// Those that follow: each power of two from here on, and three between it and the next. So at most a
/// quarter of a batch is padding, and twice as many requests are four sizes more.
const FIRST_POWER: u32 = 5;

/// Which parts of rounds are captured on CUDA.
#[derive(Args, Debug, Clone, Default)]
#[command(next_help_heading = "CUDA graphs")]
pub struct GraphFlags {
    /// Batch sizes that rounds are captured for: smaller batches are padded to the next of them,
    /// larger ones are launched kernel by kernel [default: 1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64,
    /// 80, 96 and so on, up to the requests that run at a time]
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
        let most = self.most(running);
        let mut batches = match self.cuda_graph_bs.is_empty() {
            true => default_batches(most),
            false => self.cuda_graph_bs.clone(),
        };
        batches.retain(|&batch| batch <= most);
        batches.sort_unstable();
        batches.dedup();
        GraphSettings { batches, check: self.debug_cuda_graph }
    }

    /// The largest batch that may be captured.
    fn most(&self, running: usize) -> usize {
        self.cuda_graph_max_bs.unwrap_or(usize::MAX).min(running)
    }

    /// The sizes that were named and are not captured, as they are larger than what may run or be
    /// captured, in words; nothing where all are.
    pub fn dropped(&self, device: Device, running: usize) -> Option<String> {
        if device == Device::Cpu || self.disable_cuda_graph {
            return None;
        }
        let most = self.most(running);
        let dropped = self.cuda_graph_bs.iter().filter(|&&batch| batch > most);
        let dropped: Vec<String> = dropped.map(usize::to_string).collect();
        let flag = match most < running {
            true => "--cuda-graph-max-bs",
            false => "--max-running-requests",
        };
        let all = dropped.len() == self.cuda_graph_bs.len();
        let left = if all { ", so no rounds are captured" } else { "" };
        (!dropped.is_empty())
            .then(|| format!("--cuda-graph-bs: {} above {flag} {most}{left}", dropped.join(", ")))
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

/// Sizes up to `most`, which is one of them.
fn default_batches(most: usize) -> Vec<usize> {
    let powers = (FIRST_POWER..usize::BITS).map(|power| 1usize << power);
    let steps = powers.flat_map(|power| (4..8).map(move |quarters| power / 4 * quarters));
    let batches = BATCHES.into_iter().chain(steps);
    batches.take_while(|&batch| batch < most).chain([most]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batches(flags: GraphFlags, running: usize) -> Vec<usize> {
        flags.settings(Device::Cuda(0), running).batches
    }

    #[test]
    fn batches_reach_what_runs_at_a_time_and_no_further() {
        assert_eq!(batches(GraphFlags::default(), 48), [1, 2, 4, 8, 12, 16, 24, 32, 40, 48]);
        assert_eq!(batches(GraphFlags::default(), 10), [1, 2, 4, 8, 10]);
        let flags = GraphFlags { cuda_graph_max_bs: Some(5), ..GraphFlags::default() };
        assert_eq!(batches(flags, 48), [1, 2, 4, 5]);
        let flags = GraphFlags { cuda_graph_bs: vec![64, 3, 3, 1], ..GraphFlags::default() };
        assert_eq!(batches(flags, 48), [1, 3]);
    }

    #[test]
    fn at_most_a_quarter_of_a_large_batch_is_padding() {
        for running in [1, 7, 33, 256, 257, 512, 1000, 65_536] {
            let sizes = batches(GraphFlags::default(), running);
            assert_eq!(sizes.last(), Some(&running));
            assert!(sizes.len() <= 8 + 4 * (running.ilog2() as usize).saturating_sub(4));
            for batch in 33..=running {
                let padded = sizes[sizes.partition_point(|&size| size < batch)];
                assert!(4 * (padded - batch) < batch, "{batch} as {padded} of {running}");
            }
        }
        let sizes = batches(GraphFlags::default(), 512);
        assert_eq!(sizes[sizes.len() - 5..], [256, 320, 384, 448, 512]);
    }

    #[test]
    fn sizes_that_are_not_captured_are_named() {
        let cuda = Device::Cuda(0);
        let flags = GraphFlags { cuda_graph_bs: vec![8, 64, 96], ..GraphFlags::default() };
        let told = flags.dropped(cuda, 48).unwrap();
        assert_eq!(told, "--cuda-graph-bs: 64, 96 above --max-running-requests 48");
        assert_eq!((flags.dropped(cuda, 96), flags.dropped(Device::Cpu, 48)), (None, None));
        let flags =
            GraphFlags { cuda_graph_bs: vec![64], cuda_graph_max_bs: Some(32), ..flags.clone() };
        let told = flags.dropped(cuda, 48).unwrap();
        let want = "--cuda-graph-bs: 64 above --cuda-graph-max-bs 32, so no rounds are captured";
        assert_eq!(told, want);
        assert_eq!(GraphFlags::default().dropped(cuda, 48), None);
    }

    #[test]
    fn nothing_is_captured_on_the_cpu() {
        let flags = GraphFlags { cuda_graph_bs: vec![4], ..GraphFlags::default() };
        assert_eq!(flags.settings(Device::Cpu, 48), GraphSettings::default());
        assert_eq!(flags.ignored(Device::Cpu), ["--cuda-graph-bs"]);
        assert!(flags.ignored(Device::Cuda(0)).is_empty());
    }
}
