//! Heads that cannot draft for a model are refused by what is wrong with them.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use aquila_compute::cpu::{CpuBackend, IsaChoice};
use aquila_compute::{DType, HostTensor};
use aquila_model::{Checkpoint, HeadCheckpoint, Inspection, LoadFormat, Location, ModelSpec};
use serde_json::{Value, json};

use crate::head::Pair;
use crate::sequence::{fixture, shipped};

/// A head in memory, to be spoiled and written.
struct Head {
    config: Value,
    tensors: BTreeMap<String, HostTensor>,
}

fn target() -> Checkpoint {
    Checkpoint::open(&Location::Folder(fixture("llama3-rope")), LoadFormat::Auto).unwrap()
}

/// A small head with random weights for the small target; every second token can be drafted.
fn head() -> Head {
    let target = target();
    let spec: &ModelSpec = target.spec();
    let mut config = target.config().clone();
    config["architectures"] = json!(["LlamaForCausalLMEagle3"]);
    config["num_hidden_layers"] = json!(1);
    config["draft_vocab_size"] = json!(spec.vocab_size / 2);
    config["target_hidden_size"] = json!(spec.hidden_size);
    config["eagle_config"] = json!({ "eagle_aux_hidden_state_layer_ids": [0, 2] });
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    let location = Location::Folder(folder.path().into());
    let random = HeadCheckpoint::open(&location, LoadFormat::Dummy { seed: 3 }, spec).unwrap();
    let source = random.tensors();
    let all = source.names().into_iter().map(|n| (n.to_owned(), source.get(n).unwrap()));
    Head { config, tensors: all.collect() }
}

impl Head {
    fn set(&mut self, name: &str, dtype: DType, shape: Vec<usize>, bytes: Vec<u8>) {
        let tensor = HostTensor::new(name, dtype, shape, bytes.into()).unwrap();
        self.tensors.insert(name.into(), tensor);
    }

    /// Renames tensors whose names begin with `from`.
    fn rename(&mut self, from: &str, to: &str) {
        let tensors = std::mem::take(&mut self.tensors).into_iter();
        self.tensors = tensors.map(|(name, t)| (name.replacen(from, to, 1), t)).collect();
    }

    fn offsets(&self) -> Vec<i64> {
        let bytes = self.tensors["d2t"].bytes().chunks(8);
        bytes.map(|b| i64::from_le_bytes(b.try_into().unwrap())).collect()
    }

    fn set_offsets(&mut self, offsets: &[i64]) {
        let bytes = offsets.iter().flat_map(|o| o.to_le_bytes()).collect();
        self.set("d2t", DType::I64, vec![offsets.len()], bytes);
    }

    fn write(&self, folder: &Path) -> Location {
        let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
        for (name, tensor) in &self.tensors {
            let dtype = match tensor.dtype() {
                DType::I64 => "I64",
                DType::Bool => "BOOL",
                DType::Bf16 => "BF16",
                DType::F16 | DType::F32 => unreachable!("heads here have none"),
            };
            let begin = data.len();
            data.extend_from_slice(tensor.bytes());
            let offsets = [begin, data.len()];
            let entry = json!({ "dtype": dtype, "shape": tensor.shape(), "data_offsets": offsets });
            header.insert(name.clone(), entry);
        }
        let header = Value::Object(header).to_string();
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend(header.bytes());
        file.extend(data);
        fs::write(folder.join("model.safetensors"), file).unwrap();
        fs::write(folder.join("config.json"), self.config.to_string()).unwrap();
        Location::Folder(folder.into())
    }
}

fn refusal(spoil: impl FnOnce(&mut Head)) -> String {
    let mut head = head();
    spoil(&mut head);
    let folder = tempfile::tempdir().unwrap();
    let location = head.write(folder.path());
    let opened = HeadCheckpoint::open(&location, LoadFormat::Auto, target().spec());
    opened.err().expect("a spoiled head is refused").to_string()
}

#[test]
fn what_is_wrong_with_a_head_is_named() {
    type Spoil = fn(&mut Head);
    let cases: &[(Spoil, &str)] = &[
        (|h| drop(h.tensors.remove("fc.weight")), "tensor fc.weight: is missing"),
        (|h| drop(h.tensors.remove("norm.weight")), "tensor norm.weight: is missing"),
        (|h| drop(h.tensors.remove("lm_head.weight")), "tensor lm_head.weight: is missing"),
        (|h| drop(h.tensors.remove("d2t")), "tensor d2t: is missing; expected shape [160]"),
        (
            |h| drop(h.tensors.remove("midlayer.hidden_norm.weight")),
            "tensor midlayer.hidden_norm.weight: is missing",
        ),
        (
            |h| h.set("midlayer.self_attn.q_proj.weight", DType::Bf16, vec![64, 64], vec![0; 8192]),
            "q_proj.weight: expected shape [64, 128], found [64, 64]",
        ),
        (
            |h| h.set("fc.weight", DType::Bf16, vec![64, 192], vec![0; 64 * 192 * 2]),
            "fc.weight: expected shape [64, 128], found [64, 192]",
        ),
        (
            |h| h.config["eagle_config"].as_object_mut().unwrap().clear(),
            "eagle_aux_hidden_state_layer_ids is missing, and the usual layers do not exist",
        ),
        (
            |h| h.config["eagle_config"] = json!({ "eagle_aux_hidden_state_layer_ids": [1, 3] }),
            "eagle_aux_hidden_state_layer_ids must name layers of the target, which has 3; found 3",
        ),
        (
            |h| h.config["eagle_config"] = json!({ "eagle_aux_hidden_state_layer_ids": [1, 1] }),
            "eagle_config.eagle_aux_hidden_state_layer_ids must be ascending, found [1,1]",
        ),
        (
            |h| h.config["eagle_config"] = json!({ "eagle_aux_hidden_state_layer_ids": [1, -1] }),
            "must be a list of layers, found [1,-1]",
        ),
        (
            |h| h.config["target_hidden_size"] = json!(96),
            "target_hidden_size is 96, but the hidden size of the target is 64",
        ),
        (|h| h.config["vocab_size"] = json!(400), "vocab_size is 400, but the target has 320"),
        (|h| h.config["draft_vocab_size"] = json!(321), "draft_vocab_size must be at most"),
        (|h| h.config["draft_vocab_size"] = json!(150), "lm_head.weight: expected shape [150, 64]"),
        (|h| h.config["num_hidden_layers"] = json!(2), "num_hidden_layers must be 1"),
        (|h| h.config["norm_before_residual"] = json!(true), "with norm_before_residual"),
        (
            |h| h.config["eagle_config"]["use_aux_hidden_state"] = json!(false),
            "without use_aux_hidden_state",
        ),
        (
            |h| h.set("input_norm.weight", DType::Bf16, vec![1], vec![0; 2]),
            "an EAGLE-3 head with a tensor input_norm.weight",
        ),
        (
            |h| h.config["architectures"] = json!(["Eagle3DeepseekV2ForCausalLM"]),
            "architecture \"Eagle3DeepseekV2ForCausalLM\" is not supported as an EAGLE-3 head",
        ),
        (
            |h| h.set("d2t", DType::Bool, vec![160], vec![0; 160]),
            "d2t: expected int64 of shape [160], found bool of [160]",
        ),
        (
            |h| h.set("t2d", DType::Bool, vec![320], vec![1; 320]),
            "tensor t2d: disagrees with d2t about token 1",
        ),
    ];
    for (number, (spoil, text)) in cases.iter().enumerate() {
        let refusal = refusal(spoil);
        assert!(refusal.contains(text), "case {number}: {refusal:?} lacks {text:?}");
    }
}

#[test]
fn draft_tokens_beyond_the_target_or_twice_are_refused() {
    for (offset, text) in [
        (320 - 7, "draft token 7 plus 313 is no token of a vocabulary of 320"),
        (-8, "draft token 7 plus -8 is no token"),
        (i64::MAX, "is no token"),
        (8 + 8 - 7, "draft token 8 is token 16, and so is another"),
    ] {
        let refusal = refusal(|h| {
            let mut offsets = h.offsets();
            offsets[7] = offset;
            h.set_offsets(&offsets);
        });
        assert!(refusal.contains("tensor d2t: ") && refusal.contains(text), "{refusal}");
    }
}

#[test]
fn other_models_are_refused_as_what_they_are() {
    let target = Checkpoint::open(&shipped("tiny"), LoadFormat::Auto).unwrap();
    let refused = |location: &Location, spec: &ModelSpec| {
        HeadCheckpoint::open(location, LoadFormat::Auto, spec).err().unwrap().to_string()
    };
    for (name, text) in [
        ("tiny-eagle", "is an EAGLE head, not an EAGLE-3 head"),
        ("tiny-mtp", "MTP layers, not an EAGLE-3 head"),
        ("draft", "is an ordinary model, not an EAGLE-3 head"),
    ] {
        let refusal = refused(&shipped(name), target.spec());
        assert!(refusal.contains(text), "{name}: {refusal}");
    }
    let bench = refused(&Location::Preset("bench".into()), target.spec());
    assert!(bench.contains("preset:bench: is not the config of an EAGLE-3 head"), "{bench}");
    let wrong = refused(&Location::Preset("bench-eagle3".into()), target.spec());
    assert!(wrong.contains("target_hidden_size is 1536, but"), "{wrong}");
}

/// Ten rows of a text: the draft's logits by token of the target.
fn logits(location: &Location) -> Vec<(u32, Vec<u32>)> {
    let backend = CpuBackend::new(IsaChoice::Auto, 1).unwrap();
    let pair = Pair::load(backend, &target(), location);
    let ids: Vec<u32> = (3..14).collect();
    let captured = pair.capture(&ids[..10]);
    let logits = pair.drafting(10, 10).extend(&ids, &captured, 0, 10);
    let draft = pair.head.draft_ids().unwrap().ids;
    assert!(draft.is_sorted_by(|a, b| a < b));
    let column = |c: usize| logits.iter().skip(c).step_by(draft.len()).map(|l| l.to_bits());
    draft.iter().enumerate().map(|(c, &id)| (id, column(c).collect())).collect()
}

#[test]
fn the_order_of_draft_tokens_and_the_name_of_the_layer_do_not_matter() {
    let folder = tempfile::tempdir().unwrap();
    let mut head = head();
    let plain = logits(&head.write(folder.path()));

    let folder = tempfile::tempdir().unwrap();
    let ids: Vec<i64> = head.offsets().iter().enumerate().map(|(i, o)| i as i64 + o).collect();
    let order: Vec<usize> = (0..160).map(|i| i * 77 % 160).collect();
    let offsets: Vec<i64> = order.iter().enumerate().map(|(i, &row)| ids[row] - i as i64).collect();
    let rows = head.tensors["lm_head.weight"].bytes().clone();
    let shuffled = order.iter().flat_map(|&row| rows[row * 128..][..128].to_vec()).collect();
    head.set_offsets(&offsets);
    head.set("lm_head.weight", DType::Bf16, vec![160, 64], shuffled);
    head.rename("midlayer.", "layers.0.");
    let known = (0..320).map(|id| u8::from(ids.contains(&id))).collect();
    head.set("t2d", DType::Bool, vec![320], known);
    assert_eq!(logits(&head.write(folder.path())), plain);
}

#[test]
fn a_head_is_inspected_as_what_it_drafts() {
    let report = Inspection::of(&shipped("tiny-eagle3")).unwrap();
    let text = report.to_string();
    assert!(!report.servable);
    for part in [
        "EAGLE3 for models of width 384, draft vocabulary 4096",
        "outputs of layers [1, 3, 4]",
        "3.9 M",
        "no: it is an EAGLE-3 head and drafts for a model: use --speculative-draft-model-path",
    ] {
        assert!(text.contains(part), "{part}:\n{text}");
    }
    let value = serde_json::to_value(&report).unwrap();
    assert_eq!(value["draft_head"]["aux_layers"], json!([1, 3, 4]));
    let preset = Inspection::of(&Location::Preset("bench-eagle3".into())).unwrap();
    assert!(preset.to_string().contains("usual three layers"), "{preset}");

    let folder = tempfile::tempdir().unwrap();
    let mut head = head();
    head.tensors.remove("norm.weight");
    let reason = Inspection::of(&head.write(folder.path())).unwrap().reason.unwrap();
    assert!(reason.contains("tensor norm.weight: is missing"), "{reason}");
    let reason = Inspection::of(&shipped("tiny-eagle")).unwrap().reason.unwrap();
    assert!(reason.contains("is a draft head"), "{reason}");
}
