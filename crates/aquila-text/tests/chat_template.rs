//! Chat templates against Jinja2 set up as transformers sets it up (`reference/render.py`), and
//! where they are found.

use std::fs;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use aquila_text::{Error, Tokenizer};
use serde_json::{Map, Value, json};

/// The smallest tokenizer that loads.
const TOKENIZER: &str = r#"{"version": "1.0", "added_tokens": [], "model":
    {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}"#;

fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, text) in [("tokenizer.json", TOKENIZER)].iter().chain(files) {
        let path = folder.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    folder
}

fn load(files: &[(&str, &str)]) -> Tokenizer {
    Tokenizer::load(folder(files).path()).unwrap().unwrap()
}

fn render(tokenizer: &Tokenizer, tools: Option<&Value>) -> Result<String, Error> {
    let messages = json!([{"role": "user", "content": "hi"}]);
    tokenizer.chat_template().unwrap().render(&messages, tools, true, &Map::new())
}

fn reference_time() -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(1_770_281_045)
}

#[test]
fn templates_render_as_jinja2_renders_them() {
    let cases = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/chat/expected.json");
    let cases: Vec<Value> = serde_json::from_slice(&fs::read(cases).unwrap()).unwrap();
    assert!(cases.len() > 80);
    let mut wrong = Vec::new();
    for case in &cases {
        let mut config = case["tokens"].as_object().unwrap().clone();
        config.insert("chat_template".into(), case["template"].clone());
        let config = Value::Object(config).to_string();
        let tokenizer = load(&[("tokenizer_config.json", &config)]);
        let rendered = tokenizer.chat_template().unwrap().render_at(
            reference_time(),
            &case["messages"],
            Some(&case["tools"]).filter(|tools| !tools.is_null()),
            case["add_generation_prompt"].as_bool().unwrap(),
            case["extra"].as_object().unwrap(),
        );
        let agrees = match &rendered {
            Ok(text) => case["expected"] == json!(text),
            Err(Error::TemplateRaised { message }) => case["raises"] == json!(message),
            Err(_) => case["fails"].is_string(),
        };
        if !agrees {
            let wanted = ["expected", "raises", "fails"].map(|key| &case[key]);
            wrong.push(format!("{}\n  wanted {wanted:?}\n  got {rendered:?}", case["name"]));
        }
    }
    assert!(wrong.is_empty(), "{} differ:\n{}", wrong.len(), wrong.join("\n"));
}
