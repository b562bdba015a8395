//! The EAGLE head and the MTP layers that ship with `tiny`: how many of their drafts the target
//! keeps, against the figures of the code that trained them.

use aquila_compute::cpu::{CpuBackend, IsaChoice};
use aquila_compute::{AttentionSpan, Backend, ForwardPlan, KvDtype, WeightFormat};
use aquila_model::RecurrentHead as _;
use aquila_model::{
    Capture, Checkpoint, Decoder, EagleCheckpoint, FusedHead, Hidden, LmHead, LoadFormat,
    MtpCheckpoint,
};

use crate::head::{POSITIONS, node};
use crate::head_acceptance::{Text, compare, texts};
use crate::sequence::{Sequence, argmax, bounds, chunk, shipped};

/// Steps of the EAGLE chains that are compared.
const STEPS: usize = 8;

pub struct Target {
    pub backend: CpuBackend,
    pub checkpoint: Checkpoint,
    pub decoder: Decoder<CpuBackend>,
}

impl Target {
    pub fn tiny() -> Self {
        // Tests run side by side, so each keeps to one core.
        let backend = CpuBackend::new(IsaChoice::Auto, 1).unwrap();
        let checkpoint = Checkpoint::open(&shipped("tiny"), LoadFormat::Auto).unwrap();
        let format = WeightFormat::Bf16;
        let decoder = Decoder::load(&backend, &checkpoint, format, POSITIONS, &mut |_| {}).unwrap();
        Self { backend, checkpoint, decoder }
    }

    pub fn eagle(&self, lm_head: LmHead<CpuBackend>) -> FusedHead<CpuBackend> {
        let spec = self.checkpoint.spec();
        let head = EagleCheckpoint::open(&shipped("tiny-eagle"), LoadFormat::Auto, spec).unwrap();
        head.load(&self.backend, WeightFormat::Bf16, &self.decoder, lm_head, &mut |_| {}).unwrap()
    }

    pub fn mtp(&self) -> FusedHead<CpuBackend> {
        let spec = self.checkpoint.spec();
        let head = MtpCheckpoint::open(&shipped("tiny-mtp"), LoadFormat::Auto, spec).unwrap();
        let lm_head = self.decoder.lm_head();
        head.load(&self.backend, WeightFormat::Bf16, &self.decoder, lm_head, &mut |_| {}).unwrap()
    }

    pub fn capture(&self, ids: &[u32]) -> Capture<CpuBackend> {
        let mut capture = self.decoder.capture_final(&self.backend, ids.len()).unwrap();
        let mut sequence = Sequence::in_order(&self.backend, &self.decoder, ids.len());
        sequence.run_with(ids, ids.len(), Some(&mut capture));
        capture
    }
}

/// The best token of each row of logits.
fn best(logits: &[f32], width: usize) -> Vec<u32> {
    logits.chunks(width).map(argmax).collect()
}

/// For every token of the text's answer: the chain that the EAGLE head drafts after it.
fn eagle_chains(target: &Target, head: &FusedHead<CpuBackend>, text: &Text) -> Vec<Vec<u32>> {
    let Text { ids, prompt, .. } = text;
    let (backend, all) = (&target.backend, ids.len() - 1);
    let vocabulary = target.checkpoint.spec().vocab_size;
    let captured = target.capture(&ids[..all]);
    let slots = all * (1 + STEPS);
    let mut kv = head.kv(backend, slots, KvDtype::F32).unwrap();
    let mut scratch = head.scratch(backend, bounds(all, 64 * slots)).unwrap();
    let mut plan = ForwardPlan::default();
    let list: Vec<u32> = (0..all as u32).collect();
    chunk(&mut plan, &ids[1..], &list, 0, all);
    plan.sources.extend(0..all as u32);
    head.extend(backend, &plan, Some(captured.rows()), &mut kv, &mut scratch).unwrap();
    let logits = backend.read(scratch.logits(), all).unwrap();
    let firsts = best(&logits, vocabulary).split_off(prompt - 1);
    let mut chains: Vec<Vec<u32>> = firsts.iter().map(|&token| vec![token]).collect();
    for step in 1..STEPS {
        let mut plan = ForwardPlan::default();
        for (c, chain) in chains.iter().enumerate() {
            let row = prompt - 1 + c;
            let tail: Vec<u32> = (0..step).map(|s| (all + row * STEPS + s) as u32).collect();
            let source = if step == 1 { row } else { c };
            node(&mut plan, *chain.last().unwrap(), source as u32, row + 1, &tail);
        }
        plan.outputs = (0..plan.rows() as u32).collect();
        let from = if step == 1 { Hidden::Seeds } else { Hidden::Last };
        head.expand(backend, &plan, from, &mut kv, &mut scratch).unwrap();
        let next = best(&backend.read(scratch.logits(), plan.rows()).unwrap(), vocabulary);
        chains.iter_mut().zip(next).for_each(|(chain, token)| chain.push(token));
    }
    chains
}

/// For every token of the text's answer: the chain that the MTP layers draft after it. Each layer
/// runs in one pass: first the rows that rest on the text, then those that rest on drafts.
fn mtp_chains(target: &Target, head: &FusedHead<CpuBackend>, text: &Text) -> Vec<Vec<u32>> {
    let Text { ids, prompt, .. } = text;
    let (backend, all) = (&target.backend, ids.len() - 1);
    let vocabulary = target.checkpoint.spec().vocab_size;
    let mut states = target.capture(&ids[..all]).into_rows();
    let answers = ids.len() - prompt;
    let rows = all + head.layers() * answers;
    let mut scratch = head.layer_scratch(backend, bounds(rows, 8 * rows)).unwrap();
    let mut chains: Vec<Vec<u32>> = vec![Vec::new(); answers];
    for layer in 0..head.layers() {
        let mut kv = head.kv(backend, rows, KvDtype::F32).unwrap();
        let mut plan = ForwardPlan::default();
        let certain = all - layer;
        let list: Vec<u32> = (0..certain as u32).collect();
        chunk(&mut plan, &ids[1 + layer..], &list, 0, certain);
        plan.positions.iter_mut().for_each(|p| *p += layer as u32);
        plan.sources.extend(0..certain as u32);
        if layer == 0 {
            plan.outputs = (*prompt as u32 - 1..all as u32).collect();
        } else {
            plan.outputs.clear();
        }
        for (c, chain) in chains.iter().enumerate() {
            let (bonus, tree_start) = (prompt + c, plan.tree_slots.len() as u32);
            for (i, &token) in chain.iter().enumerate() {
                let row = plan.rows() as u32;
                plan.tree_slots.push(row);
                plan.tokens.push(token);
                plan.positions.push((bonus + i) as u32);
                plan.writes.push(row);
                plan.sources.push(match i {
                    0 => bonus - layer,
                    _ => certain + 1 + c * (layer - 1) + i - 1,
                } as u32);
                let prefix = (bonus - layer) as u32;
                plan.spans.push(AttentionSpan { start: 0, prefix, tree_start, tail: i as u32 + 1 });
            }
            if layer > 0 {
                plan.outputs.push(plan.rows() as u32 - 1);
            }
        }
        let mut made = backend.rows(rows, head.spec().hidden_size).unwrap();
        head.run(backend, layer, &plan, &states, &mut kv[0], &mut scratch, &mut made).unwrap();
        let logits = backend.read(scratch.logits(), answers).unwrap();
        let next = best(&logits, vocabulary);
        chains.iter_mut().zip(next).for_each(|(chain, token)| chain.push(token));
        states = made;
    }
    chains
}

#[test]
fn eagle_and_mtp_chains_are_within_2_percent_of_training() {
    let target = Target::tiny();
    let texts = texts(&target.backend, &target.decoder);
    let head = target.eagle(target.decoder.lm_head());
    let chains: Vec<_> = texts.iter().map(|text| eagle_chains(&target, &head, text)).collect();
    compare("eagle", texts, &chains, STEPS);
    let head = target.mtp();
    assert_eq!(head.layers(), 3);
    let chains: Vec<_> = texts.iter().map(|text| mtp_chains(&target, &head, text)).collect();
    compare("mtp", texts, &chains, head.layers());
}
