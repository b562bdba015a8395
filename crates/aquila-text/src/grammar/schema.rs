//! What is refused or filled in of JSON schemas before they are compiled.

use std::collections::HashSet;

use serde_json::{Map, Value, json};

/// Patterns that schemas which must all hold may have together. To find out whether any text has
/// them all may take time that doubles with each: 16 took 1.7 s, 18 took 12 s.
const MOST_PATTERNS: usize = 12;

/// A space, or a new line with its indentation.
const SPACE: &str = r" ?|\n {0,32}";

/// A schema whose JSON has few spaces between its tokens, unless it says otherwise: a model that may
/// write any number of them may write nothing else.
pub fn with_bounded_space(mut schema: Value) -> Value {
    if let Value::Object(schema) = &mut schema {
        schema.entry("x-guidance").or_insert_with(|| json!({ "whitespace_pattern": SPACE }));
    }
    schema
}

/// Refuses schemas that may take for ever to compile.
pub(super) fn check(root: &Value) -> Result<(), String> {
    let mut nodes = vec![root];
    while let Some(node) = nodes.pop() {
        if let Value::Object(object) = node
            && joins(object)
        {
            let patterns = patterns(root, node);
            if patterns > MOST_PATTERNS {
                return Err(format!(
                    "{patterns} patterns and formats must hold together, below one `allOf`: at \
                     most {MOST_PATTERNS} may"
                ));
            }
        }
        nodes.extend(children(node));
    }
    Ok(())
}

/// Whether a schema joins several that must all hold.
fn joins(schema: &Map<String, Value>) -> bool {
    schema.contains_key("allOf") || (schema.contains_key("$ref") && schema.len() > 1)
}

fn children(value: &Value) -> Vec<&Value> {
    match value {
        Value::Object(object) => object.values().collect(),
        Value::Array(items) => items.iter().collect(),
        _ => Vec::new(),
    }
}

/// The patterns and formats of a part of `root`, with what it refers to.
fn patterns<'a>(root: &'a Value, part: &'a Value) -> usize {
    let mut seen: HashSet<&str> = HashSet::new();
    let mut nodes = vec![part];
    let mut count = 0;
    while let Some(node) = nodes.pop() {
        count += ["pattern", "format"].iter().filter(|key| node[**key].is_string()).count();
        if let Some(reference) = node["$ref"].as_str()
            && seen.insert(reference)
        {
            nodes.extend(reference.strip_prefix('#').and_then(|pointer| root.pointer(pointer)));
        }
        nodes.extend(children(node));
    }
    count
}
