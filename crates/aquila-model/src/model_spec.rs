//! The description of an architecture that drives the decoder.
//!
//! The invariant: a [`ModelSpec`] that exists is consistent, and no size computed from it
//! overflows.

use aquila_compute::{DType, HeadShape};

use crate::config::{Settings, shown};
use crate::layout::TensorNames;
use crate::rope::RopeSpec;
use crate::{Result, Setting};

/// More parameters than any machine holds; a config beyond it is taken for corrupt.
const ABSURD_PARAMETERS: u128 = 1 << 45;

/// Layers are listed one by one, so their number is kept small.
const MOST_LAYERS: usize = 1 << 14;

/// What a decoder is made of: sizes, and which of the optional parts its layers have.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelSpec {
    /// The name in `architectures`, such as `LlamaForCausalLM`.
    pub architecture: String,
    /// Rows of the embedding table and of the language-model head.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width inside the feed-forward part.
    pub intermediate_size: usize,
    /// Decoder layers.
    pub layers: usize,
    /// The heads of each layer.
    pub heads: HeadShape,
    /// Whether each query and key head is normed before it is turned.
    pub qk_norm: bool,
    /// Whether the projections to queries, keys and values have biases.
    pub qkv_bias: bool,
    /// Whether the projection out of attention has a bias.
    pub output_bias: bool,
    /// Whether the feed-forward projections have biases.
    pub mlp_bias: bool,
    /// What the norms add to the mean square.
    pub norm_epsilon: f32,
    /// Whether the head is the embedding table.
    pub tied_embeddings: bool,
    /// Rotary embedding.
    pub rope: RopeSpec,
    /// The longest context the model was made for.
    pub max_positions: usize,
    /// The element type that the config declares.
    pub dtype: DType,
    /// What the checkpoint calls its tensors.
    pub names: &'static TensorNames,
}

/// What an architecture decides for itself where the config is silent.
pub(crate) struct FamilyDefaults {
    pub head_dim: Option<usize>,
    pub qk_norm: bool,
    pub qkv_bias: bool,
    pub output_bias: bool,
    pub mlp_bias: bool,
    pub names: &'static TensorNames,
}

impl ModelSpec {
    /// Reads the settings that decoders of Llama's family share.
    pub(crate) fn read(
        config: &Settings<'_>,
        architecture: &str,
        defaults: FamilyDefaults,
    ) -> Result<Self> {
        refuse_what_is_not_supported(config)?;
        let hidden_size = config.size("hidden_size")?;
        let heads = config.size("num_attention_heads")?;
        let kv_heads = config.size_if_any("num_key_value_heads")?.unwrap_or(heads);
        if heads % kv_heads != 0 {
            return Err(config.wrong(
                "num_key_value_heads",
                format!("must divide num_attention_heads {heads}, found {kv_heads}"),
            ));
        }
        let head_dim = match config.size_if_any("head_dim")?.or(defaults.head_dim) {
            Some(width) => width,
            None if hidden_size % heads == 0 => hidden_size / heads,
            None => {
                return Err(config.wrong(
                    "num_attention_heads",
                    format!("must divide hidden_size {hidden_size}, found {heads}"),
                ));
            }
        };
        if head_dim % 2 != 0 {
            return Err(config.wrong("head_dim", format!("must be even, found {head_dim}")));
        }
        let max_positions = config.size("max_position_embeddings")?;
        let spec = Self {
            architecture: architecture.into(),
            vocab_size: config.size("vocab_size")?,
            hidden_size,
            intermediate_size: config.size("intermediate_size")?,
            layers: layers(config)?,
            heads: HeadShape { heads, kv_heads, head_dim },
            qk_norm: defaults.qk_norm,
            qkv_bias: defaults.qkv_bias,
            output_bias: defaults.output_bias,
            mlp_bias: defaults.mlp_bias,
            norm_epsilon: epsilon(config)?,
            tied_embeddings: config.flag("tie_word_embeddings", false)?,
            rope: RopeSpec::read(config, max_positions)?,
            max_positions,
            dtype: dtype(config)?,
            names: defaults.names,
        };
        let parameters = spec.parameters_wide();
        if parameters > ABSURD_PARAMETERS {
            return Err(config.wrong(
                "sizes",
                format!(
                    "are absurd: hidden_size {hidden_size}, intermediate_size {}, {} layers, \
                     vocab_size {} make {parameters} parameters",
                    spec.intermediate_size, spec.layers, spec.vocab_size
                ),
            ));
        }
        Ok(spec)
    }

    /// How many parameters the model has; tied ones count once.
    pub fn parameters(&self) -> u64 {
        self.parameters_wide() as u64
    }

    fn parameters_wide(&self) -> u128 {
        let w = |n: usize| n as u128;
        let [hidden, inner, vocab] =
            [self.hidden_size, self.intermediate_size, self.vocab_size].map(w);
        let [heads, kv, width] =
            [self.heads.heads, self.heads.kv_heads, self.heads.head_dim].map(w);
        let (q, kv) = (heads * width, kv * width);
        let on = |flag: bool, n: u128| if flag { n } else { 0 };
        let layer = hidden * (q + 2 * kv)
            + q * hidden
            + 3 * hidden * inner
            + 2 * hidden
            + on(self.qk_norm, 2 * width)
            + on(self.qkv_bias, q + 2 * kv)
            + on(self.output_bias, hidden)
            + on(self.mlp_bias, 2 * inner + hidden);
        let tables = if self.tied_embeddings { 1 } else { 2 };
        w(self.layers) * layer + tables * vocab * hidden + hidden
    }
}

fn refuse_what_is_not_supported(config: &Settings<'_>) -> Result<()> {
    if let Some(activation) = config.text("hidden_act")?
        && activation != "silu"
    {
        return Err(config.unsupported(format!("hidden_act {activation:?} is not supported")));
    }
    if config.flag("use_sliding_window", false)? {
        return Err(config.unsupported("use_sliding_window is not supported"));
    }
    if let Some(types) = config.get("layer_types") {
        let list = types.as_array().map(Vec::as_slice).unwrap_or(std::slice::from_ref(types));
        if let Some(other) = list.iter().find(|t| t.as_str() != Some("full_attention")) {
            return Err(
                config.unsupported(format!("layer_types with {} are not supported", shown(other)))
            );
        }
    }
    if let Some(quantization) = config.object("quantization_config")? {
        let method = quantization.text("quant_method")?.unwrap_or("unnamed");
        let reason = format!(
            "weights stored with quantization {method:?} are not supported; use the unquantized \
             checkpoint, kept as int8 if it must be smaller"
        );
        return Err(config.needs(Setting::Int8, reason));
    }
    Ok(())
}

fn layers(config: &Settings<'_>) -> Result<usize> {
    match config.size("num_hidden_layers")? {
        n if n <= MOST_LAYERS => Ok(n),
        n => {
            Err(config
                .wrong("num_hidden_layers", format!("must be at most {MOST_LAYERS}, found {n}")))
        }
    }
}

fn epsilon(config: &Settings<'_>) -> Result<f32> {
    let epsilon = config.positive("rms_norm_eps")?.unwrap_or(1e-6) as f32;
    if !epsilon.is_normal() || epsilon >= 1.0 {
        return Err(
            config.wrong("rms_norm_eps", format!("must be above 0 and below 1, found {epsilon}"))
        );
    }
    Ok(epsilon)
}

fn dtype(config: &Settings<'_>) -> Result<DType> {
    let field = if config.get("dtype").is_some() { "dtype" } else { "torch_dtype" };
    match config.text(field)? {
        Some("bfloat16") => Ok(DType::Bf16),
        Some("float16") => Ok(DType::F16),
        Some("float32") | None => Ok(DType::F32),
        Some(other) => {
            Err(config
                .wrong(field, format!("must be bfloat16, float16 or float32, found {other:?}")))
        }
    }
}
