//! Which model, and how it is kept and run.

use std::sync::OnceLock;

use aquila_compute::cpu::{Isa, IsaChoice};
use aquila_compute::cuda::{Arithmetic, FoundDriver, find_driver};
use aquila_compute::{KvDtype, WeightFormat};
use aquila_model::{LoadFormat, Location};
use clap::builder::Resettable;
use clap::{Args, ValueEnum};

use super::number::{seed, whole};
use crate::error::{Error, Result};
use crate::find::find;
use crate::notice::notice;

/// The shipped model that runs where none is named.
const DEFAULT_MODEL: &str = "tiny";

/// Which model.
#[derive(Args, Debug, Clone)]
pub struct ModelName {
    /// A Hugging Face folder, a hub id (org/name), a shipped model (tiny, draft) or preset:NAME
    /// [default: tiny]
    #[arg(value_name = "MODEL", help_heading = Resettable::Reset)]
    model: Option<String>,

    /// The same as MODEL
    #[arg(long, value_name = "MODEL", conflicts_with = "model", visible_alias = "model")]
    model_path: Option<String>,

    /// The branch, tag or commit of a model of the hub [default: main]
    #[arg(long)]
    revision: Option<String>,
}

/// Which model, and how.
#[derive(Args, Debug, Clone)]
#[command(next_help_heading = "Model")]
pub struct ModelFlags {
    #[command(flatten)]
    model: ModelName,

    /// How weights are kept; auto is bfloat16
    #[arg(long, value_enum, default_value_t = Dtype::Auto)]
    dtype: Dtype,

    /// How keys and values are kept; auto is float32 on the CPU and where weights are float32,
    /// else bfloat16
    #[arg(long, value_enum, default_value_t = Dtype::Auto, value_name = "DTYPE")]
    kv_cache_dtype: Dtype,

    /// Quantize weights and activations: int8 in groups of 32 inputs with a scale each
    #[arg(long, value_enum, value_name = "FORMAT")]
    quantization: Option<Quantization>,

    /// Where weights come from: the files, or random numbers made from the config alone
    #[arg(long, value_enum, default_value_t = Load::Auto, value_name = "FORMAT")]
    load_format: Load,

    /// Tokens of one sequence, prompt and answer together [default: the model's]
    #[arg(
        long,
        value_name = "TOKENS",
        value_parser = whole(1, 1 << 30),
        allow_negative_numbers = true,
    )]
    pub context_length: Option<usize>,

    /// The model again, as some launch lines have it
    #[arg(long, hide = true)]
    tokenizer_path: Option<String>,

    /// Where the model runs: cpu, cuda or cuda:INDEX; auto is the first GPU of compute capability 8.0
    /// or newer with a driver for CUDA 13.0 or newer, and the CPU where there is none, or where
    /// --quantization int8 or --kv-cache-dtype float32 without --dtype float32 asks for what the CPU
    /// alone has. A model that does not run on that GPU is refused, and not moved to the CPU
    #[arg(long, default_value = "auto")]
    device: String,

    /// Compute threads; 0 is one per core
    #[arg(
        long,
        default_value_t = 0,
        value_name = "N",
        value_parser = threads,
        allow_negative_numbers = true,
    )]
    pub threads: usize,

    /// The instruction set of the kernels; it changes the speed and nothing else
    #[arg(long, value_enum, default_value_t = CpuIsa::Auto, value_name = "ISA")]
    cpu_isa: CpuIsa,

    /// What dummy weights, and the seeds of requests without one, derive from
    #[arg(
        long,
        default_value_t = 0,
        value_name = "SEED",
        value_parser = seed,
        allow_negative_numbers = true,
    )]
    pub random_seed: u64,
}

/// Where a model runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Device {
    /// On the CPU's cores.
    Cpu,
    /// On the CUDA device of this number.
    Cuda(usize),
}

#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
enum Dtype {
    Auto,
    #[value(alias = "bf16")]
    Bfloat16,
    #[value(aliases = ["float", "fp32"])]
    Float32,
}

#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
enum Quantization {
    Int8,
}

#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
enum Load {
    Auto,
    Dummy,
}

#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
enum CpuIsa {
    Auto,
    Avx512,
    Avx2,
    Portable,
}

impl ModelName {
    /// The model's name.
    pub fn name(&self) -> &str {
        self.model.as_deref().or(self.model_path.as_deref()).unwrap_or(DEFAULT_MODEL)
    }
}

impl ModelFlags {
    /// The model's name.
    pub fn name(&self) -> &str {
        self.model.name()
    }

    /// The revision of the hub that was asked for.
    pub fn revision(&self) -> Option<&str> {
        self.model.revision.as_deref()
    }

    /// Where the model is, downloaded if need be.
    pub fn find(&self, quiet: bool) -> Result<Location> {
        find(self.name(), self.revision(), quiet)
    }

    /// How weights, keys and values are kept, in words.
    pub fn formats(&self) -> String {
        let Self { quantization, dtype, .. } = self;
        let weights = match (quantization, dtype) {
            (Some(Quantization::Int8), _) => "int8",
            (None, Dtype::Float32) => "float32",
            (None, Dtype::Auto | Dtype::Bfloat16) => "bfloat16",
        };
        let kv = match self.kv_dtype() {
            KvDtype::F32 => "float32",
            KvDtype::Bf16 => "bfloat16",
        };
        format!("weights {weights}, KV {kv}")
    }

    /// Refuses a device that no model runs on or that lacks what was asked for, and the tokenizer
    /// of another model.
    pub fn check(&self) -> Result<()> {
        if let Some(path) = self.tokenizer_path.as_deref().filter(|path| *path != self.name()) {
            return Err(Error::Usage(format!(
                "--tokenizer-path {path}: the tokenizer is read from the model's own folder: put \
                 tokenizer.json there"
            )));
        }
        let refused = |why| Err(Error::Usage(format!("--device {}: {why}", self.device)));
        match (self.device()?, self.quantization, self.dtype, self.kv_cache_dtype) {
            (Device::Cpu, ..) => Ok(()),
            (_, Some(Quantization::Int8), ..) => {
                refused("there is no int8 on CUDA yet: leave --quantization out")
            }
            (_, _, Dtype::Auto | Dtype::Bfloat16, Dtype::Float32) => refused(
                "tensor cores read keys and values as bfloat16: leave --kv-cache-dtype out, or \
                 give --dtype float32, which computes without them",
            ),
            _ => Ok(()),
        }
    }

    /// Where the model runs.
    pub fn device(&self) -> Result<Device> {
        let cuda = |index: &str| match index {
            "" => Some(0),
            _ => index.strip_prefix(':')?.parse().ok(),
        };
        match self.device.as_str() {
            "auto" if self.needs_cpu() => Ok(Device::Cpu),
            "auto" => Ok(first_gpu().map_or(Device::Cpu, Device::Cuda)),
            "cpu" => Ok(Device::Cpu),
            other => match other.strip_prefix("cuda").and_then(cuda) {
                Some(ordinal) => Ok(Device::Cuda(ordinal)),
                None => Err(Error::Usage(format!(
                    "--device {other}: expected auto, cpu, cuda or cuda:INDEX"
                ))),
            },
        }
    }

    /// Whether the device was left to choose.
    pub fn chooses_device(&self) -> bool {
        self.device == "auto"
    }

    /// Whether the CPU alone has what was asked for, as [`Self::check`] says.
    fn needs_cpu(&self) -> bool {
        self.quantization.is_some()
            || (self.kv_cache_dtype == Dtype::Float32 && self.dtype != Dtype::Float32)
    }

    /// How a CUDA device computes.
    pub fn arithmetic(&self) -> Arithmetic {
        match self.dtype {
            Dtype::Float32 => Arithmetic::Plain,
            Dtype::Auto | Dtype::Bfloat16 => Arithmetic::Tensor,
        }
    }

    /// How weights are kept.
    pub fn weight_format(&self) -> Result<WeightFormat> {
        match (self.quantization, self.dtype) {
            (Some(Quantization::Int8), Dtype::Float32) => Err(Error::Usage(
                "--quantization int8 and --dtype float32 exclude each other: leave one out".into(),
            )),
            (Some(Quantization::Int8), _) => Ok(WeightFormat::Int8),
            (None, Dtype::Float32) => Ok(WeightFormat::F32),
            (None, Dtype::Auto | Dtype::Bfloat16) => Ok(WeightFormat::Bf16),
        }
    }

    /// How keys and values are kept.
    pub fn kv_dtype(&self) -> KvDtype {
        let on_cpu = matches!(self.device(), Ok(Device::Cpu));
        match self.kv_cache_dtype {
            Dtype::Auto if on_cpu || self.arithmetic() == Arithmetic::Plain => KvDtype::F32,
            Dtype::Float32 => KvDtype::F32,
            Dtype::Auto | Dtype::Bfloat16 => KvDtype::Bf16,
        }
    }

    /// Where the weights come from.
    pub fn load_format(&self) -> LoadFormat {
        match self.load_format {
            Load::Auto => LoadFormat::Auto,
            Load::Dummy => LoadFormat::Dummy { seed: self.random_seed },
        }
    }

    /// The instruction set asked for.
    pub fn isa(&self) -> IsaChoice {
        match self.cpu_isa {
            CpuIsa::Auto => IsaChoice::Auto,
            CpuIsa::Avx512 => IsaChoice::Only(Isa::Avx512),
            CpuIsa::Avx2 => IsaChoice::Only(Isa::Avx2),
            CpuIsa::Portable => IsaChoice::Only(Isa::Portable),
        }
    }
}

/// Whether the environment hides all GPUs from this process.
fn are_hidden() -> bool {
    let visible = std::env::var("CUDA_VISIBLE_DEVICES");
    visible.is_ok_and(|visible| ["", "-1"].contains(&visible.as_str()))
}

/// The first GPU that there are kernels for. The driver is asked once.
fn first_gpu() -> Option<usize> {
    static FOUND: OnceLock<Option<usize>> = OnceLock::new();
    *FOUND.get_or_init(|| {
        let found = find_driver();
        let served = found.iter().flatten().find_map(FoundDriver::first_served);
        let why = match found {
            _ if served.is_some() => None,
            // No driver, or none of its devices for this process, as somebody wished.
            Ok(None) => None,
            Ok(Some(driver)) if driver.devices.is_empty() && are_hidden() => None,
            Ok(Some(driver)) if driver.devices.is_empty() => {
                Some("NVIDIA's driver is there, but it shows this process no GPU")
            }
            Ok(Some(_)) | Err(_) => Some("CUDA cannot be used here"),
        };
        if let Some(why) = why {
            notice(format_args!(
                "note: --device auto is the CPU: {why}, and aquila doctor says more"
            ));
        }
        served
    })
}

/// Threads that a machine can run at the same time, or nearly.
fn threads(text: &str) -> std::result::Result<usize, String> {
    // A few threads more than cores do no harm, and tests of their number run everywhere.
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let most = cores.max(16);
    whole(0, most)(text).map_err(|why| {
        format!(
            "{why}: this machine has {cores} cores, and threads beyond them wait for each other"
        )
    })
}
