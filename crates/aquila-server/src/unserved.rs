//! Fields of other servers' bodies that would change an answer and are not served here, and those
//! that change none.
//!
//! The first are refused by name, unless they ask for what is done anyway: to ignore them would be
//! a lie. The second are taken, since clients send them to every server.

use serde_json::Value;

/// A field that is not served.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Unserved {
    pub name: &'static str,
    /// Values beside null that ask for what is done anyway, as JSON.
    allowed: &'static [&'static str],
}

impl Unserved {
    /// Whether a value asks for what is done anyway; so does a list of such values, one for each
    /// prompt.
    pub fn allows(&self, value: &Value) -> bool {
        let same = |allowed: &&str| match (serde_json::from_str(allowed), value) {
            (Ok(Value::Number(allowed)), Value::Number(given)) => {
                allowed.as_f64() == given.as_f64()
            }
            (Ok(allowed), value) => allowed == *value,
            (Err(_), _) => false,
        };
        match value {
            Value::Null => true,
            Value::Array(values) if values.iter().all(|value| self.allows(value)) => true,
            _ => self.allowed.iter().any(same),
        }
    }
}

/// Fields that only null leaves alone.
const fn never(name: &'static str) -> Unserved {
    Unserved { name, allowed: &[] }
}

const fn but(name: &'static str, allowed: &'static [&'static str]) -> Unserved {
    Unserved { name, allowed }
}

/// A flag that is off by default.
const fn off(name: &'static str) -> Unserved {
    but(name, &["false"])
}

/// Fields of all three bodies.
pub(crate) const EVERYWHERE: &[Unserved] = &[
    never("stop_regex"),
    never("lora_path"),
    never("custom_logit_processor"),
    never("session_params"),
    never("extra_key"),
    never("cache_salt"),
    off("return_indexer_topk"),
    off("return_prompt_token_ids"),
    off("return_entropy"),
    off("return_sampling_mask"),
    off("background"),
];

/// Fields of `/generate`.
pub(crate) const GENERATE: &[Unserved] = &[
    never("input_embeds"),
    never("image_data"),
    never("video_data"),
    never("audio_data"),
    never("modalities"),
    never("lora_id"),
    never("token_ids_logprob"),
    never("token_type_ids"),
    never("positional_embed_overrides"),
    never("multi_item_delimiter_indices"),
    off("return_flat_raw_top_logprobs"),
    off("return_bytes"),
    off("require_reasoning"),
];

/// Fields of both kinds of OpenAI's completions: SGLang's, and those that vLLM adds.
pub(crate) const OPENAI: &[Unserved] = &[
    off("return_hidden_states"),
    off("return_routed_experts"),
    but("routed_experts_start_len", &["0"]),
    off("return_cached_tokens_details"),
    off("return_meta_info"),
    off("return_token_ids"),
    off("return_tokens_as_token_ids"),
    off("no_stop_trim"),
    off("include_stop_str_in_output"),
    off("use_beam_search"),
    off("early_stopping"),
    but("length_penalty", &["1"]),
    never("prompt_logprobs"),
    never("truncate_prompt_tokens"),
    never("allowed_token_ids"),
    never("bad_words"),
    never("logits_processors"),
    never("kv_transfer_params"),
    never("vllm_xargs"),
];

/// Fields of their `stream_options`.
pub(crate) const STREAM_OPTIONS: &[Unserved] = &[off("continuous_usage_stats")];

/// Fields of `/v1/chat/completions`.
pub(crate) const CHAT: &[Unserved] = &[
    off("continue_final_message"),
    but("add_generation_prompt", &["true"]),
    off("add_special_tokens"),
    off("echo"),
    but("best_of", &["1"]),
    never("suffix"),
    never("functions"),
    but("function_call", &["\"none\"", "\"auto\""]),
    but("modalities", &["\"text\""]),
    never("audio"),
    never("reasoning"),
    but("verbosity", &["\"medium\""]),
    never("web_search_options"),
    never("chat_template"),
    never("documents"),
    never("input_ids"),
    never("mm_processor_kwargs"),
];

/// Fields of `/v1/completions`.
pub(crate) const COMPLETIONS: &[Unserved] =
    &[never("suffix"), never("prompt_embeds"), but("add_special_tokens", &["true"])];

/// Fields of `/v1/responses`.
pub(crate) const RESPONSES: &[Unserved] = &[
    but("truncation", &["\"disabled\""]),
    never("max_tool_calls"),
    never("context_management"),
    but("n", &["1"]),
];

/// Fields of `/v1/messages`.
pub(crate) const MESSAGES: &[Unserved] =
    &[never("container"), never("context_management"), never("mcp_servers"), never("stop")];

/// Fields that change no answer, or nothing without another that is refused.
pub(crate) const WITHOUT_EFFECT: &[&str] = &[
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prompt_cache_options",
    "cache_control",
    "inference_geo",
    "prediction",
    "request_id",
    "conversation_id",
    "data_parallel_rank",
    "data_parallel_rank_decode",
    "routed_dp_rank",
    "routing_key",
    // SGLang's router sends them to every worker.
    "bootstrap_pair_key",
    "custom_params",
    "custom_labels",
    "log_metrics",
    "no_logs",
    "external_trace_header",
    // Chats take them; elsewhere there is no reasoning to tell apart.
    "separate_reasoning",
    "stream_reasoning",
    "spaces_between_special_tokens",
    "guided_decoding_backend",
    "stream_interval",
    "stream_options",
];
