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

#[test]
fn the_shipped_tokenizer_renders_chatml() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tiny");
    let tokenizer = Tokenizer::load(&folder).unwrap().unwrap();
    let prompt = render(&tokenizer, None).unwrap();
    assert_eq!(prompt, "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n");
    let ids = tokenizer.encode(&prompt, false).unwrap();
    assert_eq!(ids.iter().filter(|id| tokenizer.is_special(**id)).count(), 3);
}

#[test]
fn a_template_file_goes_before_the_configuration() {
    let config = ("tokenizer_config.json", r#"{"chat_template": "config"}"#);
    let json = ("chat_template.json", r#"{"chat_template": "json"}"#);
    let jinja = ("chat_template.jinja", "jinja");
    let tool_use = ("additional_chat_templates/tool_use.jinja", "with tools");
    let tools = json!([]);
    assert_eq!(render(&load(&[config]), None).unwrap(), "config");
    assert_eq!(render(&load(&[config, json]), None).unwrap(), "json");
    assert_eq!(render(&load(&[config, json, jinja]), Some(&tools)).unwrap(), "jinja");
    let named = load(&[config, jinja, tool_use]);
    assert_eq!(render(&named, None).unwrap(), "jinja");
    assert_eq!(render(&named, Some(&tools)).unwrap(), "with tools");
}

#[test]
fn the_template_named_for_tools_is_taken_with_tools() {
    let named = json!({"chat_template": [
        {"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"},
    ]});
    let tokenizer = load(&[("tokenizer_config.json", &named.to_string())]);
    assert_eq!(render(&tokenizer, None).unwrap(), "plain");
    assert_eq!(render(&tokenizer, Some(&json!([]))).unwrap(), "tools");
}

#[test]
fn named_templates_without_a_default_are_refused_by_name() {
    let named = json!({"chat_template": [{"name": "rag", "template": "x"}]});
    let error = render(&load(&[("tokenizer_config.json", &named.to_string())]), None).unwrap_err();
    assert!(error.to_string().contains("rag"), "{error}");
}

#[test]
fn a_folder_without_a_template_has_none() {
    assert!(load(&[]).chat_template().is_none());
    assert!(
        load(&[("tokenizer_config.json", r#"{"chat_template": null}"#)]).chat_template().is_none()
    );
}

#[test]
fn a_broken_template_loads_and_says_so_when_used() {
    let tokenizer = load(&[("chat_template.jinja", "line one\n{% for %}")]);
    let error = render(&tokenizer, None).unwrap_err();
    assert!(matches!(error, Error::TemplateSyntax { .. }));
    let error = error.to_string();
    assert!(error.contains("chat_template.jinja") && error.contains("line 2"), "{error}");
}

#[test]
fn a_template_that_refuses_gives_its_own_words() {
    let tokenizer = load(&[("chat_template.jinja", "{{ raise_exception('No system turns.') }}")]);
    let error = render(&tokenizer, None).unwrap_err().to_string();
    assert_eq!(error, "the chat template refuses these messages: No system turns.");
}

#[test]
fn a_template_that_fails_says_where() {
    let tokenizer = load(&[("chat_template.jinja", "a\nb\n{{ nothing.at.all }}")]);
    let error = render(&tokenizer, None).unwrap_err().to_string();
    assert!(error.contains("chat_template.jinja") && error.contains("line 3"), "{error}");
}

#[test]
fn the_old_special_tokens_count_unless_configured() {
    let template = ("chat_template.jinja", "{{ bos_token }}{{ eos_token }}");
    let elder = ("special_tokens_map.json", r#"{"bos_token": {"content": "<elder>"}}"#);
    let plain = ("tokenizer_config.json", r#"{"bos_token": "<b>", "eos_token": "<e>"}"#);
    assert_eq!(render(&load(&[template, elder, plain]), None).unwrap(), "<elder><e>");
    let listing = r#"{"bos_token": "<b>", "eos_token": "<e>", "added_tokens_decoder": {}}"#;
    let listing = ("tokenizer_config.json", listing);
    assert_eq!(render(&load(&[template, elder, listing]), None).unwrap(), "<b><e>");
}

#[test]
fn dates_are_written_as_python_writes_them() {
    // From `datetime.datetime(2027, 1, 5, 15, 4, 9).strftime(…)` of CPython with glibc.
    let now = UNIX_EPOCH + Duration::from_secs(1_799_161_449);
    for (format, date) in [
        ("%d %b %Y, %A %B %-d", "05 Jan 2027, Tuesday January 5"),
        ("%I:%M %p %y %F %T %h", "03:04 PM 27 2027-01-05 15:04:09 Jan"),
        ("%H%Z%z %%Z 100%%", "15 %Z 100%"),
        ("%Y年%m月", "2027年01月"),
    ] {
        let template = format!("{{{{ strftime_now('{format}') }}}}");
        let tokenizer = load(&[("chat_template.jinja", &template)]);
        let template = tokenizer.chat_template().unwrap();
        let text = template.render_at(now, &json!([]), None, false, &Map::new());
        assert_eq!(text.unwrap(), date, "{format}");
    }
    let tokenizer = load(&[("chat_template.jinja", "{{ strftime_now('%Y %!') }}")]);
    let error = render(&tokenizer, None).unwrap_err().to_string();
    assert!(error.contains("%Y %!"), "{error}");
}

#[test]
fn dates_are_right_through_the_centuries() {
    let template = "{{ strftime_now('%Y-%m-%d %a %j %H:%M:%S') }}";
    let tokenizer = load(&[("chat_template.jinja", template)]);
    // From `date -u -d @SECONDS '+%Y-%m-%d %a %j %T'`.
    for (seconds, date) in [
        (0, "1970-01-01 Thu 001 00:00:00"),
        (951_782_399, "2000-02-28 Mon 059 23:59:59"),
        (951_868_799, "2000-02-29 Tue 060 23:59:59"),
        (978_307_199, "2000-12-31 Sun 366 23:59:59"),
        (1_798_761_600, "2027-01-01 Fri 001 00:00:00"),
        (4_107_542_399, "2100-02-28 Sun 059 23:59:59"),
        (4_107_542_400, "2100-03-01 Mon 060 00:00:00"),
    ] {
        let now = UNIX_EPOCH + Duration::from_secs(seconds);
        let template = tokenizer.chat_template().unwrap();
        assert_eq!(template.render_at(now, &json!([]), None, false, &Map::new()).unwrap(), date);
    }
}
