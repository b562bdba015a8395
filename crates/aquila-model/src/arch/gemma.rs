//! Gemma 3: layers with a window among layers without, each kind with a rotary embedding of its
//! own; norms before and after each part, their weights kept less one.

use aquila_compute::Activation;

use crate::config::Settings;
use crate::layer_spec::{AttentionSpec, DenseSpec, FeedForward, LayerSpec, Mixer, Norms};
use crate::layout::TensorNames;
use crate::model_spec::{
    NormSpec, activation, dtype, epsilon, heads, layer_types, layers, refuse_quantized,
};
use crate::rope::{RopeSpec, base};
use crate::{ModelSpec, Result};

pub(super) const NAME: &str = "Gemma3ForCausalLM";

const NAMES: TensorNames = TensorNames {
    attention_output_norm: "post_attention_layernorm",
    ffn_norm: "pre_feedforward_layernorm",
    ffn_output_norm: "post_feedforward_layernorm",
    ..TensorNames::HUGGING_FACE
};

/// Where the config is silent, transformers' defaults hold.
pub(super) fn read(config: &Settings<'_>) -> Result<ModelSpec> {
    refuse_quantized(config)?;
    if config.flag("use_bidirectional_attention", false)? {
        return Err(config.unsupported("use_bidirectional_attention is not supported"));
    }
    if config.positive("attn_logit_softcapping")?.is_some() {
        return Err(config.unsupported("attn_logit_softcapping is not supported"));
    }
    let size =
        |field, default| -> Result<usize> { Ok(config.size_if_any(field)?.unwrap_or(default)) };
    let hidden_size = size("hidden_size", 2304)?;
    let max_positions = size("max_position_embeddings", 131_072)?;
    let [local, global] = ropes(config, max_positions)?;
    let query_heads = size("num_attention_heads", 8)?;
    let kv_heads = size("num_key_value_heads", 4)?;
    let bias = config.flag("attention_bias", false)?;
    let scalar = config.positive("query_pre_attn_scalar")?.unwrap_or(256.0);
    let attention = AttentionSpec {
        heads: heads(config, query_heads, kv_heads, size("head_dim", 256)?)?,
        scale: (1.0 / scalar.sqrt()) as f32,
        window: None,
        rope: global,
        qk_norm: true,
        qkv_bias: bias,
        output_bias: bias,
    };
    let windowed = AttentionSpec {
        window: Some(size("sliding_window", 4096)?),
        rope: local,
        ..attention.clone()
    };
    let ffn = FeedForward::Dense(DenseSpec {
        width: size("intermediate_size", 9216)?,
        bias: false,
        activation: activation(config, "hidden_activation", Activation::GeluTanh)?,
    });
    let layer = |has_window: bool| LayerSpec {
        mixer: Mixer::Attention(if has_window { &windowed } else { &attention }.clone()),
        ffn: ffn.clone(),
        norms: Norms::BeforeAndAfter,
    };
    let types = match layer_types(config)? {
        Some(types) => types,
        None => {
            let every = size("sliding_window_pattern", 6)?;
            (1..=layers(config)?).map(|number| number % every != 0).collect()
        }
    };
    Ok(ModelSpec {
        architecture: NAME.into(),
        vocab_size: size("vocab_size", 262_208)?,
        hidden_size,
        layers: types.into_iter().map(layer).collect(),
        norm: NormSpec { epsilon: epsilon(config)?, one_plus: true },
        embedding_scale: (hidden_size as f64).sqrt() as f32,
        logit_cap: config.positive("final_logit_softcapping")?.map(|cap| cap as f32),
        tied_embeddings: config.flag("tie_word_embeddings", true)?,
        max_positions,
        dtype: dtype(config)?,
        names: NAMES,
    })
}

/// The rotary embeddings of layers with a window and of those without.
fn ropes(config: &Settings<'_>, max_positions: usize) -> Result<[RopeSpec; 2]> {
    let parameters = config.object("rope_parameters")?;
    let of = |kind| parameters.map(|p| p.object(kind)).transpose().map(Option::flatten);
    let (local, global) = (of("sliding_attention")?, of("full_attention")?);
    let global = global.or(config.object("rope_scaling")?);
    let theta = |field, default| -> Result<f64> { Ok(base(config, field)?.unwrap_or(default)) };
    Ok([
        RopeSpec::scaled(config, local, theta("rope_local_base_freq", 1e4)?, max_positions)?,
        RopeSpec::scaled(config, global, theta("rope_theta", 1e6)?, max_positions)?,
    ])
}
