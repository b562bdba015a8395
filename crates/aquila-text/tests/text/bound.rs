//! The bound on a text's bytes is exact: no text that fits is above it.

use std::path::Path;
use std::sync::LazyLock;

use aquila_text::Tokenizer;
use proptest::prelude::*;

fn fixture(name: &str) -> Tokenizer {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name);
    Tokenizer::load(&folder).unwrap().unwrap()
}

/// A tokenizer as `change` makes it from the one of a fixture.
fn changed(name: &str, change: impl FnOnce(&mut serde_json::Value)) -> Tokenizer {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name);
    let text = std::fs::read(path.join("tokenizer.json")).unwrap();
    let mut json = serde_json::from_slice(&text).unwrap();
    change(&mut json);
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("tokenizer.json"), json.to_string()).unwrap();
    Tokenizer::load(folder.path()).unwrap().unwrap()
}

fn with_normalizer(normalizer: serde_json::Value) -> Tokenizer {
    changed("tiny", |json| json["normalizer"] = normalizer)
}

/// Tokenizers that have a bound.
static BOUNDED: LazyLock<Vec<Tokenizer>> = LazyLock::new(|| {
    vec![
        fixture("tiny"),
        fixture("byte_fallback"),
        with_normalizer(serde_json::json!({ "type": "NFC" })),
        with_normalizer(serde_json::json!({
            "type": "Replace", "pattern": { "String": "aaaa" }, "content": "b"
        })),
    ]
});

fn check(tokenizer: &Tokenizer, text: &str) {
    for add_special in [false, true] {
        let tokens = tokenizer.encode(text, add_special).unwrap().len();
        let most = tokenizer.most_bytes(tokens).expect("a bound");
        assert!(text.len() <= most, "{text:?}: {} bytes in {tokens} tokens", text.len());
    }
}

proptest! {
    #[test]
    fn no_text_has_fewer_tokens_than_its_bytes_allow(
        parts in prop::collection::vec(
            prop_oneof!["[a-z ]{0,20}", "\\PC{0,8}", " {0,200}", "\n{0,40}", "a{0,80}",
                Just("<|im_start|>".to_owned()), Just("\u{1fbe}\u{344}".repeat(9))],
            0..12,
        ),
    ) {
        let text = parts.concat();
        BOUNDED.iter().for_each(|tokenizer| check(tokenizer, &text));
    }
}

#[test]
fn a_text_of_longest_tokens_meets_its_bound() {
    let tokenizer = fixture("tiny");
    let most = tokenizer.most_bytes(1).unwrap();
    let text = (0..tokenizer.vocab_size() as u32)
        .filter_map(|id| tokenizer.token_text(id).unwrap())
        .find(|text| text.len() == most)
        .expect("a token of as many bytes");
    assert_eq!(tokenizer.encode(&text, false).unwrap().len(), 1);
}

#[test]
fn tokenizers_that_drop_or_fuse_text_have_no_bound() {
    let stripped = changed("tiny", |json| json["added_tokens"][0]["lstrip"] = true.into());
    assert_eq!(stripped.encode(&format!("{}<|endoftext|>", " ".repeat(999)), false).unwrap(), [0]);
    let whitespace = serde_json::json!({ "type": "WhitespaceSplit" });
    let split = changed("tiny", |json| {
        json["pre_tokenizer"]["pretokenizers"].as_array_mut().unwrap().insert(0, whitespace);
    });
    let incomplete = changed("tiny", |json| {
        json["model"]["vocab"].as_object_mut().unwrap().shift_remove("Ā");
    });
    let strip = with_normalizer(serde_json::json!({
        "type": "Strip", "strip_left": true, "strip_right": true
    }));
    let wordpiece = fixture("wordpiece");
    for tokenizer in [stripped, split, incomplete, strip, wordpiece] {
        assert_eq!(tokenizer.most_bytes(1), None);
    }
}
