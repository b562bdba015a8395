//! SGLang's `ebnf` into llguidance's notation.
//!
//! ```text
//! root ::= greeting (", " name)* "!"   # a comment
//! greeting ::= "hello" | "hi"
//! name ::= [A-Z] [a-z]{1,9}
//! ```

use std::collections::HashMap;

use serde_json::Value;

/// How deeply groups may be nested.
const MOST_GROUPS: usize = 100;

/// Rules and groups together. Each may stand within all others when they are compiled, and then
/// takes up to 3 KiB of the stack.
const MOST_RULES: usize = 10_000;

/// The grammar in llguidance's notation, or what is wrong with it.
pub(super) fn to_lark(ebnf: &str) -> Result<String, String> {
    let mut reader = Reader { rest: ebnf, line: 1, rules: HashMap::new(), groups: 0, levels: 0 };
    let mut lark = String::new();
    let mut defined: HashMap<String, usize> = HashMap::new();
    reader.skip();
    while !reader.rest.is_empty() {
        let line = reader.line;
        let name = reader.name().ok_or_else(|| reader.wrong("a rule begins with its name"))?;
        reader.skip();
        if !reader.take("::=") {
            return Err(reader.wrong(&format!("`::=` must follow the name `{name}`")));
        }
        if defined.insert(name.clone(), line).is_some() {
            return Err(format!("line {line}: the rule `{name}` is defined twice"));
        }
        let rule = reader.rule(&name, line);
        reader.enter()?;
        let body = reader.alternatives()?;
        lark.push_str(&format!("{rule}: {body}\n"));
        reader.skip();
    }
    if let Some((name, (_, line))) =
        reader.rules.iter().find(|(name, _)| !defined.contains_key(*name))
    {
        return Err(format!("line {line}: there is no rule `{name}`"));
    }
    match reader.rules.get("root") {
        Some((root, _)) => Ok(format!("start: rule_{root}\n{lark}")),
        None => Err("there is no rule `root`, with which a text begins".into()),
    }
}

struct Reader<'a> {
    rest: &'a str,
    line: usize,
    /// The number of each rule, and where it was first named.
    rules: HashMap<String, (usize, usize)>,
    groups: usize,
    /// The rules and groups so far.
    levels: usize,
}

impl Reader<'_> {
    fn wrong(&self, why: &str) -> String {
        let found: String = self.rest.chars().take(20).take_while(|&c| c != '\n').collect();
        let found = if found.is_empty() { "the end".into() } else { format!("`{found}`") };
        format!("line {}: {why}, found {found}", self.line)
    }

    /// Counts a rule or a group.
    fn enter(&mut self) -> Result<(), String> {
        self.levels += 1;
        match self.levels > MOST_RULES {
            true => Err(format!(
                "line {}: it has too many rules and groups: at most {MOST_RULES} are allowed",
                self.line
            )),
            false => Ok(()),
        }
    }

    fn next(&mut self) -> Option<char> {
        let next = self.rest.chars().next()?;
        self.rest = &self.rest[next.len_utf8()..];
        self.line += usize::from(next == '\n');
        Some(next)
    }

    fn take(&mut self, text: &str) -> bool {
        let rest = self.rest.strip_prefix(text);
        self.rest = rest.unwrap_or(self.rest);
        rest.is_some()
    }

    /// Passes over spaces, line ends and comments.
    fn skip(&mut self) {
        while let Some(next) = self.rest.chars().next() {
            if next == '#' {
                let end = self.rest.find('\n').unwrap_or(self.rest.len());
                self.rest = &self.rest[end..];
            } else if next.is_whitespace() {
                self.next();
            } else {
                return;
            }
        }
    }

    fn name(&mut self) -> Option<String> {
        let part = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
        let end = self.rest.find(|c| !part(c)).unwrap_or(self.rest.len());
        let (name, rest) = self.rest.split_at(end);
        if name.is_empty() || name.starts_with(|c: char| c.is_ascii_digit()) {
            return None;
        }
        self.rest = rest;
        Some(name.to_owned())
    }

    /// Whether a rule begins here.
    fn at_rule(&self) -> bool {
        let mut ahead =
            Reader { rest: self.rest, line: 0, rules: HashMap::new(), groups: 0, levels: 0 };
        ahead.name().is_some() && {
            ahead.skip();
            ahead.rest.starts_with("::=")
        }
    }

    /// The name that a rule has in llguidance's notation.
    fn rule(&mut self, name: &str, line: usize) -> String {
        let next = self.rules.len();
        let (number, _) = self.rules.entry(name.into()).or_insert((next, line));
        format!("rule_{number}")
    }

    fn alternatives(&mut self) -> Result<String, String> {
        let mut alternatives = vec![self.sequence()?];
        while self.take("|") {
            alternatives.push(self.sequence()?);
        }
        Ok(alternatives.join(" | "))
    }

    fn sequence(&mut self) -> Result<String, String> {
        let mut items = Vec::new();
        loop {
            self.skip();
            if self.rest.is_empty() || self.rest.starts_with(['|', ')']) || self.at_rule() {
                break;
            }
            let item = self.item()?;
            items.push(item + &self.repetition()?);
        }
        Ok(if items.is_empty() { "\"\"".into() } else { items.join(" ") })
    }

    fn item(&mut self) -> Result<String, String> {
        if self.take("\"") {
            return self.literal();
        }
        if self.take("[") {
            return self.class();
        }
        if self.rest.starts_with("(=") {
            return Err(self.wrong("lookaheads are not supported"));
        }
        if self.take("(") {
            self.groups += 1;
            if self.groups > MOST_GROUPS {
                return Err(self.wrong("groups are nested too deeply"));
            }
            self.enter()?;
            let group = self.alternatives()?;
            self.groups -= 1;
            return match self.take(")") {
                true => Ok(format!("({group})")),
                false => Err(self.wrong("a group must end with `)`")),
            };
        }
        let line = self.line;
        match self.name() {
            Some(name) if self.rest.starts_with('(') && name.starts_with("TagDispatch") => {
                Err(format!("line {line}: `{name}` is not supported"))
            }
            Some(name) => Ok(self.rule(&name, line)),
            None => Err(self.wrong("expected a text in quotes, a class, a group or a rule")),
        }
    }

    /// `*`, `+`, `?`, `{n}`, `{n,}`, `{n,m}`, or nothing.
    fn repetition(&mut self) -> Result<String, String> {
        for sign in ["*", "+", "?"] {
            if self.take(sign) {
                return Ok(sign.into());
            }
        }
        if !self.take("{") {
            return Ok(String::new());
        }
        let inside = self.rest.split_once('}').map(|(inside, _)| inside);
        let Some(inside) = inside else { return Err(self.wrong("a repetition must end with `}`")) };
        let (least, most) = inside.split_once(',').unwrap_or((inside, inside));
        let number = |text: &str| text.trim().parse::<u32>();
        let range = match (number(least), number(most), most.trim().is_empty()) {
            (Ok(least), Ok(most), _) if least <= most => format!("{{{least},{most}}}"),
            (Ok(least), _, true) => format!("{{{least},}}"),
            _ => return Err(self.wrong("a repetition is {n}, {n,} or {n,m}")),
        };
        self.rest = &self.rest[inside.len() + 1..];
        Ok(range)
    }

    /// A text, behind its first quote.
    fn literal(&mut self) -> Result<String, String> {
        let mut text = String::new();
        loop {
            match self.next() {
                Some('"') => return Ok(Value::from(text).to_string()),
                Some('\\') => text.push(self.escaped()?),
                Some('\n') | None => return Err(self.wrong("a text must end with a quote")),
                Some(other) => text.push(other),
            }
        }
    }

    /// A class of characters, behind its bracket, as a regular expression.
    fn class(&mut self) -> Result<String, String> {
        let mut class = String::from("/[");
        if self.take("^") {
            class.push('^');
        }
        let mut range = false;
        loop {
            let character = match self.next() {
                Some(']') => break,
                Some('-')
                    if !self.rest.starts_with(']') && !class.ends_with(['[', '^']) && !range =>
                {
                    class.push('-');
                    range = true;
                    continue;
                }
                Some('\\') => self.escaped()?,
                Some('\n') | None => return Err(self.wrong("a class must end with `]`")),
                Some(other) => other,
            };
            class.push_str(&format!("\\u{{{:x}}}", u32::from(character)));
            range = false;
        }
        if class.ends_with(['[', '^']) {
            return Err(self.wrong("a class must have characters"));
        }
        Ok(class + "]/")
    }

    /// What stands for a character, behind its backslash.
    fn escaped(&mut self) -> Result<char, String> {
        let digits = match self.next() {
            Some('n') => return Ok('\n'),
            Some('r') => return Ok('\r'),
            Some('t') => return Ok('\t'),
            Some('x') => 2,
            Some('u') => 4,
            Some('U') => 8,
            Some(other) if !other.is_ascii_alphanumeric() => return Ok(other),
            _ => return Err(self.wrong("there is no such escape")),
        };
        let code = self.rest.get(..digits).and_then(|code| u32::from_str_radix(code, 16).ok());
        let Some(character) = code.and_then(char::from_u32) else {
            return Err(
                self.wrong(&format!("{digits} hexadecimal digits of a character must follow"))
            );
        };
        self.rest = &self.rest[digits..];
        Ok(character)
    }
}
