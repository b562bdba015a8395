//! EAGLE heads and MTP layers that draft: invisible in the output, invariant in their drafts, as
//! effective as the references.

use std::path::Path;
use std::sync::Arc;

use aquila_compute::WeightFormat;
use aquila_compute::cpu::{CpuBackend, IsaChoice};
use aquila_engine::{EngineConfig, Runner, Scheduler};
use aquila_model::{
    Checkpoint, Decoder, DraftTokens, EagleCheckpoint, LoadFormat, Location, MtpCheckpoint, resolve,
};
use aquila_spec::{
    Algorithm, DraftFor, Eagle, Mtp, MtpRoom, Opening, RecurrentDraft, Registry, Shape,
};
use safetensors::SafeTensors;
use serde_json::Value;

use crate::support::answers::*;
use crate::support::shipped::{Algorithm as Shipped, config, engine as shipped_engine};

/// Which head drafts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Head {
    Eagle,
    /// An EAGLE head that can draft every other token alone.
    MappedEagle,
    Mtp,
    /// The first MTP layer alone, which recurs.
    OneLayer,
    /// MTP layers that take the target's hidden states, each of them.
    Unchained,
}

type Draft = Algorithm<CpuBackend>;

/// A copy of the shipped MTP layers with another config, and without the layers beyond `layers`.
fn changed_mtp(folder: &Path, layers: usize, change: impl FnOnce(&mut Value)) -> Location {
    let Location::Folder(shipped) = resolve("tiny-mtp").unwrap() else { unreachable!() };
    let config = std::fs::read(shipped.join("config.json")).unwrap();
    let mut config: Value = serde_json::from_slice(&config).unwrap();
    config["num_nextn_predict_layers"] = layers.into();
    change(&mut config);
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let bytes = std::fs::read(shipped.join("model.safetensors")).unwrap();
    let all = SafeTensors::deserialize(&bytes).unwrap();
    let within = |name: &str| {
        let number = name.strip_prefix("model.mtp_layers.").and_then(|n| n.split('.').next());
        number.unwrap().parse::<usize>().unwrap() < layers
    };
    let kept: Vec<_> = all.tensors().into_iter().filter(|(name, _)| within(name)).collect();
    let file = safetensors::serialize(kept, None).unwrap();
    std::fs::write(folder.join("model.safetensors"), file).unwrap();
    Location::Folder(folder.into())
}

fn draft(
    head: Head,
    backend: &CpuBackend,
    checkpoint: &Checkpoint,
    target: &Decoder<CpuBackend>,
    config: &EngineConfig,
) -> aquila_model::Result<Draft> {
    let (format, load, spec) = (WeightFormat::Bf16, LoadFormat::Auto, checkpoint.spec());
    let (bounds, slots, dtype) = (config.draft_bounds(), config.slots(), config.kv_dtype);
    let folder = tempfile::tempdir().unwrap();
    let recurrent = |name, head| -> aquila_model::Result<Draft> {
        let head = Box::new(Eagle::new(backend, name, head, bounds)?);
        Ok(Algorithm::on_device(RecurrentDraft::new(backend, head, slots, dtype)?))
    };
    let layers = |location: &Location| {
        MtpCheckpoint::open(location, load, spec)?.load(
            backend,
            format,
            target,
            target.lm_head(),
            &mut |_| (),
        )
    };
    let by_layers = |head| -> aquila_model::Result<Draft> {
        let (shape, requests) = (config.shape, config.max_running_requests);
        let room = MtpRoom { bounds, shape, requests, slots, dtype };
        Ok(Algorithm::on_device(Mtp::new(backend, head, room)?))
    };
    match head {
        Head::Eagle | Head::MappedEagle => {
            let lm_head = if head == Head::Eagle {
                target.lm_head()
            } else {
                let tokens: Vec<u32> = (0..8192).filter(|t| t % 2 == 0).rev().collect();
                DraftTokens::of(checkpoint, &tokens)?.lm_head(backend, format)?
            };
            let head = EagleCheckpoint::open(&resolve("tiny-eagle")?, load, spec)?;
            recurrent("EAGLE", head.load(backend, format, target, lm_head, &mut |_| ())?)
        }
        Head::Mtp => by_layers(layers(&resolve("tiny-mtp")?)?),
        Head::OneLayer => recurrent("MTP", layers(&changed_mtp(folder.path(), 1, |_| ()))?),
        Head::Unchained => {
            let change = |config: &mut Value| config["chain_mtp_hidden_states"] = false.into();
            by_layers(layers(&changed_mtp(folder.path(), 3, change))?)
        }
    }
}

fn engine(head: Head, config: EngineConfig) -> Scheduler {
    let backend = Arc::new(CpuBackend::new(IsaChoice::Auto, 1).unwrap());
    let checkpoint = Checkpoint::open(&resolve("tiny").unwrap(), LoadFormat::Auto).unwrap();
    let (format, positions) = (WeightFormat::Bf16, config.context_length);
    let target = Decoder::load(&*backend, &checkpoint, format, positions, &mut |_| ()).unwrap();
    let draft = draft(head, &backend, &checkpoint, &target, &config).unwrap();
    let runner = Runner::new(backend, target, Some(draft), &config).unwrap();
    crate::support::with_overlap(Scheduler::new(runner, config).unwrap())
}

#[test]
fn heads_are_invisible_in_the_output() {
    let mut prompts: Vec<Vec<u32>> = prompts().into_iter().step_by(4).map(|(_, ids)| ids).collect();
    // Texts that are shorter than the layers look back.
    prompts.extend([vec![17], vec![5, 900]]);
    let modes: [Change; 4] = [greedy, warm, hot, penalized];
    let plain: Vec<Vec<Answer>> = modes
        .iter()
        .map(|&mode| {
            let mut plain = shipped_engine(Shipped::None, config(Shape::PLAIN));
            answers(&mut plain, &prompts, 32, mode)
        })
        .collect();
    for (head, shape, page_size, batch, mode) in [
        (Head::Eagle, shape(5, 1, 6), 4, 8, 0),
        (Head::Eagle, shape(5, 8, 32), 16, 3, 1),
        (Head::MappedEagle, shape(4, 4, 16), 1, 8, 3),
        (Head::Mtp, shape(3, 1, 4), 16, 3, 2),
        (Head::Mtp, shape(3, 4, 16), 1, 8, 3),
        (Head::Mtp, shape(2, 8, 32), 4, 8, 1),
        (Head::OneLayer, shape(4, 2, 8), 4, 3, 0),
        (Head::Unchained, shape(3, 2, 8), 16, 8, 2),
    ] {
        let config = EngineConfig { page_size, max_running_requests: batch, ..config(shape) };
        let got = answers(&mut engine(head, config), &prompts, 32, modes[mode]);
        let what = format!("{head:?}, {shape}, pages of {page_size}, batch {batch}, mode {mode}");
        assert_eq!(texts(&got), texts(&plain[mode]), "{what}");
        assert!(got.iter().all(|h| h.spec.verify_ct > 0), "{what}");
    }
}

#[test]
fn drafts_do_not_depend_on_other_requests_or_memory() {
    // Most are cut, so that answers are what fills the memory.
    let cut = |(index, (_, ids)): (usize, (String, Vec<u32>))| match index % 4 {
        0 => ids,
        _ => ids[ids.len().saturating_sub(48)..].to_vec(),
    };
    let mut prompts: Vec<Vec<u32>> =
        prompts().into_iter().step_by(4).enumerate().map(cut).collect();
    prompts.extend([vec![17], vec![5, 900]]);
    for (head, shape, mode) in [
        (Head::Eagle, shape(4, 4, 12), warm as Change),
        (Head::Mtp, shape(3, 1, 4), greedy),
        (Head::Mtp, shape(3, 4, 12), hot),
        (Head::Unchained, shape(3, 3, 10), greedy),
    ] {
        let what = format!("{head:?}, {shape}");
        same_in_any_company(&what, &prompts, mode, config(shape), 460, |config| {
            engine(head, config)
        });
    }
}

fn table(file: &str) -> Value {
    serde_json::from_str(&std::fs::read_to_string(crate::support::fixture(file)).unwrap()).unwrap()
}

fn compare(head: Head, shape: Shape, table: &Value, key: &str) {
    for (kind, got) in acceptance_of(shape, |config| engine(head, config)) {
        let want = table[&kind][key].as_f64().unwrap();
        println!("{head:?}, {shape}, {kind}: {got:.3}, reference {want:.3}");
        assert!((got / want - 1.0).abs() <= 0.02, "{head:?}, {shape}, {kind}: {got}, not {want}");
    }
}

#[test]
fn chains_of_heads_are_within_2_percent_of_reference() {
    let table = table("tiny-acceptance.json");
    for (head, name, steps) in [(Head::Eagle, "eagle", 8), (Head::Mtp, "mtp", 3)] {
        compare(head, Shape::chain(steps), &table[name], &steps.to_string());
    }
}

#[test]
fn trees_of_heads_are_within_2_percent_of_reference() {
    let table = table("tiny-tree-acceptance.json");
    for (steps, topk, nodes) in [(5, 4, 16), (5, 8, 48)] {
        let key = format!("steps {steps} topk {topk} nodes {nodes}");
        compare(Head::Eagle, shape(steps, topk, nodes), &table["eagle"], &key);
    }
}

#[test]
fn trees_of_mtp_layers_keep_more_than_chains() {
    let table = table("tiny-acceptance.json");
    for (kind, tree) in acceptance_of(shape(3, 4, 16), |config| engine(Head::Mtp, config)) {
        let chain = table["mtp"][&kind]["3"].as_f64().unwrap();
        println!("MTP, {kind}: {tree:.3} in trees of 16 nodes, {chain} in chains");
        assert!(tree > chain, "{kind}: {tree} in trees, {chain} in chains");
    }
}

#[test]
fn steps_beyond_the_layers_are_refused_by_a_sentence() {
    let backend = CpuBackend::new(IsaChoice::Auto, 1).unwrap();
    let checkpoint = Checkpoint::open(&resolve("tiny").unwrap(), LoadFormat::Auto).unwrap();
    let target = Decoder::load(&backend, &checkpoint, WeightFormat::Bf16, 64, &mut |_| ()).unwrap();
    let config = config(Shape::chain(4));
    let refused = draft(Head::Mtp, &backend, &checkpoint, &target, &config).err().unwrap();
    let sentence = "4 draft steps: the head has 3 MTP layers, one for each step";
    assert!(refused.to_string().starts_with(sentence), "{refused}");
}

#[test]
fn heads_are_found_by_name_and_take_what_they_say() {
    let backend = CpuBackend::new(IsaChoice::Auto, 1).unwrap();
    let target = Checkpoint::open(&resolve("tiny").unwrap(), LoadFormat::Auto).unwrap();
    let format = WeightFormat::Bf16;
    let decoder = Decoder::load(&backend, &target, format, 64, &mut |_| ()).unwrap();
    let registry = Registry::built_in();
    let config = config(shape(3, 2, 6));
    let allowance = config.allowance(format);
    let few: Vec<u32> = (0..100).collect();
    for (called, name, groups) in [("Eagle", "EAGLE", 1), ("nextn", "MTP", 3)] {
        let entry = registry.find(called).unwrap().unwrap();
        let DraftFor::Model(draft) = entry.draft_for("tiny") else { panic!("{called}") };
        let location = resolve(&draft).unwrap();
        let mut opening = Opening { draft: Some((&draft, &location)), ..Opening::new(&target) };
        let opened = entry.open(&opening).unwrap();
        let algorithm = opened.load(&backend, &decoder, &allowance).unwrap();
        let declaration = algorithm.declaration();
        assert_eq!((declaration.name, declaration.groups.len()), (name, groups));
        // Keys and values of two heads of 64 in each group.
        let needs = opened.needs(&allowance);
        assert_eq!(needs.kv_per_token, groups as u64 * 1024);
        // A token map takes its rows of the head, and less room for logits.
        opening.token_map = Some(&few);
        let mapped = entry.open(&opening).unwrap().needs(&allowance);
        assert_eq!(mapped.weights, needs.weights + 100 * 384 * 2);
        let logits = allowance.bounds.outputs * (8192 - 100) * 4;
        assert_eq!(mapped.scratch, needs.scratch - logits as u64);
    }
    // Where nobody names a draft, MTP layers are looked for in the model itself.
    let entry = registry.find("MTP").unwrap().unwrap();
    assert_eq!(entry.draft_for("other"), DraftFor::Itself);
    let tiny = resolve("tiny").unwrap();
    let opening = Opening { draft: Some(("tiny", &tiny)), ..Opening::new(&target) };
    let refused = entry.open(&opening).err().unwrap().to_string();
    assert!(refused.contains("has no MTP layers"), "{refused}");
}
