//! Compiled schemas, as far as it matters what a copy of them takes.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

/// Bytes of a compiled schema without names, texts and parts.
pub(super) const NODE: usize = 256;

/// Bytes of a name in a compiled schema, without its text.
pub(super) const NAME: usize = 64;

/// A compiled schema.
pub(super) struct Shape<'a> {
    pub kind: Kind<'a>,
    /// What a copy takes.
    pub bytes: usize,
    /// How many of its parts are looked at to tell it from another one.
    pub checks: usize,
}

pub(super) type Part<'a> = Rc<Shape<'a>>;

pub(super) enum Kind<'a> {
    Any,
    Nothing,
    /// A type without parts.
    Scalar(&'a str),
    Text {
        bytes: usize,
        patterns: usize,
    },
    Array {
        first: Vec<Part<'a>>,
        rest: Part<'a>,
    },
    Object(Object<'a>),
    Options {
        options: Vec<Part<'a>>,
        /// Whether no two may hold at once.
        one: bool,
    },
    Ref(&'a str),
}

pub(super) struct Object<'a> {
    pub properties: BTreeMap<&'a str, Part<'a>>,
    pub patterns: BTreeMap<&'a str, Part<'a>>,
    pub rest: Part<'a>,
    pub required: BTreeSet<&'a str>,
    /// Whether the number of its properties is bounded.
    pub counted: bool,
}

impl<'a> Shape<'a> {
    /// The shape, and what it takes without its parts.
    pub fn of(kind: Kind<'a>) -> (Self, usize) {
        let (mut own, mut checks) = (NODE, 1_usize);
        let mut parts: Vec<&Part> = Vec::new();
        match &kind {
            Kind::Any | Kind::Nothing | Kind::Scalar(_) => {}
            Kind::Text { bytes, .. } => own += bytes,
            Kind::Ref(name) => own += name.len(),
            Kind::Array { first, rest } => parts.extend(first.iter().chain([rest])),
            Kind::Options { options, .. } => {
                checks = options.iter().fold(1, |sum, option| sum.saturating_add(option.checks));
                parts.extend(options);
            }
            Kind::Object(object) => {
                let Object { properties, patterns, rest, required, .. } = object;
                let names = properties.keys().chain(patterns.keys()).chain(required);
                own += names.map(|name| NAME + name.len()).sum::<usize>();
                let unnamed = patterns
                    .values()
                    .fold(rest.checks, |sum, part| sum.saturating_add(part.checks));
                for name in required {
                    let part = properties.get(name).map_or(unnamed, |part| part.checks);
                    checks = checks.saturating_add(part).saturating_add(patterns.len());
                }
                parts.extend(properties.values().chain(patterns.values()).chain([rest]));
            }
        }
        let bytes = parts.iter().fold(own, |sum, part| sum.saturating_add(part.bytes));
        (Self { kind, bytes, checks }, own)
    }
}

/// What a property that an object does not name must be: as one of the patterns says, or the rest.
/// Which pattern has its name is not looked for.
pub(super) fn unnamed<'a>(patterns: &BTreeMap<&'a str, Part<'a>>, rest: &Part<'a>) -> Part<'a> {
    if patterns.is_empty() {
        return rest.clone();
    }
    let options = patterns.values().chain([rest]).cloned().collect();
    Rc::new(Shape::of(Kind::Options { options, one: false }).0)
}
