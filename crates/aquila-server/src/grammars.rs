//! Compiled grammars: requests with equal ones share them, and what all of them take is bounded.
//!
//! The invariant: a compiled grammar that a request has is in the store, and the bytes of all in the
//! store are within the bound. One that no request has any more stays until others need its room,
//! the one that was asked for longest ago first.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use aquila_text::{CompiledGrammar, GenerateError, Grammar, GrammarSpec};
use ring::digest::{SHA256, SHA256_OUTPUT_LEN, digest};

use crate::compile_turns::{CompileTurn, CompileTurns};
use crate::constraint::Constraint;
use crate::metrics::Page;
use crate::refusal::Refusal;
use crate::state::App;

/// The SHA-256 of a grammar as it was asked for.
pub(crate) type Digest = [u8; SHA256_OUTPUT_LEN];

/// Compiled grammars.
#[derive(Debug)]
pub(crate) struct GrammarStore {
    /// Bytes of all grammars, at most.
    most: usize,
    stored: Mutex<Stored>,
    turns: CompileTurns,
    /// Grammars that were asked for.
    asked: AtomicU64,
    /// Of those, the ones that were in the store.
    found: AtomicU64,
}

#[derive(Debug, Default)]
struct Stored {
    grammars: HashMap<Digest, StoredGrammar>,
    /// Counts uses.
    uses: u64,
}

#[derive(Debug)]
struct StoredGrammar {
    grammar: Arc<CompiledGrammar>,
    /// When it was last asked for, by the count of uses.
    used: u64,
}

impl StoredGrammar {
    /// Whether a request has it. Only the store hands out one that none has, so none gets it while
    /// the store is locked.
    fn is_held(&self) -> bool {
        Arc::strong_count(&self.grammar) > 1
    }
}

impl Stored {
    fn use_of(&mut self, digest: &Digest) -> Option<Arc<CompiledGrammar>> {
        self.uses += 1;
        let stored = self.grammars.get_mut(digest)?;
        stored.used = self.uses;
        Some(stored.grammar.clone())
    }

    fn bytes(&self, counts: impl Fn(&StoredGrammar) -> bool) -> usize {
        let counted = self.grammars.values().filter(|stored| counts(stored));
        counted.map(|stored| stored.grammar.bytes()).sum()
    }

    /// Takes out what no request has, the one that was asked for longest ago first, until there is
    /// room for `bytes` more of `most`; nothing if there cannot be.
    fn make_room(&mut self, bytes: usize, most: usize) -> Option<Vec<StoredGrammar>> {
        let room = most.checked_sub(bytes)?;
        if self.bytes(StoredGrammar::is_held) > room {
            return None;
        }
        let mut unheld: Vec<(u64, Digest)> = Vec::new();
        for (digest, stored) in self.grammars.iter().filter(|(_, stored)| !stored.is_held()) {
            unheld.push((stored.used, *digest));
        }
        unheld.sort_unstable();
        let (mut taken, mut all) = (Vec::new(), self.bytes(|_| true));
        for (_, digest) in unheld {
            if all <= room {
                break;
            }
            let stored = self.grammars.remove(&digest).expect("it was just seen");
            all -= stored.grammar.bytes();
            taken.push(stored);
        }
        Some(taken)
    }
}

/// What a request with a grammar waits for.
enum Next {
    Found(Arc<CompiledGrammar>),
    Turn(CompileTurn),
}

impl GrammarStore {
    /// Room for so many bytes.
    pub fn new(bytes: usize) -> Self {
        let (stored, turns) = (Mutex::default(), CompileTurns::default());
        Self { most: bytes, stored, turns, asked: AtomicU64::new(0), found: AtomicU64::new(0) }
    }

    /// The grammar of a request whose prompt came as `param`: as it is stored, or compiled when there
    /// is a turn, unless there is none for as long as a request may take.
    pub async fn get(
        self: &Arc<Self>,
        app: &App,
        constraint: &Constraint,
        param: &str,
    ) -> Result<Arc<dyn Grammar>, Refusal> {
        self.asked.fetch_add(1, Relaxed);
        let digest = digest_of(&constraint.spec);
        let turn = match self.next(digest, app.settings.limits.request_time).await? {
            Next::Found(grammar) => {
                self.found.fetch_add(1, Relaxed);
                return Ok(grammar);
            }
            Next::Turn(turn) => turn,
        };
        let (store, generator) = (self.clone(), app.generator.clone());
        let (field, spec) = (constraint.field, constraint.spec.clone());
        let compiled = turn.run(move || {
            let compiled = generator.compile(&spec);
            compiled.map(|grammar| store.put(digest, grammar, field))
        });
        let stored = compiled.await?.map_err(|error| match error {
            GenerateError::Param(error) => Refusal::param(field, error.why),
            error => Refusal::of(error, param),
        })?;
        Ok(stored?)
    }

    /// Waits until the grammar is stored, or for the turn to compile it.
    async fn next(&self, digest: Digest, patience: Option<Duration>) -> Result<Next, Refusal> {
        if let Some(found) = self.stored().use_of(&digest) {
            return Ok(Next::Found(found));
        }
        let waiting = async {
            let alone = self.turns.alone(digest).await;
            // It may have been compiled for another request meanwhile.
            let found = self.stored().use_of(&digest);
            match found {
                Some(found) => Next::Found(found),
                None => Next::Turn(self.turns.turn(alone).await),
            }
        };
        match patience {
            Some(patience) => tokio::time::timeout(patience, waiting).await.map_err(|_| {
                Refusal::busy("other grammars were compiled for as long as a request may take")
            }),
            None => Ok(waiting.await),
        }
    }

    /// Stores a grammar that came in `field`, if there is room.
    fn put(
        &self,
        digest: Digest,
        grammar: Arc<CompiledGrammar>,
        field: &str,
    ) -> Result<Arc<CompiledGrammar>, Refusal> {
        let (bytes, most) = (grammar.bytes(), self.most);
        if bytes > most {
            let why = format!(
                "compiled, it takes {bytes} bytes, and this server has room for {most} of all \
                 grammars together (--max-grammar-bytes)"
            );
            return Err(Refusal::param(field, why));
        }
        let mut stored = self.stored();
        let Some(dropped) = stored.make_room(bytes, most) else {
            return Err(Refusal::busy(format!(
                "no room for a grammar that takes {bytes} bytes: those of requests have most of the \
                 {most} bytes that compiled grammars may take together (--max-grammar-bytes)"
            )));
        };
        stored.uses += 1;
        let used = stored.uses;
        stored.grammars.insert(digest, StoredGrammar { grammar: grammar.clone(), used });
        drop(stored);
        // Large ones take long to drop, and the others need not wait for it.
        drop(dropped);
        Ok(grammar)
    }

    fn stored(&self) -> MutexGuard<'_, Stored> {
        // A panic between two changes could only leave a grammar out.
        self.stored.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many grammars were asked for and found, and what requests hold.
    pub fn write_metrics(&self, page: &mut Page) {
        let held = self.stored().bytes(StoredGrammar::is_held);
        let (asked, found) = (self.asked.load(Relaxed), self.found.load(Relaxed));
        for (name, kind, help, value) in [
            ("sglang:num_grammar_total", "counter", "Grammars asked for", asked as f64),
            (
                "sglang:num_grammar_cache_hit_total",
                "counter",
                "Of those, the ones that need not be compiled",
                found as f64,
            ),
            ("aquila:grammar_bytes", "gauge", "Bytes of grammars that requests hold", held as f64),
        ] {
            page.single(name, kind, help, value);
        }
    }
}

/// Of the spec as JSON, where schemas differ if their properties come in another order, since then
/// answers do.
fn digest_of(spec: &GrammarSpec) -> Digest {
    let text = serde_json::to_vec(spec).expect("keys are strings");
    let digest = digest(&SHA256, &text);
    digest.as_ref().try_into().expect("a SHA-256 has 32 bytes")
}

#[cfg(test)]
mod tests {
    use std::sync::LazyLock;

    use aquila_model::{Location, resolve};
    use aquila_text::{GrammarCompiler, Tokenizer};
    use proptest::prelude::*;

    use super::*;

    const KINDS: usize = 6;

    static COMPILER: LazyLock<GrammarCompiler> = LazyLock::new(|| {
        let Location::Folder(folder) = resolve("tiny").unwrap() else { panic!("it has files") };
        let tokenizer = Tokenizer::load(&folder).unwrap().unwrap();
        GrammarCompiler::new(&tokenizer, 8192, &[0, 2]).unwrap()
    });

    /// Grammars of different sizes.
    fn spec(kind: usize) -> GrammarSpec {
        GrammarSpec::Choice((0..=kind * 10).map(|text| format!("text {text}")).collect())
    }

    fn bytes(kind: usize) -> usize {
        static BYTES: LazyLock<Vec<usize>> =
            LazyLock::new(|| (0..KINDS).map(|kind| compiled(kind).bytes()).collect());
        BYTES[kind]
    }

    fn compiled(kind: usize) -> Arc<CompiledGrammar> {
        COMPILER.compile(&spec(kind)).unwrap()
    }

    /// As a request gets one, but for its turn.
    fn get(store: &GrammarStore, kind: usize) -> Result<Arc<CompiledGrammar>, Refusal> {
        let digest = digest_of(&spec(kind));
        let found = store.stored().use_of(&digest);
        found.map_or_else(|| store.put(digest, compiled(kind), "regex"), Ok)
    }

    fn kinds_in(store: &GrammarStore) -> Vec<usize> {
        let stored = store.stored();
        (0..KINDS).filter(|&kind| stored.grammars.contains_key(&digest_of(&spec(kind)))).collect()
    }

    #[test]
    fn unheld_grammars_are_dropped_in_order_of_last_use() {
        let store = GrammarStore::new(bytes(0) + bytes(2) + bytes(3));
        let held = get(&store, 0).unwrap();
        drop((get(&store, 3), get(&store, 2), get(&store, 3)));
        assert_eq!(kinds_in(&store), [0, 2, 3]);
        // The smallest is held, and the largest was asked for last.
        drop(get(&store, 1));
        assert_eq!(kinds_in(&store), [0, 1, 3]);
        drop(held);
        drop(get(&store, 2));
        assert_eq!(kinds_in(&store), [1, 2]);
    }

    #[test]
    fn schemas_with_properties_in_another_order_are_others() {
        let digest =
            |text| digest_of(&GrammarSpec::JsonSchema(serde_json::from_str(text).unwrap()));
        let (one, other) = (r#"{"a": {}, "b": {}}"#, r#"{"b": {}, "a": {}}"#);
        assert_ne!(digest(one), digest(other));
        assert_eq!(digest(one), digest(r#"{ "a":{}, "b":{}}"#));
    }

    #[test]
    fn who_waits_too_long_for_a_turn_is_refused() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let store = GrammarStore::new(0);
        let refused = runtime.block_on(async {
            let _alone = store.turns.alone([1; 32]).await;
            store.next([1; 32], Some(Duration::from_millis(1))).await
        });
        assert_eq!(refused.err().unwrap().status(), 503);
    }

    proptest! {
        #[test]
        fn what_requests_hold_is_within_the_bound(
            most in 0..3 * KINDS,
            steps in prop::collection::vec((0..KINDS, any::<bool>()), 1..60),
        ) {
            let most = most * bytes(KINDS / 2) / 3;
            let store = GrammarStore::new(most);
            // What requests hold, and what is stored in the order of last use.
            let mut held: Vec<(usize, Arc<CompiledGrammar>)> = Vec::new();
            let mut stored: Vec<usize> = Vec::new();
            let sum = |kinds: &[usize]| kinds.iter().map(|&kind| bytes(kind)).sum::<usize>();
            for (kind, leaves) in steps {
                let holder = held.iter().position(|(held, _)| *held == kind);
                if leaves {
                    holder.into_iter().for_each(|holder| drop(held.remove(holder)));
                    continue;
                }
                let is_held = |kind: &usize| held.iter().any(|(held, _)| held == kind);
                let (free, taken): (Vec<_>, Vec<_>) = stored.iter().partition(|kind| !is_held(kind));
                let fits = stored.contains(&kind) || sum(&taken) + bytes(kind) <= most;
                let refused = if bytes(kind) > most { 400 } else { 503 };
                let got = get(&store, kind);
                let status = got.as_ref().err().map(|refusal| refusal.status().as_u16());
                prop_assert_eq!(status, (!fits).then_some(refused));
                if let Ok(grammar) = got {
                    // Equal grammars of different requests are one.
                    prop_assert!(holder.is_none_or(|at| Arc::ptr_eq(&held[at].1, &grammar)));
                    stored.retain(|stored| *stored != kind);
                    for oldest in free {
                        if sum(&stored) + bytes(kind) > most {
                            stored.retain(|stored| *stored != oldest);
                        }
                    }
                    stored.push(kind);
                    held.push((kind, grammar));
                }
                let mut kinds = stored.clone();
                kinds.sort_unstable();
                prop_assert_eq!(kinds_in(&store), kinds);
                prop_assert_eq!(store.stored().bytes(|_| true), sum(&stored));
                prop_assert!(sum(&stored) <= most);
                let mut kinds: Vec<usize> = held.iter().map(|(kind, _)| *kind).collect();
                kinds.sort_unstable();
                kinds.dedup();
                prop_assert_eq!(store.stored().bytes(StoredGrammar::is_held), sum(&kinds));
            }
        }
    }
}
