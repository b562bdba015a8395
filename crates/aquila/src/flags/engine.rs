//! How requests share the machine.

use aquila_engine::{Priorities, Returned};
use clap::{Args, ValueEnum};

use super::number::whole;
use super::{Device, GraphFlags, SpeculativeFlags};
use crate::error::{Error, Result};

/// By how much a waiting request must outrank a running one to take its place.
const PREEMPTION_THRESHOLD: usize = 10;

/// Memory, batching and caching.
#[derive(Args, Debug, Clone)]
#[command(next_help_heading = "Scheduler")]
pub struct EngineFlags {
    /// Slots of one KV page
    #[arg(
        long,
        default_value_t = 1,
        value_name = "SLOTS",
        value_parser = whole(1, 1 << 20),
        allow_negative_numbers = true,
    )]
    pub page_size: usize,

    /// How much of the memory that is free at start may be used for weights and KV
    #[arg(long, default_value_t = 0.8, value_name = "FRACTION", allow_negative_numbers = true)]
    pub mem_fraction_static: f64,

    /// Requests that run at a time
    #[arg(
        long,
        default_value_t = 48,
        value_name = "N",
        value_parser = whole(1, 1 << 16),
        allow_negative_numbers = true,
    )]
    pub max_running_requests: usize,

    /// Requests that may wait; a file is read no further ahead than that
    #[arg(
        long,
        default_value_t = 4096,
        value_name = "N",
        value_parser = whole(1, 1 << 30),
        allow_negative_numbers = true,
    )]
    pub max_queued_requests: usize,

    /// Tokens of the KV pool [default: what the running requests could use, if it fits]
    #[arg(
        long,
        value_name = "TOKENS",
        value_parser = whole(1, 1 << 31),
        allow_negative_numbers = true,
    )]
    pub max_total_tokens: Option<usize>,

    /// Prompt tokens of one round; -1 reads whole prompts
    #[arg(long, default_value_t = 512, value_name = "TOKENS", allow_negative_numbers = true)]
    chunked_prefill_size: i64,

    /// Keep no prefixes for requests that begin alike
    #[arg(long)]
    pub disable_radix_cache: bool,

    /// Which waiting request is admitted next: the first, or the one whose prompt has the longest
    /// cached prefix (none is overtaken without end)
    #[arg(long, value_enum, default_value_t = SchedulePolicy::Fcfs, value_name = "POLICY")]
    pub schedule_policy: SchedulePolicy,

    /// Admit requests of higher `priority` first; one without comes last. None is overtaken without
    /// end: after 64 others, the one that has waited longest is next
    #[arg(long)]
    enable_priority_scheduling: bool,

    /// Low values of `priority` go first, not high ones
    #[arg(long, requires = "enable_priority_scheduling")]
    schedule_low_priority_values_first: bool,

    /// By how much a waiting request must outrank a running one to take its place [default: 10]
    #[arg(
        long,
        value_name = "DIFFERENCE",
        value_parser = whole(0, u32::MAX as usize),
        allow_negative_numbers = true,
        requires = "enable_priority_scheduling",
    )]
    priority_scheduling_preemption_threshold: Option<usize>,

    /// Refuse a request with a `priority` where priorities are not enabled; else it is ignored
    #[arg(long)]
    abort_on_priority_when_disabled: bool,

    /// Plan no round while the one before it runs; SGLANG_ENABLE_SPEC_V2=0 means the same
    #[arg(long)]
    disable_overlap_schedule: bool,

    /// Plan each round while the one before it runs, also where that is not the default
    #[arg(long, conflicts_with = "disable_overlap_schedule")]
    enable_overlap_schedule: bool,

    #[command(flatten)]
    pub graphs: GraphFlags,

    #[command(flatten)]
    pub speculative: SpeculativeFlags,

    /// What requests may get beside tokens, where a command has requests that can ask.
    #[arg(skip)]
    pub returned: Returned,

    /// Whether prompts are processed for other workers, which decode: what rounds cost is then not
    /// measured.
    #[arg(skip)]
    pub prefills_only: bool,
}

/// Which request is admitted next.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub enum SchedulePolicy {
    /// First come, first served
    Fcfs,
    /// Longest prefix match
    Lpm,
}

/// Whether rounds are planned while others run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Overlap {
    /// Whether they are.
    pub on: bool,
    /// What decided it.
    pub why: &'static str,
}

impl EngineFlags {
    /// Whether rounds overlap, and why: a flag, `SGLANG_ENABLE_SPEC_V2`, or what suits the device.
    pub fn overlap(&self, device: Device) -> Overlap {
        let spec_v2 = std::env::var("SGLANG_ENABLE_SPEC_V2").unwrap_or_default();
        if self.disable_overlap_schedule {
            Overlap { on: false, why: "--disable-overlap-schedule" }
        } else if self.enable_overlap_schedule {
            Overlap { on: true, why: "--enable-overlap-schedule" }
        } else if ["0", "false", "False"].contains(&spec_v2.as_str()) {
            Overlap { on: false, why: "SGLANG_ENABLE_SPEC_V2" }
        } else if ["1", "true", "True"].contains(&spec_v2.as_str()) {
            Overlap { on: true, why: "SGLANG_ENABLE_SPEC_V2" }
        } else {
            match device {
                Device::Cpu => Overlap {
                    on: false,
                    why: "the scheduler and the executor share the CPU's cores",
                },
                Device::Cuda(_) => Overlap { on: true, why: "rounds run on a device" },
            }
        }
    }

    /// What becomes of the priorities of requests.
    pub fn priorities(&self) -> Priorities {
        let threshold = self.priority_scheduling_preemption_threshold;
        if self.enable_priority_scheduling {
            Priorities::Ranked {
                low_values_first: self.schedule_low_priority_values_first,
                preemption_threshold: threshold.unwrap_or(PREEMPTION_THRESHOLD) as u64,
            }
        } else if self.abort_on_priority_when_disabled {
            Priorities::Refused
        } else {
            Priorities::Ignored
        }
    }

    /// Prompt rows of one round, for contexts of `context` tokens.
    pub fn prefill_rows(&self, context: usize) -> Result<usize> {
        match self.chunked_prefill_size {
            -1 => Ok(context),
            rows if rows > 0 => Ok((rows as usize).min(context)),
            rows => Err(Error::Usage(format!(
                "--chunked-prefill-size must be at least 1, or -1 for whole prompts; found {rows}"
            ))),
        }
    }

    /// The share of memory, if it is one.
    pub fn fraction(&self) -> Result<f64> {
        let fraction = self.mem_fraction_static;
        if fraction > 0.0 && fraction <= 1.0 {
            return Ok(fraction);
        }
        Err(Error::Usage(format!(
            "--mem-fraction-static must be above 0 and at most 1; found {fraction}"
        )))
    }
}
