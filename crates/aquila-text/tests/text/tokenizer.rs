//! Tokenizers against the `tokenizers` package of PyPI (`reference/encode.py`), and the files of a
//! folder, whole and broken.

use std::fs;
use std::path::{Path, PathBuf};

use aquila_text::Tokenizer;
use proptest::prelude::*;
use serde_json::{Value, json};

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")
}

fn fixture(name: &str) -> Tokenizer {
    Tokenizer::load(&fixtures().join(name)).unwrap().unwrap()
}

fn tokenizer_json(name: &str) -> Value {
    serde_json::from_slice(&fs::read(fixtures().join(name).join("tokenizer.json")).unwrap())
        .unwrap()
}

fn folder(files: &[(&str, String)]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, text) in files {
        fs::write(folder.path().join(name), text).unwrap();
    }
    folder
}

fn load(files: &[(&str, String)]) -> aquila_text::Result<Option<Tokenizer>> {
    Tokenizer::load(folder(files).path())
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

#[test]
fn ids_and_texts_equal_those_of_the_python_package() {
    let expected: Value =
        serde_json::from_slice(&fs::read(fixtures().join("encodings.json")).unwrap()).unwrap();
    assert_eq!(expected.as_object().unwrap().len(), 8);
    for (name, expected) in expected.as_object().unwrap() {
        let tokenizer = fixture(name);
        assert_eq!(json!(tokenizer.vocab_size()), expected["vocab_size"], "{name}");
        for case in expected["texts"].as_array().unwrap() {
            let text = case["text"].as_str().unwrap();
            assert_eq!(
                tokenizer.encode(text, false).unwrap(),
                ids(&case["ids"]),
                "{name} {text:?}"
            );
            let with_special = tokenizer.encode(text, true).unwrap();
            assert_eq!(with_special, ids(&case["ids_with_special"]), "{name} {text:?}");
        }
        let texts = expected["texts"].as_array().unwrap();
        for case in texts.iter().chain(expected["random"].as_array().unwrap()) {
            let ids = ids(&case["ids"]);
            let decoded = tokenizer.decode(&ids, false).unwrap();
            assert_eq!(json!(decoded), case["decoded"], "{name} {ids:?}");
            let decoded = tokenizer.decode(&ids, true).unwrap();
            assert_eq!(json!(decoded), case["decoded_without_special"], "{name} {ids:?}");
        }
    }
}

#[test]
fn a_folder_without_a_tokenizer_has_none() {
    assert!(load(&[("tokenizer_config.json", "{}".into())]).unwrap().is_none());
}

#[test]
fn ids_beyond_the_vocabulary_are_no_text() {
    for name in ["tiny", "byte_fallback", "metaspace", "wordpiece", "word_ends", "words"] {
        let tokenizer = fixture(name);
        let size = tokenizer.vocab_size() as u32;
        for id in [size, size + 1, u32::MAX] {
            assert_eq!(tokenizer.decode(&[id], false).unwrap(), "", "{name}");
            assert_eq!(tokenizer.token_bytes(id).unwrap(), None);
            assert_eq!(tokenizer.token_text(id).unwrap(), None);
            assert!(!tokenizer.is_special(id));
        }
    }
    let tiny = fixture("tiny");
    let with =
        |id| [tiny.encode("go", false).unwrap(), vec![id], tiny.encode(" on", false).unwrap()];
    assert_eq!(tiny.decode(&with(9000).concat(), true).unwrap(), "go on");
}

#[test]
fn a_byte_level_token_shows_its_own_bytes() {
    let tokenizer = fixture("tiny");
    for text in ["Hello, world!\n", "naïve 世界 🌍", "a\u{0}b\u{ad}"] {
        let ids = tokenizer.encode(text, false).unwrap();
        let bytes: Vec<u8> =
            ids.iter().flat_map(|id| tokenizer.token_bytes(*id).unwrap().unwrap()).collect();
        assert_eq!(bytes, text.as_bytes());
    }
    assert_eq!(tokenizer.token_text(2).unwrap().unwrap(), "<|im_end|>");
    let mut single: Vec<u8> = (0..tokenizer.vocab_size() as u32)
        .filter_map(|id| tokenizer.token_bytes(id).unwrap())
        .filter(|bytes| bytes.len() == 1)
        .map(|bytes| bytes[0])
        .collect();
    single.sort_unstable();
    assert_eq!(single, (0..=255).collect::<Vec<u8>>());
}

#[test]
fn a_byte_fallback_token_is_one_byte() {
    let tokenizer = fixture("byte_fallback");
    let ids = tokenizer.encode("ü", false).unwrap();
    let bytes: Vec<Vec<u8>> =
        ids.iter().map(|id| tokenizer.token_bytes(*id).unwrap().unwrap()).collect();
    assert_eq!(bytes, [b" ".to_vec(), vec![0xC3], vec![0xBC]]);
    assert_eq!(tokenizer.token_text(ids[1]).unwrap().unwrap(), "\u{FFFD}");
    assert_eq!(tokenizer.token(ids[1]).unwrap(), "<0xC3>");
    assert_eq!(tokenizer.token_id("<0xC3>"), Some(ids[1]));
}

#[test]
fn malformed_bytes_spoil_no_character_beside_them() {
    let tokenizer = fixture("byte_fallback");
    let id = |byte: u8| u32::from(byte) + 3;
    let bytes = |bytes: &[u8]| bytes.iter().map(|b| id(*b)).collect::<Vec<u32>>();
    let cases = [
        (bytes("世".as_bytes()), "世"),
        (bytes(&[0xE4, 0xB8, 0x96, 0xE4, 0xB8]), "世\u{FFFD}\u{FFFD}"),
        (bytes(&[0xFF, b'o', b'k']), "\u{FFFD}ok"),
        (
            [bytes(&[0xE4, 0xB8]), vec![tokenizer.token_id("a").unwrap()]].concat(),
            "\u{FFFD}\u{FFFD}a",
        ),
    ];
    for (ids, text) in cases {
        assert_eq!(tokenizer.decode(&ids, true).unwrap(), text);
    }
}

#[test]
fn special_tokens_are_known_by_id() {
    let tokenizer = fixture("tiny");
    let special: Vec<u32> = (0..8192).filter(|id| tokenizer.is_special(*id)).collect();
    assert_eq!(special, [0, 1, 2]);
    let ids = tokenizer.encode("<|im_start|>hi<|im_end|>", false).unwrap();
    assert_eq!(tokenizer.decode(&ids, false).unwrap(), "<|im_start|>hi<|im_end|>");
    assert_eq!(tokenizer.decode(&ids, true).unwrap(), "hi");
}

#[test]
fn a_token_with_a_role_is_always_special() {
    for (config, file) in [
        (json!({"eos_token": "test"}), "tokenizer_config.json"),
        (json!({"eos_token": {"content": "test", "lstrip": false}}), "tokenizer_config.json"),
        (json!({"additional_special_tokens": ["test"]}), "tokenizer_config.json"),
        (
            json!({"eos_token": "test", "pad_token": "not in the vocabulary"}),
            "special_tokens_map.json",
        ),
    ] {
        let files =
            [("tokenizer.json", tokenizer_json("words").to_string()), (file, config.to_string())];
        let tokenizer = load(&files).unwrap().unwrap();
        let test = tokenizer.token_id("test").unwrap();
        assert!(tokenizer.is_special(test), "{config}");
        assert_eq!(tokenizer.decode(&[1, test], true).unwrap(), "the");
        assert_eq!(tokenizer.vocab_size(), 7);
    }
}

#[test]
fn tokens_only_in_the_configuration_are_added_by_id() {
    let listed = json!({"7": {"content": "<tool>", "lstrip": false, "rstrip": false,
        "normalized": false, "single_word": false, "special": true}});
    let config = json!({"added_tokens_decoder": listed}).to_string();
    let elder = json!({"<tool>": 7}).to_string();
    for file in [("tokenizer_config.json", config), ("added_tokens.json", elder)] {
        let tokenizer = load(&[("tokenizer.json", tokenizer_json("words").to_string()), file]);
        let tokenizer = tokenizer.unwrap().unwrap();
        assert_eq!(tokenizer.encode("the<tool>test", false).unwrap(), [1, 7, 2]);
        assert_eq!(tokenizer.decode(&[7], false).unwrap(), "<tool>");
    }
}

#[test]
fn truncation_and_padding_of_training_leave_prompts_alone() {
    let mut tokenizer = tokenizer_json("tiny");
    tokenizer["truncation"] =
        json!({"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0});
    tokenizer["padding"] = json!({"strategy": {"Fixed": 64}, "direction": "Right",
        "pad_to_multiple_of": null, "pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>"});
    let tokenizer = load(&[("tokenizer.json", tokenizer.to_string())]).unwrap().unwrap();
    let text = "a text of rather more than four tokens";
    assert_eq!(tokenizer.encode(text, true).unwrap(), fixture("tiny").encode(text, true).unwrap());
}

#[test]
fn errors_name_the_file_and_what_is_wrong() {
    let words = || ("tokenizer.json", tokenizer_json("words").to_string());
    let config = |text: &str| vec![words(), ("tokenizer_config.json", text.to_owned())];
    let added = r#"{"added_tokens_decoder": {"99": {"content": "<t>", "lstrip": false,
        "rstrip": false, "normalized": false, "single_word": false, "special": true}}}"#;
    let cases = [
        (vec![("tokenizer.json", String::new())], "tokenizer.json", "JSON"),
        (vec![("tokenizer.json", "{\"model\": ".into())], "tokenizer.json", "JSON"),
        (vec![("tokenizer.json", "{}".into())], "tokenizer.json", "no usable tokenizer"),
        (vec![("tokenizer.json", "[1]".into())], "tokenizer.json", "no usable tokenizer"),
        (config("{"), "tokenizer_config.json", "JSON"),
        (config("[]"), "tokenizer_config.json", "object"),
        (config(r#"{"eos_token": 3}"#), "tokenizer_config.json", "`eos_token`"),
        (config(r#"{"bos_token": {"text": "a"}}"#), "tokenizer_config.json", "`bos_token`"),
        (config(r#"{"additional_special_tokens": "a"}"#), "tokenizer_config.json", "list"),
        (config(r#"{"chat_template": 1}"#), "tokenizer_config.json", "`chat_template`"),
        (config(r#"{"chat_template": [{"name": "x"}]}"#), "tokenizer_config.json", "`template`"),
        (config(r#"{"added_tokens_decoder": []}"#), "tokenizer_config.json", "id to token"),
        (config(r#"{"added_tokens_decoder": {"x": {}}}"#), "tokenizer_config.json", "token id"),
        (config(r#"{"added_tokens_decoder": {"8": {}}}"#), "tokenizer_config.json", "content"),
        (config(added), "tokenizer_config.json", "id 99"),
        (vec![words(), ("added_tokens.json", r#"{"<t>": -1}"#.into())], "added_tokens.json", "<t>"),
        (
            vec![words(), ("special_tokens_map.json", "3".into())],
            "special_tokens_map.json",
            "object",
        ),
        (vec![words(), ("chat_template.json", "3".into())], "chat_template.json", "object"),
    ];
    for (files, file, reason) in cases {
        let error = load(&files).unwrap_err().to_string();
        assert!(error.contains(file) && error.contains(reason), "{files:?}: {error}");
    }
}

#[test]
fn a_tokenizer_that_contradicts_itself_is_refused_when_loaded() {
    let mut tokenizer = tokenizer_json("byte_fallback");
    tokenizer["post_processor"]["special_tokens"] = json!({});
    let error = load(&[("tokenizer.json", tokenizer.to_string())]).unwrap_err().to_string();
    assert!(error.contains("tokenizer.json describes no usable tokenizer"), "{error}");
}

/// Every place in a JSON value, as a path of keys and indices.
fn places(value: &Value, at: &str, out: &mut Vec<String>) {
    out.push(at.to_owned());
    match value {
        Value::Object(fields) => {
            for (key, field) in fields {
                let key = key.replace('~', "~0").replace('/', "~1");
                places(field, &format!("{at}/{key}"), out);
            }
        }
        Value::Array(items) => {
            for (i, item) in items.iter().enumerate() {
                places(item, &format!("{at}/{i}"), out);
            }
        }
        _ => {}
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn a_tokenizer_cut_short_is_refused(cut in 0.0..1.0f64) {
        let text = tokenizer_json("byte_fallback").to_string();
        let mut end = (text.len() as f64 * cut) as usize;
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        prop_assert!(load(&[("tokenizer.json", text[..end].to_owned())]).is_err());
    }

    #[test]
    fn a_tokenizer_with_one_wrong_value_never_panics(
        name in prop::sample::select(vec!["byte_fallback", "metaspace", "wordpiece", "word_ends"]),
        place in any::<prop::sample::Index>(),
        wrong in prop::sample::select(vec![
            json!(null), json!(-1), json!(1e30), json!("x"), json!(""), json!([]), json!({}),
            json!([[1]]), json!(true),
        ]),
    ) {
        let mut tokenizer = tokenizer_json(name);
        // The vocabulary is most of the file and the least interesting: a few entries will do.
        let mut all = Vec::new();
        places(&tokenizer, "", &mut all);
        all.retain(|place| !place.starts_with("/model/vocab/") || place.len() < 17);
        let place = place.get(&all);
        *tokenizer.pointer_mut(place).unwrap() = wrong;
        if let Ok(Some(tokenizer)) = load(&[("tokenizer.json", tokenizer.to_string())]) {
            let _ = tokenizer.encode("the tests! é", true);
            let ids: Vec<u32> = (0..300).collect();
            let _ = tokenizer.decode(&ids, false);
            let _ = tokenizer.decode(&[], false);
        }
    }
}
