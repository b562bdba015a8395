//! Grammars over the vocabulary of the shipped model.

use std::sync::{Arc, LazyLock};

use aquila_compute::round::{Grammar, GrammarState};
use aquila_model::{Location, Places};
use aquila_text::{GrammarCompiler, GrammarSpec, Tokenizer};
use proptest::prelude::*;
use serde_json::{Map, Value, json};

const LOGITS: usize = 8192;
const EOS: [u32; 2] = [0, 2];

static TOKENIZER: LazyLock<Tokenizer> = LazyLock::new(|| {
    let places = Places {
        shipped: vec![concat!(env!("CARGO_MANIFEST_DIR"), "/../../models").into()],
        unpacked: Some(env!("CARGO_TARGET_TMPDIR").into()),
        hub: None,
    };
    match places.resolve("tiny", None, &mut |_| {}).unwrap() {
        Location::Folder(folder) => Tokenizer::load(&folder).unwrap().unwrap(),
        other => panic!("{other:?}"),
    }
});

pub static COMPILER: LazyLock<GrammarCompiler> =
    LazyLock::new(|| GrammarCompiler::new(&TOKENIZER, LOGITS, &EOS).unwrap());

fn compile(spec: GrammarSpec) -> Arc<dyn Grammar> {
    COMPILER.compile(&spec).unwrap()
}

fn refused(spec: GrammarSpec) -> String {
    COMPILER.compile(&spec).unwrap_err()
}

/// How a text ends: whether the grammar allows it at all, and as a whole.
#[derive(Debug, PartialEq)]
enum Fate {
    Refused,
    Begun,
    Whole,
}

/// What becomes of a text, one byte at a time, so that no tokenization is preferred.
fn fate(grammar: &Arc<dyn Grammar>, text: &str) -> Fate {
    let mut state = grammar.begin();
    for byte in text.bytes() {
        if state.is_complete() || !state.push(token_of(&[byte])).unwrap() {
            return Fate::Refused;
        }
    }
    let ends = state.is_complete() || state.push(EOS[0]).unwrap();
    if ends { Fate::Whole } else { Fate::Begun }
}

fn token_of(bytes: &[u8]) -> u32 {
    let is = |&id: &u32| TOKENIZER.token_bytes(id).unwrap().as_deref() == Some(bytes);
    (3..LOGITS as u32).find(is).unwrap_or_else(|| panic!("no token has the bytes {bytes:?}"))
}

fn check(spec: GrammarSpec, whole: &[&str], begun: &[&str], refused: &[&str]) {
    let grammar = compile(spec);
    for (texts, wanted) in [(whole, Fate::Whole), (begun, Fate::Begun), (refused, Fate::Refused)] {
        for text in texts {
            assert_eq!(fate(&grammar, text), wanted, "{text:?}");
        }
    }
}

#[test]
fn reasoning_is_free_before_every_kind_of_grammar() {
    let schema = json!({
        "type": "object", "properties": { "a": { "enum": [1, 2] } }, "required": ["a"]
    });
    let kinds = [
        (GrammarSpec::JsonSchema(schema), r#"{"a":1}"#),
        (GrammarSpec::Regex("[0-9]{2}/x".into()), "47/x"),
        (GrammarSpec::Ebnf("root ::= \"yes\" | \"no\"".into()), "no"),
        (GrammarSpec::Choice(vec!["red".into(), "blue".into()]), "blue"),
        (GrammarSpec::Lark("start: \"a\" rest\nrest: /b+/".into()), "abb"),
    ];
    for (answer, text) in kinds {
        let after = |begun| GrammarSpec::AfterReasoning { begun, answer: Box::new(answer.clone()) };
        let lines = format!("1 < 2, \"{text}\" </think\n</think>\n\n{text}");
        let close = format!("</think>{text}");
        let opened = format!("<think>{lines}");
        let begun = ["", "so", "so </think", "so </think>", "</think>\n"];
        check(after(true), &[&lines, &close, &opened], &[&begun[..], &[text]].concat(), &[]);
        check(after(true), &[], &[], &["so </think> so", "</think>\n\n\n\n\n\n"]);
        let begun = ["", "<think>", "<think>so", "<think></think>\n"];
        check(after(false), &[text, &opened], &begun, &["so", "</think>", "<think></think>so"]);
    }
}

#[test]
fn every_kind_of_grammar_says_which_texts_it_allows() {
    let schema = json!({
        "type": "object",
        "properties": { "age": { "type": "integer", "minimum": 0, "maximum": 120 } },
        "required": ["age"],
        "additionalProperties": false
    });
    check(
        GrammarSpec::JsonSchema(schema),
        &[r#"{"age": 42}"#, r#"{"age":0}"#],
        &[r#"{"a"#, r#"{"age": 12"#],
        &[r#"{"age": 121"#, r#"{"name"#, "[", r#"{"age": 1}}"#],
    );
    let object = GrammarSpec::JsonSchema(json!({ "type": "object" }));
    check(object, &["{}", r#"{"a": [1, null]}"#], &["{"], &["[", "null"]);
    check(
        GrammarSpec::Regex(r"(0|[1-9][0-9]*)\.[0-9]{2}".into()),
        &["0.25", "13.00"],
        &["13.0", "7"],
        &["01", "1.000", "x"],
    );
    check(
        GrammarSpec::Choice(vec!["yes".into(), "no".into(), "no way".into()]),
        &["yes", "no", "no way"],
        &["y", "no w"],
        &["yess", "maybe"],
    );
    let lark = "start: \"say \" WORD+ \".\"\nWORD: /[a-z]+ ?/";
    check(GrammarSpec::Lark(lark.into()), &["say a word."], &["say a"], &["say 1"]);
}

#[test]
fn ebnf_grammars_mean_what_they_mean_in_sglang() {
    let ebnf = r#"
        # A greeting, some names, a sign.
        root ::= greeting (", " name)* sign?
        greeting ::= "hello" | "hi"   # either
        name ::= [A-Z] [a-z]{1,3} | "\"" [^"\n]* "\""
        sign ::= ("!" | "." ){2} | "\x3f\u00e9"
    "#;
    check(
        GrammarSpec::Ebnf(ebnf.into()),
        &["hello", "hi, Bo", "hi, Anna, \"O'Neil-1\"!.", "hello?é", "hi, \"\""],
        &["h", "hi, B", "hi!"],
        &["hi, bo", "hi, Annas", "hi, Bo!?", "hello\n"],
    );
    let recursive = "root ::= pair\npair ::= \"(\" pair \")\" | [-+a-c]";
    check(GrammarSpec::Ebnf(recursive.into()), &["((a))", "-", "(+)"], &["(("], &["()", "d"]);
    let empty = "root ::= \"a\" rest\nrest ::= | \"b\" rest";
    check(GrammarSpec::Ebnf(empty.into()), &["a", "abb"], &[], &["b", "ac"]);
}

#[test]
fn bad_grammars_are_refused_with_their_fault() {
    let ebnf = |text: &str| refused(GrammarSpec::Ebnf(text.into()));
    assert_eq!(ebnf("start ::= \"a\""), "there is no rule `root`, with which a text begins");
    assert_eq!(ebnf("root ::= \"a\" |\n  other"), "line 2: there is no rule `other`");
    assert_eq!(ebnf("root ::= \"a"), "line 1: a text must end with a quote, found the end");
    assert_eq!(
        ebnf("root ::= a\na ::= (\"b\""),
        "line 2: a group must end with `)`, found the end"
    );
    assert_eq!(ebnf("root ::= \"a\"\nroot ::= \"b\""), "line 2: the rule `root` is defined twice");
    assert_eq!(
        ebnf("root ::= \"a\"{3,2}"),
        "line 1: a repetition is {n}, {n,} or {n,m}, found `3,2}`"
    );
    assert_eq!(
        ebnf("root ::= (= \"a\") \"b\""),
        "line 1: lookaheads are not supported, found `(= \"a\") \"b\"`"
    );
    assert!(ebnf(&format!("root ::= {}", "(".repeat(100_000))).contains("nested too deeply"));
    assert!(
        refused(GrammarSpec::Regex("(".into())).contains("regex"),
        "{}",
        refused(GrammarSpec::Regex("(".into()))
    );
    assert!(!refused(GrammarSpec::Regex("(".repeat(100_000))).is_empty());
    assert!(!refused(GrammarSpec::Lark("start: other".into())).is_empty());
    assert!(!refused(GrammarSpec::Lark(format!("start: {}", "(".repeat(100_000)))).is_empty());
    assert!(!refused(GrammarSpec::Choice(vec![])).is_empty());
    let why = refused(GrammarSpec::JsonSchema(json!({ "type": "strnig" })));
    assert!(why.contains("strnig"), "{why}");
    let why = refused(GrammarSpec::JsonSchema(json!({ "type": "string", "pattern": "(" })));
    assert!(why.contains("pattern") || why.contains("regex"), "{why}");
    // To find a text with all of these would take for ever.
    let letters = ('a'..='z').map(|letter| json!({ "pattern": format!(".*{letter}.*") }));
    let all = json!({ "type": "string", "allOf": letters.collect::<Vec<_>>() });
    let why = refused(GrammarSpec::JsonSchema(all));
    assert!(why.contains("more than 12 patterns and formats must hold together"), "{why}");
    // No text can be like this.
    let nothing = json!({ "type": "integer", "minimum": 3, "maximum": 2 });
    assert!(!refused(GrammarSpec::JsonSchema(nothing)).is_empty());
}

#[test]
fn deeply_nested_schemas_do_not_overflow_the_stack() {
    let mut schema = json!({ "type": "integer" });
    for depth in 0..60 {
        schema = match depth % 3 {
            0 => json!({ "type": "array", "items": schema, "maxItems": 2 }),
            1 => json!({ "anyOf": [schema, { "type": "null" }] }),
            _ => json!({ "allOf": [schema, {}] }),
        };
    }
    compile(GrammarSpec::JsonSchema(schema));
}

/// The schema of references that lead from one to the next, `count` of them, each as `step` says.
fn chain(count: usize, step: impl Fn(Value) -> Value) -> Value {
    let link = |index| json!({ "$ref": format!("#/$defs/{index}") });
    let mut defs: Map<String, Value> =
        (0..count).map(|index| (index.to_string(), step(link(index + 1)))).collect();
    defs.insert(count.to_string(), json!({ "type": "object" }));
    json!({ "$ref": "#/$defs/0", "$defs": defs })
}

#[test]
fn chains_of_rules_and_references_are_bounded() {
    let rules = |count: usize, open: &str, close: &str| {
        let next = |index| format!("r{index}::={open}r{}{close} ", index + 1);
        let chain: String = (0..count).map(next).collect();
        GrammarSpec::Ebnf(format!("root::=r0 {chain} r{count}::=\"x\""))
    };
    check(rules(9_990, "", ""), &["x"], &[""], &["y"]);
    check(rules(340, &"(".repeat(28), &")".repeat(28)), &["x"], &[""], &["y"]);
    assert!(refused(rules(10_000, "", "")).contains("at most 10000 are allowed"));
    assert!(refused(rules(400, &"(".repeat(28), &")".repeat(28))).contains("rules and groups"));

    let array = |item| json!({ "type": "array", "items": item });
    compile(GrammarSpec::JsonSchema(chain(2_500, array)));
    let why = refused(GrammarSpec::JsonSchema(chain(3_900, array)));
    assert!(why.contains("nested too deeply"), "{why}");
    let why = refused(GrammarSpec::JsonSchema(chain(4_100, |next| next)));
    assert!(why.contains("nested too deeply"), "{why}");
}

#[test]
fn texts_of_grammars_are_bounded() {
    let long = "a".repeat(300_000);
    let specs = [
        GrammarSpec::Regex(long.clone()),
        GrammarSpec::Ebnf(format!("root ::= \"{long}\"")),
        GrammarSpec::Choice(vec![long.clone()]),
        GrammarSpec::Lark(format!("start: \"{}\"", long.repeat(4))),
        GrammarSpec::JsonSchema(json!({ "const": long })),
    ];
    for spec in specs {
        let after = GrammarSpec::AfterReasoning { begun: false, answer: Box::new(spec.clone()) };
        for spec in [spec, after] {
            let why = refused(spec);
            assert!(why.contains("262144") || why.contains("1048576"), "{why}");
        }
    }
}

#[test]
fn parts_that_copy_each_other_are_refused() {
    let refused = |schema| refused(GrammarSpec::JsonSchema(schema));
    // Each level has the next one twice.
    let twice = |next: Value| {
        let object = json!({ "$ref": next["$ref"], "type": "object" });
        json!({ "type": "object", "properties": { "x": object, "y": object } })
    };
    assert!(refused(chain(40, twice)).contains("parts are joined"));
    // Each option has the text.
    let options = vec![json!({ "type": "string", "minLength": 1 }); 2_000];
    let copied = json!({ "allOf": [{ "const": "x".repeat(100_000) }, { "anyOf": options }] });
    assert!(refused(copied).contains("parts are joined"));
    let options = vec![json!({ "enum": ["a", "b", "c"] }); 30];
    assert!(refused(json!({ "allOf": options })).contains("parts are joined"));
    // Options that say nothing have what holds already.
    let options = json!({ "const": vec![1; 5_000], "anyOf": vec![json!({}); 2_000] });
    assert!(refused(options).contains("parts are joined"));
    // Each type has the text.
    let types = json!({ "type": vec!["array"; 2_000], "items": { "const": vec![1; 60_000] } });
    assert!(refused(types).contains("parts are joined"));
}

#[test]
fn what_is_copied_into_each_property_is_counted() {
    let names = |count: usize, part: Value| -> Map<String, Value> {
        (0..count).map(|index| (format!("p{index}"), part.clone())).collect()
    };
    let long = json!({ "const": vec![1; 60_000] });
    let any = json!({ "type": "object", "properties": names(10_000, json!({})) });
    let additional = json!({ "type": "object", "additionalProperties": long });
    let items = json!({ "type": "array", "items": long });
    let link = names(3_000, json!({ "$ref": "#/$defs/a" }));
    let link = json!({ "type": "object", "properties": link });
    let typed = json!({ "type": "object", "additionalProperties": { "type": "array" } });
    for schema in [
        json!({ "allOf": [any, additional] }),
        json!({ "properties": any["properties"], "patternProperties": { "^p": long } }),
        json!({ "allOf": [{ "type": "array", "prefixItems": vec![json!({}); 30_000] }, items] }),
        json!({ "allOf": [link, typed], "$defs": { "a": { "const": vec![1; 5_000] } } }),
    ] {
        assert!(schema.to_string().len() < 256 << 10);
        let why = refused(GrammarSpec::JsonSchema(schema));
        assert!(why.contains("parts are joined"), "{why}");
    }
}

#[test]
fn what_is_compared_with_all_others_is_counted() {
    let refused = |schema| refused(GrammarSpec::JsonSchema(schema));
    let patterns = |names: std::ops::Range<usize>| {
        let named = names.map(|index| (format!("^a{index}$"), json!({})));
        json!({ "type": "object", "patternProperties": named.collect::<Map<_, _>>() })
    };
    compile(GrammarSpec::JsonSchema(patterns(0..32)));
    assert!(refused(patterns(0..33)).contains("33 `patternProperties`"));
    assert!(refused(patterns(0..1_200)).contains("at most 32"));
    let joined = json!({ "allOf": [patterns(0..20), patterns(10..40)] });
    assert!(refused(joined).contains("40 `patternProperties`"));
    let mut again = vec![json!({ "type": "object" }); 1_000];
    again[0] = patterns(0..32);
    assert!(refused(json!({ "allOf": again })).contains("parts are joined"));
    // At least one of many properties.
    let names: Map<String, Value> = (0..2_000).map(|i| (format!("p{i}"), json!(true))).collect();
    let one = json!({ "properties": names, "minProperties": 1, "additionalProperties": false });
    assert!(refused(one).contains("parts are joined"));
    let option =
        |index| json!({ "required": ["a", "b", "c"], "properties": { "a": { "const": index } } });
    let one: Vec<Value> = (0..3_000).map(option).collect();
    assert!(refused(json!({ "type": "object", "oneOf": one })).contains("parts are joined"));
}

#[test]
fn composed_objects_hold_answers() {
    let part = |index: usize, values: usize| {
        let values: Vec<String> = (0..values).map(|value| format!("v{value}")).collect();
        json!({ "type": "object", "properties": { format!("k{index}"): { "enum": values } } })
    };
    let parts = |count, values| -> Vec<Value> { (0..count).map(|i| part(i, values)).collect() };
    let base = |index: usize| json!({ "$ref": format!("#/$defs/{index}") });
    let level = |index: usize| match index {
        0 => part(0, 20),
        _ => json!({ "allOf": [base(index - 1), part(index, 20)] }),
    };
    let levels: Map<String, Value> = (0..4).map(|i| (i.to_string(), level(i))).collect();
    let typeless: Vec<Value> =
        parts(8, 20).into_iter().map(|part| json!({ "properties": part["properties"] })).collect();
    for schema in [
        json!({ "allOf": parts(4, 20) }),
        json!({ "allOf": parts(3, 100) }),
        json!({ "$ref": "#/$defs/3", "$defs": levels }),
        json!({ "type": "object", "allOf": typeless }),
    ] {
        check(
            GrammarSpec::JsonSchema(schema),
            &[r#"{"k0":"v19"}"#, r#"{"k0":"v0","k1":"v7","k2":"v11"}"#],
            &[r#"{"k0":"v1"#],
            &[r#"{"k0":"v100"#, r#"{"k2":"w"#],
        );
    }
    // Each says more of the one before.
    let object = |next: Value| json!({ "$ref": next["$ref"], "type": "object" });
    check(GrammarSpec::JsonSchema(chain(2_000, object)), &["{}"], &["{"], &["["]);
}

#[test]
fn schemas_that_join_many_parts_are_checked_at_once() {
    // Each refers to all others, and says more.
    let part = json!({ "$ref": "#", "x": 1 });
    let schema = json!({ "type": "object", "x": vec![part; 10_000] });
    assert_eq!(fate(&compile(GrammarSpec::JsonSchema(schema)), "{}"), Fate::Whole);
}

#[test]
fn patterns_hold_together_where_their_strings_are_one() {
    let date = json!({ "type": "string", "format": "date" });
    let dates: Map<String, Value> =
        (0..20).map(|index| (format!("d{index}"), date.clone())).collect();
    let of = |part: Value| {
        GrammarSpec::JsonSchema(json!({ "allOf": [part, { "$ref": "#/$defs/b" }],
        "$defs": { "b": { "properties": { "name": { "type": "string" } } } } }))
    };
    let grammar = compile(of(json!({ "type": "object", "properties": dates })));
    assert_eq!(fate(&grammar, r#"{"d0":"2024-02-30"}"#), Fate::Refused);
    assert_eq!(fate(&grammar, r#"{"d0":"2024-02-28"}"#), Fate::Whole);
    // A chain of references, each with a pattern of its own: of texts, of any value, and of objects,
    // which patterns say nothing about.
    let more = |next: Value| json!({ "$ref": next["$ref"], "pattern": "a" });
    let chain_to = |last: Value| {
        let mut chain = chain(20, more);
        chain["$defs"]["20"] = last;
        GrammarSpec::JsonSchema(chain)
    };
    for last in [json!({ "type": "string" }), json!({})] {
        let why = refused(chain_to(last));
        assert!(why.contains("more than 12 patterns and formats must hold together"), "{why}");
    }
    check(chain_to(json!({ "type": "object" })), &["{}"], &["{"], &["\"a"]);
}

/// 250 definitions that refer to each other as those of large programs do, and inherit from others.
#[test]
fn large_schemas_of_real_programs_compile() {
    let link = |to: usize| json!({ "$ref": format!("#/$defs/Model{to}") });
    let described = |to: usize| json!({ "$ref": format!("#/$defs/Model{to}"), "description": "What it belongs to." });
    let model = |index: usize| {
        let own = json!({
            "type": "object",
            "description": "A part of the whole that has many others within it.",
            "properties": {
                "name": { "type": "string", "maxLength": 80 },
                "created": { "type": "string", "format": "date-time" },
                "kind": { "enum": ["first", "second", "third", null] },
                "parent": { "anyOf": [link(index * 7 % 250), { "type": "null" }] },
                "owner": described(index * 3 % 250),
                "parts": { "type": "array", "items": link((index + 1) % 250) },
                "labels": { "type": "object", "additionalProperties": { "type": "string" } },
            },
            "required": ["name", "kind"],
        });
        match index % 5 {
            _ if index >= 240 => json!({ "properties": { "id": { "type": "integer" } } }),
            0 => json!({ "allOf": [link(240 + index % 10), own] }),
            _ => own,
        }
    };
    let defs: Map<String, Value> =
        (0..250).map(|index| (format!("Model{index}"), model(index))).collect();
    let schema = json!({ "$ref": "#/$defs/Model5", "$defs": defs });
    assert!((120_000..200_000).contains(&schema.to_string().len()));
    let grammar = compile(GrammarSpec::JsonSchema(schema));
    let text = r#"{"name":"a","kind":null,"owner":{"name":"b","kind":"third"}}"#;
    assert_eq!(fate(&grammar, text), Fate::Whole);
}

/// The lexer of this one remembers which of the last 200 characters were letters.
#[test]
fn answers_that_need_much_memory_end_early() {
    let grammar = compile(GrammarSpec::Regex("(?s:.*)[a-mA-M](?s:.{200})".into()));
    let mut state = grammar.begin();
    let tokens: Vec<u32> = (3..LOGITS as u32).filter(|&id| !TOKENIZER.is_special(id)).collect();
    let mut random = 12_345_u64;
    let mut failed = None;
    for _ in 0..3_000 {
        match state.allowed() {
            Ok(allowed) => {
                let token = loop {
                    random =
                        random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                    let token = tokens[(random >> 33) as usize % tokens.len()];
                    if allowed.contains(token) {
                        break token;
                    }
                };
                assert!(state.push(token).unwrap());
            }
            Err(why) => {
                failed = Some(why);
                break;
            }
        }
    }
    let why = failed.expect("it needs more than 3,000 tokens");
    assert!(why.contains("too many states"), "{why}");
}

#[test]
fn a_text_that_names_a_special_token_is_not_that_token() {
    let special = (0..LOGITS as u32).find(|&id| TOKENIZER.is_special(id)).unwrap();
    let name = TOKENIZER.token(special).unwrap();
    let grammar = compile(GrammarSpec::Choice(vec![name.clone()]));
    assert_eq!(fate(&grammar, &name), Fate::Whole);
    let mut state = grammar.begin();
    let forced = state.forced().unwrap();
    assert!(!forced.contains(&special), "{forced:?}");
    assert!(!state.allowed().unwrap().contains(special));
}

#[test]
fn what_must_follow_is_found_and_allowed() {
    let grammar = compile(GrammarSpec::Regex("The result is: [0-9]+ of 100".into()));
    let mut state = grammar.begin();
    let forced = state.forced().unwrap();
    let text = TOKENIZER.decode(&forced, false).unwrap();
    assert!("The result is: ".starts_with(&text) && text.len() > 8, "{text:?}");
    for &token in &forced {
        assert!(state.allowed().unwrap().contains(token));
        assert!(state.push(token).unwrap());
    }
}

/// Texts that the grammar of the property allows: arrays of arrays, with spaces wherever they may be.
fn some_json() -> impl Strategy<Value = String> {
    let space = || prop_oneof![Just(""), Just(" "), Just("\n    "), Just("\n        ")];
    let item = prop_oneof![
        any::<i16>().prop_map(|n| n.to_string()),
        "[a-z \"é✓]{0,12}".prop_map(|text| json!(text).to_string()),
        Just("null".to_owned()),
    ];
    item.prop_recursive(3, 12, 4, move |inner| {
        let items = prop::collection::vec((space(), inner, space()), 0..4);
        items.prop_map(|items| {
            let items: Vec<String> = items
                .into_iter()
                .map(|(before, item, after)| format!("{before}{item}{after}"))
                .collect();
            format!("[{}]", items.join(","))
        })
    })
}

fn arrays() -> Arc<dyn Grammar> {
    static ARRAYS: LazyLock<Arc<dyn Grammar>> = LazyLock::new(|| {
        compile(GrammarSpec::JsonSchema(json!({
            "$defs": { "item": { "anyOf": [
                { "type": "integer" }, { "type": "string" }, { "type": "null" },
                { "type": "array", "items": { "$ref": "#/$defs/item" } }
            ] } },
            "$ref": "#/$defs/item"
        })))
    });
    ARRAYS.clone()
}

fn allowed(state: &mut dyn GrammarState) -> Option<aquila_compute::sampling::TokenSet> {
    (!state.is_complete()).then(|| state.allowed().unwrap())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    /// The engine asks about drafts that are not chosen. Tokens of spaces and brackets, since
    /// lexemes that may go on are where a matcher has most to remember.
    #[test]
    fn what_is_allowed_depends_on_the_text_alone(
        text in some_json(),
        drafts in prop::collection::vec(
            prop::collection::vec((any::<prop::sample::Index>(), any::<bool>()), 0..6),
            0..8,
        ),
    ) {
        let grammar = arrays();
        let tokens = TOKENIZER.encode(&text, false).unwrap();
        let mut state = grammar.begin();
        for (place, &token) in tokens.iter().enumerate() {
            let mut branches = vec![state.branch()];
            for draft in &drafts {
                let mut branch = branches[draft.len() % branches.len()].branch();
                for (which, asks) in draft {
                    if *asks {
                        let _ = allowed(&mut *branch);
                        branch.forced().unwrap();
                    }
                    if branch.is_complete() || !branch.push(tokens[which.index(tokens.len())]).unwrap() {
                        break;
                    }
                }
                branches.push(branch);
            }
            let mut fresh = grammar.begin();
            for &before in &tokens[..place] {
                prop_assert!(fresh.push(before).unwrap());
            }
            prop_assert_eq!(allowed(&mut *state), allowed(&mut *fresh), "before token {}", place);
            prop_assert!(state.push(token).unwrap(), "{} at {}", text, place);
        }
    }
}
