//! Refuses schemas whose references may be nested too deeply for any stack.

use std::collections::BTreeSet;

use serde_json::Value;

/// Levels of schemas within each other, where each reference leads into the deepest one.
const MOST_LEVELS: usize = 16_000;

/// The levels that a schema may have by its references, or that they are more than any stack has
/// room for.
pub(super) fn check_levels(root: &Value) -> Result<(), String> {
    let references = references(root);
    let levels = (references.len() + 1).saturating_mul(depth(root));
    match levels > MOST_LEVELS {
        true => Err(format!(
            "its {} different references may be nested too deeply: references times levels of \
             the schema may be {MOST_LEVELS}",
            references.len()
        )),
        false => Ok(()),
    }
}

/// The values within one.
pub(super) fn children(value: &Value) -> Vec<&Value> {
    match value {
        Value::Object(object) => object.values().collect(),
        Value::Array(items) => items.iter().collect(),
        _ => Vec::new(),
    }
}

/// All different references of a schema.
fn references(root: &Value) -> BTreeSet<&str> {
    let mut nodes = vec![root];
    let mut found = BTreeSet::new();
    while let Some(node) = nodes.pop() {
        found.extend(node.get("$ref").and_then(Value::as_str));
        nodes.extend(children(node));
    }
    found
}

fn depth(value: &Value) -> usize {
    1 + children(value).into_iter().map(depth).max().unwrap_or(0)
}
