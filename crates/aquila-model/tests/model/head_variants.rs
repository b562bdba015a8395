//! The variants of EAGLE-3 heads compute what their publishers define: each is compared with the
//! definition, written once more row by row in f64.

use std::collections::BTreeMap;

use aquila_compute::cpu::{CpuBackend, IsaChoice};
use aquila_compute::{Backend, DType, ForwardPlan, HostTensor};
use aquila_model::Hidden;
use half::bf16;
use serde_json::json;

use crate::head::{Pair, node};
use crate::head_files::{Head, head, target};
use crate::sequence::Sequence;

const HIDDEN: usize = 64;
const HEAD_DIM: usize = 16;
/// Query heads that share one key and value head.
const GROUP: usize = 2;
const ROWS: usize = 6;

/// Random bfloat16 values around `middle`.
fn random(head: &mut Head, name: &str, shape: Vec<usize>, middle: f32) {
    let mut state = name.bytes().fold(7u32, |s, b| s.wrapping_mul(31).wrapping_add(b.into()));
    let values = (0..shape.iter().product()).flat_map(|_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        bf16::from_f32(middle + (state >> 8) as f32 / (1 << 24) as f32 - 0.5).to_le_bytes()
    });
    let bytes = values.collect();
    head.set(name, DType::Bf16, shape, bytes);
}

/// The definition: what of it holds is decided by the flags and by the tensors that are there.
struct Definition<'a> {
    tensors: &'a BTreeMap<String, HostTensor>,
    table: Vec<f64>,
    norm_before_residual: bool,
    norm_output: bool,
    /// What the names of each layer begin with.
    layers: Vec<String>,
    /// The norm of what layers behind the first read.
    later_norm: &'static str,
    /// Keys and values of each layer's rows.
    rows: Vec<Vec<(Vec<f64>, Vec<f64>)>>,
}

fn wide(tensor: &HostTensor) -> Vec<f64> {
    tensor.to_f32().unwrap().into_iter().map(f64::from).collect()
}

fn normed(x: &[f64], weight: &[f64]) -> Vec<f64> {
    let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
    x.iter().zip(weight).map(|(x, w)| x / (mean + 1e-6).sqrt() * w).collect()
}

fn added(a: &[f64], b: &[f64]) -> Vec<f64> {
    a.iter().zip(b).map(|(a, b)| a + b).collect()
}

impl Definition<'_> {
    fn get(&self, name: &str) -> Option<Vec<f64>> {
        self.tensors.get(name).map(wide)
    }

    fn times(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let weight = self.get(&format!("{name}.weight")).unwrap();
        let dot = |row: &[f64]| row.iter().zip(x).map(|(w, x)| w * x).sum();
        let y: Vec<f64> = weight.chunks(x.len()).map(dot).collect();
        match self.get(&format!("{name}.bias")) {
            Some(bias) => added(&y, &bias),
            None => y,
        }
    }

    fn norm(&self, name: &str, x: &[f64]) -> Vec<f64> {
        normed(x, &self.get(&format!("{name}.weight")).unwrap())
    }

    /// The hidden state that the target's become.
    fn joined(&self, features: &[f64]) -> Vec<f64> {
        let mut features = features.to_vec();
        if self.tensors.contains_key("input_norm.weight") {
            features = self.norm("input_norm", &features);
        }
        if self.tensors.contains_key("fc_norm.0.weight") {
            let parts = features.chunks(HIDDEN).enumerate();
            features = parts.flat_map(|(i, x)| self.norm(&format!("fc_norm.{i}"), x)).collect();
        }
        match self.tensors.contains_key("fc.weight") {
            true => self.times("fc", &features),
            false => features,
        }
    }

    /// Queries or keys: normed where there is a norm, and turned.
    fn turned(&self, mut x: Vec<f64>, norm: &str, position: usize) -> Vec<f64> {
        for head in x.chunks_mut(HEAD_DIM) {
            if let Some(weight) = self.get(&format!("{norm}.weight")) {
                head.copy_from_slice(&normed(head, &weight));
            }
            let half = HEAD_DIM / 2;
            for i in 0..half {
                let angle = position as f64 * 1e4f64.powf(-(i as f64) / half as f64);
                let (a, b) = (head[i], head[i + half]);
                head[i] = a * angle.cos() - b * angle.sin();
                head[i + half] = b * angle.cos() + a * angle.sin();
            }
        }
        x
    }

    /// The gated part whose names begin with `prefix`.
    fn gated(&self, prefix: &str, x: &[f64]) -> Vec<f64> {
        let gate = self.times(&format!("{prefix}.gate_proj"), x);
        let up = self.times(&format!("{prefix}.up_proj"), x);
        let silu = |(g, up): (&f64, f64)| g / (1.0 + (-g).exp()) * up;
        let inner: Vec<f64> = gate.iter().zip(up).map(silu).collect();
        self.times(&format!("{prefix}.down_proj"), &inner)
    }

    /// The two likeliest experts of a row, weighted to sum to 1.
    fn experts(&self, prefix: &str, x: &[f64]) -> Vec<f64> {
        let logits = self.times(&format!("{prefix}.gate"), x);
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
        let total = logits[order[0]].exp() + logits[order[1]].exp();
        let mut sum = vec![0.0; x.len()];
        for &expert in &order[..2] {
            let made = self.gated(&format!("{prefix}.experts.{expert}"), x);
            let weight = logits[expert].exp() / total;
            sum.iter_mut().zip(made).for_each(|(s, m)| *s += weight * m);
        }
        sum
    }

    /// Adds a row that sees all rows before it; answers its logits and what the next takes.
    fn row(&mut self, token: u32, hidden: &[f64], position: usize) -> (Vec<f64>, Vec<f64>) {
        let embedding = &self.table[token as usize * HIDDEN..][..HIDDEN];
        let mut x = hidden.to_vec();
        for (number, layer) in self.layers.clone().iter().enumerate() {
            let input = if number == 0 {
                let hidden = self.norm(&format!("{layer}.hidden_norm"), &x);
                let embedding = self.norm(&format!("{layer}.input_layernorm"), embedding);
                let both = [embedding, hidden.clone()].concat();
                x = if self.norm_before_residual { hidden } else { x };
                both
            } else {
                self.norm(&format!("{layer}.{}", self.later_norm), &x)
            };
            let at = |part: &str| format!("{layer}.self_attn.{part}");
            let q = self.times(&at("q_proj"), &input);
            let k = self.times(&at("k_proj"), &input);
            let key = self.turned(k, &at("k_norm"), position);
            let value = self.times(&at("v_proj"), &input);
            self.rows[number].push((key, value));
            let rows = &self.rows[number];
            let mut attended = Vec::new();
            for (h, q) in self.turned(q, &at("q_norm"), position).chunks(HEAD_DIM).enumerate() {
                let part = h / GROUP * HEAD_DIM..(h / GROUP + 1) * HEAD_DIM;
                let dot =
                    |k: &[f64]| q.iter().zip(&k[part.clone()]).map(|(q, k)| q * k).sum::<f64>();
                let scores: Vec<f64> = rows.iter().map(|(k, _)| (dot(k) / 4.0).exp()).collect();
                let total: f64 = scores.iter().sum();
                attended.extend(part.clone().map(|i| {
                    let weighed = rows.iter().zip(&scores).map(|((_, v), s)| v[i] * s / total);
                    weighed.sum::<f64>()
                }));
            }
            x = added(&x, &self.times(&at("o_proj"), &attended));
            let inner = self.norm(&format!("{layer}.post_attention_layernorm"), &x);
            let mlp = format!("{layer}.mlp");
            let made = match self.tensors.contains_key(&format!("{mlp}.gate.weight")) {
                true => self.experts(&mlp, &inner),
                false => self.gated(&mlp, &inner),
            };
            x = added(&x, &made);
        }
        let last = self.norm("norm", &x);
        (self.times("lm_head", &last), if self.norm_output { last } else { x })
    }
}

#[track_caller]
fn assert_near(ours: &[f32], defined: &[f64], what: &str) {
    assert_eq!(ours.len(), defined.len(), "{what}");
    let largest = defined.iter().fold(0f64, |m, x| m.max(x.abs()));
    for (i, (&o, &d)) in ours.iter().zip(defined).enumerate() {
        let off = (f64::from(o) - d).abs();
        assert!(off < 1e-4 * largest, "{what}, element {i}: {o} is off by {off} from {d}");
    }
}

/// A head whose every weight is random, with a plain rope.
fn any_head() -> Head {
    let mut head = head();
    head.config["rope_parameters"] = json!({ "rope_theta": 10000.0 });
    let norms: Vec<String> =
        head.tensors.keys().filter(|name| name.contains("norm")).cloned().collect();
    norms.iter().for_each(|name| random(&mut head, name, vec![HIDDEN], 1.0));
    random(&mut head, "fc.weight", vec![HIDDEN, 2 * HIDDEN], 0.0);
    head
}

/// Runs six rows of a text and two steps behind them, and compares all with the definition.
fn check(what: &str, mut head: Head, norm_before_residual: bool, norm_output: bool) {
    let folder = tempfile::tempdir().unwrap();
    let location = head.write(folder.path());
    let target = target();
    let pair = Pair::load(CpuBackend::new(IsaChoice::Auto, 1).unwrap(), &target, &location);
    let ids: Vec<u32> = vec![9, 41, 300, 7, 7, 120, 66];
    let spec = pair.head.spec().clone();

    // What a head without `fc` reads is what the target's language-model head reads.
    let captured = match spec.aux_count {
        0 => {
            let mut capture = pair.target.capture_final(&pair.backend, ROWS).unwrap();
            let mut sequence = Sequence::in_order(&pair.backend, &pair.target, ROWS);
            sequence.run_with(&ids, ROWS, Some(&mut capture));
            capture
        }
        _ => pair.capture(&ids[..ROWS]),
    };
    let features = pair.backend.read(captured.rows(), ROWS).unwrap();
    let width = features.len() / ROWS;
    let mut drafting = pair.drafting(ROWS, 16);
    let logits = drafting.extend(&ids, &captured, 0, ROWS);

    // A head without tables of its own reads those of the target.
    let own = head.tensors.get("embed_tokens.weight").cloned();
    let table = own.unwrap_or_else(|| target.tensors().get("model.embed_tokens.weight").unwrap());
    if !head.tensors.contains_key("lm_head.weight") {
        let theirs = target.tensors().get("lm_head.weight").unwrap();
        head.tensors.insert("lm_head.weight".into(), theirs);
    }
    let mut definition = Definition {
        tensors: &head.tensors,
        table: wide(&table),
        norm_before_residual,
        norm_output,
        later_norm: match head.tensors.contains_key("layers.1.hidden_norm.weight") {
            true => "hidden_norm",
            false => "input_layernorm",
        },
        rows: vec![Vec::new(); spec.layer.layers.len()],
        layers: match spec.layer.layers.len() {
            1 => vec!["midlayer".into()],
            layers => (0..layers).map(|number| format!("layers.{number}")).collect(),
        },
    };
    let columns = spec.draft_vocab_size;
    let mut state = Vec::new();
    for (p, features) in features.chunks(width).enumerate() {
        let features: Vec<f64> = features.iter().copied().map(f64::from).collect();
        let hidden = definition.joined(&features);
        let (defined, next) = definition.row(ids[p + 1], &hidden, p);
        assert_near(&logits[p * columns..][..columns], &defined, &format!("{what}, row {p}"));
        state = next;
    }
    for (step, from) in [(0, Hidden::Seeds), (1, Hidden::Last)] {
        let mut plan = ForwardPlan::default();
        let tail: Vec<u32> = (0..=step).map(|i| (ROWS + i) as u32).collect();
        node(&mut plan, 33, if step == 0 { ROWS as u32 - 1 } else { 0 }, ROWS, &tail);
        let logits = drafting.expand(plan, from);
        let (defined, next) = definition.row(33, &state, ROWS + step);
        assert_near(&logits, &defined, &format!("{what}, step {step}"));
        state = next;
    }
}

#[test]
fn a_head_without_variants_is_as_defined() {
    check("plain", any_head(), false, false);
}

#[test]
fn norms_of_the_targets_hidden_states_are_as_defined() {
    let mut together = any_head();
    random(&mut together, "input_norm.weight", vec![2 * HIDDEN], 1.0);
    check("input_norm", together, false, false);
    let mut singly = any_head();
    random(&mut singly, "fc_norm.0.weight", vec![HIDDEN], 1.0);
    random(&mut singly, "fc_norm.1.weight", vec![HIDDEN], 1.0);
    singly.config["fc_norm"] = json!(true);
    check("fc_norm", singly, false, false);
}

#[test]
fn the_older_names_of_norms_are_known() {
    let folder = tempfile::tempdir().unwrap();
    let mut head = any_head();
    head.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = json!([0, 1, 2]);
    random(&mut head, "fc.weight", vec![HIDDEN, 3 * HIDDEN], 0.0);
    for i in 0..3 {
        random(&mut head, &format!("fc_norm.{i}.weight"), vec![HIDDEN], 1.0);
    }
    let backend = || CpuBackend::new(IsaChoice::Auto, 1).unwrap();
    let logits = |head: &Head| {
        let pair = Pair::load(backend(), &target(), &head.write(folder.path()));
        let ids: Vec<u32> = (3..14).collect();
        let captured = pair.capture(&ids[..10]);
        pair.drafting(10, 10).extend(&ids, &captured, 0, 10)
    };
    let new = logits(&head);
    for (i, name) in ["low", "mid", "high"].into_iter().enumerate() {
        head.rename(&format!("fc_norm.{i}."), &format!("aux_norm_{name}."));
    }
    head.config["eagle_config"]["use_aux_norm"] = json!(true);
    assert!(logits(&head) == new);
}

#[test]
fn residual_and_next_step_begin_as_defined() {
    let mut head = any_head();
    head.config["norm_before_residual"] = json!(true);
    check("norm_before_residual", head, true, false);
    let mut head = any_head();
    head.config["eagle_config"]["norm_output"] = json!(true);
    check("norm_output", head, false, true);
    let mut both = any_head();
    both.config["eagle_config"]["norm_before_residual"] = json!(true);
    both.config["norm_output"] = json!(true);
    check("both", both, true, true);
    // Speculators mean the norm to come first where they are silent.
    let mut silent = any_head();
    silent.config["speculators_model_type"] = json!("eagle3");
    silent.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = json!([1, 3]);
    check("speculators", silent, true, false);
}

#[test]
fn biases_and_norms_of_heads_are_as_defined() {
    let mut head = any_head();
    random(&mut head, "fc.bias", vec![HIDDEN], 0.0);
    for (part, width) in [("q", 64), ("k", 32), ("v", 32)] {
        random(&mut head, &format!("midlayer.self_attn.{part}_proj.bias"), vec![width], 0.0);
    }
    check("biases", head, false, false);
    let mut head = any_head();
    random(&mut head, "midlayer.self_attn.q_norm.weight", vec![HEAD_DIM], 1.0);
    random(&mut head, "midlayer.self_attn.k_norm.weight", vec![HEAD_DIM], 1.0);
    check("qk norms", head, false, false);
}

#[test]
fn a_head_without_fc_reads_the_final_normed_stream() {
    let mut head = any_head();
    head.tensors.remove("fc.weight");
    head.config["eagle_config"] = json!({ "use_aux_hidden_state": false });
    check("no fc", head, false, false);
}

#[test]
fn a_head_of_the_whole_vocabulary_may_borrow_lm_head() {
    let mut head = any_head();
    head.config["draft_vocab_size"] = json!(null);
    head.tensors.remove("d2t");
    head.tensors.remove("lm_head.weight");
    check("borrowed lm_head", head, false, false);
    let mut own = any_head();
    random(&mut own, "embed_tokens.weight", vec![320, HIDDEN], 0.0);
    check("own embedding", own, false, false);
}

/// Experts in place of a layer's feed-forward part.
fn set_experts(head: &mut Head, layer: &str) {
    let inner = 24;
    head.tensors.retain(|name, _| !name.starts_with(&format!("{layer}.mlp.")));
    random(head, &format!("{layer}.mlp.gate.weight"), vec![5, HIDDEN], 0.0);
    for expert in 0..5 {
        let at = |part: &str| format!("{layer}.mlp.experts.{expert}.{part}.weight");
        random(head, &at("gate_proj"), vec![inner, HIDDEN], 0.0);
        random(head, &at("up_proj"), vec![inner, HIDDEN], 0.0);
        random(head, &at("down_proj"), vec![HIDDEN, inner], 0.0);
    }
    head.config["num_experts"] = json!(5);
    head.config["num_experts_per_tok"] = json!(2);
    head.config["moe_intermediate_size"] = json!(inner);
    head.config["norm_topk_prob"] = json!(true);
}

/// A second layer behind the first, its norm of this name.
fn add_layer(head: &mut Head, norm: &str) {
    head.rename("midlayer.", "layers.0.");
    let first: Vec<(String, Vec<usize>)> =
        head.tensors.iter().map(|(name, t)| (name.clone(), t.shape().to_vec())).collect();
    for (name, mut shape) in first {
        let Some(part) = name.strip_prefix("layers.0.") else { continue };
        if ["hidden_norm", "input_layernorm"].iter().any(|n| part.starts_with(n)) {
            continue;
        }
        if ["q_proj", "k_proj", "v_proj"].iter().any(|p| part.contains(p)) {
            shape[1] = HIDDEN;
        }
        let middle = if part.contains("norm") { 1.0 } else { 0.0 };
        random(head, &format!("layers.1.{part}"), shape, middle);
    }
    random(head, &format!("layers.1.{norm}.weight"), vec![HIDDEN], 1.0);
    head.config["num_hidden_layers"] = json!(2);
}

#[test]
fn heads_of_several_layers_are_as_defined() {
    for norm in ["input_layernorm", "hidden_norm"] {
        let mut head = any_head();
        add_layer(&mut head, norm);
        check(&format!("two layers by {norm}"), head, false, false);
    }
}

#[test]
fn heads_with_experts_are_as_defined() {
    let mut one = any_head();
    set_experts(&mut one, "midlayer");
    check("experts", one, false, false);
    let mut second = any_head();
    add_layer(&mut second, "input_layernorm");
    set_experts(&mut second, "layers.1");
    check("experts in the second layer", second, false, false);
}
