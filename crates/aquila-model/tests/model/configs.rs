//! Configs: what they mean, and which are refused, by the name of the field.

use aquila_compute::DType;
use aquila_model::{Checkpoint, Error, FeedForward, LoadFormat, Location, ModelSpec, RopeKind};
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::sequence::fixture;

fn config(name: &str) -> Value {
    serde_json::from_slice(&std::fs::read(fixture(name).join("config.json")).unwrap()).unwrap()
}

/// Opens a folder that holds nothing but this config, with random weights.
fn open(config: &Value) -> Result<Checkpoint, Error> {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    Checkpoint::open(&Location::Folder(folder.path().into()), LoadFormat::Dummy { seed: 0 })
}

fn spec(config: &Value) -> ModelSpec {
    open(config).unwrap().spec().clone()
}

fn with(name: &str, field: &str, value: Value) -> Value {
    let mut config = config(name);
    config[field] = value;
    config
}

fn refusal(config: &Value) -> String {
    match open(config) {
        Ok(_) => panic!("not refused: {config}"),
        Err(e) => e.to_string(),
    }
}

#[test]
fn absurd_values_are_refused_with_field_and_value() {
    let cases = [
        ("num_attention_heads", json!(0), "found 0"),
        ("num_attention_heads", json!(-4), "found -4"),
        ("num_attention_heads", json!(4.5), "found 4.5"),
        ("num_key_value_heads", json!(3), "must divide num_attention_heads 4, found 3"),
        ("num_key_value_heads", json!(0), "found 0"),
        ("head_dim", json!(15), "must be even, found 15"),
        ("head_dim", json!("16"), "found \"16\""),
        ("vocab_size", json!(0), "found 0"),
        ("vocab_size", json!(u64::MAX), "found 18446744073709551615"),
        ("hidden_size", json!(1u64 << 40), "found 1099511627776"),
        ("hidden_size", json!([64]), "found [64]"),
        ("intermediate_size", json!(1e300), "found 1e+300"),
        ("num_hidden_layers", json!(1 << 20), "at most 16384, found 1048576"),
        ("max_position_embeddings", json!(0), "found 0"),
        ("rms_norm_eps", json!(0.0), "found 0.0"),
        ("rms_norm_eps", json!(-1e-6), "found -1e-6"),
        ("rms_norm_eps", json!("NaN"), "found \"NaN\""),
        ("rms_norm_eps", json!(1e-300), "found 0"),
        ("tie_word_embeddings", json!("yes"), "must be true or false, found \"yes\""),
        ("eos_token_id", json!([1, -1]), "found -1"),
        ("eos_token_id", json!("</s>"), "found \"</s>\""),
        ("dtype", json!("float8_e4m3fn"), "found \"float8_e4m3fn\""),
        ("rope_parameters", json!({"rope_theta": 0.5}), "rope_theta must be at least 1, found 0.5"),
        ("rope_parameters", json!({"rope_type": "linear"}), "rope_parameters.factor is missing"),
        ("rope_parameters", json!(7), "must be an object, found 7"),
    ];
    for (field, value, expected) in cases {
        let text = refusal(&with("llama3-rope", field, value));
        assert!(text.contains("config.json: "), "{text}");
        assert!(text.contains(field) && text.contains(expected), "{field}: {text}");
    }
    let mut wide = with("llama3-rope", "hidden_size", json!(1 << 24));
    wide["intermediate_size"] = json!(1 << 28);
    let text = refusal(&wide);
    assert!(text.contains("sizes are absurd"), "{text}");
}

#[test]
fn missing_fields_are_refused_by_name() {
    for field in [
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "vocab_size",
        "max_position_embeddings",
    ] {
        for gone in [None, Some(Value::Null)] {
            let mut config = config("qwen3");
            match gone {
                None => drop(config.as_object_mut().unwrap().remove(field)),
                Some(null) => config[field] = null,
            }
            let text = refusal(&config);
            assert!(text.contains(&format!("{field} is missing")), "{text}");
        }
    }
}

#[test]
fn what_is_not_supported_is_refused_by_name() {
    let cases = [
        ("hidden_act", json!("gelu"), "hidden_act \"gelu\" is not supported"),
        ("quantization_config", json!({"quant_method": "awq"}), "quantization \"awq\""),
        ("architectures", json!(["GPT2LMHeadModel"]), "\"GPT2LMHeadModel\" is not supported"),
        ("architectures", json!(["LlamaForCausalLMEagle3"]), "is a draft head"),
        (
            "rope_parameters",
            json!({"rope_type": "dynamic", "factor": 2.0}),
            "rope type \"dynamic\"",
        ),
        ("rope_parameters", json!({"partial_rotary_factor": 0.5}), "partial_rotary_factor"),
    ];
    for (field, value, expected) in cases {
        let text = refusal(&with("qwen2", field, value));
        assert!(text.contains(expected), "{field}: {text}");
    }
}

#[test]
fn windows_are_taken_where_the_family_has_them() {
    let windows = |spec: &ModelSpec| -> Vec<Option<usize>> {
        spec.layers.iter().map(|layer| layer.attention().window).collect()
    };
    let mut qwen = with("qwen3", "use_sliding_window", json!(true));
    assert!(refusal(&qwen).contains("sliding_window is missing"));
    qwen["sliding_window"] = json!(7);
    qwen["layer_types"] = Value::Null;
    qwen["max_window_layers"] = json!(1);
    let layers = spec(&qwen).layers.len();
    let mut all = vec![Some(7); layers];
    all[0] = None;
    assert_eq!(windows(&spec(&qwen)), all);
    qwen["layer_types"] = json!(vec!["sliding_attention"; layers - 1]);
    assert!(refusal(&qwen).contains(&format!("layer_types must name {layers} layers")));
    qwen["layer_types"] = json!(vec!["sliding_attention"; layers]);
    assert_eq!(windows(&spec(&qwen)), vec![Some(7); layers]);
    qwen["use_sliding_window"] = json!(false);
    assert!(refusal(&qwen).contains("layer_types names layers with a window"));
    let gemma = spec(&config("gemma3"));
    let [w, none] = [Some(16), None];
    assert_eq!(windows(&gemma), [w, w, w, w, w, none]);
    for (field, value) in [
        ("use_sliding_window", json!(true)),
        ("layer_types", json!(["full_attention", "sliding_attention"])),
    ] {
        assert!(refusal(&with("llama3-rope", field, value)).contains(field));
    }
}

#[test]
fn what_sparse_and_gemma_configs_get_wrong_is_said_by_field() {
    let cases = [
        ("qwen3-moe", "num_experts", json!(9), "is 9, but num_local_experts is 8"),
        ("qwen3-moe", "num_experts_per_tok", json!(9), "must be at most the 8 experts, found 9"),
        ("qwen3-moe", "num_experts_per_tok", json!(0), "found 0"),
        ("qwen3-moe", "num_local_experts", json!(1 << 20), "experts in all; at most"),
        ("qwen3-moe", "num_local_experts", json!(-1), "found -1"),
        ("qwen3-moe", "mlp_only_layers", json!(1), "must be a list, found 1"),
        ("qwen3-moe", "mlp_only_layers", json!([0.5]), "found 0.5"),
        ("qwen3-moe", "decoder_sparse_step", json!(0), "found 0"),
        ("qwen3-moe", "norm_topk_prob", json!(1), "must be true or false, found 1"),
        ("qwen3-moe", "moe_intermediate_size", json!("48"), "found \"48\""),
        ("gemma3", "sliding_window", json!(0), "found 0"),
        ("gemma3", "query_pre_attn_scalar", json!(-1), "must be above zero, found -1"),
        ("gemma3", "final_logit_softcapping", json!(0), "must be above zero, found 0"),
        ("gemma3", "attn_logit_softcapping", json!(50.0), "is not supported"),
        ("gemma3", "use_bidirectional_attention", json!(true), "is not supported"),
        ("gemma3", "hidden_activation", json!("gelu"), "\"gelu\" is not supported"),
        ("gemma3", "layer_types", json!(["full_attention"]), "must name 6 layers, found 1"),
        ("gemma3", "layer_types", json!(["chunked_attention"]), "\"chunked_attention\""),
        ("gemma3", "rope_parameters", json!({"full_attention": 3}), "full_attention must be"),
    ];
    for (name, field, value, expected) in cases {
        let text = refusal(&with(name, field, value));
        let named = text.contains(field) || text.contains("sizes") || field == "rope_parameters";
        assert!(named && text.contains(expected), "{field}: {text}");
    }
}

#[test]
fn both_spellings_of_a_rope_mean_the_same() {
    let new = config("llama3-rope");
    let mut old = new.clone();
    let mut rope = old.as_object_mut().unwrap().remove("rope_parameters").unwrap();
    old["rope_theta"] = rope.as_object_mut().unwrap().remove("rope_theta").unwrap();
    old["rope_scaling"] = rope.clone();
    assert_eq!(spec(&old).first_attention().rope, spec(&new).first_attention().rope);

    // The oldest form calls the type "type".
    let kind = rope.as_object_mut().unwrap().remove("rope_type").unwrap();
    rope["type"] = kind;
    old["rope_scaling"] = rope;
    assert_eq!(spec(&old).first_attention().rope, spec(&new).first_attention().rope);

    old["rope_scaling"] = Value::Null;
    assert_eq!(spec(&old).first_attention().rope.kind, RopeKind::Default);
    assert_eq!(spec(&old).first_attention().rope.theta, 500_000.0);
    old.as_object_mut().unwrap().remove("rope_theta");
    assert_eq!(spec(&old).first_attention().rope.theta, 10_000.0);
}

#[test]
fn a_linear_rope_divides_every_frequency() {
    let plain = spec(&config("llama-bias")).first_attention().rope.frequencies(16);
    let rope = json!({"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0});
    let scaled =
        spec(&with("llama-bias", "rope_parameters", rope)).first_attention().rope.frequencies(16);
    assert_eq!(scaled, plain.iter().map(|f| f / 4.0).collect::<Vec<_>>());
}

/// Values of `_compute_yarn_parameters` in transformers, worked out by hand from its formulas.
#[test]
fn yarn_scales_attention_as_the_config_says() {
    let factor = |extra: Value| {
        let mut rope = json!({"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0});
        rope.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        match spec(&with("qwen2-yarn", "rope_parameters", rope)).first_attention().rope.kind.clone()
        {
            RopeKind::Yarn { attention_factor, .. } => attention_factor,
            other => panic!("{other:?}"),
        }
    };
    assert!((factor(json!({})) - (0.1 * 4f64.ln() + 1.0)).abs() < 1e-12);
    assert_eq!(factor(json!({"attention_factor": 1.5})), 1.5);
    let both = (0.1 * 0.707 * 4f64.ln() + 1.0) / (0.1 * 4f64.ln() + 1.0);
    assert!((factor(json!({"mscale": 0.707, "mscale_all_dim": 1.0})) - both).abs() < 1e-12);
    assert!((factor(json!({"mscale": 0.707})) - (0.1 * 4f64.ln() + 1.0)).abs() < 1e-12);
}

#[test]
fn defaults_are_those_of_the_architecture() {
    let mut llama = config("llama-bias");
    for field in ["head_dim", "num_key_value_heads", "attention_bias", "mlp_bias", "dtype"] {
        llama.as_object_mut().unwrap().remove(field);
    }
    llama["torch_dtype"] = json!("float16");
    let llama = spec(&llama);
    assert_eq!(
        (llama.first_attention().heads.head_dim, llama.first_attention().heads.kv_heads),
        (16, 4)
    );
    let attention = llama.first_attention();
    assert_eq!((attention.qkv_bias, attention.output_bias), (false, false));
    assert!(matches!(&llama.layers[0].ffn, FeedForward::Dense(dense) if !dense.bias));
    assert_eq!(llama.dtype, DType::F16);

    let qwen2 = spec(&config("qwen2"));
    let attention = qwen2.first_attention();
    let parts = (attention.qkv_bias, attention.output_bias, attention.qk_norm);
    assert_eq!(parts, (true, false, false));
    assert!(qwen2.tied_embeddings);

    let mut qwen3 = config("qwen3");
    qwen3.as_object_mut().unwrap().remove("head_dim");
    qwen3.as_object_mut().unwrap().remove("architectures");
    let qwen3 = spec(&qwen3);
    let attention = qwen3.first_attention();
    assert_eq!((attention.heads.head_dim, attention.qk_norm), (128, true));
    assert_eq!(qwen3.architecture, "Qwen3ForCausalLM");
}

#[test]
fn the_ends_of_text_are_those_of_both_configs() {
    let folder = tempfile::tempdir().unwrap();
    let location = Location::Folder(folder.path().into());
    let open = || Checkpoint::open(&location, LoadFormat::Dummy { seed: 0 });
    let mut config = config("qwen2");
    config["eos_token_id"] = json!([9, 2]);
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    assert_eq!(open().unwrap().eos_token_ids(), [2, 9]);
    let generation = folder.path().join("generation_config.json");
    std::fs::write(&generation, r#"{"eos_token_id": [2, 5]}"#).unwrap();
    assert_eq!(open().unwrap().eos_token_ids(), [2, 5, 9]);
    std::fs::write(&generation, r#"{"eos_token_id": 7}"#).unwrap();
    assert_eq!(open().unwrap().eos_token_ids(), [2, 7, 9]);
    std::fs::write(&generation, r#"{"eos_token_id": -7}"#).unwrap();
    let text = open().err().unwrap().to_string();
    assert!(text.contains("generation_config.json: eos_token_id"), "{text}");
    std::fs::write(&generation, r#"{"eos_token_id":"#).unwrap();
    let text = open().err().unwrap().to_string();
    assert!(text.contains("generation_config.json: not valid JSON"), "{text}");
}

fn any_value() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        (-3i64..70).prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        "[a-z0-9_\u{e9}]{0,80}".prop_map(Value::from),
        prop::collection::vec(any::<i32>(), 0..3).prop_map(Value::from),
        Just(json!({})),
        (any::<f64>(), any::<i64>(), "linear|llama3|yarn|default").prop_map(|(factor, n, kind)| {
            json!({"rope_type": kind, "factor": factor, "low_freq_factor": n,
                   "original_max_position_embeddings": n, "rope_theta": factor})
        }),
    ]
}

proptest! {
    #[test]
    fn no_config_causes_a_panic(
        fixture in prop::sample::select(vec!["llama3-rope", "qwen2-yarn", "qwen3"]),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any_value(), any::<bool>()), 1..4),
    ) {
        let mut config = config(fixture);
        for (index, value, nested) in changes {
            let map = match config.get_mut("rope_parameters").and_then(Value::as_object_mut) {
                Some(map) if nested && !map.is_empty() => map,
                _ => config.as_object_mut().unwrap(),
            };
            let field = map.keys().nth(index.index(map.len())).unwrap().clone();
            map.insert(field, value);
        }
        if let Ok(checkpoint) = open(&config) {
            let spec = checkpoint.spec();
            prop_assert!(spec.parameters() > 0);
            let table = spec.first_attention().rope.table(spec.first_attention().heads.head_dim.min(4096), 8);
            prop_assert!(table.cos.iter().chain(&table.sin).all(|x| x.is_finite()));
        }
    }
}
