//! Algorithms are found by name in any case, and no two share one.

use aquila_spec::{DraftFor, Entry, Error, Opened, Opening, Registry, Result};

struct Named(&'static str, &'static [&'static str]);

impl Entry for Named {
    fn name(&self) -> &'static str {
        self.0
    }

    fn aliases(&self) -> &'static [&'static str] {
        self.1
    }

    fn draft_for(&self, _model: &str) -> DraftFor {
        DraftFor::Nothing
    }

    fn open(&self, _opening: &Opening<'_>) -> Result<Box<dyn Opened>> {
        Err(Error::Refused(format!("{} opens nothing", self.0)))
    }
}

fn name(registry: &Registry, name: &str) -> Option<&'static str> {
    registry.find(name).unwrap().map(|entry| entry.name())
}

#[test]
fn an_algorithm_is_found_by_its_names_in_any_case() {
    let mut registry = Registry::built_in();
    registry.register(Box::new(Named("OWL", &["Night-Bird"]))).unwrap();
    for called in ["OWL", "owl", "Owl", "NIGHT-BIRD", "night-bird"] {
        assert_eq!(name(&registry, called), Some("OWL"), "{called}");
    }
    assert_eq!(name(&registry, "eagle3"), Some("EAGLE3"));
    assert_eq!(name(&registry, "none"), None);
}

#[test]
fn a_name_that_is_taken_is_refused_whoever_took_it() {
    let mut registry = Registry::built_in();
    registry.register(Box::new(Named("OWL", &["BIRD"]))).unwrap();
    let taken = [("owl", &[][..]), ("bird", &[]), ("Eagle3", &[]), ("standalone", &[])];
    for (name, aliases) in taken.into_iter().chain([
        ("none", &[][..]),
        ("dflash", &[]),
        ("frozen_kv_mtp", &[]),
        ("HAWK", &["Bird"]),
    ]) {
        let refused = registry.register(Box::new(Named(name, aliases))).unwrap_err();
        assert!(matches!(refused, Error::NameTaken(_)), "{name}: {refused}");
    }
    for name in ["", "two words", "a,b"] {
        let refused = registry.register(Box::new(Named(name, &[]))).unwrap_err();
        assert!(matches!(refused, Error::BadName(_)), "{name}: {refused}");
    }
    assert!(registry.find("hawk").is_err(), "a refused algorithm leaves nothing behind");
}

#[test]
fn an_unknown_name_is_answered_with_those_there_are() {
    let registry = Registry::built_in();
    let text = |name| registry.find(name).err().unwrap().to_string();
    assert!(
        text("HAWK").contains("NONE, EAGLE3, EAGLE, MTP, NEXTN, STANDALONE, NGRAM"),
        "{}",
        text("HAWK")
    );
    assert!(text("dflash").contains("not yet"), "{}", text("dflash"));
}
