//! EAGLE heads and MTP layers as people have them: every layout computes the same, and what does
//! not fit is refused by what is wrong with it.

use std::collections::BTreeMap;
use std::fs;

use aquila_compute::{Backend, ForwardPlan, HostTensor, KvDtype, WeightFormat};
use aquila_model::RecurrentHead as _;
use aquila_model::{
    Checkpoint, DraftTokens, EagleCheckpoint, FirstEmbedding, FusedHead, HeadOptions, Inspection,
    LoadFormat, Location, MtpCheckpoint, MtpNaming, Result, Safetensors, TensorSource,
};
use serde_json::{Value, json};

use crate::fused_heads::Target;
use crate::safetensors_writer::safetensors_file;
use crate::sequence::{Sequence, bounds, chunk, shipped};

const IDS: [u32; 13] = [9, 410, 77, 5021, 33, 8, 1999, 260, 17, 4, 900, 31, 2048];
const ROWS: usize = IDS.len() - 1;

/// A head in memory, to be changed and written.
#[derive(Clone)]
struct Head {
    config: Value,
    tensors: BTreeMap<String, HostTensor>,
}

impl Head {
    fn shipped(name: &str) -> Self {
        let Location::Folder(folder) = shipped(name) else { unreachable!() };
        let config = fs::read(folder.join("config.json")).unwrap();
        let stored = Safetensors::open_folder(&folder).unwrap();
        let all = stored.names().into_iter().map(|n| (n.to_owned(), stored.get(n).unwrap()));
        Self { config: serde_json::from_slice(&config).unwrap(), tensors: all.collect() }
    }

    /// The first MTP layer alone.
    fn one_layer() -> Self {
        let mut head = Self::shipped("tiny-mtp");
        head.tensors.retain(|name, _| name.contains("mtp_layers.0."));
        head.config["num_nextn_predict_layers"] = json!(1);
        head
    }

    fn rename(&mut self, from: &str, to: &str) {
        let tensors = std::mem::take(&mut self.tensors).into_iter();
        self.tensors = tensors.map(|(name, t)| (name.replacen(from, to, 1), t)).collect();
    }

    fn set(&mut self, name: &str, shape: &[usize], values: &[f32]) {
        let tensor = HostTensor::from_f32(name, shape.to_vec(), values).unwrap();
        self.tensors.insert(name.into(), tensor);
    }

    fn zeros(&mut self, name: &str, shape: &[usize]) {
        self.set(name, shape, &vec![0.0; shape.iter().product()]);
    }

    /// The names of DeepSeek, under `prefix`, with the embedding before the hidden state.
    fn named_next_n(mut self, prefix: &str) -> Self {
        for (from, to) in [
            ("model.mtp_layers.0.token_layernorm", "enorm"),
            ("model.mtp_layers.0.hidden_layernorm", "hnorm"),
            ("model.mtp_layers.0.input_proj", "eh_proj"),
            ("model.mtp_layers.0.final_layernorm", "shared_head.norm"),
        ] {
            self.rename(from, &format!("{prefix}.{to}"));
        }
        self.rename("model.mtp_layers.0", prefix);
        let join = format!("{prefix}.eh_proj.weight");
        let stored = self.tensors[&join].to_f32().unwrap();
        let swapped: Vec<f32> =
            stored.chunks(768).flat_map(|row| [&row[384..], &row[..384]].concat()).collect();
        self.set(&join, &[384, 768], &swapped);
        self
    }

    /// The names of Qwen3-Next, whose norms are kept less one.
    fn named_qwen(self) -> Self {
        let mut head = self.named_next_n("mtp.layers.0");
        for (from, to) in [
            ("mtp.layers.0.enorm", "mtp.pre_fc_norm_embedding"),
            ("mtp.layers.0.hnorm", "mtp.pre_fc_norm_hidden"),
            ("mtp.layers.0.eh_proj", "mtp.fc"),
            ("mtp.layers.0.shared_head.norm", "mtp.norm"),
        ] {
            head.rename(from, to);
        }
        for (name, tensor) in head.tensors.clone() {
            if tensor.shape().len() == 1 {
                let less: Vec<f32> = tensor.to_f32().unwrap().iter().map(|w| w - 1.0).collect();
                head.set(&name, tensor.shape(), &less);
            }
        }
        head
    }

    /// Writes the head and opens what was written.
    fn open<T>(&self, open: impl FnOnce(&Location) -> Result<T>) -> Result<T> {
        let folder = tempfile::tempdir().unwrap();
        let tensors = self.tensors.iter().map(|(name, tensor)| (name.as_str(), tensor));
        let file = safetensors_file(tensors);
        fs::write(folder.path().join("model.safetensors"), file).unwrap();
        fs::write(folder.path().join("config.json"), self.config.to_string()).unwrap();
        open(&Location::Folder(folder.path().into()))
    }

    fn mtp(&self, target: &Checkpoint) -> Result<MtpCheckpoint> {
        self.open(|location| MtpCheckpoint::open(location, LoadFormat::Auto, target.spec()))
    }

    fn eagle(&self, target: &Checkpoint) -> Result<EagleCheckpoint> {
        self.open(|location| EagleCheckpoint::open(location, LoadFormat::Auto, target.spec()))
    }
}

/// The logits of a short text.
fn logits(target: &Target, head: &FusedHead<aquila_compute::cpu::CpuBackend>) -> Vec<f32> {
    logits_of(target, head, &IDS)
}

fn logits_of(
    target: &Target,
    head: &FusedHead<aquila_compute::cpu::CpuBackend>,
    ids: &[u32; IDS.len()],
) -> Vec<f32> {
    let backend = &target.backend;
    let captured = target.capture(&ids[..ROWS]);
    let mut kv = head.kv(backend, ROWS, KvDtype::F32).unwrap();
    let mut scratch = head.scratch(backend, bounds(ROWS, ROWS)).unwrap();
    let mut plan = ForwardPlan::default();
    let slots: Vec<u32> = (0..ROWS as u32).collect();
    chunk(&mut plan, &ids[1..], &slots, 0, ROWS);
    plan.sources = slots;
    head.extend(backend, &plan, Some(captured.rows()), &mut kv, &mut scratch).unwrap();
    backend.read(scratch.logits(), ROWS).unwrap()
}

fn loaded(target: &Target, layers: &MtpCheckpoint) -> Vec<f32> {
    let lm_head = target.decoder.lm_head();
    let format = WeightFormat::Bf16;
    let head = layers.load(&target.backend, format, &target.decoder, lm_head, &mut |_| {}).unwrap();
    logits(target, &head)
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

#[test]
fn one_layer_under_three_names_computes_the_same() {
    let target = Target::tiny();
    let checkpoint = &target.checkpoint;
    let plain = Head::one_layer();
    let mimo = plain.mtp(checkpoint).unwrap();
    assert_eq!((mimo.spec().naming, mimo.spec().layers()), (MtpNaming::MiMo, 1));
    let mimo = loaded(&target, &mimo);

    // In the target's own checkpoint the layer comes behind the target's; exports begin at 0.
    let within = plain.clone().named_next_n("model.layers.6").mtp(checkpoint).unwrap();
    assert_eq!((within.spec().naming, within.spec().layers()), (MtpNaming::NextN, 1));
    let within = loaded(&target, &within);
    let mut exported = plain.clone().named_next_n("model.layers.0");
    exported.config["num_hidden_layers"] = json!(1);
    exported.zeros("model.layers.0.shared_head.head.weight", &[8192, 384]);
    assert!(bits(&loaded(&target, &exported.mtp(checkpoint).unwrap())) == bits(&within));

    let qwen = plain.named_qwen().mtp(checkpoint).unwrap();
    assert_eq!(qwen.spec().naming, MtpNaming::Qwen);
    assert!(bits(&loaded(&target, &qwen)) == bits(&within));

    // The hidden state first or last: another order of the same sum.
    let largest = mimo.iter().fold(0f32, |m, x| m.max(x.abs()));
    let off = mimo.iter().zip(&within).fold(0f32, |m, (a, b)| m.max((a - b).abs()));
    assert!(off > 0.0 && off < 1e-4 * largest, "{off} of {largest}");
}

#[test]
fn zeros_may_stand_for_the_embedding_at_position_0() {
    let target = Target::tiny();
    let mut head = Head::one_layer();
    let vocabulary = target.checkpoint.spec().vocab_size;
    // Whether the second and the third token of a text matter to the rows that take them.
    let open = |head: &Head, first_embedding: FirstEmbedding| {
        let options = HeadOptions { first_embedding, ..HeadOptions::default() };
        let spec = target.checkpoint.spec();
        let open = |l: &Location| MtpCheckpoint::open_with(l, LoadFormat::Auto, spec, &options);
        head.open(open).unwrap()
    };
    let seen = |layers: &MtpCheckpoint| {
        let (lm_head, format) = (target.decoder.lm_head(), WeightFormat::Bf16);
        let head = layers.load(&target.backend, format, &target.decoder, lm_head, &mut |_| {});
        let head = head.unwrap();
        [1, 2].map(|at| {
            let mut ids = IDS;
            ids[at] += 1;
            let row = (at - 1) * vocabulary..at * vocabulary;
            let before = logits_of(&target, &head, &IDS);
            bits(&before[row.clone()]) != bits(&logits_of(&target, &head, &ids)[row])
        })
    };
    use FirstEmbedding::{Auto, Keep, Zero};
    assert_eq!(seen(&open(&head, Keep)), [true, true]);
    assert_eq!(seen(&open(&head, Zero)), [false, true]);
    assert_eq!(seen(&open(&head, Auto)), [true, true]);
    // Whoever publishes MiMo's own layers says so in the config.
    head.config["architectures"] = json!(["MiMoForCausalLM"]);
    assert_eq!(seen(&open(&head, Auto)), [false, true]);
    assert!(!open(&head, Keep).spec().zeroes_first.0);
}

#[test]
fn inspect_says_what_mtp_layers_do() {
    let report = |head: &Head| head.open(Inspection::of).unwrap().draft_head.unwrap();
    let shipped = report(&Head::shipped("tiny-mtp"));
    assert_eq!((shipped.algorithm, shipped.target_hidden_size), ("MTP", 384));
    assert_eq!(
        shipped.particulars,
        [
            "3 layers, one for each step, chained",
            "joins the hidden state first",
            "takes the embedding at position 0: as SGLang does; vLLM takes zeros for most models",
        ]
    );
    let mut qwen = Head::one_layer().named_qwen();
    qwen.config["architectures"] = json!(["Qwen3NextForCausalLM"]);
    assert_eq!(
        report(&qwen).particulars,
        [
            "one layer, which recurs",
            "joins the embedding first",
            "takes the embedding at position 0: as SGLang and vLLM do for Qwen",
            "weights of norms are kept less one",
        ]
    );
}

#[test]
fn parts_of_a_layer_are_known_by_their_tensors() {
    let target = Target::tiny();
    let plain = Head::one_layer();
    let want = loaded(&target, &plain.mtp(&target.checkpoint).unwrap());
    let mut biased = plain.clone();
    for (name, width) in [("q", 384), ("k", 128), ("v", 128)] {
        biased.zeros(&format!("model.mtp_layers.0.self_attn.{name}_proj.bias"), &[width]);
    }
    // The config of this family may not say how wide heads are.
    biased.config["head_dim"] = Value::Null;
    let biased = biased.mtp(&target.checkpoint).unwrap();
    let attention = biased.spec().layer.first_attention();
    assert!(attention.qkv_bias && !attention.output_bias);
    assert!(bits(&loaded(&target, &biased)) == bits(&want));

    let mut normed = plain;
    for name in ["q_norm", "k_norm"] {
        let name = format!("model.mtp_layers.0.self_attn.{name}.weight");
        normed.set(&name, &[64], &[1.0; 64]);
    }
    let normed = normed.mtp(&target.checkpoint).unwrap();
    assert!(normed.spec().layer.first_attention().qk_norm);
    assert!(bits(&loaded(&target, &normed)) != bits(&want), "norms were not used");
}

/// Three experts that are all what the layer's feed-forward part was: whichever a row takes, it
/// takes with weight 1.
fn with_equal_experts(mut head: Head, layer: &str) -> Head {
    for part in ["gate_proj", "up_proj", "down_proj"] {
        let dense = head.tensors.remove(&format!("{layer}.mlp.{part}.weight")).unwrap();
        for expert in 0..3 {
            let name = format!("{layer}.mlp.experts.{expert}.{part}.weight");
            head.set(&name, dense.shape(), &dense.to_f32().unwrap());
        }
    }
    let router: Vec<f32> = (0..3 * 384).map(|i| ((i * 37) % 101) as f32 / 101.0 - 0.5).collect();
    head.set(&format!("{layer}.mlp.gate.weight"), &[3, 384], &router);
    for (field, value) in [
        ("num_experts", json!(3)),
        ("num_experts_per_tok", json!(1)),
        ("moe_intermediate_size", json!(1024)),
        ("norm_topk_prob", json!(true)),
    ] {
        head.config[field] = value;
    }
    head
}

#[test]
fn layers_of_heads_may_have_experts() {
    let target = Target::tiny();
    let checkpoint = &target.checkpoint;
    let plain = Head::one_layer();
    let want = bits(&loaded(&target, &plain.mtp(checkpoint).unwrap()));
    let sparse = with_equal_experts(plain, "model.mtp_layers.0").mtp(checkpoint).unwrap();
    assert_eq!(sparse.spec().layer.experts_per_token(), Some(1));
    assert!(bits(&loaded(&target, &sparse)) == want);

    let own = bits(&logits(&target, &target.eagle(target.decoder.lm_head())));
    let sparse = with_equal_experts(Head::shipped("tiny-eagle"), "layers.0");
    let sparse = sparse.eagle(checkpoint).unwrap();
    let (format, lm_head) = (WeightFormat::Bf16, target.decoder.lm_head());
    let head = sparse.load(&target.backend, format, &target.decoder, lm_head, &mut |_| {}).unwrap();
    assert!(bits(&logits(&target, &head)) == own);
}

#[test]
fn an_eagle_head_uses_the_tables_of_its_target() {
    let target = Target::tiny();
    let mut head = Head::shipped("tiny-eagle");
    head.zeros("embed_tokens.weight", &[8192, 384]);
    head.zeros("lm_head.weight", &[8192, 384]);
    let head = head.eagle(&target.checkpoint).unwrap();
    assert_eq!(head.spec().ignored, ["embed_tokens.weight", "lm_head.weight"]);
    assert!(head.spec().fc_bias);
    let (format, lm_head) = (WeightFormat::Bf16, target.decoder.lm_head());
    let copied = head.load(&target.backend, format, &target.decoder, lm_head, &mut |_| {}).unwrap();
    let own = target.eagle(target.decoder.lm_head());
    assert!(bits(&logits(&target, &copied)) == bits(&logits(&target, &own)));
}

#[test]
fn an_eagle_head_is_the_same_in_every_layout() {
    let target = Target::tiny();
    let own = bits(&logits(&target, &target.eagle(target.decoder.lm_head())));
    type Rewrite = fn(&mut Head);
    let layouts: [(&str, Rewrite); 4] = [
        ("everything under model", |h| h.rename("", "model.")),
        ("the layer and the embedding under model", |h| {
            h.rename("layers.", "model.layers.");
            h.zeros("model.embed_tokens.weight", &[8192, 384]);
            h.zeros("lm_head.weight", &[8192, 384]);
        }),
        ("fc under model", |h| h.rename("fc.", "model.fc.")),
        ("a config in a config", |h| {
            let layer = h.config.take();
            h.config = json!({ "model_type": "eagle", "eagle_fc_bias": true, "model": layer });
            h.rename("layers.", "model.layers.");
        }),
    ];
    for (layout, rewrite) in layouts {
        let mut head = Head::shipped("tiny-eagle");
        rewrite(&mut head);
        let head = head.eagle(&target.checkpoint).unwrap();
        let (format, lm_head) = (WeightFormat::Bf16, target.decoder.lm_head());
        let head = head.load(&target.backend, format, &target.decoder, lm_head, &mut |_| ());
        assert!(bits(&logits(&target, &head.unwrap())) == own, "{layout}");
    }
}

#[test]
fn a_token_map_keeps_the_logits_of_its_tokens() {
    let target = Target::tiny();
    let map = [5021, 8, 4095, 17, 0, 8191];
    for format in [WeightFormat::Bf16, WeightFormat::Int8] {
        let tokens = DraftTokens::of(&target.checkpoint, &map).unwrap();
        let some = target.eagle(tokens.lm_head(&target.backend, format).unwrap());
        let ids = some.draft_ids().unwrap();
        assert_eq!((ids.ids, ids.vocabulary), (&[0, 8, 17, 4095, 5021, 8191][..], 8192));
        let every: Vec<u32> = (0..8192).collect();
        let every = DraftTokens::of(&target.checkpoint, &every).unwrap();
        let all = logits(&target, &target.eagle(every.lm_head(&target.backend, format).unwrap()));
        let want: Vec<f32> =
            all.chunks(8192).flat_map(|row| ids.ids.iter().map(|&id| row[id as usize])).collect();
        assert!(bits(&logits(&target, &some)) == bits(&want), "{format:?}");
        if format == WeightFormat::Bf16 {
            let whole = logits(&target, &target.eagle(target.decoder.lm_head()));
            assert!(bits(&all) == bits(&whole));
        }
    }
    for (map, wrong) in [
        (&[3, 8192][..], "8192 is no token of the target, which has 8192"),
        (&[3, 7, 3], "it names token 3 twice"),
        (&[], "it names no token"),
    ] {
        let refused = DraftTokens::of(&target.checkpoint, map).err().unwrap().to_string();
        assert!(refused.contains(wrong), "{refused}");
    }
}

#[test]
fn what_is_wrong_with_a_head_is_said() {
    let target = Target::tiny();
    let mtp = |spoil: &dyn Fn(&mut Head)| {
        let mut head = Head::shipped("tiny-mtp");
        spoil(&mut head);
        head.mtp(&target.checkpoint).err().expect("it is refused").to_string()
    };
    let eagle = |spoil: &dyn Fn(&mut Head)| {
        let mut head = Head::shipped("tiny-eagle");
        spoil(&mut head);
        head.eagle(&target.checkpoint).err().expect("it is refused").to_string()
    };
    let layer = "model.mtp_layers.0";
    let cases = [
        (
            mtp(&|h| drop(h.tensors.remove("model.mtp_layers.1.final_layernorm.weight"))),
            "tensor model.mtp_layers.1.final_layernorm.weight: is missing",
        ),
        (
            mtp(&|h| h.zeros(&format!("{layer}.self_attn.kv_a_proj_with_mqa.weight"), &[4, 4])),
            "model.mtp_layers.0 has latent attention (MLA), which is not supported",
        ),
        (
            mtp(&|h| h.zeros(&format!("{layer}.mlp.experts.0.up_proj.weight"), &[4, 4])),
            "model.mtp_layers.0 has experts whose weights are stored together",
        ),
        (
            mtp(&|h| h.zeros(&format!("{layer}.mlp.shared_expert.up_proj.weight"), &[4, 4])),
            "model.mtp_layers.0 has shared experts (mlp.shared_expert), which is not supported",
        ),
        (
            mtp(&|h| h.zeros(&format!("{layer}.mlp.gate.e_score_correction_bias"), &[4])),
            "a bias on the choice of experts (e_score_correction_bias), which is not supported",
        ),
        (
            mtp(&|h| h.config["scoring_func"] = json!("sigmoid")),
            "experts scored by \"sigmoid\" (scoring_func), which is not supported",
        ),
        (mtp(&|h| h.config["attn_output_gate"] = json!(true)), "attn_output_gate"),
        (mtp(&|h| h.config["hidden_size"] = json!(256)), "the head was made for another model"),
        (mtp(&|h| h.config["vocab_size"] = json!(100)), "vocab_size is 100, but the target's is"),
        (mtp(&|h| h.tensors.clear()), "declares MTP layers, but no tensor of one is there"),
        (mtp(&|h| *h = Head::shipped("tiny-eagle")), "is an EAGLE head, not MTP layers"),
        (mtp(&|h| *h = Head::shipped("tiny-eagle3")), "is an EAGLE-3 head, not MTP layers"),
        (mtp(&|h| *h = Head::shipped("draft")), "has no MTP layers"),
        (
            mtp(&|h| h.rename("model.mtp_layers.", "model.mtp.layers.")),
            "has the MTP layers of MiMo-V2, which attend within a window",
        ),
        (
            mtp(&|h| h.rename(&format!("{layer}.input_proj"), "model.mtp_linear_proj.0")),
            "has the MTP layers of Ernie 4.5: not supported yet",
        ),
        (
            eagle(&|h| {
                h.rename("", "model.");
                h.zeros("model.norm.weight", &[384]);
            }),
            "an EAGLE head with a tensor norm.weight",
        ),
        (
            eagle(&|h| {
                h.rename("", "model.");
                h.tensors.remove("model.layers.0.mlp.up_proj.weight");
            }),
            "tensor layers.0.mlp.up_proj.weight: is missing",
        ),
        (eagle(&|h| drop(h.tensors.remove("fc.weight"))), "an EAGLE head"),
        (eagle(&|h| h.zeros("fc.weight", &[384, 1152])), "expected shape [384, 768], found"),
        (eagle(&|h| h.zeros("norm.weight", &[384])), "an EAGLE head with a tensor norm.weight"),
        (
            eagle(&|h| h.zeros("layers.0.input_layernorm.weight", &[384])),
            "an EAGLE head with a tensor layers.0.input_layernorm.weight",
        ),
        (eagle(&|h| h.config["num_hidden_layers"] = json!(2)), "must be 1 in an EAGLE head"),
        (eagle(&|h| *h = Head::shipped("tiny-eagle3")), "is an EAGLE-3 head, not an EAGLE head"),
        (eagle(&|h| *h = Head::shipped("tiny-mtp")), "holds MTP layers, not an EAGLE head"),
        (eagle(&|h| *h = Head::shipped("draft")), "is an ordinary model, not an EAGLE head"),
    ];
    for (refused, wrong) in cases {
        assert!(refused.contains(wrong), "{wrong:?} is not in: {refused}");
    }
}

#[test]
fn capturing_what_the_language_model_head_reads_changes_nothing() {
    let target = Target::tiny();
    let mut plain = Sequence::in_order(&target.backend, &target.decoder, ROWS);
    let logits = plain.run(&IDS, ROWS);
    let hidden = target.backend.read(plain.scratch.hidden(), ROWS).unwrap();
    let mut capture = target.decoder.capture_final(&target.backend, ROWS).unwrap();
    let mut captured = Sequence::in_order(&target.backend, &target.decoder, ROWS);
    assert!(bits(&captured.run_with(&IDS, ROWS, Some(&mut capture))) == bits(&logits));
    assert!(bits(&target.backend.read(capture.rows(), ROWS).unwrap()) == bits(&hidden));
}

#[test]
fn heads_take_the_memory_that_is_told() {
    let target = Target::tiny();
    let eagle = Head::shipped("tiny-eagle").eagle(&target.checkpoint).unwrap();
    // Vectors are stored as bfloat16 and kept as float32.
    let vectors = |source: &dyn TensorSource| {
        let names = source.names().into_iter().filter_map(|name| source.info(name));
        names.filter(|info| info.shape.len() == 1).map(|info| info.bytes).sum::<u64>()
    };
    let bytes = eagle.spec().weight_bytes(WeightFormat::Bf16);
    assert_eq!(bytes, eagle.tensor_bytes() + vectors(eagle.tensors()));
    let mtp = Head::shipped("tiny-mtp").mtp(&target.checkpoint).unwrap();
    let bytes = mtp.spec().weight_bytes(WeightFormat::Bf16);
    assert_eq!(bytes, mtp.tensor_bytes() + vectors(mtp.tensors()));
    // Two kv heads of 64, keys and values, four bytes, in as many layers as there are steps.
    assert_eq!(mtp.spec().kv_bytes_per_token(KvDtype::F32, 2), 2 * 1024);
    assert_eq!(mtp.spec().kv_bytes_per_token(KvDtype::F32, 8), 3 * 1024);
}

#[test]
fn presets_have_heads_with_random_weights() {
    for name in ["bench", "llama-3.1-8b"] {
        let preset = |end: &str| Location::Preset(format!("{name}{end}"));
        let target = Checkpoint::open(&preset(""), LoadFormat::Auto).unwrap();
        let load = LoadFormat::Auto;
        EagleCheckpoint::open(&preset("-eagle"), load, target.spec()).unwrap();
        let mtp = MtpCheckpoint::open(&preset("-mtp"), load, target.spec()).unwrap();
        assert_eq!(mtp.spec().layers(), 3);
        assert!(EagleCheckpoint::open(&preset("-eagle3"), load, target.spec()).is_err());
        assert!(MtpCheckpoint::open(&preset("-eagle"), load, target.spec()).is_err());
    }
}
