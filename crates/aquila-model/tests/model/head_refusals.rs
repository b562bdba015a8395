//! Heads that cannot draft for a model are refused by what is wrong with them.

use aquila_compute::DType;
use aquila_model::{
    Checkpoint, HeadCheckpoint, Inspection, LoadFormat, Location, ModelSpec, Setting,
};
use serde_json::json;

use crate::head_files::{Head, head, target};
use crate::sequence::shipped;

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
            "eagle_aux_hidden_state_layer_ids names 2 layers, but fc joins 3",
        ),
        (
            |h| h.set("fc.weight", DType::Bf16, vec![64, 100], vec![0; 64 * 100 * 2]),
            "fc.weight: has shape [64, 100], which joins no whole number of hidden states",
        ),
        (
            |h| h.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = json!(null),
            "eagle_aux_hidden_state_layer_ids is missing, and fc joins 2 layers, not the usual",
        ),
        (
            |h| {
                h.config["eagle_config"].as_object_mut().unwrap().clear();
                h.set("fc.weight", DType::Bf16, vec![64, 192], vec![0; 64 * 192 * 2]);
            },
            "eagle_aux_hidden_state_layer_ids is missing, and the usual layers do not exist",
        ),
        (
            |h| h.config["eagle_config"] = json!({ "eagle_aux_hidden_state_layer_ids": [1, 4] }),
            "eagle_aux_hidden_state_layer_ids must name layers of the target, which has 3; found 4",
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
        (
            |h| h.config["num_hidden_layers"] = json!(2),
            "num_hidden_layers is 2, and the head has the one",
        ),
        (
            |h| h.set("layers.1.hidden_norm.weight", DType::Bf16, vec![64], vec![0; 128]),
            "num_hidden_layers is 1, and the head has layers.1.",
        ),
        (
            |h| h.set("mask_hidden", DType::Bf16, vec![128], vec![0; 256]),
            "an EAGLE-3 head with parallel drafting (P-EAGLE) is not supported yet",
        ),
        (
            |h| h.set("input_norm.weight", DType::Bf16, vec![1], vec![0; 2]),
            "input_norm.weight: expected shape [128], found [1]",
        ),
        (
            |h| {
                h.config["draft_vocab_size"] = json!(320);
                h.tensors.remove("lm_head.weight");
                let mut offsets = vec![0; 320];
                (offsets[0], offsets[1]) = (1, -1);
                h.set_offsets(&offsets);
            },
            "lm_head.weight: is missing, and the target's has its tokens in another order",
        ),
        (|h| h.config["norm_before_fc"] = json!(true), "tensor input_norm.weight: is missing"),
        (|h| h.config["fc_norm"] = json!(true), "tensor fc_norm.0.weight: is missing"),
        (|h| h.config["norm_output"] = json!("yes"), "norm_output must be true or false"),
        (
            |h| {
                let name = "midlayer.self_attn.kv_a_proj_with_mqa.weight";
                h.set(name, DType::Bf16, vec![1], vec![0; 2]);
            },
            "midlayer has latent attention (MLA), which is not supported",
        ),
        (
            |h| h.config["speculators_model_type"] = json!("dflash"),
            "is a draft of the kind DFLASH: not supported yet",
        ),
        (
            |h| h.config["architectures"] = json!(["DSparkDraftModel"]),
            "is a draft of the kind DSPARK: not supported yet",
        ),
        (
            |h| h.config["speculators_model_type"] = json!("peagle"),
            "is a draft of the kind P-EAGLE: not supported yet",
        ),
        (
            |h| {
                let verifier = json!({"architectures": ["Qwen3ForCausalLM"]});
                h.config["speculators_config"] = json!({ "verifier": verifier });
            },
            "verifier.architectures are Qwen3ForCausalLM, but the target is a LlamaForCausalLM: \
             the head was made for another model",
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

#[test]
fn a_head_is_inspected_as_what_it_drafts() {
    let report = Inspection::of(&shipped("tiny-eagle3")).unwrap();
    let text = report.to_string();
    assert!(!report.servable);
    for part in [
        "EAGLE3 for models of width 384, draft vocabulary 4096",
        "outputs of layers [1, 3, 4]",
        "3.9 M",
        "no: it is an EAGLE-3 head and drafts for a model",
    ] {
        assert!(text.contains(part), "{part}:\n{text}");
    }
    assert_eq!(report.setting, Some(Setting::Draft(Some("EAGLE3"))));
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
