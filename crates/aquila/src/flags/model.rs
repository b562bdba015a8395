//! Which model, and how it is kept and run.

use aquila_compute::cpu::{Isa, IsaChoice};
use aquila_compute::{KvDtype, WeightFormat};
use aquila_model::LoadFormat;
use clap::{Args, ValueEnum};

use crate::error::{Error, Result};

/// The shipped model that runs where none is named.
const DEFAULT_MODEL: &str = "tiny";

/// Which model, and how.
#[derive(Args, Debug, Clone)]
#[command(next_help_heading = "Model")]
pub struct ModelFlags {
    /// A Hugging Face folder, a hub id (org/name), a shipped model (tiny, draft) or preset:NAME
    #[arg(value_name = "MODEL")]
    model: Option<String>,

    /// The same, as a flag [default: tiny]
    #[arg(long, value_name = "MODEL", conflicts_with = "model")]
    model_path: Option<String>,

    /// How weights are kept; auto is bfloat16
    #[arg(long, value_enum, default_value_t = Dtype::Auto)]
    dtype: Dtype,

    /// How keys and values are kept; auto is float32
    #[arg(long, value_enum, default_value_t = Dtype::Auto)]
    kv_cache_dtype: Dtype,

    /// Quantize weights and activations
    #[arg(long, value_enum)]
    quantization: Option<Quantization>,

    /// dummy makes random weights from the config alone
    #[arg(long, value_enum, default_value_t = Load::Auto)]
    load_format: Load,

    /// Tokens of one sequence, prompt and answer together [default: the model's]
    #[arg(long, value_name = "TOKENS")]
    pub context_length: Option<usize>,

    /// Compute threads; 0 is one per core
    #[arg(long, default_value_t = 0)]
    pub threads: usize,

    /// The instruction set of the kernels; it changes the speed and nothing else
    #[arg(long, value_enum, default_value_t = CpuIsa::Auto)]
    cpu_isa: CpuIsa,

    /// What dummy weights, and the seeds of requests without one, derive from
    #[arg(long, default_value_t = 0)]
    pub random_seed: u64,
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
    /// 8-bit integers, in groups of 32 inputs with a scale each
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

impl ModelFlags {
    /// The model's name.
    pub fn name(&self) -> &str {
        self.model.as_deref().or(self.model_path.as_deref()).unwrap_or(DEFAULT_MODEL)
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
        match self.kv_cache_dtype {
            Dtype::Auto | Dtype::Float32 => KvDtype::F32,
            Dtype::Bfloat16 => KvDtype::Bf16,
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
