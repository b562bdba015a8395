//! Configs that ship with the code, for random weights: `preset:NAME`.

use serde_json::{Value, json};

use crate::Error;

/// The prefix that names a preset.
pub(crate) const PREFIX: &str = "preset:";

/// The names of all presets.
pub fn presets() -> impl Iterator<Item = &'static str> {
    [
        "bench",
        "llama-3.1-8b",
        "bench-eagle3",
        "llama-3.1-8b-eagle3",
        "bench-eagle",
        "llama-3.1-8b-eagle",
        "bench-mtp",
        "llama-3.1-8b-mtp",
    ]
    .into_iter()
}

/// The error about a preset that does not exist.
pub(crate) fn unknown(name: &str) -> Error {
    let known = presets().map(|p| format!("{PREFIX}{p}")).collect::<Vec<_>>().join(", ");
    Error::NotFound { name: format!("{PREFIX}{name}"), tried: vec![format!("presets are {known}")] }
}

/// The config of a preset.
pub(crate) fn config(name: &str) -> Option<Value> {
    match name {
        "bench" => Some(json!({
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": 1536,
            "intermediate_size": 4096,
            "num_hidden_layers": 16,
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "hidden_act": "silu",
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "vocab_size": 32000,
            "tie_word_embeddings": false,
            "torch_dtype": "bfloat16",
        })),
        "llama-3.1-8b" => Some(json!({
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "hidden_act": "silu",
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            "vocab_size": 128256,
            "tie_word_embeddings": false,
            "bos_token_id": 128000,
            "eos_token_id": [128001, 128008, 128009],
            "torch_dtype": "bfloat16",
        })),
        "bench-eagle3" => eagle3("bench", 16_000),
        "llama-3.1-8b-eagle3" => eagle3("llama-3.1-8b", 32_000),
        "bench-eagle" => eagle("bench"),
        "llama-3.1-8b-eagle" => eagle("llama-3.1-8b"),
        "bench-mtp" => mtp("bench"),
        "llama-3.1-8b-mtp" => mtp("llama-3.1-8b"),
        _ => None,
    }
}

/// An EAGLE head for a preset.
fn eagle(target: &str) -> Option<Value> {
    let mut head = config(target)?;
    head["architectures"] = json!(["LlamaForCausalLMEagle"]);
    head["num_hidden_layers"] = json!(1);
    head["bias"] = json!(false);
    Some(head)
}

/// Three MTP layers for a preset, one for each drafted token.
fn mtp(target: &str) -> Option<Value> {
    let mut head = config(target)?;
    head["architectures"] = json!(["LlamaForCausalLMMTP"]);
    head["num_nextn_predict_layers"] = json!(3);
    Some(head)
}

/// An EAGLE-3 head whose layer is as wide as those of the preset that it drafts for.
fn eagle3(target: &str, draft_vocab_size: usize) -> Option<Value> {
    let mut head = config(target)?;
    head["architectures"] = json!(["LlamaForCausalLMEagle3"]);
    head["num_hidden_layers"] = json!(1);
    head["draft_vocab_size"] = json!(draft_vocab_size);
    head["target_hidden_size"] = head["hidden_size"].clone();
    Some(head)
}
