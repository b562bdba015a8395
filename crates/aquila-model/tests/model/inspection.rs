//! Reports on checkpoints, servable or not.

use std::fs;

use aquila_model::{Inspection, Location};
use serde_json::{Value, json};

use crate::sequence::fixture;

#[test]
fn a_servable_model_is_described_in_full() {
    let report = Inspection::of(&Location::Folder(fixture("qwen2-yarn"))).unwrap();
    assert!(report.servable, "{report}");
    let text = report.to_string();
    for part in [
        "Qwen2ForCausalLM",
        "bfloat16",
        "theta 10000, yarn × 4 from 64",
        "4, 2 for keys and values, of 16",
        "model.safetensors (",
        "none: prompts are token ids",
        "servable       yes",
    ] {
        assert!(text.contains(part), "{part}:\n{text}");
    }
    let value: Value = serde_json::to_value(&report).unwrap();
    assert_eq!(value["vocab_size"], 320);
    assert_eq!(value["layers"], 3);
    assert_eq!(value["eos_token_ids"], json!([1]));
    // 3 layers × 2 kv heads × 16 × keys and values × 4 bytes.
    assert_eq!(value["memory"]["kv_per_token_f32"], 768);
}

#[test]
fn a_preset_is_described_from_its_config() {
    let report = Inspection::of(&Location::Preset("llama-3.1-8b".into())).unwrap();
    assert!(report.servable);
    assert_eq!(report.parameters, Some(8_030_261_248));
    assert!(report.to_string().contains("8.03 B"), "{report}");
    assert!(Inspection::of(&Location::Preset("giant".into())).is_err());
}

#[test]
fn what_cannot_be_served_is_reported_with_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    let location = Location::Folder(folder.path().into());
    let source = fixture("qwen3");
    let mut config: Value =
        serde_json::from_slice(&fs::read(source.join("config.json")).unwrap()).unwrap();
    let write = |config: &Value| {
        fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    };
    write(&config);
    let report = Inspection::of(&location).unwrap();
    assert!(!report.servable && report.reason.unwrap().contains("holds neither"));

    fs::copy(source.join("model.safetensors"), folder.path().join("model.safetensors")).unwrap();
    assert!(Inspection::of(&location).unwrap().servable);

    config["architectures"] = json!(["UnknownForCausalLM"]);
    write(&config);
    let report = Inspection::of(&location).unwrap();
    assert_eq!(report.architecture.as_deref(), Some("UnknownForCausalLM"));
    assert_eq!(report.vocab_size, Some(320));
    assert_eq!(report.parameters, Some(207_488), "counted from the file");
    assert!(report.to_string().contains("no: "), "{report}");
    assert!(report.reason.unwrap().contains("supported are LlamaForCausalLM"));

    config["architectures"] = json!(["LlamaForCausalLM"]);
    config["vocab_size"] = json!(321);
    write(&config);
    let reason = Inspection::of(&location).unwrap().reason.unwrap();
    assert!(reason.contains("expected shape [321, 64], found [320, 64]"), "{reason}");

    fs::remove_file(folder.path().join("config.json")).unwrap();
    assert!(Inspection::of(&location).is_err());
}
