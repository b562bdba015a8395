//! Qwen3-MoE: Qwen3's attention, and experts in place of some or all feed-forward parts.

use super::qwen::{family_3, with_windows};
use crate::config::Settings;
use crate::layer_spec::{ExpertsSpec, FeedForward};
use crate::{ModelSpec, Result};

pub(super) const NAME: &str = "Qwen3MoeForCausalLM";

pub(super) fn read(config: &Settings<'_>) -> Result<ModelSpec> {
    let mut spec = ModelSpec::read(config, NAME, family_3(config)?)?;
    let Some(experts) = ExpertsSpec::read(config, spec.layers[0].ffn.activation())? else {
        return with_windows(config, spec, 0);
    };
    let every = config.size_if_any("decoder_sparse_step")?.unwrap_or(1);
    let dense = config.counts("mlp_only_layers")?;
    for (index, layer) in spec.layers.iter_mut().enumerate() {
        if (index + 1) % every == 0 && !dense.contains(&index) {
            layer.ffn = FeedForward::Experts(experts.clone());
        }
    }
    // Unlike the dense models, all layers have the window.
    with_windows(config, spec, 0)
}
