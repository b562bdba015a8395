//! Random lives of many requests in small pools, against a model that remembers what was written
//! to which slot.

use std::collections::{BTreeMap, BTreeSet};

use aquila_kv::{CacheConfig, Group, GroupConfig, KvCache, Namespace, Sequence, Usage};
use proptest::prelude::*;
use proptest::sample::Index;

/// What a row's keys and values depend on: the namespace and every token that it has seen.
type Row = (usize, Vec<u32>);

#[derive(Debug, Clone)]
enum Step {
    Admit { namespace: usize, pages: Vec<Shape>, tail: usize, groups: usize, short_of: usize },
    Reserve { who: Index, group: Index, rows: usize },
    Commit { who: Index, group: Index, rows: usize, next: Vec<u32> },
    Publish { who: Index, unseen: usize },
    Release { who: Index, unseen: usize },
    Discard { who: Index },
    Flush,
}

/// A page of a prompt: zeros, or zeros with a one where lookahead and splits may go wrong.
#[derive(Debug, Clone, Copy)]
enum Shape {
    Zeros,
    First,
    Second,
    Last,
}

impl Shape {
    fn tokens(self, page_size: usize) -> Vec<u32> {
        let mut tokens = vec![0; page_size];
        match self {
            Self::Zeros => {}
            Self::First => tokens[0] = 1,
            Self::Second => tokens[1 % page_size] = 1,
            Self::Last => tokens[page_size - 1] = 1,
        }
        tokens
    }
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let shape = prop_oneof![
        4 => Just(Shape::Zeros),
        1 => Just(Shape::First),
        1 => Just(Shape::Second),
        1 => Just(Shape::Last),
    ];
    let (who, group) = (any::<Index>, any::<Index>);
    let next = prop::collection::vec(prop_oneof![5 => Just(0u32), 1 => Just(1u32)], 20);
    let step = prop_oneof![
        4 => (0..2usize, prop::collection::vec(shape, 0..6), 0..70usize, 1..4usize, 0..3usize)
            .prop_map(|(namespace, pages, tail, groups, short_of)| {
                Step::Admit { namespace, pages, tail, groups, short_of }
            }),
        8 => (who(), group(), 0..90usize)
            .prop_map(|(who, group, rows)| Step::Reserve { who, group, rows }),
        10 => (who(), group(), 0..90usize, next)
            .prop_map(|(who, group, rows, next)| Step::Commit { who, group, rows, next }),
        5 => (who(), 0..4usize).prop_map(|(who, unseen)| Step::Publish { who, unseen }),
        2 => (who(), 0..4usize).prop_map(|(who, unseen)| Step::Release { who, unseen }),
        1 => who().prop_map(|who| Step::Discard { who }),
        1 => Just(Step::Flush),
    ];
    prop::collection::vec(step, 1..250)
}

fn configs() -> impl Strategy<Value = CacheConfig> {
    let page_size = prop_oneof![Just(1usize), Just(2), Just(3), Just(4), Just(16), Just(64)];
    let lookaheads = prop_oneof![
        Just(vec![0usize]),
        Just(vec![1]),
        Just(vec![0, 0]),
        Just(vec![0, 1]),
        Just(vec![0, 1, 3]),
    ];
    (page_size, lookaheads, 4..30usize, 4..30usize, prop::bool::weighted(0.95)).prop_map(
        |(page_size, lookaheads, target, draft, prefix_cache)| CacheConfig {
            page_size,
            groups: lookaheads
                .into_iter()
                .enumerate()
                .map(|(index, lookahead)| GroupConfig {
                    name: format!("group {index}"),
                    pages: if index == 0 { target } else { draft },
                    lookahead,
                })
                .collect(),
            prefix_cache,
        },
    )
}

struct Live {
    seq: Sequence,
    namespace: usize,
    tokens: Vec<u32>,
    /// Pages per group that this sequence has locked in the tree.
    published: Vec<usize>,
}

struct World {
    config: CacheConfig,
    cache: KvCache,
    live: Vec<Live>,
    /// What was last written to each slot of each group; none for scratch.
    written: Vec<Vec<Option<Row>>>,
    /// Pages per group that the tree must have, by the tokens that they depend on.
    known: Vec<BTreeSet<Row>>,
    /// Whether `known` is all that the tree has.
    exact: Vec<bool>,
}

impl World {
    fn new(config: CacheConfig) -> Self {
        let slots = |group: &GroupConfig| vec![None; group.pages * config.page_size];
        Self {
            cache: KvCache::new(config.clone()).expect("the configuration is valid"),
            live: Vec::new(),
            written: config.groups.iter().map(slots).collect(),
            known: vec![BTreeSet::new(); config.groups.len()],
            exact: vec![true; config.groups.len()],
            config,
        }
    }

    fn usage(&self) -> Vec<Usage> {
        self.cache.groups().map(|group| self.cache.usage(group)).collect()
    }

    /// The key of page `page` in `group`, if `tokens` determine it.
    fn key(&self, group: usize, namespace: usize, tokens: &[u32], page: usize) -> Option<Row> {
        let end = (page + 1) * self.config.page_size + self.config.groups[group].lookahead;
        Some((namespace, tokens.get(..end)?.to_vec()))
    }

    fn run(&mut self, step: Step) {
        let groups = self.config.groups.len();
        match step {
            Step::Admit { namespace, pages, tail, groups: some, short_of } => {
                let some: Vec<Group> =
                    (0..groups).filter(|g| some >> (g % 2) & 1 == 1).map(Group::new).collect();
                self.admit(namespace, &pages, tail, &some, short_of);
            }
            Step::Flush => self.flush(),
            _ if self.live.is_empty() => {}
            Step::Reserve { who, group, rows } => {
                let who = who.index(self.live.len());
                self.reserve(who, group.index(groups), rows);
            }
            Step::Commit { who, group, rows, next } => {
                let who = who.index(self.live.len());
                self.commit(who, group.index(groups), rows, &next);
            }
            Step::Publish { who, unseen } => {
                let who = who.index(self.live.len());
                let seen = self.note_publication(who, unseen);
                let Live { seq, tokens, .. } = &mut self.live[who];
                self.cache.publish(seq, &tokens[..seen]);
            }
            Step::Release { who, unseen } => {
                let who = who.index(self.live.len());
                let seen = self.note_publication(who, unseen);
                let Live { seq, tokens, .. } = self.live.swap_remove(who);
                self.cache.release(seq, &tokens[..seen]);
            }
            Step::Discard { who } => {
                let who = who.index(self.live.len());
                self.cache.discard(self.live.swap_remove(who).seq);
            }
        }
    }

    fn admit(
        &mut self,
        namespace: usize,
        pages: &[Shape],
        tail: usize,
        groups: &[Group],
        short_of: usize,
    ) {
        let size = self.config.page_size;
        let mut tokens: Vec<u32> = pages.iter().flat_map(|page| page.tokens(size)).collect();
        tokens.resize(tokens.len() + tail % size, 0);
        let limit = tokens.len().saturating_sub(short_of);
        let name = name(namespace);
        let promised = self.cache.peek(&name, &tokens, limit, groups);
        let seq = self.cache.admit(&name, &tokens, limit, groups);
        let matched = seq.matched();
        assert_eq!(matched, promised, "peek and admit disagree");
        assert!(matched <= limit && matched.is_multiple_of(size));

        let known = |page: usize| {
            groups.iter().all(|group| {
                let key = self.key(group.index(), namespace, &tokens, page);
                key.is_some_and(|key| self.known[group.index()].contains(&key))
            })
        };
        let expected = (0..limit / size).take_while(|page| known(*page)).count();
        let expected = if groups.is_empty() { 0 } else { expected * size };
        assert!(matched >= expected, "a match of {matched} tokens misses some of {expected}");
        if groups.iter().all(|group| self.exact[group.index()]) {
            assert_eq!(matched, expected, "a match of pages that nobody published");
        }
        let mut published = vec![0; self.config.groups.len()];
        for group in self.cache.groups() {
            let expected = if groups.contains(&group) { matched } else { 0 };
            assert_eq!(seq.committed(group), expected);
            assert_eq!(seq.reserved(group), expected);
            published[group.index()] = expected / size;
        }
        self.live.push(Live { seq, namespace, tokens, published });
    }

    fn reserve(&mut self, who: usize, group: usize, rows: usize) {
        let size = self.config.page_size;
        let group = Group::new(group);
        let Live { seq, .. } = &mut self.live[who];
        let before = self.cache.usage(group);
        let (had, committed) = (seq.reserved(group), seq.committed(group));
        let more = (committed + rows).saturating_sub(had).div_ceil(size);
        let available = self.cache.available(group) / size;
        assert_eq!(available, before.free + before.cached - before.locked);
        let got = self.cache.reserve(seq, group, rows);
        let after = self.cache.usage(group);
        match got {
            Ok(()) => {
                assert!(more <= available);
                assert_eq!(seq.reserved(group), had + more * size);
                let evicted = more.saturating_sub(before.free);
                assert_eq!(before.cached - after.cached, evicted, "evicts just what is missing");
                assert_eq!(before.locked, after.locked, "locked pages are not evicted");
            }
            Err(full) => {
                assert_eq!(full.group, group);
                assert_eq!(more - available, full.missing);
                assert_eq!(before, after, "a failed reservation changes nothing");
                assert_eq!(seq.reserved(group), had);
            }
        }
        // Whoever still relies on these slots will notice.
        for index in committed..seq.reserved(group) {
            self.written[group.index()][seq.slot(group, index) as usize] = None;
        }
        if after.cached < before.cached {
            self.forget_all_but_locked(group.index());
            self.exact[group.index()] = false;
        }
    }

    fn commit(&mut self, who: usize, group: usize, rows: usize, next: &[u32]) {
        let lookahead = self.config.groups[group].lookahead;
        let group = Group::new(group);
        let Live { seq, namespace, tokens, .. } = &mut self.live[who];
        let committed = seq.committed(group);
        let rows = rows.min(seq.reserved(group) - committed);
        let needed = committed + rows + lookahead;
        let generated = next.iter().cycle().take(needed.saturating_sub(tokens.len()));
        tokens.extend(generated);
        for index in committed..committed + rows {
            let slot = seq.slot(group, index) as usize;
            let seen = tokens[..=index + lookahead].to_vec();
            self.written[group.index()][slot] = Some((*namespace, seen));
        }
        self.cache.commit(seq, group, rows);
        assert_eq!(seq.committed(group), committed + rows);
    }

    /// Notes what publishing all but the last `unseen` tokens will add, and answers how many
    /// tokens that leaves; never fewer than have a row.
    fn note_publication(&mut self, who: usize, unseen: usize) -> usize {
        let size = self.config.page_size;
        let Live { seq, namespace, tokens, published } = &self.live[who];
        let rows = self.cache.groups().map(|group| seq.committed(group)).max();
        let seen = rows.unwrap_or(0).max(tokens.len().saturating_sub(unseen));
        let (namespace, mut published) = (*namespace, published.clone());
        let tokens = tokens[..seen].to_vec();
        if self.config.prefix_cache {
            for (group, published) in published.iter_mut().enumerate() {
                let rows = self.live[who].seq.committed(Group::new(group));
                for page in *published..rows / size {
                    let Some(key) = self.key(group, namespace, &tokens, page) else { break };
                    self.known[group].insert(key);
                    *published += 1;
                }
            }
        }
        self.live[who].published = published;
        seen
    }

    fn flush(&mut self) {
        let before = self.usage();
        let dropped = self.cache.flush();
        let mut evictable = 0;
        for (before, after) in before.iter().zip(self.usage()) {
            evictable += before.cached - before.locked;
            assert_eq!(after.cached, before.locked);
            assert_eq!(after.locked, before.locked);
        }
        assert_eq!(dropped, evictable);
        for group in 0..self.known.len() {
            self.forget_all_but_locked(group);
            self.exact[group] = true;
        }
    }

    fn forget_all_but_locked(&mut self, group: usize) {
        let locked = self.live.iter().flat_map(|live| {
            (0..live.published[group])
                .filter_map(|page| self.key(group, live.namespace, &live.tokens, page))
        });
        let locked = locked.collect();
        self.known[group] = locked;
    }

    fn verify(&self) {
        self.cache.check().expect("the cache is sound");
        self.cache
            .check_with(self.live.iter().map(|live| &live.seq))
            .expect("all is accounted for");
        for (group, usage) in self.usage().into_iter().enumerate() {
            assert!(usage.balanced(), "{usage:?}");
            self.verify_accounts(group, usage);
            self.verify_slots(group);
        }
    }

    /// The cache's counts are those of the model.
    fn verify_accounts(&self, group: usize, usage: Usage) {
        let size = self.config.page_size;
        let (mut held, mut locked) = (0, BTreeSet::new());
        for live in &self.live {
            held += live.seq.reserved(Group::new(group)) / size - live.published[group];
            for page in 0..live.published[group] {
                locked.insert(self.key(group, live.namespace, &live.tokens, page));
            }
        }
        assert_eq!(usage.held, held);
        assert_eq!(usage.locked, locked.len());
        if self.exact[group] {
            assert_eq!(usage.cached, self.known[group].len());
        }
        if !self.config.prefix_cache {
            assert_eq!(usage.cached, 0);
        }
    }

    /// Every live sequence finds its own rows in its slots, and shares slots only where the tree
    /// does: in published pages, at the same place of the sequence.
    fn verify_slots(&self, group: usize) {
        let lookahead = self.config.groups[group].lookahead;
        let mut users: BTreeMap<u32, (usize, bool)> = BTreeMap::new();
        for Live { seq, namespace, tokens, published } in &self.live {
            let mut slots = Vec::new();
            let reserved = seq.reserved(Group::new(group));
            seq.extend_slots(Group::new(group), 0..reserved, &mut slots);
            for (index, slot) in slots.into_iter().enumerate() {
                assert_eq!(slot, seq.slot(Group::new(group), index));
                if index < seq.committed(Group::new(group)) {
                    let row = self.written[group][slot as usize].as_ref();
                    let row = row.expect("a committed row is not overwritten");
                    assert_eq!(row.0, *namespace);
                    assert_eq!(row.1, tokens[..=index + lookahead]);
                }
                let shared = index < published[group] * self.config.page_size;
                if let Some(other) = users.insert(slot, (index, shared)) {
                    assert!(shared, "slot {slot} is in two sequences");
                    assert_eq!(other, (index, shared), "slot {slot} is in two sequences");
                }
            }
        }
    }

    fn end(mut self) {
        for Live { seq, tokens, .. } in self.live.drain(..) {
            self.cache.release(seq, &tokens);
        }
        self.cache.check_with([]).expect("nothing is left behind");
        self.cache.flush();
        for usage in self.usage() {
            assert_eq!(usage.free, usage.total);
        }
        self.cache.check_with([]).expect("nothing is left behind");
    }
}

fn name(namespace: usize) -> Namespace {
    if namespace == 0 { Namespace::default() } else { Namespace::new(format!("salt {namespace}")) }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 1500,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn no_page_is_lost_and_every_row_is_found(
        config in configs(),
        steps in steps(),
    ) {
        let mut world = World::new(config);
        for step in steps {
            world.run(step);
            world.verify();
        }
        world.end();
    }
}
