//! Long texts are tokenized in pieces, with the tokens of the whole.

use std::path::Path;
use std::sync::LazyLock;

use aquila_text::Tokenizer;
use proptest::prelude::*;
use serde_json::{Value, json};

const LLAMA: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// A tokenizer as we load it, and as the library does.
type Pair = (Tokenizer, tokenizers::Tokenizer);

fn pair(change: impl FnOnce(&mut Value)) -> Pair {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny/tokenizer.json");
    let mut json = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    change(&mut json);
    let folder = tempfile::tempdir().unwrap();
    let bytes = json.to_string();
    std::fs::write(folder.path().join("tokenizer.json"), &bytes).unwrap();
    let ours = Tokenizer::load(folder.path()).unwrap().unwrap();
    (ours, tokenizers::Tokenizer::from_bytes(bytes).unwrap())
}

/// The patterns of Qwen with and without NFC, of Llama and of GPT-2, and a tokenizer that puts a
/// token before each text, another that puts one behind it, and one whose token reads spaces.
static PAIRS: LazyLock<Vec<Pair>> = LazyLock::new(|| {
    let template = |single: Value| {
        let special = json!({ "id": "<|im_end|>", "ids": [2], "tokens": ["<|im_end|>"] });
        json!({
            "type": "TemplateProcessing", "single": single, "pair": single,
            "special_tokens": { "<|im_end|>": special },
        })
    };
    let text = json!({ "Sequence": { "id": "A", "type_id": 0 } });
    let mark = json!({ "SpecialToken": { "id": "<|im_end|>", "type_id": 0 } });
    vec![
        pair(|_| ()),
        pair(|json| json["normalizer"] = json!({ "type": "NFC" })),
        pair(|json| json["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = LLAMA.into()),
        pair(|json| {
            json["pre_tokenizer"] = json!({
                "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true,
                "use_regex": true,
            });
        }),
        pair(|json| json["post_processor"] = template(json!([mark, text]))),
        pair(|json| json["post_processor"] = template(json!([text, mark]))),
        pair(|json| json["added_tokens"][0]["rstrip"] = true.into()),
    ]
});

fn check(text: &str) {
    for (ours, library) in PAIRS.iter() {
        for add_special in [false, true] {
            let expected = library.encode_fast(text, add_special).unwrap();
            assert!(ours.encode(text, add_special).unwrap() == expected.get_ids());
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(8))]

    #[test]
    fn pieces_have_the_tokens_of_the_whole(
        parts in prop::collection::vec(
            prop_oneof![
                "[a-z0-9]{0,6}", " {1,4}", "[ \\n\\r\\t]{1,5}", "\\PC{1,3}", "[.,'!-]{1,3}",
                Just("don't we'll ".to_owned()), Just("<|endoftext|> ".to_owned()),
                Just("e\u{301} K\u{212a} ".to_owned()),
            ],
            8..40,
        ),
        shift in 0..400_usize,
    ) {
        // Every part comes to lie at a cut, sooner or later.
        let unit = parts.concat();
        let text = "x".repeat(shift) + &unit.repeat(150_000 / unit.len().max(1));
        check(&text);
    }
}

#[test]
fn texts_that_cannot_be_cut_are_whole() {
    check(&"a".repeat(100_000));
    check(&" ".repeat(200_000));
    check(&"\n".repeat(100_000));
}

#[test]
fn a_text_is_tokenized_no_further_than_it_may_go() {
    let (tokenizer, _) = &PAIRS[0];
    let text = "word ".repeat(100_000);
    let tokens = tokenizer.encode(&text, true).unwrap();
    let most = tokens.len();
    assert_eq!(tokenizer.encode_up_to(&text, true, most).unwrap(), Some(tokens));
    assert_eq!(tokenizer.encode_up_to(&text, true, most - 1).unwrap(), None);
}
