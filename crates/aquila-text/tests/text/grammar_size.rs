//! What compiled grammars say they take, against the memory of a process that holds many.

use std::process::Command;
use std::sync::{Arc, LazyLock};

use aquila_text::{CompiledGrammar, GrammarSpec};
use serde_json::{Map, Value, json};

use crate::grammar::COMPILER;

const AS_HOLDER: &str = "AQUILA_TEST_HOLDS_GRAMMARS";

fn object(count: usize, value: impl Fn(usize) -> Value) -> GrammarSpec {
    let values = (0..count).map(|at| (format!("property_{at}"), value(at)));
    let properties: Map<String, Value> = values.collect();
    GrammarSpec::JsonSchema(json!({ "type": "object", "properties": properties }))
}

/// Grammars that take most by what they have of symbols, expressions or derivatives.
fn kinds() -> [GrammarSpec; 5] {
    let range =
        |at| json!({ "type": "integer", "minimum": at * 12_345, "maximum": at * 98_765 + 1 });
    let list = json!({ "type": "array", "items": { "type": "number" }, "maxItems": 20 });
    [
        object(1500, |at| json!({ "type": "string", "description": at })),
        object(300, |_| list.clone()),
        object(250, range),
        GrammarSpec::Choice((0..5000).map(|at| format!("{at} bottles")).collect()),
        GrammarSpec::Regex((0..8000).map(|at| format!("{at} [a-z]+|")).collect()),
    ]
}

fn resident_bytes() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() * 1024
}

/// Not a test unless a test starts it: a process that holds one kind of grammar many times.
#[test]
fn as_holder() {
    let Ok(kind) = std::env::var(AS_HOLDER) else { return };
    let spec = &kinds()[kind.parse::<usize>().unwrap()];
    LazyLock::force(&COMPILER);
    let before = resident_bytes();
    let held: Vec<Arc<CompiledGrammar>> =
        (0..10).map(|_| COMPILER.compile(spec).unwrap()).collect();
    let taken = resident_bytes() - before;
    let said: usize = held.iter().map(|grammar| grammar.bytes()).sum();
    println!("{said} bytes said, {taken} taken");
    assert!(said * 2 > taken && said * 2 < taken * 5, "{said} bytes said, {taken} taken");
}

#[test]
fn grammars_take_about_what_they_say() {
    for kind in 0..kinds().len() {
        let status = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "--nocapture", "grammar_size::as_holder"])
            .env(AS_HOLDER, kind.to_string())
            .status()
            .unwrap();
        assert!(status.success(), "kind {kind}");
    }
}
