//! What is refused or filled in of JSON schemas before they are compiled.

mod join;
mod levels;
mod parts;
mod shape;

use serde_json::{Map, Value, json};

use self::levels::{check_levels, children};
use self::parts::check_joined;
use super::{MOST_BYTES, MOST_LARK_BYTES, on_deep_stack};

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
/// If it is too large, or may take for ever to compile.
pub fn held_schema(schema: Value) -> Result<Value, String> {
    Ok(held_schemas(vec![schema])?.remove(0))
}

/// The schemas of one grammar, each as [`held_schema`] has it.
///
/// # Errors
/// If they are too large, or may take for ever to compile.
pub fn held_schemas(schemas: Vec<Value>) -> Result<Vec<Value>, String> {
    let mut left = MOST_LARK_BYTES;
    for schema in &schemas {
        let bytes = check_schema_bytes(schema)?;
        left = left
            .checked_sub(bytes)
            .ok_or_else(|| format!("the schemas may have {MOST_LARK_BYTES} bytes together"))?;
        check_levels(schema)?;
    }
    on_deep_stack(|| check_joined(&schemas))??;
    Ok(schemas.into_iter().map(hold).collect())
}

fn hold(mut schema: Value) -> Value {
    let joins_parts = joins_parts(&schema);
    if let Value::Object(schema) = &mut schema {
        if !joins_parts {
            close_objects(schema);
        }
        schema.entry("x-guidance").or_insert_with(|| json!({ "whitespace_pattern": SPACE }));
    }
    schema
}

/// How long a schema's text is.
///
/// # Errors
/// If it is too long.
pub fn check_schema_bytes(schema: &Value) -> Result<usize, String> {
    schema_bytes(schema, MOST_BYTES)
        .ok_or_else(|| format!("it is too large: a schema may have {MOST_BYTES} bytes"))
}

/// How long a schema's text is, unless it is longer than `most`.
fn schema_bytes(schema: &Value, most: usize) -> Option<usize> {
    struct Counter {
        left: usize,
    }
    impl std::io::Write for Counter {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            let left = self.left.checked_sub(bytes.len());
            self.left = left.ok_or(std::io::ErrorKind::FileTooLarge)?;
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let mut counter = Counter { left: most };
    serde_json::to_writer(&mut counter, schema).ok()?;
    Some(most - counter.left)
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

/// Whether a part of a schema joins several that must all hold.
fn joins_parts(root: &Value) -> bool {
    let mut nodes = vec![root];
    while let Some(node) = nodes.pop() {
        if let Value::Object(object) = node
            && (object.contains_key("allOf") || (object.contains_key("$ref") && object.len() > 1))
        {
            return true;
        }
        nodes.extend(children(node));
    }
    false
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
