//! What is refused or filled in of JSON schemas before they are compiled.

use std::collections::HashSet;

use serde_json::{Map, Value, json};

/// Patterns that schemas which must all hold may have together. To find out whether any text has
/// them all may take time that doubles with each: 16 took 1.7 s, 18 took 12 s.
const MOST_PATTERNS: usize = 12;

/// A space, or a new line with its indentation.
const SPACE: &str = r" ?|\n {0,32}";

/// Keywords beside which closing an object could exclude what they ask for.
const COMBINING: [&str; 8] =
    ["allOf", "anyOf", "oneOf", "not", "if", "$ref", "patternProperties", "unevaluatedProperties"];

/// A schema as answers are held to it, unless it says otherwise: few spaces between tokens, and no
/// properties beside those that it lists. A model that may write any number of them may write
/// nothing else.
///
/// # Errors
/// If it may take for ever to compile.
pub fn held_schema(mut schema: Value) -> Result<Value, String> {
    let joins_parts = check(&schema)?;
    if let Value::Object(schema) = &mut schema {
        if !joins_parts {
            close_objects(schema);
        }
        schema.entry("x-guidance").or_insert_with(|| json!({ "whitespace_pattern": SPACE }));
    }
    Ok(schema)
}

fn close_objects(schema: &mut Map<String, Value>) {
    let listed = schema.get("properties").and_then(Value::as_object);
    let required = schema.get("required").and_then(Value::as_array);
    let all_listed = |listed: &Map<String, Value>| {
        let mut names = required.into_iter().flatten().filter_map(Value::as_str);
        names.all(|name| listed.contains_key(name))
    };
    let combines = COMBINING.iter().any(|keyword| schema.contains_key(*keyword));
    if listed.is_some_and(all_listed) && !combines {
        schema.entry("additionalProperties").or_insert(false.into());
    }
    for keyword in ["properties", "$defs", "definitions"] {
        let inner = schema.get_mut(keyword).and_then(Value::as_object_mut);
        for value in inner.into_iter().flat_map(Map::values_mut) {
            value.as_object_mut().into_iter().for_each(close_objects);
        }
    }
    schema.get_mut("items").and_then(Value::as_object_mut).into_iter().for_each(close_objects);
    for keyword in ["anyOf", "oneOf"] {
        let inner = schema.get_mut(keyword).and_then(Value::as_array_mut);
        for value in inner.into_iter().flatten() {
            value.as_object_mut().into_iter().for_each(close_objects);
        }
    }
}

/// Refuses schemas that may take for ever to compile; whether parts of it must hold together.
fn check(root: &Value) -> Result<bool, String> {
    let mut nodes = vec![root];
    let mut joins_parts = false;
    while let Some(node) = nodes.pop() {
        if let Value::Object(object) = node
            && joins(object)
        {
            joins_parts = true;
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
    Ok(joins_parts)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_are_closed_where_that_excludes_nothing_asked_for() {
        let list = json!({ "properties": { "a": { "properties": {} } }, "required": ["a"] });
        let more = json!({ "properties": { "a": {} }, "required": ["b"] });
        let open = json!({ "properties": { "a": {} }, "additionalProperties": true });
        let both = json!({ "properties": { "a": {} }, "allOf": [{ "properties": {} }] });
        // What a part lists is not all that the whole has.
        let part = json!({ "properties": { "a": { "properties": {} } } });
        let parts = json!({ "allOf": [{ "$ref": "#/$defs/part" }], "$defs": { "part": part } });
        for (schema, closed) in [(list, true), (more, false), (open, false), (both, false)] {
            let schema = held_schema(schema).unwrap();
            assert_eq!(schema["additionalProperties"] == false, closed, "{schema}");
            let inner = schema.pointer("/properties/a/additionalProperties");
            assert_eq!(inner.is_some(), closed);
        }
        let parts = held_schema(parts).unwrap();
        assert_eq!(parts.pointer("/$defs/part/additionalProperties"), None);
    }
}
