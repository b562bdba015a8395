//! Whether bytes are the beginning of a JSON value, one byte at a time.

/// How deep values may be nested, so that no text makes the stack long.
const DEEPEST: usize = 256;

/// What may come next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Next {
    Value,
    ValueOrEnd,
    KeyOrEnd,
    Key,
    Colon,
    CommaOrEnd,
    String { key: bool },
    Escape { key: bool },
    Hex { key: bool, left: u8 },
    Literal(&'static [u8]),
    Number(NumberState),
    Done,
}

/// How far a number has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum NumberState {
    Minus,
    Zero,
    Whole,
    Point,
    Fraction,
    Exponent,
    ExponentSign,
    ExponentDigits,
}

impl NumberState {
    fn step(self, byte: u8) -> Option<Self> {
        match (self, byte) {
            (Self::Minus, b'0') => Some(Self::Zero),
            (Self::Minus, b'1'..=b'9') | (Self::Whole, b'0'..=b'9') => Some(Self::Whole),
            (Self::Zero | Self::Whole, b'.') => Some(Self::Point),
            (Self::Point | Self::Fraction, b'0'..=b'9') => Some(Self::Fraction),
            (Self::Zero | Self::Whole | Self::Fraction, b'e' | b'E') => Some(Self::Exponent),
            (Self::Exponent, b'+' | b'-') => Some(Self::ExponentSign),
            (Self::Exponent | Self::ExponentSign | Self::ExponentDigits, b'0'..=b'9') => {
                Some(Self::ExponentDigits)
            }
            _ => None,
        }
    }

    fn may_end(self) -> bool {
        matches!(self, Self::Zero | Self::Whole | Self::Fraction | Self::ExponentDigits)
    }
}

/// Reads one object.
#[derive(Debug, Clone)]
pub(super) struct JsonScan {
    next: Next,
    /// What the value is in: `{` and `[`.
    within: Vec<u8>,
}

/// What a byte did to the values of the outermost object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// Nothing that shows there.
    Within,
    /// The byte began a key of the object.
    KeyBegins,
    /// The byte ended a key.
    KeyEnds,
    /// The byte began a value of the object.
    ValueBegins,
    /// The byte ended a value, and is part of it.
    ValueEnds,
    /// The byte ended a value that ends before it (a number).
    ValueEndedBefore,
    /// The byte ended the object; a number may have ended before it.
    Done,
}

impl JsonScan {
    /// Before a value.
    pub fn new() -> Self {
        Self { next: Next::Value, within: Vec::new() }
    }

    /// Takes the next byte; `None` where no JSON goes on like this.
    pub fn step(&mut self, byte: u8) -> Option<Step> {
        let depth = self.within.len();
        if let Next::Number(digits) = self.next {
            if let Some(digits) = digits.step(byte) {
                self.next = Next::Number(digits);
                return Some(Step::Within);
            }
            if !digits.may_end() || depth == 0 {
                return None;
            }
            self.next = Next::CommaOrEnd;
            let step = self.step(byte)?;
            let ended = depth == 1 && step == Step::Within;
            return Some(if ended { Step::ValueEndedBefore } else { step });
        }
        let space = matches!(byte, b' ' | b'\t' | b'\n' | b'\r');
        match (self.next, byte) {
            (Next::String { key }, b'"') => {
                self.next = if key { Next::Colon } else { Next::CommaOrEnd };
                let step = if key { Step::KeyEnds } else { Step::ValueEnds };
                return Some(if depth == 1 { step } else { Step::Within });
            }
            (Next::String { key }, b'\\') => self.next = Next::Escape { key },
            (Next::String { .. }, byte) if byte < b' ' => return None,
            (Next::String { .. }, _) => {}
            (Next::Escape { key }, b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't') => {
                self.next = Next::String { key };
            }
            (Next::Escape { key }, b'u') => self.next = Next::Hex { key, left: 4 },
            (Next::Hex { key, left }, byte) if byte.is_ascii_hexdigit() => {
                let more = Next::Hex { key, left: left - 1 };
                self.next = if left > 1 { more } else { Next::String { key } };
            }
            (Next::Literal(rest), byte) if rest.first() == Some(&byte) => {
                if rest.len() > 1 {
                    self.next = Next::Literal(&rest[1..]);
                } else {
                    self.next = Next::CommaOrEnd;
                    return Some(if depth == 1 { Step::ValueEnds } else { Step::Within });
                }
            }
            (Next::Escape { .. } | Next::Hex { .. } | Next::Literal(_), _) => return None,
            _ if space => {}
            (Next::KeyOrEnd | Next::Key, b'"') => {
                self.next = Next::String { key: true };
                return Some(if depth == 1 { Step::KeyBegins } else { Step::Within });
            }
            (Next::Colon, b':') => self.next = Next::Value,
            (Next::KeyOrEnd | Next::CommaOrEnd, b'}') if self.within.last() == Some(&b'{') => {
                return Some(self.close());
            }
            (Next::ValueOrEnd | Next::CommaOrEnd, b']') if self.within.last() == Some(&b'[') => {
                return Some(self.close());
            }
            (Next::CommaOrEnd, b',') => {
                let object = self.within.last() == Some(&b'{');
                self.next = if object { Next::Key } else { Next::Value };
            }
            (Next::Value | Next::ValueOrEnd, byte) => {
                self.begin_value(byte)?;
                return Some(if depth == 1 { Step::ValueBegins } else { Step::Within });
            }
            _ => return None,
        }
        Some(Step::Within)
    }

    fn begin_value(&mut self, byte: u8) -> Option<()> {
        self.next = match byte {
            b'{' => Next::KeyOrEnd,
            b'[' => Next::ValueOrEnd,
            b'"' => Next::String { key: false },
            b't' => Next::Literal(b"rue"),
            b'f' => Next::Literal(b"alse"),
            b'n' => Next::Literal(b"ull"),
            b'-' => Next::Number(NumberState::Minus),
            b'0' => Next::Number(NumberState::Zero),
            b'1'..=b'9' => Next::Number(NumberState::Whole),
            _ => return None,
        };
        if matches!(byte, b'{' | b'[') {
            if self.within.len() == DEEPEST {
                return None;
            }
            self.within.push(byte);
        }
        Some(())
    }

    fn close(&mut self) -> Step {
        self.within.pop();
        match self.within.len() {
            0 => {
                self.next = Next::Done;
                Step::Done
            }
            depth => {
                self.next = Next::CommaOrEnd;
                if depth == 1 { Step::ValueEnds } else { Step::Within }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Whether the whole text is one object, and at which byte it turned out not to be JSON.
    fn scan(text: &str) -> Result<bool, usize> {
        let mut scan = JsonScan::new();
        let mut done = false;
        for (at, byte) in text.bytes().enumerate() {
            if done {
                return Err(at);
            }
            done = scan.step(byte).ok_or(at)? == Step::Done;
        }
        Ok(done)
    }

    proptest! {
        /// serde_json is the reference, on texts made of JSON's own characters.
        #[test]
        fn objects_are_those_of_a_json_parser(text in r#"\{["a\\u0e{}\[\],:.+\- \n1tfn]{0,14}\}"#) {
            let parsed = serde_json::from_str::<serde_json::Map<_, serde_json::Value>>(&text);
            prop_assert_eq!(scan(&text) == Ok(true), parsed.is_ok(), "{:?}", parsed);
        }

        #[test]
        fn every_value_is_read_to_its_end(
            key in any::<String>(), text in any::<String>(), number in any::<f64>(), flag: bool,
        ) {
            let inner = serde_json::json!([number, flag, serde_json::Value::Null, {"x": [text, {}], "y": -0.5e-7}]);
            let value = serde_json::json!({ key: inner, "z": 12, "w": [] });
            prop_assert_eq!(scan(&value.to_string()), Ok(true));
            prop_assert_eq!(scan(&serde_json::to_string_pretty(&value).unwrap()), Ok(true));
        }
    }

    #[test]
    fn nesting_is_bounded() {
        assert!(scan(&format!("{{\"a\":{}", "[".repeat(300))).is_err());
    }
}
