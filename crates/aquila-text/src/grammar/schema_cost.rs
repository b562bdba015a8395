//! Refuses schemas that could take very long, or all memory, to compile.
//!
//! llguidance compiles what each `$ref` names once, one within the other, and copies parts that must
//! hold together into each other's options. What that comes to is counted here before it is done.

use std::collections::{BTreeSet, HashMap};

use serde_json::{Map, Value};

/// Levels of schemas within each other, where each reference leads into the deepest one.
const MOST_LEVELS: usize = 16_000;

/// Bytes of a schema whose parts are joined: each as often as it is copied.
const MOST_JOINED_BYTES: usize = 8 << 20;

/// Patterns that one string may have to match. To find out whether any text has them all may take
/// time that doubles with each: 16 took 1.7 s, 18 took 12 s.
const MOST_PATTERNS: usize = 12;

/// Keywords that say nothing about a text.
const ANNOTATIONS: [&str; 16] = [
    "$anchor",
    "$comment",
    "$defs",
    "$id",
    "$schema",
    "contentEncoding",
    "contentMediaType",
    "default",
    "definitions",
    "description",
    "examples",
    "id",
    "readOnly",
    "title",
    "writeOnly",
    "x-guidance",
];

/// The levels that a schema may have by its references, or that they are more than any stack has
/// room for.
pub(super) fn check_levels(root: &Value) -> Result<usize, String> {
    let references = references(root);
    let levels = (references.len() + 1).saturating_mul(depth(root));
    match levels > MOST_LEVELS {
        true => Err(format!(
            "its {} different references may be nested too deeply: references times levels of \
             the schema may be {MOST_LEVELS}",
            references.len()
        )),
        false => Ok(levels),
    }
}

/// Refuses a schema whose parts, joined, are too large or have too many patterns. It calls itself
/// once for each level that [`check_levels`] counts.
pub(super) fn check_joined(root: &Value) -> Result<(), String> {
    let mut costs = Costs { root, known: HashMap::new() };
    let mut bytes = 0_usize;
    let targets = references(root).into_iter().filter_map(|reference| target(root, reference));
    for part in std::iter::once(root).chain(targets) {
        let cost = costs.of(part);
        if cost.patterns > MOST_PATTERNS {
            return Err(format!(
                "{} patterns and formats must hold together: at most {MOST_PATTERNS} may",
                cost.patterns
            ));
        }
        bytes = bytes.saturating_add(cost.bytes);
    }
    match bytes > MOST_JOINED_BYTES {
        true => Err(format!(
            "it is too large once its parts are joined: each is copied into every option of \
             those that hold with it, and that may take {MOST_JOINED_BYTES} bytes"
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

/// What a reference names, as llguidance finds it.
fn target<'a>(root: &'a Value, reference: &str) -> Option<&'a Value> {
    if matches!(reference, "#" | "#/") {
        return Some(root);
    }
    reference.strip_prefix("#/")?.split('/').try_fold(root, |value, name| match value {
        Value::Array(items) => items.get(name.parse::<usize>().ok()?),
        value => value.get(name),
    })
}

/// What a schema comes to once its parts are joined.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Cost {
    bytes: usize,
    /// Into how many options what holds with it is copied.
    options: usize,
    /// The most patterns that a string within it must match.
    patterns: usize,
}

impl Cost {
    const NONE: Self = Self { bytes: 0, options: 1, patterns: 0 };

    fn of_text(bytes: usize) -> Self {
        Self { bytes, ..Self::NONE }
    }

    /// Of two that must both hold.
    fn and(self, other: Self) -> Self {
        let copies = self.bytes.saturating_mul(other.options);
        Self {
            bytes: copies.saturating_add(other.bytes.saturating_mul(self.options)),
            options: self.options.saturating_mul(other.options),
            patterns: self.patterns + other.patterns,
        }
    }

    /// Of two of which one must hold.
    fn or(self, other: Self) -> Self {
        let options = self.options.saturating_add(other.options);
        Self { options, ..self.beside(other) }
    }

    /// Of two at different places.
    fn beside(self, other: Self) -> Self {
        Self {
            bytes: self.bytes.saturating_add(other.bytes),
            options: self.options.max(other.options),
            patterns: self.patterns.max(other.patterns),
        }
    }
}

/// A part of a schema that holds with the others.
enum Part<'a> {
    /// One of these schemas.
    Options(Vec<&'a Value>),
    /// What a reference names.
    Target(&'a str),
    /// One of so many values.
    Texts(&'a Value, usize),
}

/// The reference that a schema is, if it says nothing else.
fn reference(schema: &Value) -> Option<&str> {
    let mut says = schema.as_object()?.keys().filter(|key| !ANNOTATIONS.contains(&key.as_str()));
    schema["$ref"].as_str().filter(|_| says.nth(1).is_none())
}

struct Costs<'a> {
    root: &'a Value,
    /// Of the objects that were asked about; of those that are being counted, nothing.
    known: HashMap<*const Value, Cost>,
}

impl<'a> Costs<'a> {
    fn of(&mut self, schema: &'a Value) -> Cost {
        let Value::Object(object) = schema else { return Cost::of_text(4) };
        if let Some(&known) = self.known.get(&std::ptr::from_ref(schema)) {
            return known;
        }
        self.known.insert(schema, Cost::NONE);
        let cost = self.of_object(object);
        self.known.insert(schema, cost);
        cost
    }

    fn of_object(&mut self, schema: &'a Map<String, Value>) -> Cost {
        let mut parts = Vec::new();
        let mut own = Cost::NONE;
        for (keyword, value) in schema {
            let items = value.as_array().into_iter().flatten();
            match keyword.as_str() {
                keyword if ANNOTATIONS.contains(&keyword) => {}
                "allOf" => parts.extend(items.map(|part| Part::Options(vec![part]))),
                "anyOf" | "oneOf" => parts.push(Part::Options(items.collect())),
                "$ref" => parts.push(Part::Target(value.as_str().unwrap_or_default())),
                "enum" => parts.push(Part::Texts(value, items.count())),
                "const" => parts.push(Part::Texts(value, 1)),
                "pattern" | "format" => {
                    own.bytes += value.as_str().map_or(0, str::len);
                    own.patterns += 1;
                }
                "properties" => own = own.beside(self.of_named(value)),
                // What a pattern names may be a property, too.
                "patternProperties" => {
                    let named = self.of_named(value);
                    own = Cost { patterns: own.patterns + named.patterns, ..own.beside(named) };
                }
                _ => {
                    own.bytes += keyword.len();
                    let schemas =
                        value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
                    own = schemas.iter().fold(own, |own, schema| own.beside(self.of(schema)));
                }
            }
        }
        let joined = parts.len() + usize::from(own != Cost::NONE) > 1;
        parts.iter().fold(own, |whole, part| whole.and(self.of_part(part, joined)))
    }

    /// Of a part that holds with others, or alone.
    fn of_part(&mut self, part: &Part<'a>, joined: bool) -> Cost {
        match part {
            Part::Options(options) => {
                let costs = options.iter().map(|option| match reference(option) {
                    Some(reference) => self.of_target(reference, joined),
                    None => self.of(option),
                });
                costs.reduce(Cost::or).unwrap_or(Cost::NONE)
            }
            Part::Target(reference) => self.of_target(reference, joined),
            Part::Texts(texts, options) => {
                let options = (*options).max(1);
                Cost { options, ..Cost::of_text(texts.to_string().len()) }
            }
        }
    }

    /// Of what a reference names, which is compiled once for all unless it is joined with others.
    fn of_target(&mut self, reference: &str, joined: bool) -> Cost {
        let cost = target(self.root, reference).map_or(Cost::NONE, |target| self.of(target));
        match joined {
            true => cost,
            false => Cost { patterns: cost.patterns, ..Cost::of_text(reference.len()) },
        }
    }

    fn of_named(&mut self, schemas: &'a Value) -> Cost {
        let mut cost = Cost::NONE;
        for (name, schema) in schemas.as_object().into_iter().flatten() {
            cost = cost.beside(Cost::of_text(name.len())).beside(self.of(schema));
        }
        cost
    }
}
