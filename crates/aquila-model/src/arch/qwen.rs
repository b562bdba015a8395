//! Qwen2: biases on queries, keys and values. Qwen3: norms on query and key heads instead.

use crate::config::Settings;
use crate::layer_spec::Mixer;
use crate::layout::TensorNames;
use crate::model_spec::{Family, layer_types};
use crate::{ModelSpec, Result};

pub(super) const NAME_2: &str = "Qwen2ForCausalLM";
pub(super) const NAME_3: &str = "Qwen3ForCausalLM";

/// The first layer with a window, where the config names none: transformers' default.
const FIRST_WINDOWED: usize = 28;

pub(super) fn read_2(config: &Settings<'_>) -> Result<ModelSpec> {
    let family = Family {
        head_dim: None,
        qk_norm: false,
        qkv_bias: true,
        output_bias: false,
        mlp_bias: false,
        names: TensorNames::HUGGING_FACE,
    };
    let spec = ModelSpec::read(config, NAME_2, family)?;
    with_windows(config, spec, windowed_from(config)?)
}

pub(super) fn read_3(config: &Settings<'_>) -> Result<ModelSpec> {
    let spec = ModelSpec::read(config, NAME_3, family_3(config)?)?;
    with_windows(config, spec, windowed_from(config)?)
}

/// What Qwen3's dense and sparse models share.
pub(super) fn family_3(config: &Settings<'_>) -> Result<Family> {
    let attention_bias = config.flag("attention_bias", false)?;
    Ok(Family {
        // transformers' default for this family, whatever the hidden size.
        head_dim: Some(128),
        qk_norm: true,
        qkv_bias: attention_bias,
        output_bias: attention_bias,
        mlp_bias: false,
        names: TensorNames::HUGGING_FACE,
    })
}

fn windowed_from(config: &Settings<'_>) -> Result<usize> {
    Ok(config.count("max_window_layers")?.unwrap_or(FIRST_WINDOWED))
}

/// Gives the layers that `layer_types` names, or those from `first` on, the window that
/// `use_sliding_window` turns on.
pub(super) fn with_windows(
    config: &Settings<'_>,
    mut spec: ModelSpec,
    first: usize,
) -> Result<ModelSpec> {
    let used = config.flag("use_sliding_window", false)?;
    let types = layer_types(config)?;
    if !used && types.as_ref().is_some_and(|types| types.contains(&true)) {
        let problem = "names layers with a window, and use_sliding_window is false";
        return Err(config.wrong("layer_types", problem));
    }
    if !used {
        return Ok(spec);
    }
    let window = config.size("sliding_window")?;
    for (index, layer) in spec.layers.iter_mut().enumerate() {
        let Mixer::Attention(attention) = &mut layer.mixer;
        let windowed = types.as_ref().map_or(index >= first, |types| types[index]);
        attention.window = windowed.then_some(window);
    }
    Ok(spec)
}
