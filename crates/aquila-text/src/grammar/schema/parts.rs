//! Refuses schemas that could take very long, or all memory, once their parts are joined.
//!
//! llguidance joins parts that must hold together by copying one into each option, property and item
//! of the other. Here the same is done with shapes, which share their parts: what llguidance would
//! copy is counted, and the count is bounded.

use std::collections::{BTreeMap, HashMap};

use serde_json::{Map, Value};

use super::shape::{Kind, Object, Part, unnamed};

/// Bytes that llguidance may take for the parts of all schemas of a grammar and for their copies.
pub(super) const MOST_JOINED_BYTES: usize = 128 << 20;

/// Types of a schema that names none.
const TYPES: [&str; 6] = ["null", "boolean", "number", "string", "array", "object"];

/// The draft of JSON Schema without `const`.
const DRAFT_4: &str = "http://json-schema.org/draft-04/schema";

/// The others without `prefixItems`.
const OLD_DRAFTS: [&str; 3] = [
    "http://json-schema.org/draft-06/schema",
    "http://json-schema.org/draft-07/schema",
    "https://json-schema.org/draft/2019-09/schema",
];

/// Keywords that say nothing about a text.
const ANNOTATIONS: [&str; 15] = [
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
];

/// Refuses schemas of one grammar whose parts, joined, are too large or have too many patterns. It
/// calls itself for each level that `check_levels` counts.
pub(super) fn check_joined(schemas: &[Value]) -> Result<(), String> {
    let mut left = MOST_JOINED_BYTES;
    for root in schemas {
        let draft = root.get("$schema").and_then(Value::as_str).unwrap_or_default();
        let draft = draft.trim_end_matches('#');
        let is_old = draft == DRAFT_4 || OLD_DRAFTS.contains(&draft);
        let mut parts =
            Parts { root, targets: HashMap::new(), is_old, has_const: draft != DRAFT_4, left };
        parts.of(root)?;
        left = parts.left;
    }
    Ok(())
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

/// The schemas of one document, as they are compiled.
pub(super) struct Parts<'a> {
    root: &'a Value,
    /// Whether its draft has no `prefixItems`.
    is_old: bool,
    /// Whether its draft has `const`.
    has_const: bool,
    /// What references name, as far as it is compiled.
    pub targets: HashMap<&'a str, Option<Part<'a>>>,
    /// Bytes that are left.
    pub left: usize,
}

impl<'a> Parts<'a> {
    /// Compiles a schema. Keywords come in the order of llguidance, on which it depends what is
    /// copied into what.
    fn of(&mut self, schema: &'a Value) -> Result<Part<'a>, String> {
        let Value::Object(schema) = schema else {
            let nothing = schema == &Value::Bool(false);
            return self.part(if nothing { Kind::Nothing } else { Kind::Any });
        };
        let mut whole = self.part(Kind::Any)?;
        let mut own = Vec::new();
        for (keyword, value) in schema {
            match keyword.as_str() {
                "const" | "enum" | "allOf" | "anyOf" | "oneOf" | "$ref" => {
                    whole = self.with_own(whole, schema, &mut own)?;
                    whole = self.with(whole, keyword, value)?;
                }
                // llguidance takes out those of the whole.
                "x-guidance"
                    if self.root.as_object().is_some_and(|root| std::ptr::eq(root, schema)) => {}
                keyword if ANNOTATIONS.contains(&keyword) => {}
                keyword => own.push(keyword),
            }
        }
        self.with_own(whole, schema, &mut own)
    }

    /// Joins what keywords before another say of their own.
    fn with_own(
        &mut self,
        whole: Part<'a>,
        schema: &'a Map<String, Value>,
        own: &mut Vec<&'a str>,
    ) -> Result<Part<'a>, String> {
        if own.is_empty() {
            return Ok(whole);
        }
        let own = std::mem::take(own);
        let types = match schema.get("type") {
            Some(Value::String(name)) => vec![name.as_str()],
            Some(Value::Array(names)) => names.iter().filter_map(Value::as_str).collect(),
            _ => TYPES.to_vec(),
        };
        let options = types.into_iter().map(|name| self.of_type(name, schema, &own));
        let options = options.collect::<Result<_, _>>()?;
        let options = self.options(options, false)?;
        self.join(&whole, &options, 0)
    }

    fn of_type(
        &mut self,
        name: &'a str,
        schema: &'a Map<String, Value>,
        own: &[&str],
    ) -> Result<Part<'a>, String> {
        let get = |keyword: &str| schema.get(keyword).filter(|_| own.contains(&keyword));
        match name {
            "array" => {
                let listed = schema.get("prefixItems").and_then(Value::as_array);
                let (first, rest) = match (get("items"), get("additionalItems")) {
                    (Some(Value::Array(items)), rest) => (Some(items), rest),
                    (items, None) if !self.is_old => (listed, items),
                    (items, _) => (None, items),
                };
                let first = first.into_iter().flatten();
                // What is listed but is compiled with other keywords may be anything here.
                let own =
                    own.contains(&"prefixItems") || matches!(get("items"), Some(Value::Array(_)));
                let first = first.map(|item| self.of_some(own.then_some(item)));
                let first = first.collect::<Result<_, _>>()?;
                let rest = self.of_some(rest)?;
                self.part(Kind::Array { first, rest })
            }
            "object" => self.of_object(schema, own),
            "string" => {
                let texts: Vec<_> = ["pattern", "format"]
                    .into_iter()
                    .filter_map(get)
                    .filter_map(Value::as_str)
                    .collect();
                let bytes = texts.iter().map(|text| text.len()).sum();
                self.part(Kind::Text { bytes, patterns: texts.len() })
            }
            "integer" => self.part(Kind::Scalar("number")),
            name => self.part(Kind::Scalar(name)),
        }
    }

    fn of_object(
        &mut self,
        schema: &'a Map<String, Value>,
        own: &[&str],
    ) -> Result<Part<'a>, String> {
        let get = |keyword: &str| schema.get(keyword).filter(|_| own.contains(&keyword));
        let mut properties = self.of_named(get("properties"))?;
        // What is listed but is compiled with other keywords may be anything here.
        if !own.contains(&"properties") {
            let listed = schema.get("properties").and_then(Value::as_object);
            for name in listed.into_iter().flat_map(Map::keys) {
                properties.insert(name, self.part(Kind::Any)?);
            }
        }
        let patterns = self.of_named(get("patternProperties"))?;
        self.check_patterns(&patterns, properties.len())?;
        if !patterns.is_empty() {
            let matched = unnamed(&patterns, &self.part(Kind::Any)?);
            for part in properties.values_mut() {
                self.take(matched.bytes)?;
                *part = self.join(part, &matched, 0)?;
            }
        }
        let rest = self.of_some(get("additionalProperties"))?;
        let required = get("required").and_then(Value::as_array).into_iter().flatten();
        let required = required.filter_map(Value::as_str).collect();
        let counted = get("minProperties").or(get("maxProperties")).is_some();
        self.object(Object { properties, patterns, rest, required, counted })
    }

    /// A schema, or anything where there is none.
    fn of_some(&mut self, schema: Option<&'a Value>) -> Result<Part<'a>, String> {
        match schema {
            Some(schema) => self.of(schema),
            None => self.part(Kind::Any),
        }
    }

    fn of_named(
        &mut self,
        schemas: Option<&'a Value>,
    ) -> Result<BTreeMap<&'a str, Part<'a>>, String> {
        let schemas = schemas.and_then(Value::as_object).into_iter().flatten();
        schemas.map(|(name, schema)| Ok((name.as_str(), self.of(schema)?))).collect()
    }

    /// Joins what a keyword about the same text says.
    fn with(
        &mut self,
        whole: Part<'a>,
        keyword: &str,
        value: &'a Value,
    ) -> Result<Part<'a>, String> {
        let items = value.as_array().into_iter().flatten();
        let part = match keyword {
            "const" if !self.has_const => {
                return Err("`const` is no keyword of draft 4, its `$schema`: use `enum`".into());
            }
            "const" => self.of_value(value)?,
            "enum" => {
                let values = items.map(|value| self.of_value(value)).collect::<Result<_, _>>()?;
                self.options(values, false)?
            }
            "allOf" => {
                let mut whole = whole;
                for part in items {
                    let part = self.of(part)?;
                    whole = self.join(&whole, &part, 0)?;
                }
                return Ok(whole);
            }
            "$ref" => {
                let reference = value.as_str().unwrap_or_default();
                self.define(reference)?;
                self.part(Kind::Ref(reference))?
            }
            _ => {
                let options: Vec<_> = items.map(|part| self.of(part)).collect::<Result<_, _>>()?;
                let one = keyword == "oneOf";
                // What holds already is copied into an option that says nothing, too.
                let first = matches!(whole.kind, Kind::Any);
                match options.iter().find(|option| matches!(option.kind, Kind::Any)) {
                    Some(any) if first && !one => any.clone(),
                    _ => self.options(options, one)?,
                }
            }
        };
        self.join(&whole, &part, 0)
    }

    fn of_value(&mut self, value: &'a Value) -> Result<Part<'a>, String> {
        let kind = match value {
            Value::Null => Kind::Scalar("null"),
            Value::Bool(_) => Kind::Scalar("boolean"),
            Value::Number(_) => Kind::Scalar("number"),
            Value::String(text) => Kind::Text { bytes: text.len(), patterns: 0 },
            Value::Array(items) => {
                let first =
                    items.iter().map(|item| self.of_value(item)).collect::<Result<_, _>>()?;
                Kind::Array { first, rest: self.part(Kind::Nothing)? }
            }
            Value::Object(items) => {
                let properties =
                    items.iter().map(|(name, item)| Ok((name.as_str(), self.of_value(item)?)));
                let properties: BTreeMap<_, _> = properties.collect::<Result<_, String>>()?;
                let required = properties.keys().copied().collect();
                let rest = self.part(Kind::Nothing)?;
                Kind::Object(Object {
                    properties,
                    patterns: BTreeMap::new(),
                    rest,
                    required,
                    counted: false,
                })
            }
        };
        self.part(kind)
    }

    /// Compiles what a reference names, once.
    fn define(&mut self, reference: &'a str) -> Result<(), String> {
        if !self.targets.contains_key(reference) {
            self.targets.insert(reference, None);
            if let Some(target) = target(self.root, reference) {
                let part = self.of(target)?;
                self.targets.insert(reference, Some(part));
            }
        }
        Ok(())
    }
}
