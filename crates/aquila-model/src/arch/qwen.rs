//! Qwen2: biases on queries, keys and values. Qwen3: norms on query and key heads instead.

use crate::config::Settings;
use crate::layout::TensorNames;
use crate::model_spec::FamilyDefaults;
use crate::{ModelSpec, Result};

pub(super) const NAME_2: &str = "Qwen2ForCausalLM";
pub(super) const NAME_3: &str = "Qwen3ForCausalLM";

pub(super) fn read_2(config: &Settings<'_>) -> Result<ModelSpec> {
    let defaults = FamilyDefaults {
        head_dim: None,
        qk_norm: false,
        qkv_bias: true,
        output_bias: false,
        mlp_bias: false,
        names: &TensorNames::HUGGING_FACE,
    };
    ModelSpec::read(config, NAME_2, defaults)
}

pub(super) fn read_3(config: &Settings<'_>) -> Result<ModelSpec> {
    let attention_bias = config.flag("attention_bias", false)?;
    let defaults = FamilyDefaults {
        // transformers' default for this family, whatever the hidden size.
        head_dim: Some(128),
        qk_norm: true,
        qkv_bias: attention_bias,
        output_bias: attention_bias,
        mlp_bias: false,
        names: &TensorNames::HUGGING_FACE,
    };
    ModelSpec::read(config, NAME_3, defaults)
}
