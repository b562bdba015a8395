//! The description of an architecture that drives the decoder.
//!
//! The invariant: a [`ModelSpec`] that exists is consistent, and no size computed from it
//! overflows.

use aquila_compute::{Activation, DType, HeadShape};

use crate::config::{Settings, shown};
use crate::layer_spec::{AttentionSpec, DenseSpec, FeedForward, LayerSpec, Mixer, Norms};
use crate::layout::{Expected, TensorNames};
use crate::rope::RopeSpec;
use crate::{Result, Setting};

/// More parameters than any machine holds; a config beyond it is taken for corrupt.
const ABSURD_PARAMETERS: u128 = 1 << 45;

/// Layers are listed one by one, so their number is kept small.
const MOST_LAYERS: usize = 1 << 14;

/// So are the experts of all layers.
const MOST_EXPERTS: usize = 1 << 17;

/// What a decoder is made of.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelSpec {
    /// The name in `architectures`, such as `LlamaForCausalLM`.
    pub architecture: String,
    /// Rows of the embedding table and of the language-model head.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// The layers, first to last.
    pub layers: Vec<LayerSpec>,
    /// How all norms of the model compute.
    pub norm: NormSpec,
    /// What embeddings are multiplied by before the first layer.
    pub embedding_scale: f32,
    /// What bounds the logits: each becomes `cap * tanh(logit / cap)`.
    pub logit_cap: Option<f32>,
    /// Whether the head is the embedding table.
    pub tied_embeddings: bool,
    /// The longest context the model was made for.
    pub max_positions: usize,
    /// The element type that the config declares.
    pub dtype: DType,
    /// What the checkpoint calls its tensors.
    pub names: TensorNames,
}

/// How a model norms.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NormSpec {
    /// What is added to the mean square.
    pub epsilon: f32,
    /// Whether the checkpoint keeps the weights less one.
    pub one_plus: bool,
}

/// What an architecture of Llama's kind decides for itself where the config is silent.
pub(crate) struct Family {
    pub head_dim: Option<usize>,
    pub qk_norm: bool,
    pub qkv_bias: bool,
    pub output_bias: bool,
    pub mlp_bias: bool,
    pub names: TensorNames,
}

impl ModelSpec {
    /// Reads the settings that decoders of Llama's kind share: equal layers with full attention.
    pub(crate) fn read(config: &Settings<'_>, architecture: &str, family: Family) -> Result<Self> {
        refuse_quantized(config)?;
        let max_positions = config.size("max_position_embeddings")?;
        let hidden_size = config.size("hidden_size")?;
        let query_heads = config.size("num_attention_heads")?;
        let kv_heads = config.size_if_any("num_key_value_heads")?.unwrap_or(query_heads);
        let head_dim = match config.size_if_any("head_dim")?.or(family.head_dim) {
            Some(width) => width,
            None if hidden_size % query_heads == 0 => hidden_size / query_heads,
            None => {
                return Err(config.wrong(
                    "num_attention_heads",
                    format!("must divide hidden_size {hidden_size}, found {query_heads}"),
                ));
            }
        };
        let heads = heads(config, query_heads, kv_heads, head_dim)?;
        let layer = LayerSpec {
            mixer: Mixer::Attention(AttentionSpec {
                heads,
                scale: 1.0 / (head_dim as f32).sqrt(),
                window: None,
                rope: RopeSpec::read(config, max_positions)?,
                qk_norm: family.qk_norm,
                qkv_bias: family.qkv_bias,
                output_bias: family.output_bias,
            }),
            ffn: FeedForward::Dense(DenseSpec {
                width: config.size("intermediate_size")?,
                bias: family.mlp_bias,
                activation: activation(config, "hidden_act", Activation::Silu)?,
            }),
            norms: Norms::Before,
        };
        Ok(Self {
            architecture: architecture.into(),
            vocab_size: config.size("vocab_size")?,
            hidden_size,
            layers: vec![layer; layers(config)?],
            norm: NormSpec { epsilon: epsilon(config)?, one_plus: false },
            embedding_scale: 1.0,
            logit_cap: None,
            tied_embeddings: config.flag("tie_word_embeddings", false)?,
            max_positions,
            dtype: dtype(config)?,
            names: family.names,
        })
    }

    /// Refuses sizes that no machine could hold.
    pub(crate) fn checked(self, config: &Settings<'_>) -> Result<Self> {
        let experts = self.layers.iter().filter_map(|l| l.ffn.experts()).map(|e| e.experts);
        let listed = experts.fold(0usize, usize::saturating_add);
        if listed > MOST_EXPERTS {
            let problem = format!("make {listed} experts in all; at most {MOST_EXPERTS} may be");
            return Err(config.wrong("sizes", problem));
        }
        let parameters = self.parameters_wide();
        if parameters > ABSURD_PARAMETERS {
            return Err(config.wrong(
                "sizes",
                format!(
                    "are absurd: hidden_size {}, {} layers, vocab_size {} make {parameters} \
                     parameters",
                    self.hidden_size,
                    self.layers.len(),
                    self.vocab_size
                ),
            ));
        }
        Ok(self)
    }

    /// The attention of the first layer, whose heads and rotary embedding stand for the model's.
    pub fn first_attention(&self) -> &AttentionSpec {
        self.layers[0].attention()
    }

    /// How many experts a row takes at most, where layers have any.
    pub fn experts_per_token(&self) -> Option<usize> {
        let experts = self.layers.iter().filter_map(|layer| layer.ffn.experts());
        experts.map(|experts| experts.per_token).max()
    }

    /// How many parameters the model has; tied ones count once.
    pub fn parameters(&self) -> u64 {
        self.parameters_wide() as u64
    }

    fn parameters_wide(&self) -> u128 {
        self.tensors().map(|tensor| Expected::elements(&tensor)).sum()
    }
}

/// The shape of attention heads, refused where heads cannot share keys or be rotated.
pub(crate) fn heads(
    config: &Settings<'_>,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
) -> Result<HeadShape> {
    if !heads.is_multiple_of(kv_heads) {
        return Err(config.wrong(
            "num_key_value_heads",
            format!("must divide num_attention_heads {heads}, found {kv_heads}"),
        ));
    }
    if !head_dim.is_multiple_of(2) {
        return Err(config.wrong("head_dim", format!("must be even, found {head_dim}")));
    }
    Ok(HeadShape { heads, kv_heads, head_dim })
}

/// The function of a gate that `field` names.
pub(crate) fn activation(
    config: &Settings<'_>,
    field: &str,
    default: Activation,
) -> Result<Activation> {
    match config.text(field)? {
        None => Ok(default),
        Some("silu" | "swish") => Ok(Activation::Silu),
        Some("gelu_pytorch_tanh") => Ok(Activation::GeluTanh),
        Some(other) => Err(config.unsupported(format!("{field} {other:?} is not supported"))),
    }
}

/// Refuses layers that do not see the whole context.
pub(crate) fn refuse_windows(config: &Settings<'_>) -> Result<()> {
    if config.flag("use_sliding_window", false)? {
        return Err(config.unsupported("use_sliding_window is not supported"));
    }
    match windowed_types(config)? {
        Some(types) if types.contains(&true) => {
            Err(config.unsupported("layer_types with \"sliding_attention\" are not supported"))
        }
        _ => Ok(()),
    }
}

/// Whether each layer has a window, where `layer_types` says it.
pub(crate) fn layer_types(config: &Settings<'_>) -> Result<Option<Vec<bool>>> {
    let (types, expected) = (windowed_types(config)?, layers(config)?);
    match types {
        Some(types) if types.len() != expected => {
            let problem = format!("must name {expected} layers, found {}", types.len());
            Err(config.wrong("layer_types", problem))
        }
        types => Ok(types),
    }
}

fn windowed_types(config: &Settings<'_>) -> Result<Option<Vec<bool>>> {
    let Some(types) = config.get("layer_types") else { return Ok(None) };
    let list = types.as_array().map(Vec::as_slice).unwrap_or(std::slice::from_ref(types));
    let kind = |kind: &serde_json::Value| match kind.as_str() {
        Some("full_attention") => Ok(false),
        Some("sliding_attention") => Ok(true),
        _ => Err(config.unsupported(format!("layer_types with {} are not supported", shown(kind)))),
    };
    list.iter().map(kind).collect::<Result<_>>().map(Some)
}

/// Refuses weights that are stored quantized.
pub(crate) fn refuse_quantized(config: &Settings<'_>) -> Result<()> {
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

pub(crate) fn layers(config: &Settings<'_>) -> Result<usize> {
    match config.size("num_hidden_layers")? {
        n if n <= MOST_LAYERS => Ok(n),
        n => {
            Err(config
                .wrong("num_hidden_layers", format!("must be at most {MOST_LAYERS}, found {n}")))
        }
    }
}

pub(crate) fn epsilon(config: &Settings<'_>) -> Result<f32> {
    let epsilon = config.positive("rms_norm_eps")?.unwrap_or(1e-6) as f32;
    if !epsilon.is_normal() || epsilon >= 1.0 {
        return Err(
            config.wrong("rms_norm_eps", format!("must be above 0 and below 1, found {epsilon}"))
        );
    }
    Ok(epsilon)
}

pub(crate) fn dtype(config: &Settings<'_>) -> Result<DType> {
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
