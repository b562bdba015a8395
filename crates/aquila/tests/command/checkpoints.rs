//! Checkpoints that are damaged or make no sense are refused with the place at fault.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use crate::run::{fixture, run};

/// A copy of a sound checkpoint.
fn copy() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for name in ["config.json", "generation_config.json", "model.safetensors"] {
        fs::copy(fixture("qwen3").join(name), folder.path().join(name)).unwrap();
    }
    folder
}

fn edit(folder: &Path, name: &str, change: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = fs::read(folder.join(name)).unwrap();
    change(&mut bytes);
    fs::write(folder.join(name), bytes).unwrap();
}

fn set(folder: &Path, name: &str, key: &str, value: Option<Value>) {
    edit(folder, name, |bytes| {
        let mut config: Value = serde_json::from_slice(bytes).unwrap();
        let object = config.as_object_mut().unwrap();
        match value {
            Some(value) => object.insert(key.into(), value),
            None => object.remove(key),
        };
        *bytes = config.to_string().into_bytes();
    });
}

/// Replaces the header of the tensors by one of the same length.
fn edit_header(folder: &Path, from: &str, to: &str) {
    assert_eq!(from.len(), to.len());
    edit(folder, "model.safetensors", |bytes| {
        let at = bytes.windows(from.len()).position(|window| window == from.as_bytes()).unwrap();
        bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
    });
}

type Damage = Box<dyn Fn(&Path)>;

fn config(key: &'static str, value: Value) -> Damage {
    Box::new(move |folder| set(folder, "config.json", key, Some(value.clone())))
}

fn without(key: &'static str) -> Damage {
    Box::new(move |folder| set(folder, "config.json", key, None))
}

fn file(name: &'static str, content: &'static [u8]) -> Damage {
    Box::new(move |folder| fs::write(folder.join(name), content).unwrap())
}

fn truncated(length: usize) -> Damage {
    Box::new(move |folder| edit(folder, "model.safetensors", |bytes| bytes.truncate(length)))
}

/// What is done to the checkpoint, and words of the error.
fn damages() -> Vec<(Damage, &'static [&'static str])> {
    let remove = |name: &'static str| -> Damage {
        Box::new(move |folder| fs::remove_file(folder.join(name)).unwrap())
    };
    const NORM: &str = "model.norm.weight";
    vec![
        (remove("config.json"), &["config.json"]),
        (file("config.json", b"{\"architectures\": ["), &["config.json"]),
        (file("config.json", b"[]"), &["config.json"]),
        (file("config.json", b""), &["config.json"]),
        (config("architectures", json!(["NobodysModel"])), &["config.json", "NobodysModel"]),
        (without("hidden_size"), &["config.json", "hidden_size"]),
        (without("num_hidden_layers"), &["config.json", "num_hidden_layers"]),
        (config("hidden_size", json!(0)), &["config.json", "hidden_size"]),
        (config("hidden_size", json!(-64)), &["config.json", "hidden_size"]),
        (config("hidden_size", json!("wide")), &["config.json", "hidden_size"]),
        (config("num_hidden_layers", json!(1u64 << 60)), &["config.json", "num_hidden_layers"]),
        (config("vocab_size", json!(1u64 << 62)), &["config.json", "vocab_size"]),
        (config("num_key_value_heads", json!(3)), &["config.json", "num_key_value_heads"]),
        (config("rms_norm_eps", json!("tiny")), &["config.json", "rms_norm_eps"]),
        (config("eos_token_id", json!("end")), &["config.json", "eos_token_id"]),
        (config("hidden_act", json!("sigmoid")), &["config.json", "sigmoid"]),
        // Sound by itself, but not what the tensors are.
        (config("hidden_size", json!(128)), &["model.", "[320, 128]", "[320, 64]"]),
        (config("vocab_size", json!(321)), &["embed_tokens", "321", "320"]),
        (config("num_hidden_layers", json!(4)), &["layer_types must name 4 layers, found 3"]),
        (remove("model.safetensors"), &["model.safetensors"]),
        (truncated(0), &["model.safetensors", "truncated"]),
        (truncated(4), &["model.safetensors", "truncated"]),
        (truncated(1000), &["model.safetensors", "truncated"]),
        (truncated(400_000), &["model.safetensors", "truncated"]),
        (
            Box::new(|folder| edit(folder, "model.safetensors", |bytes| bytes[7] = 0xff)),
            &["model.safetensors", "header"],
        ),
        (
            Box::new(|folder| edit(folder, "model.safetensors", |bytes| bytes[8] = b'?')),
            &["model.safetensors", "header"],
        ),
        (
            Box::new(move |folder| edit_header(folder, NORM, "model.form.weight")),
            &[NORM, "missing"],
        ),
        (Box::new(|folder| edit_header(folder, "\"BF16\"", "\"BF61\"")), &["model.safetensors"]),
        (file("generation_config.json", b"{"), &["generation_config.json"]),
        (
            file("generation_config.json", br#"{"temperature": "hot"}"#),
            &["generation_config.json", "temperature", "hot"],
        ),
        (
            file("generation_config.json", br#"{"top_p": 7}"#),
            &["generation_config.json", "top_p", "7"],
        ),
        (file("tokenizer.json", b"{"), &["tokenizer.json", "JSON"]),
        (file("tokenizer.json", b"{}"), &["tokenizer.json"]),
        (file("tokenizer.json", b"\xff\xfe"), &["tokenizer.json", "JSON"]),
    ]
}

#[test]
fn a_damaged_checkpoint_is_refused_with_the_place_at_fault() {
    for (at, (damage, words)) in damages().into_iter().enumerate() {
        let folder = copy();
        damage(folder.path());
        let model = folder.path().to_str().unwrap();
        let ran = run(&["generate", "-q", model, "--input", "/dev/null"]);
        assert_eq!(ran.code, Some(1), "damage {at} ({words:?}): {:?}", ran.stderr);
        assert!(!ran.stderr.contains("panicked"), "{}", ran.stderr);
        for word in words {
            assert!(ran.stderr.contains(word), "damage {at}: {:?} lacks {word:?}", ran.stderr);
        }
    }
}

#[test]
fn inspection_reports_that_a_damaged_checkpoint_cannot_be_served() {
    let folder = copy();
    edit(folder.path(), "model.safetensors", |bytes| bytes.truncate(1000));
    let model = folder.path().to_str().unwrap();
    let ran = run(&["inspect", model]);
    assert_eq!(ran.code, Some(1));
    assert!(ran.stdout.contains("servable       no:"), "{}", ran.stdout);
    let ran = run(&["inspect", "--json", model]);
    let report: Value = serde_json::from_str(&ran.stdout).unwrap();
    assert_eq!(report["servable"], false);
    assert!(report["reason"].as_str().unwrap().contains("truncated"), "{report}");
    let ran = run(&["inspect", "no/model"]);
    assert_eq!((ran.code, ran.stdout.as_str()), (Some(1), ""));
    assert!(ran.stderr.contains("no/model"), "{}", ran.stderr);
}

#[test]
fn inspection_says_what_the_shipped_model_is() {
    let ran = run(&["inspect", "--json", "--model-path", "tiny"]);
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    let report: Value = serde_json::from_str(&ran.stdout).unwrap();
    assert_eq!(report["architecture"], "LlamaForCausalLM");
    assert_eq!(report["eos_token_ids"], json!([0, 2]));
    assert_eq!(report["servable"], true);
    let ran = run(&["inspect"]);
    assert_eq!(ran.code, Some(0));
    assert!(ran.stdout.contains("servable       yes"), "{}", ran.stdout);
}
