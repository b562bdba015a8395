//! A row's bits do not depend on chunks, slots, threads, instruction sets or company.

use aquila_compute::cpu::{CpuBackend, Isa, IsaChoice};
use aquila_compute::{AttentionSpan, Backend, ForwardPlan, KvDtype, WeightFormat};
use aquila_model::Decoder;
use proptest::prelude::*;

use crate::sequence::{Sequence, bounds, chunk, golden, load};

const FIXTURES: [&str; 5] = ["llama3-rope", "llama-bias", "qwen2", "qwen2-yarn", "qwen3"];
const ROOM: usize = 128;

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// A longer text than the golden one, so that attention crosses a block of 64 positions.
fn long_text(name: &str) -> Vec<u32> {
    let golden = golden(name);
    let mut ids = golden.input_ids.clone();
    ids.extend(golden.greedy_ids);
    ids.extend(golden.input_ids);
    ids.truncate(100);
    ids
}

fn in_chunks(
    backend: &CpuBackend,
    decoder: &Decoder<CpuBackend>,
    ids: &[u32],
    slots: Vec<u32>,
    dtype: KvDtype,
    mut size: impl FnMut() -> usize,
) -> Vec<u32> {
    let mut sequence = Sequence::new(backend, decoder, slots, dtype);
    let mut all = Vec::new();
    while sequence.done < ids.len() {
        let to = (sequence.done + size()).min(ids.len());
        all.extend(bits(&sequence.run(ids, to)));
    }
    all
}

#[test]
fn every_chunk_size_gives_the_same_bits() {
    let backend = CpuBackend::new(IsaChoice::Auto, 2).unwrap();
    for (name, format) in
        FIXTURES.into_iter().zip([WeightFormat::Bf16, WeightFormat::Int8].iter().cycle())
    {
        let decoder = load(&backend, name, *format);
        let ids = golden(name).input_ids;
        let run = |size: usize| {
            let slots = (0..ROOM as u32).collect();
            in_chunks(&backend, &decoder, &ids, slots, KvDtype::F32, || size)
        };
        let whole = run(ids.len());
        for size in 1..ids.len() {
            assert!(run(size) == whole, "{name}: chunks of {size}");
        }
    }
}

#[test]
fn every_instruction_set_and_thread_count_gives_the_same_bits() {
    for name in FIXTURES {
        let ids = long_text(name);
        for format in [WeightFormat::Bf16, WeightFormat::F32, WeightFormat::Int8] {
            for dtype in [KvDtype::F32, KvDtype::Bf16] {
                let mut first = None;
                for isa in Isa::available() {
                    for threads in [1, 2] {
                        let backend = CpuBackend::new(IsaChoice::Only(isa), threads).unwrap();
                        let decoder = load(&backend, name, format);
                        let slots = (0..ROOM as u32).collect();
                        let ours = in_chunks(&backend, &decoder, &ids, slots, dtype, || 33);
                        let want = first.get_or_insert_with(|| ours.clone());
                        assert!(
                            ours == *want,
                            "{name}, {format:?}, {dtype:?}: {isa} with {threads} threads"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn a_row_computes_the_same_among_any_number_of_others() {
    let backend = CpuBackend::new(IsaChoice::Auto, 2).unwrap();
    let decoder = load(&backend, "qwen3", WeightFormat::Bf16);
    let ids = golden("qwen3").input_ids;
    let vocabulary = decoder.spec().vocab_size;
    let prompt = 12;
    let alone = {
        let mut sequence = Sequence::in_order(&backend, &decoder, ROOM);
        sequence.run(&ids, prompt);
        bits(&sequence.run(&ids, prompt + 1))
    };
    for company in 1..=64 {
        let room = company * ROOM;
        let mut kv = decoder.kv(&backend, room, KvDtype::F32).unwrap();
        let mut scratch = decoder.scratch(&backend, bounds(company * prompt, room)).unwrap();
        let texts: Vec<Vec<u32>> = (0..company)
            .map(|c| {
                if c == company / 2 {
                    ids.clone()
                } else {
                    ids.iter().map(|i| (i + c as u32) % 320).collect()
                }
            })
            .collect();
        let slots =
            |c: usize| (0..ROOM as u32).map(|s| s * company as u32 + c as u32).collect::<Vec<_>>();
        for (from, to) in [(0, prompt), (prompt, prompt + 1)] {
            let mut plan = ForwardPlan::default();
            for (c, text) in texts.iter().enumerate() {
                chunk(&mut plan, text, &slots(c), from, to);
            }
            decoder.forward(&backend, &plan, &mut kv, &mut scratch, &mut []).unwrap();
        }
        let logits = backend.read(scratch.logits(), company).unwrap();
        let ours = &logits[company / 2 * vocabulary..][..vocabulary];
        assert!(bits(ours) == alone, "among {company} rows");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn any_slots_and_any_chunks_give_the_same_bits(
        slots in Just((0..ROOM as u32).collect::<Vec<_>>()).prop_shuffle(),
        page in 1u32..=64,
        sizes in prop::collection::vec(1usize..40, 1..20),
        fixture in 0usize..5,
    ) {
        let backend = CpuBackend::new(IsaChoice::Auto, 1).unwrap();
        let decoder = load(&backend, FIXTURES[fixture], WeightFormat::Bf16);
        let ids = long_text(FIXTURES[fixture]);
        let straight = (0..ROOM as u32).collect();
        let want = in_chunks(&backend, &decoder, &ids, straight, KvDtype::F32, || ids.len());

        let mut next = sizes.iter().cycle();
        let ours = in_chunks(&backend, &decoder, &ids, slots.clone(), KvDtype::F32, || *next.next().unwrap());
        prop_assert!(ours == want, "slots in any order");

        // Pages of any size, in the order in which their numbers were drawn.
        let pages = slots.iter().filter(|&&s| s < (ROOM as u32).div_ceil(page));
        let paged = pages.flat_map(|p| p * page..(p + 1) * page).collect();
        let ours = in_chunks(&backend, &decoder, &ids, paged, KvDtype::F32, || *next.next().unwrap());
        prop_assert!(ours == want, "pages of {}", page);
    }
}

#[test]
fn an_empty_plan_and_a_plan_without_outputs_are_ordinary() {
    let backend = CpuBackend::new(IsaChoice::Auto, 1).unwrap();
    let decoder = load(&backend, "qwen2", WeightFormat::Bf16);
    let ids = golden("qwen2").input_ids;
    let mut kv = decoder.kv(&backend, ROOM, KvDtype::F32).unwrap();
    let mut scratch = decoder.scratch(&backend, bounds(ROOM, ROOM)).unwrap();
    decoder.forward(&backend, &ForwardPlan::default(), &mut kv, &mut scratch, &mut []).unwrap();

    let slots: Vec<u32> = (0..ROOM as u32).collect();
    let mut plan = ForwardPlan::default();
    chunk(&mut plan, &ids, &slots, 0, 39);
    plan.outputs.clear();
    decoder.forward(&backend, &plan, &mut kv, &mut scratch, &mut []).unwrap();
    plan.clear();
    chunk(&mut plan, &ids, &slots, 39, 40);
    decoder.forward(&backend, &plan, &mut kv, &mut scratch, &mut []).unwrap();
    let last = backend.read(scratch.logits(), 1).unwrap();

    let whole = Sequence::in_order(&backend, &decoder, ROOM).run(&ids, 40);
    assert_eq!(bits(&last), bits(&whole[39 * decoder.spec().vocab_size..]));
}

#[test]
fn ancestors_in_a_tail_are_seen_like_a_prefix() {
    let backend = CpuBackend::new(IsaChoice::Auto, 2).unwrap();
    let decoder = load(&backend, "qwen3", WeightFormat::Bf16);
    let ids = long_text("qwen3");
    let (committed, end) = (60, 68);
    let whole = Sequence::in_order(&backend, &decoder, ROOM).run(&ids, end);

    // Two branches of one tree over the same prefix: the text, and another beside it.
    let mut sequence = Sequence::in_order(&backend, &decoder, ROOM);
    sequence.run(&ids, committed);
    let mut plan = ForwardPlan::default();
    plan.add_table(0..committed as u32);
    for (branch, first_slot) in [(0, 100), (1, 110)] {
        let tree_start = plan.tree_slots.len() as u32;
        for (depth, &id) in ids[committed..end].iter().enumerate() {
            plan.outputs.push(plan.tokens.len() as u32);
            plan.tokens.push((id + branch) % 320);
            plan.positions.push((committed + depth) as u32);
            plan.writes.push(first_slot + depth as u32);
            plan.tree_slots.push(first_slot + depth as u32);
            let (prefix, tail) = (committed as u32, depth as u32 + 1);
            plan.spans.push(AttentionSpan { start: 0, prefix, tree_start, tail });
        }
    }
    decoder.forward(&backend, &plan, &mut sequence.kv, &mut sequence.scratch, &mut []).unwrap();
    let logits = backend.read(sequence.scratch.logits(), end - committed).unwrap();
    assert_eq!(bits(&logits), bits(&whole[committed * decoder.spec().vocab_size..]));
}

#[test]
fn a_plan_outside_the_model_is_refused_with_its_number() {
    let backend = CpuBackend::new(IsaChoice::Auto, 1).unwrap();
    let decoder = load(&backend, "qwen2", WeightFormat::Bf16);
    let mut kv = decoder.kv(&backend, 8, KvDtype::F32).unwrap();
    let mut scratch = decoder.scratch(&backend, bounds(4, 8)).unwrap();
    let mut refused = |spoil: fn(&mut ForwardPlan)| {
        let mut plan = ForwardPlan::default();
        chunk(&mut plan, &[1, 2, 3], &[0, 1, 2], 0, 3);
        spoil(&mut plan);
        decoder.forward(&backend, &plan, &mut kv, &mut scratch, &mut []).unwrap_err().to_string()
    };
    assert!(refused(|p| p.tokens[1] = 320).contains("token 320, vocabulary 320"));
    assert!(refused(|p| p.positions[2] = 512).contains("position 512, context 512"));
    assert!(refused(|p| p.outputs.push(3)).contains("output 3 of 3 rows"));
    assert!(refused(|p| p.spans[0].prefix = 9).contains("leaves the block tables"));
    assert!(refused(|p| p.change_table(3, &[0; 9])).contains("12 slots exceed"));
    assert!(
        refused(|p| {
            p.writes.pop();
        })
        .contains("3 tokens, but other counts")
    );
}
