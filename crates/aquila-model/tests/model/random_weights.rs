//! Random weights: the same everywhere, of a sensible size, and enough to run a model.

use aquila_compute::cpu::{CpuBackend, IsaChoice};
use aquila_compute::{Backend, KvDtype, PlanBounds, WeightFormat};
use aquila_model::{Checkpoint, Decoder, Dummy, LoadFormat, Location, TensorSource, memory};

use crate::sequence::{Sequence, fixture};

fn preset(name: &str) -> Checkpoint {
    Checkpoint::open(&Location::Preset(name.into()), LoadFormat::Auto).unwrap()
}

#[test]
fn random_weights_depend_on_seed_and_name_alone() {
    let bench = preset("bench");
    let name = "model.layers.3.self_attn.k_proj.weight";
    let other = "model.layers.4.self_attn.k_proj.weight";
    let first = bench.tensors().get(name).unwrap();
    let again = Dummy::new(bench.spec(), 0).get(name).unwrap();
    assert_eq!(first.bytes(), again.bytes());
    assert_ne!(first.bytes(), bench.tensors().get(other).unwrap().bytes());
    assert_ne!(first.bytes(), Dummy::new(bench.spec(), 1).get(name).unwrap().bytes());

    let values = first.to_f32().unwrap();
    let n = values.len() as f32;
    let mean = values.iter().sum::<f32>() / n;
    let deviation = (values.iter().map(|v| (v - mean).powi(2)).sum::<f32>() / n).sqrt();
    assert!(mean.abs() < 1e-3 && (deviation - 0.02).abs() < 1e-3, "{mean} {deviation}");
    let norm = bench.tensors().get("model.norm.weight").unwrap().to_f32().unwrap();
    assert!(norm.iter().all(|&w| w == 1.0));
}

#[test]
fn the_presets_are_the_models_they_are_named_for() {
    let bench = preset("bench");
    let spec = bench.spec();
    assert_eq!((spec.hidden_size, spec.layers.len()), (1536, 16));
    let heads = spec.first_attention().heads;
    assert_eq!((heads.heads, heads.kv_heads, heads.head_dim), (12, 4, 128));
    assert_eq!((spec.vocab_size, spec.max_positions, spec.tied_embeddings), (32000, 4096, false));
    // As published: 8.03 billion, and 128 KiB of bfloat16 keys and values per token.
    let llama = preset("llama-3.1-8b");
    assert_eq!(llama.spec().parameters(), 8_030_261_248);
    assert_eq!(memory::kv_bytes_per_token(llama.spec(), KvDtype::Bf16), 128 * 1024);
    assert_eq!(llama.eos_token_ids(), [128001, 128008, 128009]);
}

#[test]
fn a_config_alone_runs_with_random_weights() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::copy(fixture("qwen3").join("config.json"), folder.path().join("config.json")).unwrap();
    let location = Location::Folder(folder.path().into());
    assert!(Checkpoint::open(&location, LoadFormat::Auto).is_err());
    let checkpoint = Checkpoint::open(&location, LoadFormat::Dummy { seed: 7 }).unwrap();
    let backend = CpuBackend::new(IsaChoice::Auto, 1).unwrap();
    let decoder =
        Decoder::load(&backend, &checkpoint, WeightFormat::Bf16, 64, &mut |_| {}).unwrap();
    for absurd in [0, usize::MAX] {
        let load = Decoder::load(&backend, &checkpoint, WeightFormat::Bf16, absurd, &mut |_| {});
        assert!(load.err().unwrap().to_string().contains("context"));
    }
    let logits = Sequence::in_order(&backend, &decoder, 8).run(&[1, 2, 3, 4], 4);
    assert_eq!(logits.len(), 4 * 320);
    assert!(logits.iter().all(|x| x.is_finite()) && logits.iter().any(|&x| x != 0.0));
}

#[test]
fn progress_ends_at_all_bytes_and_estimates_are_exact() {
    let backend = CpuBackend::new(IsaChoice::Auto, 1).unwrap();
    for name in ["llama-bias", "qwen2", "qwen3"] {
        let location = Location::Folder(fixture(name));
        let checkpoint = Checkpoint::open(&location, LoadFormat::Auto).unwrap();
        let mut reports = Vec::new();
        let load = &mut |p| reports.push(p);
        let decoder = Decoder::load(&backend, &checkpoint, WeightFormat::Bf16, 64, load).unwrap();
        assert!(reports.windows(2).all(|w| w[0].done_bytes < w[1].done_bytes));
        let last = reports.last().unwrap();
        assert_eq!(last.done_bytes, last.total_bytes, "{name}");

        // Everything is stored as bfloat16, so bytes tell parameters, and those tell the estimate:
        // vectors are kept as float32, and a tied table is kept twice.
        let spec = decoder.spec();
        assert_eq!(checkpoint.tensor_bytes(), 2 * spec.parameters(), "{name}");
        let vectors: usize =
            spec.tensors().filter(|t| t.shape.len() == 1).map(|t| t.shape[0]).sum();
        let table = if spec.tied_embeddings { spec.vocab_size * spec.hidden_size } else { 0 };
        let want = checkpoint.tensor_bytes() + 2 * (vectors + table) as u64;
        assert_eq!(memory::weight_bytes(spec, WeightFormat::Bf16), want, "{name}");
        assert!(memory::weight_bytes(spec, WeightFormat::Int8) < want);
        let shape = decoder.spec().kv_shapes(10, KvDtype::F32)[0];
        let per_token = memory::kv_bytes_per_token(spec, KvDtype::F32);
        assert_eq!(shape.bytes_per_slot() as u64, per_token);
        assert!(backend.kv(shape).is_ok());
        let bounds = PlanBounds { rows: 3, outputs: 2, slots: 64 };
        assert!(memory::scratch_bytes(spec, bounds) > 0);
    }
}
