//! What the cache promises, one sentence at a time.

use aquila_kv::{CacheConfig, Error, Full, Group, GroupConfig, KvCache, Namespace, Sequence};

const TARGET: Group = Group::new(0);
const DRAFT: Group = Group::new(1);

fn config(page_size: usize, groups: &[(usize, usize)]) -> CacheConfig {
    let groups = groups.iter().enumerate().map(|(index, &(pages, lookahead))| GroupConfig {
        name: ["target", "draft"][index].into(),
        pages,
        lookahead,
    });
    CacheConfig { page_size, groups: groups.collect(), prefix_cache: true }
}

fn cache(page_size: usize, groups: &[(usize, usize)]) -> KvCache {
    KvCache::new(config(page_size, groups)).expect("the configuration is valid")
}

/// Runs `tokens` as a request over `groups` would: admitted, computed, not yet published.
fn compute(cache: &mut KvCache, tokens: &[u32], rows: usize, groups: &[Group]) -> Sequence {
    let mut seq = cache.admit(&Namespace::default(), tokens, rows, groups);
    for &group in groups {
        let rows = rows - seq.committed(group);
        cache.reserve(&mut seq, group, rows).expect("there is room");
        cache.commit(&mut seq, group, rows);
    }
    seq
}

/// As [`compute`], given back at once.
fn leave(cache: &mut KvCache, tokens: &[u32], groups: &[Group]) {
    let seq = compute(cache, tokens, tokens.len(), groups);
    cache.release(seq, tokens);
}

fn peek(cache: &KvCache, tokens: &[u32], groups: &[Group]) -> usize {
    cache.peek(&Namespace::default(), tokens, tokens.len(), groups)
}

fn slots(seq: &Sequence, group: Group, rows: usize) -> Vec<u32> {
    let mut slots = Vec::new();
    seq.extend_slots(group, 0..rows, &mut slots);
    slots
}

#[test]
fn a_released_prefix_is_matched_in_whole_pages() {
    let mut cache = cache(4, &[(16, 0)]);
    leave(&mut cache, &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10], &[TARGET]);
    assert_eq!(peek(&cache, &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10], &[TARGET]), 8);
    assert_eq!(peek(&cache, &[1, 2, 3, 4, 5, 6, 7, 0], &[TARGET]), 4);
    assert_eq!(peek(&cache, &[1, 2, 3], &[TARGET]), 0);
    assert_eq!(peek(&cache, &[0, 2, 3, 4], &[TARGET]), 0);
    assert_eq!(peek(&cache, &[], &[TARGET]), 0);
}

#[test]
fn a_match_keeps_to_the_limit() {
    let mut cache = cache(4, &[(16, 0)]);
    let tokens = [1, 2, 3, 4, 5, 6, 7, 8];
    leave(&mut cache, &tokens, &[TARGET]);
    // At least one token must be left to run, or there would be no logits.
    assert_eq!(cache.peek(&Namespace::default(), &tokens, 7, &[TARGET]), 4);
    assert_eq!(cache.peek(&Namespace::default(), &tokens, 0, &[TARGET]), 0);
}

#[test]
fn a_match_yields_the_slots_that_were_written() {
    let mut cache = cache(4, &[(16, 0)]);
    let tokens = [1, 2, 3, 4, 5, 6, 7, 8];
    let mut first = compute(&mut cache, &tokens, 8, &[TARGET]);
    cache.publish(&mut first, &tokens);
    let written = slots(&first, TARGET, 8);
    cache.release(first, &tokens);
    let second = cache.admit(&Namespace::default(), &tokens, 8, &[TARGET]);
    assert_eq!(second.matched(), 8);
    assert_eq!(slots(&second, TARGET, 8), written);
    cache.discard(second);
}

#[test]
fn slots_of_a_range_are_those_of_its_indices() {
    let mut cache = cache(4, &[(16, 0)]);
    let seq = compute(&mut cache, &[0; 14], 14, &[TARGET]);
    for start in 0..14 {
        for end in start..14 {
            let mut range = vec![99];
            seq.extend_slots(TARGET, start..end, &mut range);
            let single = (start..end).map(|index| seq.slot(TARGET, index));
            assert_eq!(range, [99].into_iter().chain(single).collect::<Vec<_>>());
        }
    }
    cache.discard(seq);
}

#[test]
fn namespaces_never_meet() {
    let mut cache = cache(1, &[(16, 0)]);
    leave(&mut cache, &[1, 2, 3], &[TARGET]);
    let other = Namespace::new("another adapter");
    assert_eq!(cache.peek(&other, &[1, 2, 3], 3, &[TARGET]), 0);
    let mut seq = cache.admit(&other, &[1, 2, 3], 3, &[TARGET]);
    cache.reserve(&mut seq, TARGET, 3).expect("there is room");
    cache.commit(&mut seq, TARGET, 3);
    cache.release(seq, &[1, 2, 3]);
    assert_eq!(cache.usage(TARGET).cached, 6);
    assert_eq!(cache.peek(&other, &[1, 2, 3], 3, &[TARGET]), 3);
    assert_eq!(peek(&cache, &[1, 2, 3], &[TARGET]), 3);
}

#[test]
fn uncommitted_rows_are_never_published() {
    let mut cache = cache(2, &[(16, 0)]);
    let tokens = [1, 2, 3, 4, 5, 6];
    let mut seq = compute(&mut cache, &tokens, 3, &[TARGET]);
    cache.reserve(&mut seq, TARGET, 3).expect("there is room");
    cache.publish(&mut seq, &tokens);
    assert_eq!(peek(&cache, &tokens, &[TARGET]), 2);
    cache.release(seq, &tokens);
    assert_eq!(peek(&cache, &tokens, &[TARGET]), 2);
}

#[test]
fn a_tree_takes_slots_in_proportion_to_its_nodes() {
    for page_size in [1, 4, 16, 64] {
        let mut cache = cache(page_size, &[(256, 0)]);
        let mut seq = compute(&mut cache, &[0; 30], 30, &[TARGET]);
        cache.reserve(&mut seq, TARGET, 60).expect("there is room");
        assert!(seq.reserved(TARGET) < 90 + page_size);
        let mut nodes = Vec::new();
        seq.extend_slots(TARGET, 30..90, &mut nodes);
        nodes.sort_unstable();
        nodes.dedup();
        assert_eq!(nodes.len(), 60);
        cache.commit(&mut seq, TARGET, 5);
        cache.discard(seq);
        assert_eq!(cache.usage(TARGET).free, 256);
    }
}

#[test]
fn a_reservation_is_whole_or_says_what_is_missing() {
    let mut cache = cache(4, &[(4, 0)]);
    let mut seq = cache.admit(&Namespace::default(), &[], 0, &[TARGET]);
    let full = cache.reserve(&mut seq, TARGET, 21);
    assert_eq!(full, Err(Full { group: TARGET, missing: 2 }));
    assert_eq!(cache.usage(TARGET).free, 4);
    cache.reserve(&mut seq, TARGET, 16).expect("all pages are free");
    cache.reserve(&mut seq, TARGET, 16).expect("what is there already is not asked for twice");
    cache.discard(seq);
}

#[test]
fn the_second_of_two_equal_requests_shares_the_firsts_pages() {
    let mut cache = cache(2, &[(16, 0)]);
    let tokens = [1, 2, 3, 4, 5];
    let mut first = compute(&mut cache, &tokens, 5, &[TARGET]);
    let mut second = compute(&mut cache, &tokens, 5, &[TARGET]);
    assert_eq!(second.matched(), 0);
    cache.publish(&mut first, &tokens);
    assert_eq!(cache.usage(TARGET).held, 4);
    cache.publish(&mut second, &tokens);
    assert_eq!(cache.usage(TARGET).held, 2, "only the partial pages stay private");
    assert_eq!(slots(&first, TARGET, 4), slots(&second, TARGET, 4));
    assert_ne!(first.slot(TARGET, 4), second.slot(TARGET, 4));
    cache.check_with([&first, &second]).expect("all is accounted for");
    cache.release(first, &tokens);
    assert_eq!(cache.usage(TARGET).locked, 2, "the second still uses them");
    cache.release(second, &tokens);
    assert_eq!(cache.usage(TARGET).locked, 0);
}

#[test]
fn requests_that_diverge_share_what_is_common() {
    let mut cache = cache(2, &[(16, 0)]);
    leave(&mut cache, &[1, 1, 2, 2, 3, 3], &[TARGET]);
    leave(&mut cache, &[1, 1, 2, 2, 4, 4], &[TARGET]);
    leave(&mut cache, &[1, 1, 2, 5, 4, 4], &[TARGET]);
    assert_eq!(cache.usage(TARGET).cached, 3 + 1 + 2);
    assert_eq!(peek(&cache, &[1, 1, 2, 2, 3, 3], &[TARGET]), 6);
    assert_eq!(peek(&cache, &[1, 1, 2, 2, 4, 4], &[TARGET]), 6);
    assert_eq!(peek(&cache, &[1, 1, 2, 5, 4, 4], &[TARGET]), 6);
    assert_eq!(peek(&cache, &[1, 1, 2, 5, 3, 3], &[TARGET]), 4);
}

#[test]
fn the_least_recently_used_prefix_is_evicted_from_its_end() {
    let mut cache = cache(1, &[(9, 0)]);
    for tokens in [[1, 1, 1], [2, 2, 2], [3, 3, 3]] {
        leave(&mut cache, &tokens, &[TARGET]);
    }
    let used_again = cache.admit(&Namespace::default(), &[1, 1, 1], 3, &[TARGET]);
    cache.discard(used_again);
    let mut seq = cache.admit(&Namespace::default(), &[], 0, &[TARGET]);
    cache.reserve(&mut seq, TARGET, 2).expect("two cached pages make room");
    assert_eq!(peek(&cache, &[1, 1, 1], &[TARGET]), 3);
    assert_eq!(peek(&cache, &[2, 2, 2], &[TARGET]), 1);
    assert_eq!(peek(&cache, &[3, 3, 3], &[TARGET]), 3);
    cache.reserve(&mut seq, TARGET, 6).expect("four more make room");
    assert_eq!(peek(&cache, &[1, 1, 1], &[TARGET]), 3);
    assert_eq!(peek(&cache, &[2, 2, 2], &[TARGET]), 0);
    assert_eq!(peek(&cache, &[3, 3, 3], &[TARGET]), 0);
    cache.discard(seq);
}

#[test]
fn a_common_prefix_outlives_its_continuations() {
    let mut cache = cache(1, &[(6, 0)]);
    leave(&mut cache, &[1, 1, 2], &[TARGET]);
    leave(&mut cache, &[1, 1, 3], &[TARGET]);
    leave(&mut cache, &[9, 9], &[TARGET]);
    let mut seq = cache.admit(&Namespace::default(), &[], 0, &[TARGET]);
    // Oldest first: the 2, then the 3 and, with it, what both had in common.
    for (rows, left) in [(1, (2, 3)), (2, (2, 2)), (3, (1, 1)), (4, (0, 0))] {
        cache.reserve(&mut seq, TARGET, rows).expect("cached pages make room");
        assert_eq!(peek(&cache, &[1, 1, 2], &[TARGET]), left.0);
        assert_eq!(peek(&cache, &[1, 1, 3], &[TARGET]), left.1);
        assert_eq!(peek(&cache, &[9, 9], &[TARGET]), 2);
    }
    cache.discard(seq);
}

#[test]
fn what_a_request_uses_is_not_available_to_others() {
    let mut cache = cache(4, &[(4, 0)]);
    let tokens = [7; 8];
    leave(&mut cache, &tokens, &[TARGET]);
    assert_eq!(cache.available(TARGET), 16);
    let reader = cache.admit(&Namespace::default(), &tokens, 8, &[TARGET]);
    assert_eq!(cache.available(TARGET), 8);
    let mut other = cache.admit(&Namespace::default(), &[], 0, &[TARGET]);
    let full = cache.reserve(&mut other, TARGET, 9);
    assert_eq!(full, Err(Full { group: TARGET, missing: 1 }));
    assert_eq!(cache.flush(), 0);
    cache.discard(reader);
    cache.reserve(&mut other, TARGET, 9).expect("the reader has left");
    assert_eq!(peek(&cache, &tokens, &[TARGET]), 4);
    cache.discard(other);
}

#[test]
fn a_plain_request_leaves_a_prefix_for_plain_requests_only() {
    let mut cache = cache(2, &[(16, 0), (16, 0)]);
    let tokens = [1, 2, 3, 4];
    leave(&mut cache, &tokens, &[TARGET]);
    assert_eq!(peek(&cache, &tokens, &[TARGET]), 4);
    assert_eq!(peek(&cache, &tokens, &[TARGET, DRAFT]), 0);
    leave(&mut cache, &tokens, &[TARGET, DRAFT]);
    assert_eq!(peek(&cache, &tokens, &[TARGET, DRAFT]), 4, "the draft's rows were filled in");
    assert_eq!(cache.usage(TARGET).cached, 2, "the target's rows were there already");
}

#[test]
fn a_short_group_evicts_in_that_group_alone() {
    let mut cache = cache(1, &[(8, 0), (4, 0)]);
    leave(&mut cache, &[1, 2, 3, 4], &[TARGET, DRAFT]);
    let mut seq = cache.admit(&Namespace::default(), &[], 0, &[TARGET, DRAFT]);
    cache.reserve(&mut seq, DRAFT, 3).expect("three cached pages make room");
    assert_eq!(peek(&cache, &[1, 2, 3, 4], &[TARGET]), 4);
    assert_eq!(peek(&cache, &[1, 2, 3, 4], &[TARGET, DRAFT]), 1);
    cache.discard(seq);
}

#[test]
fn a_row_that_looked_ahead_matches_only_equal_lookahead() {
    let mut cache = cache(2, &[(16, 0), (16, 1)]);
    // The draft's row 3 has seen token 4, which is a 5 for one request and a 6 for the other.
    let (five, six) = ([1, 2, 3, 4, 5, 5, 5], [1, 2, 3, 4, 6, 6, 6]);
    let first = compute(&mut cache, &five, 6, &[TARGET, DRAFT]);
    cache.release(first, &five);
    assert_eq!(peek(&cache, &five, &[TARGET, DRAFT]), 6);
    assert_eq!(peek(&cache, &five[..6], &[TARGET, DRAFT]), 4, "token 6 is not known to match");
    assert_eq!(peek(&cache, &six, &[TARGET]), 4);
    assert_eq!(peek(&cache, &six, &[TARGET, DRAFT]), 2);

    let second = compute(&mut cache, &six, 6, &[TARGET, DRAFT]);
    cache.release(second, &six);
    assert_eq!(cache.usage(TARGET).cached, 2 + 1 + 1);
    assert_eq!(cache.usage(DRAFT).cached, 1 + 2 + 2, "each keeps its own rows 2 and 3");
    let seq = |cache: &mut KvCache, tokens| cache.admit(&Namespace::default(), tokens, 6, &[DRAFT]);
    let (a, b) = (seq(&mut cache, &five), seq(&mut cache, &six));
    assert_eq!((a.matched(), b.matched()), (6, 6));
    assert_eq!(a.slot(DRAFT, 1), b.slot(DRAFT, 1));
    assert_ne!(a.slot(DRAFT, 3), b.slot(DRAFT, 3));
    cache.discard(a);
    cache.discard(b);
}

#[test]
fn rows_that_look_ahead_wait_for_the_tokens_they_saw() {
    let mut cache = cache(2, &[(16, 0), (16, 1)]);
    let tokens = [1, 2, 3, 4, 5];
    let mut seq = compute(&mut cache, &tokens, 4, &[TARGET, DRAFT]);
    cache.publish(&mut seq, &tokens[..4]);
    assert_eq!(cache.usage(TARGET).cached, 2);
    assert_eq!(cache.usage(DRAFT).cached, 1);
    cache.publish(&mut seq, &tokens);
    assert_eq!(cache.usage(DRAFT).cached, 2);
    cache.release(seq, &tokens);
}

#[test]
fn a_group_that_joins_late_begins_with_its_first_row() {
    let mut cache = cache(2, &[(16, 0), (16, 0)]);
    let tokens = [1, 2, 3, 4];
    leave(&mut cache, &tokens, &[TARGET]);
    let mut seq = cache.admit(&Namespace::default(), &tokens, 4, &[TARGET]);
    assert_eq!((seq.committed(TARGET), seq.committed(DRAFT)), (4, 0));
    cache.reserve(&mut seq, DRAFT, 4).expect("there is room");
    cache.commit(&mut seq, DRAFT, 4);
    cache.release(seq, &tokens);
    assert_eq!(peek(&cache, &tokens, &[TARGET, DRAFT]), 4);
}

#[test]
fn a_request_that_publishes_tokens_matches_at_every_length() {
    let mut cache = cache(1, &[(512, 0)]);
    let tokens: Vec<u32> = (0..400).map(|token| token % 7).collect();
    let mut seq = cache.admit(&Namespace::default(), &tokens, 0, &[TARGET]);
    for rows in 1..=tokens.len() {
        cache.reserve(&mut seq, TARGET, 1).expect("there is room");
        cache.commit(&mut seq, TARGET, 1);
        cache.publish(&mut seq, &tokens[..rows]);
        assert_eq!(peek(&cache, &tokens, &[TARGET]), rows);
    }
    cache.check_with([&seq]).expect("all is accounted for");
    cache.release(seq, &tokens);
    assert_eq!(cache.flush(), 400);
}

#[test]
fn a_reader_neither_stops_the_writer_nor_grows() {
    let mut cache = cache(1, &[(16, 0)]);
    let tokens = [1, 2, 3, 4];
    let mut writer = compute(&mut cache, &tokens, 2, &[TARGET]);
    cache.publish(&mut writer, &tokens);
    let reader = cache.admit(&Namespace::default(), &tokens, 4, &[TARGET]);
    cache.reserve(&mut writer, TARGET, 2).expect("there is room");
    cache.commit(&mut writer, TARGET, 2);
    cache.release(writer, &tokens);
    assert_eq!(reader.reserved(TARGET), 2);
    assert_eq!(cache.usage(TARGET).locked, 2);
    assert_eq!(cache.flush(), 2);
    cache.check_with([&reader]).expect("all is accounted for");
    cache.discard(reader);
}

#[test]
fn without_a_prefix_cache_nothing_is_kept() {
    let config = CacheConfig { prefix_cache: false, ..config(1, &[(16, 0)]) };
    let mut cache = KvCache::new(config).expect("the configuration is valid");
    let mut seq = compute(&mut cache, &[1, 2, 3], 3, &[TARGET]);
    cache.publish(&mut seq, &[1, 2, 3]);
    cache.release(seq, &[1, 2, 3]);
    assert_eq!(peek(&cache, &[1, 2, 3], &[TARGET]), 0);
    assert_eq!(cache.usage(TARGET).free, 16);
}

#[test]
fn a_discarded_sequence_leaves_only_what_was_published() {
    let mut cache = cache(1, &[(16, 0)]);
    let mut seq = compute(&mut cache, &[1, 2, 3], 2, &[TARGET]);
    cache.publish(&mut seq, &[1, 2, 3]);
    cache.reserve(&mut seq, TARGET, 1).expect("there is room");
    cache.commit(&mut seq, TARGET, 1);
    cache.discard(seq);
    assert_eq!(peek(&cache, &[1, 2, 3], &[TARGET]), 2);
    assert_eq!(cache.usage(TARGET).free, 14);
}

#[test]
fn configurations_that_make_no_cache_are_refused() {
    let refused = |config| KvCache::new(config).expect_err("the configuration is refused");
    assert_eq!(refused(config(0, &[(1, 0)])), Error::EmptyPages);
    assert_eq!(refused(config(1, &[])), Error::NoGroups);
    assert_eq!(
        refused(config(16, &[(1, 0), (0, 0)])),
        Error::NoPages { name: "draft".into(), page_size: 16 }
    );
    for pages in [1 << 30, usize::MAX] {
        assert_eq!(
            refused(config(4, &[(pages, 0)])),
            Error::TooManySlots { name: "target".into(), pages, page_size: 4 }
        );
    }
    let mut twins = config(1, &[(1, 0), (1, 0)]);
    twins.groups[1].name = "target".into();
    assert_eq!(refused(twins), Error::SameName { name: "target".into() });
}

#[test]
fn the_check_notices_a_lock_that_outlives_its_sequence() {
    let mut cache = cache(1, &[(16, 0)]);
    leave(&mut cache, &[1, 2], &[TARGET]);
    let seq = cache.admit(&Namespace::default(), &[1, 2], 2, &[TARGET]);
    cache.check_with([&seq]).expect("all is accounted for");
    assert!(cache.check_with([]).is_err());
    cache.discard(seq);
}

#[test]
fn the_check_notices_pages_that_outlive_their_sequence() {
    let mut cache = cache(1, &[(16, 0)]);
    let seq = compute(&mut cache, &[1, 2], 2, &[TARGET]);
    cache.check_with([&seq]).expect("all is accounted for");
    assert!(cache.check_with([]).is_err());
    cache.discard(seq);
}

#[test]
#[should_panic(expected = "only 4 reserved")]
fn rows_that_were_not_reserved_cannot_be_committed() {
    let mut cache = cache(4, &[(16, 0)]);
    let mut seq = compute(&mut cache, &[0; 3], 3, &[TARGET]);
    cache.commit(&mut seq, TARGET, 2);
}

#[test]
#[cfg(debug_assertions)]
#[should_panic(expected = "release() or discard()")]
fn dropping_a_sequence_with_its_pages_panics() {
    let mut cache = cache(4, &[(16, 0)]);
    drop(compute(&mut cache, &[0; 3], 3, &[TARGET]));
}
