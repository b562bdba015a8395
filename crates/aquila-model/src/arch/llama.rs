//! Llama: optional biases, no norms on heads.

use crate::config::Settings;
use crate::layout::TensorNames;
use crate::model_spec::{Family, refuse_windows};
use crate::{ModelSpec, Result};

pub(super) const NAME: &str = "LlamaForCausalLM";

pub(super) fn read(config: &Settings<'_>) -> Result<ModelSpec> {
    refuse_windows(config)?;
    let attention_bias = config.flag("attention_bias", false)?;
    let family = Family {
        head_dim: None,
        qk_norm: false,
        qkv_bias: attention_bias,
        output_bias: attention_bias,
        mlp_bias: config.flag("mlp_bias", false)?,
        names: TensorNames::HUGGING_FACE,
    };
    ModelSpec::read(config, NAME, family)
}
