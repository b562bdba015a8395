//! Parts that must hold together, as llguidance joins them.

use std::collections::BTreeMap;
use std::rc::Rc;

use super::parts::{MOST_JOINED_BYTES, Parts};
use super::shape::{Kind, NAME, NODE, Object, Part, Shape, unnamed};

/// To compare two patterns of names takes about the time in which so many bytes are copied.
const PATTERN_PAIR: usize = 2 << 10;

/// The same, for each byte of all patterns of the object, whose expressions are copied.
const PATTERN_BYTE: usize = 16;

/// Bytes of a property in a choice between properties: where their number is bounded, each of them
/// begins a rule that has all others.
const CHOICE: usize = 4 << 10;

/// Patterns that one string may have to match. To find out whether any text has them all may take
/// time that doubles with each: 16 took 1.7 s, 18 took 12 s.
const MOST_PATTERNS: usize = 12;

/// Patterns of names of one object, each of which is compared with all others.
const MOST_NAME_PATTERNS: usize = 32;

/// Levels of joins within each other, as in llguidance.
const MOST_JOINED_LEVELS: usize = 128;

impl<'a> Parts<'a> {
    /// Counts bytes.
    pub fn take(&mut self, bytes: usize) -> Result<(), String> {
        self.left = self.left.checked_sub(bytes).ok_or_else(|| {
            format!(
                "it is too large once its parts are joined: each is copied into the options, \
                 properties and items of those that hold with it, and that may take \
                 {MOST_JOINED_BYTES} bytes"
            )
        })?;
        Ok(())
    }

    /// Makes a shape, whose own bytes are counted.
    pub fn part(&mut self, kind: Kind<'a>) -> Result<Part<'a>, String> {
        let (shape, own) = Shape::of(kind);
        self.take(own)?;
        Ok(Rc::new(shape))
    }

    /// Counts that each pattern is compared with all others, and with so many names.
    pub fn check_patterns(
        &mut self,
        patterns: &BTreeMap<&str, Part<'a>>,
        names: usize,
    ) -> Result<(), String> {
        let count = patterns.len();
        if count > MOST_NAME_PATTERNS {
            return Err(format!(
                "an object has {count} `patternProperties`, with those of parts that hold with \
                 it: at most {MOST_NAME_PATTERNS} may be"
            ));
        }
        let bytes: usize = patterns.keys().map(|pattern| pattern.len()).sum();
        let pairs = count * count.saturating_sub(1) / 2;
        self.take(pairs * (PATTERN_PAIR + PATTERN_BYTE * bytes) + count * names * NAME)
    }

    /// Makes an object.
    pub fn object(&mut self, object: Object<'a>) -> Result<Part<'a>, String> {
        if object.counted {
            let names = object.properties.len();
            let optional =
                object.properties.keys().filter(|name| !object.required.contains(*name)).count();
            self.take(optional * names * CHOICE)?;
        }
        self.part(Kind::Object(object))
    }

    /// One of several parts.
    pub fn options(&mut self, parts: Vec<Part<'a>>, one: bool) -> Result<Part<'a>, String> {
        let mut options = Vec::new();
        for part in parts {
            match &part.kind {
                Kind::Nothing => {}
                Kind::Options { options: inner, .. } => options.extend(inner.iter().cloned()),
                _ => options.push(part),
            }
        }
        if one {
            // Each is told from each other one.
            let checks =
                options.iter().fold(0_usize, |sum, option| sum.saturating_add(option.checks));
            self.take(checks.saturating_mul(checks) / 4)?;
        }
        match options.len() {
            0 => self.part(Kind::Nothing),
            1 => Ok(options.remove(0)),
            _ => self.part(Kind::Options { options, one }),
        }
    }

    /// What a reference names. llguidance refuses what there is not, and what is joined with itself.
    fn copy_of(&mut self, reference: &str) -> Result<Part<'a>, String> {
        match self.targets.get(reference).cloned().flatten() {
            Some(target) => {
                self.take(target.bytes)?;
                Ok(target)
            }
            None => self.part(Kind::Nothing),
        }
    }

    /// Parts of which both must hold.
    pub fn join(&mut self, a: &Part<'a>, b: &Part<'a>, level: usize) -> Result<Part<'a>, String> {
        if level > MOST_JOINED_LEVELS {
            return Err("its parts, once they are joined, are nested too deeply".into());
        }
        self.take(NODE)?;
        let level = level + 1;
        match (&a.kind, &b.kind) {
            (Kind::Any, _) => Ok(b.clone()),
            (_, Kind::Any) => Ok(a.clone()),
            (Kind::Nothing, _) | (_, Kind::Nothing) => self.part(Kind::Nothing),
            (Kind::Ref(reference), _) => {
                let a = self.copy_of(reference)?;
                self.join(&a, b, level)
            }
            (_, Kind::Ref(reference)) => {
                let b = self.copy_of(reference)?;
                self.join(a, &b, level)
            }
            (Kind::Options { options, one }, _) => self.join_options(options, *one, b, level),
            (_, Kind::Options { options, one }) => self.join_options(options, *one, a, level),
            (Kind::Text { bytes: x, patterns: n }, Kind::Text { bytes: y, patterns: m }) => {
                if n + m > MOST_PATTERNS {
                    return Err(format!(
                        "more than {MOST_PATTERNS} patterns and formats must hold together"
                    ));
                }
                self.part(Kind::Text { bytes: x + y, patterns: n + m })
            }
            (Kind::Array { first: x, rest: x_rest }, Kind::Array { first: y, rest: y_rest }) => {
                let mut first = Vec::new();
                for index in 0..x.len().max(y.len()) {
                    let copied = if x.len() <= index { x_rest } else { y_rest };
                    self.take(copied.bytes)?;
                    let x = x.get(index).unwrap_or(x_rest);
                    first.push(self.join(x, y.get(index).unwrap_or(y_rest), level)?);
                }
                let rest = self.join(x_rest, y_rest, level)?;
                self.part(Kind::Array { first, rest })
            }
            (Kind::Object(x), Kind::Object(y)) => self.join_objects(x, y, level),
            (Kind::Scalar(x), Kind::Scalar(y)) if x == y => Ok(a.clone()),
            _ => self.part(Kind::Nothing),
        }
    }

    /// Joins a part with each of the options, for which it is copied.
    fn join_options(
        &mut self,
        options: &[Part<'a>],
        one: bool,
        part: &Part<'a>,
        level: usize,
    ) -> Result<Part<'a>, String> {
        let joined = options.iter().map(|option| {
            self.take(part.bytes)?;
            self.join(option, part, level)
        });
        let joined = joined.collect::<Result<_, _>>()?;
        self.options(joined, one)
    }

    /// What one of them does not name is what the other says of unnamed properties, which is copied.
    fn join_objects(
        &mut self,
        x: &Object<'a>,
        y: &Object<'a>,
        level: usize,
    ) -> Result<Part<'a>, String> {
        let names = x.properties.len() + y.properties.len();
        self.take((x.patterns.len() + y.patterns.len()) * names * NAME)?;
        let rests = [x, y].map(|object| unnamed(&object.patterns, &object.rest));
        let properties = self.join_named([&x.properties, &y.properties], rests, level)?;
        let rests = [x, y].map(|object| object.rest.clone());
        let patterns = self.join_named([&x.patterns, &y.patterns], rests, level)?;
        self.check_patterns(&patterns, 0)?;
        let rest = self.join(&x.rest, &y.rest, level)?;
        let required = x.required.union(&y.required).copied().collect();
        self.object(Object {
            properties,
            patterns,
            rest,
            required,
            counted: x.counted || y.counted,
        })
    }

    fn join_named(
        &mut self,
        [x, y]: [&BTreeMap<&'a str, Part<'a>>; 2],
        [x_rest, y_rest]: [Part<'a>; 2],
        level: usize,
    ) -> Result<BTreeMap<&'a str, Part<'a>>, String> {
        let mut joined = BTreeMap::new();
        for name in x.keys().chain(y.keys().filter(|name| !x.contains_key(*name))) {
            let (own, other) = (x.get(name), y.get(name).unwrap_or(&y_rest));
            let copied = if own.is_some() { other } else { &x_rest };
            self.take(NAME + name.len() + copied.bytes)?;
            joined.insert(*name, self.join(own.unwrap_or(&x_rest), other, level)?);
        }
        Ok(joined)
    }
}
