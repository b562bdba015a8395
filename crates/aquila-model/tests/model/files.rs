//! Weight files: in one piece or several, of any float type; what is missing, truncated,
//! mismatched or lying is refused by file and tensor.

use std::fs;
use std::path::Path;

use aquila_compute::WeightFormat;
use aquila_compute::cpu::{CpuBackend, IsaChoice};
use aquila_model::{Checkpoint, Decoder, LoadFormat, Location, Safetensors, TensorSource};
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::sequence::{Sequence, fixture, golden};

/// A copy of a fixture to spoil.
fn copy(name: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for file in ["config.json", "generation_config.json", "model.safetensors"] {
        fs::copy(fixture(name).join(file), folder.path().join(file)).unwrap();
    }
    folder
}

fn refusal(folder: &Path) -> String {
    match Checkpoint::open(&Location::Folder(folder.into()), LoadFormat::Auto) {
        Ok(_) => panic!("{} was not refused", folder.display()),
        Err(e) => e.to_string(),
    }
}

/// A file whose header is as given, followed by `data` bytes.
fn safetensors(header: &Value, data: &[u8]) -> Vec<u8> {
    let header = header.to_string();
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.bytes());
    bytes.extend(data);
    bytes
}

fn split(file: &[u8]) -> (Value, &[u8]) {
    let end = 8 + u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    (serde_json::from_slice(&file[8..end]).unwrap(), &file[end..])
}

fn rewrite_header(folder: &Path, change: impl FnOnce(&mut Value)) {
    let path = folder.join("model.safetensors");
    let file = fs::read(&path).unwrap();
    let (mut header, data) = split(&file);
    change(&mut header);
    fs::write(path, safetensors(&header, data)).unwrap();
}

#[test]
fn a_missing_config_or_weight_file_is_named() {
    let folder = copy("qwen2");
    fs::remove_file(folder.path().join("model.safetensors")).unwrap();
    let text = refusal(folder.path());
    assert!(text.contains("neither model.safetensors nor model.safetensors.index.json"), "{text}");
    fs::write(folder.path().join("pytorch_model.bin"), "").unwrap();
    assert!(refusal(folder.path()).contains("pytorch_model.bin: is no torch file"));
    fs::write(folder.path().join("config.json"), "{\"a\": ").unwrap();
    assert!(refusal(folder.path()).contains("config.json: not valid JSON: EOF"));
    fs::write(folder.path().join("config.json"), "[1]").unwrap();
    assert!(refusal(folder.path()).contains("must be a JSON object, found a list"));
    fs::remove_file(folder.path().join("config.json")).unwrap();
    assert!(refusal(folder.path()).contains("config.json: No such file"));
}

#[test]
fn a_tensor_of_wrong_shape_or_type_is_named() {
    let folder = copy("llama-bias");
    let path = folder.path().join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    config["intermediate_size"] = json!(176);
    fs::write(&path, config.to_string()).unwrap();
    let text = refusal(folder.path());
    let place = "model.safetensors: tensor model.layers.0.mlp.gate_proj.weight";
    assert!(text.contains(place), "{text}");
    assert!(text.contains("expected shape [176, 64], found [160, 64]"), "{text}");

    let folder = copy("llama-bias");
    rewrite_header(folder.path(), |h| h["model.norm.weight"]["dtype"] = json!("I16"));
    let text = refusal(folder.path());
    assert!(text.contains("tensor model.norm.weight: expected BF16, F16 or F32, found I16"));
}

#[test]
fn a_missing_tensor_is_named_with_its_shape() {
    let folder = copy("qwen3");
    rewrite_header(folder.path(), |h| {
        let map = h.as_object_mut().unwrap();
        let tensor = map.remove("model.layers.1.self_attn.q_norm.weight").unwrap();
        map.insert("stranger".into(), tensor);
    });
    let text = refusal(folder.path());
    let want = "tensor model.layers.1.self_attn.q_norm.weight: is missing; expected shape [32]";
    assert!(text.contains(want), "{text}");
}

#[test]
fn a_file_cut_off_anywhere_is_refused() {
    let folder = copy("qwen2");
    let path = folder.path().join("model.safetensors");
    let file = fs::read(&path).unwrap();
    let header = 8 + u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    for length in [0, 7, 8, 100, header - 1, header, header + 1, file.len() - 1] {
        fs::write(&path, &file[..length]).unwrap();
        let text = refusal(folder.path());
        assert!(text.contains("model.safetensors") && text.contains("truncated"), "{text}");
    }
    let mut longer = file.clone();
    longer.extend([0; 3]);
    fs::write(&path, longer).unwrap();
    assert!(refusal(folder.path()).contains("has 3 bytes that no tensor owns"));
}

#[test]
fn a_header_that_lies_is_refused_without_allocation() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.safetensors");
    let refused = |bytes: &[u8]| {
        fs::write(&path, bytes).unwrap();
        match Safetensors::open_file(&path) {
            Ok(_) => panic!("not refused"),
            Err(e) => e.to_string(),
        }
    };
    let tensor = |dtype: &str, shape: Value, begin: u64, end: u64| json!({"dtype": dtype, "shape": shape, "data_offsets": [begin, end]});
    let a = tensor("F32", json!([2]), 0, 8);

    let mut huge = (1u64 << 60).to_le_bytes().to_vec();
    huge.extend([b'{'; 100]);
    assert!(refused(&huge).contains("not safetensors: header of 1152921504606846976 bytes"));
    assert!(refused(b"version https://git-lfs.github.com/spec/v1\n").contains("Git LFS pointer"));
    assert!(refused(&safetensors(&json!([1]), &[])).contains("header is not valid JSON"));
    assert!(refused(&safetensors(&json!({"a": 1}), &[])).contains("tensor a: header has no dtype"));
    let cases = [
        (json!({"a": a, "b": tensor("F32", json!([2]), 4, 12)}), "tensor b: overlaps"),
        (json!({"a": a, "b": tensor("F32", json!([1]), 12, 16)}), "tensor b: leaves a gap"),
        (json!({"a": tensor("F32", json!([6]), 0, 24)}), "tensor a: ends at byte 24"),
        (json!({"a": tensor("F32", json!([3]), 0, 8)}), "tensor a: shape [3] of F32"),
        (json!({"a": tensor("F32", json!([2]), 8, 0)}), "tensor a: ends before it begins"),
        (json!({"a": tensor("F32", json!([-2]), 0, 8)}), "tensor a: header has no shape"),
        (
            json!({"a": tensor("F32", json!([1u64 << 62, 16]), 0, 0)}),
            "tensor a: shape [4611686018427387904, 16] of F32",
        ),
        (
            json!({"a": tensor("U8", json!([u64::MAX]), 0, u64::MAX)}),
            "tensor a: ends at byte 18446744073709551615",
        ),
    ];
    for (header, expected) in cases {
        let text = refused(&safetensors(&header, &[0; 16]));
        assert!(text.contains(expected), "{expected}: {text}");
    }
}

/// A fixture in two files and an index.
fn in_shards(name: &str) -> tempfile::TempDir {
    let folder = copy(name);
    let path = folder.path().join("model.safetensors");
    let file = fs::read(&path).unwrap();
    let (header, data) = split(&file);
    let mut parts = [(json!({}), Vec::new()), (json!({}), Vec::new())];
    let mut map = json!({});
    let tensors = header.as_object().unwrap().iter().filter(|(n, _)| *n != "__metadata__");
    for (i, (tensor, entry)) in tensors.enumerate() {
        let at = |i: usize| entry["data_offsets"][i].as_u64().unwrap() as usize;
        let (header, bytes) = &mut parts[i % 2];
        let begin = bytes.len();
        bytes.extend(&data[at(0)..at(1)]);
        header[tensor] = entry.clone();
        header[tensor]["data_offsets"] = json!([begin, bytes.len()]);
        map[tensor] = json!(format!("part-{}.safetensors", i % 2));
    }
    for (i, (header, bytes)) in parts.iter().enumerate() {
        let name = format!("part-{i}.safetensors");
        fs::write(folder.path().join(name), safetensors(header, bytes)).unwrap();
    }
    fs::remove_file(path).unwrap();
    let index = json!({"metadata": {}, "weight_map": map});
    fs::write(folder.path().join("model.safetensors.index.json"), index.to_string()).unwrap();
    folder
}

#[test]
fn a_sharded_checkpoint_holds_the_same_tensors() {
    let whole = Safetensors::open_folder(&fixture("llama-bias")).unwrap();
    let folder = in_shards("llama-bias");
    let shards = Safetensors::open_folder(folder.path()).unwrap();
    assert_eq!(shards.names(), whole.names());
    for name in whole.names() {
        let (a, b) = (whole.get(name).unwrap(), shards.get(name).unwrap());
        assert_eq!((a.shape(), a.dtype(), a.bytes()), (b.shape(), b.dtype(), b.bytes()), "{name}");
    }
    Checkpoint::open(&Location::Folder(folder.path().into()), LoadFormat::Auto).unwrap();
}

/// A fixture whose tensors are stored in another type.
fn stored_as(name: &str, dtype: &str, widen: impl Fn(f32) -> Vec<u8>) -> tempfile::TempDir {
    let folder = copy(name);
    let source = Safetensors::open_folder(&fixture(name)).unwrap();
    let (mut header, mut data) = (json!({}), Vec::new());
    for name in source.names() {
        let tensor = source.get(name).unwrap();
        let begin = data.len();
        data.extend(tensor.to_f32().unwrap().into_iter().flat_map(&widen));
        header[name] =
            json!({"dtype": dtype, "shape": tensor.shape(), "data_offsets": [begin, data.len()]});
    }
    fs::write(folder.path().join("model.safetensors"), safetensors(&header, &data)).unwrap();
    folder
}

#[test]
fn float32_and_float16_weights_run_like_bfloat16() {
    let backend = CpuBackend::new(IsaChoice::Auto, 1).unwrap();
    let golden = golden("llama-bias");
    let logits = |folder: &Path, format: WeightFormat| {
        let location = Location::Folder(folder.into());
        let checkpoint = Checkpoint::open(&location, LoadFormat::Auto).unwrap();
        let decoder = Decoder::load(&backend, &checkpoint, format, 64, &mut |_| {}).unwrap();
        Sequence::in_order(&backend, &decoder, 40).run(&golden.input_ids, 40)
    };
    let wide = stored_as("llama-bias", "F32", |x| x.to_le_bytes().to_vec());
    let plain = logits(&fixture("llama-bias"), WeightFormat::Bf16);
    assert!(logits(wide.path(), WeightFormat::Bf16) == plain, "widening loses nothing");
    assert!(logits(wide.path(), WeightFormat::F32) == plain);
    let half = stored_as("llama-bias", "F16", |x| half::f16::from_f32(x).to_le_bytes().to_vec());
    let off = logits(half.path(), WeightFormat::F32)
        .iter()
        .zip(&golden.logits)
        .map(|(a, b)| (a - b).abs())
        .fold(0.0, f32::max);
    assert!(off < 1e-3, "float16 holds all but the smallest of these weights: off by {off}");
}

#[test]
fn a_model_outlives_the_truncation_of_its_files() {
    // A mapping of a truncated file cannot be read: the process would end by SIGBUS.
    for name in ["qwen2", "llama-bias"] {
        let folder = copy(name);
        let backend = CpuBackend::new(IsaChoice::Auto, 1).unwrap();
        let location = Location::Folder(folder.path().into());
        let checkpoint = Checkpoint::open(&location, LoadFormat::Auto).unwrap();
        let decoder =
            Decoder::load(&backend, &checkpoint, WeightFormat::Bf16, 64, &mut |_| {}).unwrap();
        let ids = golden(name).input_ids;
        let run = || Sequence::in_order(&backend, &decoder, ids.len()).run(&ids, ids.len());
        let before = run();
        // In place, so that the mapping sees it.
        fs::File::create(folder.path().join("model.safetensors")).unwrap();
        assert!(run() == before, "{name}");
    }
}

#[test]
fn a_faulty_index_is_refused_by_file_and_tensor() {
    let folder = in_shards("qwen2");
    let path = folder.path().join("model.safetensors.index.json");
    let good: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let refused = |change: &dyn Fn(&mut Value)| {
        let mut index = good.clone();
        change(&mut index);
        fs::write(&path, index.to_string()).unwrap();
        refusal(folder.path())
    };
    let norm = "model.norm.weight";
    let text = refused(&|i| i["weight_map"][norm] = json!("part-2.safetensors"));
    assert!(text.contains("part-2.safetensors: No such file"), "{text}");
    let text = refused(&|i| i["weight_map"][norm] = json!("../part-0.safetensors"));
    assert!(text.contains("weight_map.model.norm.weight: \"../part-0.safetensors\" names no file"));
    let text = refused(&|i| i["weight_map"]["ghost"] = json!("part-0.safetensors"));
    assert!(text.contains("part-0.safetensors: tensor ghost: is missing, though"), "{text}");
    let text = refused(&|i| drop(i["weight_map"].as_object_mut().unwrap().remove(norm)));
    assert!(text.contains("index.json: tensor model.norm.weight: is missing"), "{text}");
    assert!(refused(&|i| *i = json!({})).contains("index.json: has no weight_map"));
}

proptest! {
    #[test]
    fn no_change_to_a_file_causes_a_panic(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in prop::option::of(any::<prop::sample::Index>()),
        in_header: bool,
    ) {
        let header = json!({
            "__metadata__": {"format": "pt"},
            "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
            "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
            "c": {"dtype": "U8", "shape": [8], "data_offsets": [32, 40]},
        });
        let mut bytes = safetensors(&header, &[7; 40]);
        for (index, value) in changes {
            let length = if in_header { bytes.len() - 40 } else { bytes.len() };
            bytes[index.index(length)] = value;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.safetensors");
        fs::write(&path, bytes).unwrap();
        if let Ok(tensors) = Safetensors::open_file(&path) {
            for name in tensors.names() {
                if let Ok(tensor) = tensors.get(name) {
                    prop_assert_eq!(tensor.bytes().len() as u64, tensors.info(name).unwrap().bytes);
                }
            }
        }
    }
}
