//! Lists of tokens that are worth drafting, from files of torch and of JSON.

use std::fs;
use std::path::Path;

use aquila_model::TokenMap;

use crate::sequence::fixture;

fn refusal(path: &Path, vocabulary: usize) -> String {
    TokenMap::open(path, vocabulary).unwrap_err().to_string()
}

#[test]
fn a_list_a_tensor_and_json_name_the_same_tokens() {
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("ids.json");
    fs::write(&json, " [5, 3, 300, 1, 70000]").unwrap();
    for path in [fixture("torch").join("ids.pt"), fixture("torch").join("id_tensor.pt"), json] {
        let map = TokenMap::open(&path, 70_001).unwrap();
        assert_eq!(map.ids(), [1, 3, 5, 300, 70_000]);
        let text = refusal(&path, 70_000);
        assert!(text.contains("names 70000, which is no token of the target: it has 70000"));
    }
}

#[test]
fn what_is_no_list_of_tokens_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("map");
    for (content, expected) in [
        ("[]", "names no token"),
        ("[4, 1, 4]", "names token 4 twice"),
        ("[1, 2, 3, 4, 0, 1]", "names more than all 5 tokens of the target"),
        ("[-1]", "names -1, which is no token"),
        ("[1.5]", "holds 1.5"),
        ("[1", "not a valid JSON list"),
        ("1", "is no torch file"),
    ] {
        fs::write(&path, content).unwrap();
        let text = refusal(&path, 5);
        assert!(text.contains(expected), "{content}: {text}");
    }
    for (name, expected) in [
        ("surprise.bin", "names \"posix.system\""),
        ("every_kind.bin", "holds neither a list nor a tensor"),
        ("before_1.6.bin", "before torch 1.6"),
    ] {
        let text = refusal(&fixture("torch").join(name), 5);
        assert!(text.contains(expected), "{text}");
    }
}
