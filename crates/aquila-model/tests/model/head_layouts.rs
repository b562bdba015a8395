//! A head gives the same bits in every layout that publishers use.

use aquila_compute::DType;
use aquila_compute::cpu::{CpuBackend, IsaChoice};
use aquila_model::RecurrentHead as _;
use aquila_model::{
    AuxLayerConvention, HeadCheckpoint, HeadOptions, Inspection, LoadFormat, Location, Setting,
};
use serde_json::{Value, json};

use crate::head::Pair;
use crate::head_files::{Head, head, target};

/// Ten rows of a text: the draft's logits by token of the target.
fn logits_with(location: &Location, options: &HeadOptions) -> Vec<(u32, Vec<u32>)> {
    let target = target();
    let opened = HeadCheckpoint::open_with(location, LoadFormat::Auto, &target, options).unwrap();
    let backend = CpuBackend::new(IsaChoice::Auto, 1).unwrap();
    let pair = Pair::of(backend, &target, opened);
    let ids: Vec<u32> = (3..14).collect();
    let captured = pair.capture(&ids[..10]);
    let logits = pair.drafting(10, 10).extend(&ids, &captured, 0, 10);
    let all: Vec<u32> = (0..320).collect();
    let draft = pair.head.draft_ids().map_or(&all[..], |draft| draft.ids);
    assert!(draft.is_sorted_by(|a, b| a < b));
    let column = |c: usize| logits.iter().skip(c).step_by(draft.len()).map(|l| l.to_bits());
    draft.iter().enumerate().map(|(c, &id)| (id, column(c).collect())).collect()
}

fn logits(location: &Location) -> Vec<(u32, Vec<u32>)> {
    logits_with(location, &HeadOptions::default())
}

fn original() -> Vec<(u32, Vec<u32>)> {
    let folder = tempfile::tempdir().unwrap();
    logits(&head().write(folder.path()))
}

/// The config of speculators: sizes in an object of their own, layers numbered by boundary.
fn by_speculators(head: &mut Head) {
    let mut sizes = head.config.clone();
    let own = ["architectures", "draft_vocab_size", "target_hidden_size", "eagle_config"];
    own.iter().for_each(|field| drop(sizes.as_object_mut().unwrap().remove(*field)));
    head.config = json!({
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "/private/path"},
        },
        "draft_vocab_size": 160,
        "target_hidden_size": null,
        "norm_before_residual": false,
        "eagle_aux_hidden_state_layer_ids": [1, 3],
        "transformer_layer_config": sizes,
    });
    head.rename("midlayer.", "layers.0.");
}

#[test]
fn every_layout_gives_the_same_bits() {
    type Rewrite = fn(&mut Head);
    let layouts: &[(&str, Rewrite)] = &[
        ("SpecForge's name of the layer", |h| h.rename("midlayer.", "layers.0.")),
        ("everything but lm_head and d2t under model", |h| {
            h.rename("midlayer.", "model.layers.0.");
            h.rename("fc.", "model.fc.");
            h.rename("norm.", "model.norm.");
        }),
        ("everything under model", |h| {
            h.rename("", "model.");
        }),
        ("vLLM's architecture and numbers", |h| {
            h.config["architectures"] = json!(["Eagle3LlamaForCausalLM"]);
            h.config["eagle_config"] = Value::Null;
            h.config["eagle_aux_hidden_state_layer_ids"] = json!([1, 3]);
        }),
        ("a number that only a boundary can have", |h| {
            h.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = json!([1, 3]);
        }),
        ("the other name of the numbers", |h| {
            h.config["eagle_config"] = json!({ "layer_ids": [0, 2] });
        }),
        ("speculators", by_speculators),
        ("the original architecture", |h| h.config["architectures"] = json!(["LlamaForCausalLM"])),
        ("a qwen2 config without biases", |h| h.config["model_type"] = json!("qwen2")),
        ("no head_dim", |h| drop(h.config.as_object_mut().unwrap().remove("head_dim"))),
        ("no draft_vocab_size", |h| h.config["draft_vocab_size"] = Value::Null),
        ("a copy of the target's embedding", |h| {
            let table = target().tensors().get("model.embed_tokens.weight").unwrap();
            let name = "embed_tokens.weight";
            h.set(name, table.dtype(), table.shape().to_vec(), table.bytes().to_vec());
        }),
        ("all weights as float32", |h| {
            let tensors = h.tensors.values().cloned().collect::<Vec<_>>();
            for tensor in tensors.iter().filter(|t| t.dtype() == DType::Bf16) {
                let wide = tensor.to_f32().unwrap();
                let bytes = wide.iter().flat_map(|x| x.to_le_bytes()).collect();
                h.set(tensor.name(), DType::F32, tensor.shape().to_vec(), bytes);
            }
        }),
        ("t2d beside d2t", |h| {
            let known = (0..320).map(|id| u8::from(id % 2 == 0)).collect();
            h.set("t2d", DType::Bool, vec![320], known);
        }),
        ("an old rope", |h| {
            let mut rope = h.config.as_object_mut().unwrap().remove("rope_parameters").unwrap();
            h.config["rope_theta"] = rope.as_object_mut().unwrap().remove("rope_theta").unwrap();
            h.config["rope_scaling"] = rope;
        }),
    ];
    let plain = original();
    for (name, rewrite) in layouts {
        let mut head = head();
        rewrite(&mut head);
        for torch in [false, true] {
            let folder = tempfile::tempdir().unwrap();
            let location = match torch {
                false => head.write(folder.path()),
                true => head.write_torch(folder.path()),
            };
            assert!(logits(&location) == plain, "{name}, torch file: {torch}");
        }
    }
}

#[test]
fn the_order_of_draft_tokens_does_not_matter() {
    let folder = tempfile::tempdir().unwrap();
    let mut head = head();
    let ids: Vec<i64> = head.offsets().iter().enumerate().map(|(i, o)| i as i64 + o).collect();
    let order: Vec<usize> = (0..160).map(|i| i * 77 % 160).collect();
    let offsets: Vec<i64> = order.iter().enumerate().map(|(i, &row)| ids[row] - i as i64).collect();
    let rows = head.tensors["lm_head.weight"].bytes().clone();
    let shuffled = order.iter().flat_map(|&row| rows[row * 128..][..128].to_vec()).collect();
    head.set_offsets(&offsets);
    head.set("lm_head.weight", DType::Bf16, vec![160, 64], shuffled);
    assert!(logits(&head.write(folder.path())) == original());
}

#[test]
fn safetensors_are_preferred_and_training_state_is_ignored() {
    let folder = tempfile::tempdir().unwrap();
    let location = head().write(folder.path());
    std::fs::write(folder.path().join("pytorch_model.bin"), "not read").unwrap();
    std::fs::write(folder.path().join("training_state.pt"), "not read").unwrap();
    assert!(logits(&location) == original());
}

#[test]
fn a_convention_that_is_asked_for_holds() {
    let folder = tempfile::tempdir().unwrap();
    let mut head = head();
    head.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = json!([1, 2]);
    let location = head.write(folder.path());
    let boundaries = |aux_layer_convention| {
        let options = HeadOptions { aux_layer_convention, ..HeadOptions::default() };
        let head = HeadCheckpoint::open_with(&location, LoadFormat::Auto, &target(), &options);
        head.map(|head| head.boundaries().to_vec()).map_err(|e| (e.to_string(), e.setting()))
    };
    assert_eq!(boundaries(AuxLayerConvention::Auto).unwrap(), [2, 3]);
    assert_eq!(boundaries(AuxLayerConvention::Output).unwrap(), [2, 3]);
    assert_eq!(boundaries(AuxLayerConvention::Boundary).unwrap(), [1, 2]);

    head.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = json!([1, 3]);
    head.write(folder.path());
    let (text, setting) = boundaries(AuxLayerConvention::Output).unwrap_err();
    assert!(text.contains("must name layers of the target, which has 3; found 3"), "{text}");
    assert_eq!(setting, Some(Setting::AuxLayerConvention));
    head.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = json!([0, 4]);
    head.write(folder.path());
    let (text, _) = boundaries(AuxLayerConvention::Boundary).unwrap_err();
    assert!(text.contains("must name boundaries of layers of the target, which has 3; found 4"));
}

#[test]
fn a_boundarys_number_may_be_that_of_the_embedding() {
    let folder = tempfile::tempdir().unwrap();
    let mut head = head();
    head.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = json!([0, 2]);
    let mut read = |architecture: &str, aux_layer_convention| {
        head.config["architectures"] = json!([architecture]);
        let location = head.write(folder.path());
        let options = HeadOptions { aux_layer_convention, ..HeadOptions::default() };
        let text = Inspection::of(&location).unwrap().to_string();
        let opened = HeadCheckpoint::open_with(&location, LoadFormat::Auto, &target(), &options);
        (opened.unwrap().boundaries().to_vec(), logits_with(&location, &options), text)
    };
    // Whoever counts outputs means that of the first layer.
    let (boundaries, outputs, text) = read("LlamaForCausalLMEagle3", AuxLayerConvention::Auto);
    assert_eq!(boundaries, [1, 3]);
    assert!(text.contains("as SGLang and SpecForge number them"), "{text}");
    // Whoever counts boundaries means the embedding.
    let (boundaries, by_vllm, text) = read("Eagle3LlamaForCausalLM", AuxLayerConvention::Auto);
    assert_eq!(boundaries, [0, 2]);
    assert!(text.contains("reads the embedding beside the outputs of layers"), "{text}");
    assert!(text.contains("reads the outputs of layers [1]"), "{text}");
    let (_, asked, _) = read("LlamaForCausalLMEagle3", AuxLayerConvention::Boundary);
    assert!(by_vllm == asked && by_vllm != outputs);
}

#[test]
fn the_base_of_the_rope_can_be_set() {
    let folder = tempfile::tempdir().unwrap();
    let mut head = head();
    let location = head.write(folder.path());
    let options = HeadOptions { rope_theta: Some(10_000.0), ..HeadOptions::default() };
    let set = logits_with(&location, &options);
    assert!(set != original());
    head.config["rope_parameters"]["rope_theta"] = json!(10_000.0);
    assert!(logits(&head.write(folder.path())) == set);
}

#[test]
fn tables_equal_to_the_targets_are_shared_with_it() {
    let folder = tempfile::tempdir().unwrap();
    let mut head = head();
    let target = target();
    let table = target.tensors().get("model.embed_tokens.weight").unwrap();
    let mut bytes = table.bytes().to_vec();
    head.set("embed_tokens.weight", table.dtype(), table.shape().to_vec(), bytes.clone());
    let open = |head: &Head| {
        let (location, options) = (head.write(folder.path()), HeadOptions::default());
        HeadCheckpoint::open_with(&location, LoadFormat::Auto, &target, &options).unwrap()
    };
    assert!(!open(&head).spec().own_embedding);
    bytes[77] ^= 1;
    head.set("embed_tokens.weight", table.dtype(), table.shape().to_vec(), bytes);
    assert!(open(&head).spec().own_embedding, "a table of its own is kept");
}

#[test]
fn inspect_says_which_convention_was_chosen_and_why() {
    let folder = tempfile::tempdir().unwrap();
    let mut head = head();
    let inspected = |head: &Head| Inspection::of(&head.write(folder.path())).unwrap().to_string();
    head.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = json!([1, 2]);
    let text = inspected(&head);
    assert!(text.contains("outputs of layers [1, 2]"), "{text}");
    assert!(text.contains("as SGLang and SpecForge number them"), "{text}");
    by_speculators(&mut head);
    let text = inspected(&head);
    assert!(text.contains("outputs of layers [0, 2]"), "{text}");
    assert!(text.contains("as vLLM and speculators number them"), "{text}");
}
