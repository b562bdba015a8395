//! The part of Python's pickle language that files of tensors are written in.
//!
//! A pickle is a program. This machine runs the instructions that build numbers, texts, lists,
//! tuples, dictionaries and tensors, and knows the few names that torch uses for them. The
//! invariant: nothing else is ever called or made up; the first other instruction or name ends the
//! reading, by its name. What is built refers to its parts by number, so no shape of the data makes
//! the machine recurse, and it takes memory in proportion to the pickle, whose length is limited.

use std::collections::HashMap;

use super::names::Known;
use super::value::{Object, Storage, Strided, Value};

/// The largest pickle that is read; those of real checkpoints have a few hundred kilobytes.
const LARGEST: usize = 8 << 20;

/// The most dimensions of a tensor.
const MOST_DIMENSIONS: usize = 8;

/// What a pickle builds.
#[derive(Debug)]
pub(super) struct Pickle<'a> {
    pub objects: Vec<Object<'a>>,
    pub top: Value<'a>,
}

impl<'a> Pickle<'a> {
    /// Runs a pickle to its end. What is wrong is said in words.
    pub fn read(bytes: &'a [u8]) -> Result<Self, String> {
        if bytes.len() > LARGEST {
            return Err(format!(
                "has a pickle of {} bytes; those of tensors have at most {LARGEST}",
                bytes.len()
            ));
        }
        let mut machine = Machine { bytes, ..Machine::default() };
        let top = machine.run().map_err(|problem| {
            format!("has a pickle that {problem} (at its byte {})", machine.at.saturating_sub(1))
        })?;
        Ok(Self { objects: machine.objects, top })
    }

    /// The object that a value is.
    pub fn object(&self, value: Value<'a>) -> Option<&Object<'a>> {
        match value {
            Value::Object(number) => self.objects.get(number),
            _ => None,
        }
    }
}

#[derive(Default)]
struct Machine<'a> {
    bytes: &'a [u8],
    at: usize,
    objects: Vec<Object<'a>>,
    stack: Vec<Value<'a>>,
    marks: Vec<usize>,
    memo: HashMap<usize, Value<'a>>,
}

type Step<T> = Result<T, String>;

impl<'a> Machine<'a> {
    fn run(&mut self) -> Step<Value<'a>> {
        loop {
            let [opcode] = self.array::<1>()?;
            match opcode {
                b'.' => return self.pop(),
                b'(' => self.marks.push(self.stack.len()),
                b'0' => drop(self.pop()?),
                b'1' => drop(self.since_mark()?),
                b'2' => {
                    let top = self.pop()?;
                    self.stack.extend([top, top]);
                }
                b'N' => self.stack.push(Value::None),
                0x88 => self.stack.push(Value::Bool(true)),
                0x89 => self.stack.push(Value::Bool(false)),
                b'J' => self.int(i32::from_le_bytes)?,
                b'K' => self.int(u8::from_le_bytes)?,
                b'M' => self.int(u16::from_le_bytes)?,
                0x8a => self.long()?,
                b'G' => {
                    self.array::<8>()?;
                    self.stack.push(Value::Float);
                }
                b'X' => self.text::<4>()?,
                0x8c => self.text::<1>()?,
                0x8d => self.text::<8>()?,
                b')' => self.make(Object::Tuple(Vec::new())),
                0x85 => self.tuple(1)?,
                0x86 => self.tuple(2)?,
                0x87 => self.tuple(3)?,
                b't' => {
                    let parts = self.since_mark()?;
                    self.make(Object::Tuple(parts));
                }
                b']' => self.make(Object::List(Vec::new())),
                b'l' => {
                    let parts = self.since_mark()?;
                    self.make(Object::List(parts));
                }
                b'a' => {
                    let part = self.pop()?;
                    self.list()?.push(part);
                }
                b'e' => {
                    let parts = self.since_mark()?;
                    self.list()?.extend(parts);
                }
                b'}' => self.make(Object::Dict(Vec::new())),
                b'd' => {
                    let parts = pairs(self.since_mark()?)?;
                    self.make(Object::Dict(parts));
                }
                b's' => {
                    let (value, key) = (self.pop()?, self.pop()?);
                    self.dict("sets an item of")?.push((key, value));
                }
                b'u' => {
                    let parts = pairs(self.since_mark()?)?;
                    self.dict("sets items of")?.extend(parts);
                }
                b'h' => self.recall::<1>()?,
                b'j' => self.recall::<4>()?,
                b'q' => self.remember::<1>()?,
                b'r' => self.remember::<4>()?,
                0x94 => {
                    let number = self.memo.len();
                    self.keep(number)?;
                }
                b'c' => {
                    let (module, name) = (self.line()?, self.line()?);
                    self.stack.push(Value::Known(Known::named(module, name)?));
                }
                0x93 => match (self.pop()?, self.pop()?) {
                    (Value::Text(name), Value::Text(module)) => {
                        self.stack.push(Value::Known(Known::named(module, name)?));
                    }
                    _ => return Err("names something by what is no text".into()),
                },
                b'Q' => self.storage()?,
                b'R' => self.call()?,
                b'b' => {
                    // The attributes of a dictionary: torch keeps versions of modules there.
                    self.pop()?;
                    self.dict("gives attributes to")?;
                }
                0x80 => match self.array()? {
                    [2..=5] => {}
                    [version] => {
                        return Err(format!("is of protocol {version}; 2 to 5 are read"));
                    }
                },
                0x95 => drop(self.array::<8>()?),
                other => {
                    return Err(format!(
                        "has the instruction {:?} (0x{other:02x}), which no tensor needs: it is \
                         refused, not run",
                        char::from(other)
                    ));
                }
            }
        }
    }

    fn take(&mut self, length: usize) -> Step<&'a [u8]> {
        let rest = self.bytes.get(self.at..).unwrap_or_default();
        let found = rest.get(..length).ok_or("ends too early")?;
        self.at += length;
        Ok(found)
    }

    fn array<const N: usize>(&mut self) -> Step<[u8; N]> {
        Ok(*self.take(N)?.first_chunk::<N>().expect("as many bytes were taken"))
    }

    /// A length or number of `N` little-endian bytes.
    fn number<const N: usize>(&mut self) -> Step<usize> {
        let bytes = self.array::<N>()?;
        let wide = bytes.iter().rev().fold(0u64, |n, &b| (n << 8) | u64::from(b));
        usize::try_from(wide).map_err(|_| "has a number beyond all bounds".into())
    }

    fn line(&mut self) -> Step<&'a str> {
        let rest = self.bytes.get(self.at..).unwrap_or_default();
        let length = rest.iter().position(|&b| b == b'\n').ok_or("ends too early")?;
        let line =
            std::str::from_utf8(&rest[..length]).map_err(|_| "has a name that is no text")?;
        self.at += length + 1;
        Ok(line)
    }

    fn pop(&mut self) -> Step<Value<'a>> {
        let floor = self.marks.last().copied().unwrap_or(0);
        match self.stack.len() > floor {
            true => self.stack.pop().ok_or_else(|| "takes what is not there".into()),
            false => Err("takes what is not there".into()),
        }
    }

    fn since_mark(&mut self) -> Step<Vec<Value<'a>>> {
        let mark = self.marks.pop().ok_or("lacks a mark")?;
        Ok(self.stack.split_off(mark))
    }

    fn make(&mut self, object: Object<'a>) {
        self.stack.push(Value::Object(self.objects.len()));
        self.objects.push(object);
    }

    fn tuple(&mut self, length: usize) -> Step<()> {
        let mut parts = (0..length).map(|_| self.pop()).collect::<Step<Vec<_>>>()?;
        parts.reverse();
        self.make(Object::Tuple(parts));
        Ok(())
    }

    fn int<const N: usize, I: Into<i64>>(&mut self, read: impl Fn([u8; N]) -> I) -> Step<()> {
        let value = read(self.array()?).into();
        self.stack.push(Value::Int(value));
        Ok(())
    }

    fn long(&mut self) -> Step<()> {
        let [length] = self.array::<1>()?;
        let bytes = self.take(usize::from(length))?;
        if bytes.len() > 8 {
            return Err(format!("has an integer of {length} bytes"));
        }
        let negative = bytes.last().is_some_and(|&b| b & 0x80 != 0);
        let mut wide = [if negative { 0xff } else { 0 }; 8];
        wide[..bytes.len()].copy_from_slice(bytes);
        self.stack.push(Value::Int(i64::from_le_bytes(wide)));
        Ok(())
    }

    fn text<const N: usize>(&mut self) -> Step<()> {
        let length = self.number::<N>()?;
        let text = std::str::from_utf8(self.take(length)?);
        self.stack.push(Value::Text(text.map_err(|_| "has a text that is not UTF-8")?));
        Ok(())
    }

    /// The object on top of the stack, which stays there.
    fn top_object(&mut self) -> Option<&mut Object<'a>> {
        match self.stack.last() {
            Some(&Value::Object(number)) => self.objects.get_mut(number),
            _ => None,
        }
    }

    fn list(&mut self) -> Step<&mut Vec<Value<'a>>> {
        match self.top_object() {
            Some(Object::List(list)) => Ok(list),
            _ => Err("appends to what is no list".into()),
        }
    }

    fn dict(&mut self, what: &str) -> Step<&mut Vec<(Value<'a>, Value<'a>)>> {
        match self.top_object() {
            Some(Object::Dict(dict)) => Ok(dict),
            _ => Err(format!("{what} something that is no dictionary")),
        }
    }

    fn recall<const N: usize>(&mut self) -> Step<()> {
        let number = self.number::<N>()?;
        let value = self.memo.get(&number).copied();
        self.stack.push(value.ok_or("recalls what it never kept")?);
        Ok(())
    }

    fn remember<const N: usize>(&mut self) -> Step<()> {
        let number = self.number::<N>()?;
        self.keep(number)
    }

    fn keep(&mut self, number: usize) -> Step<()> {
        let value = self.stack.last().copied().ok_or("keeps what is not there")?;
        self.memo.insert(number, value);
        Ok(())
    }

    fn tuple_of(&self, value: Value<'a>) -> Step<&[Value<'a>]> {
        match value {
            Value::Object(number) => match self.objects.get(number) {
                Some(Object::Tuple(parts)) => Ok(parts),
                _ => Err("has something else where a tuple must be".into()),
            },
            _ => Err("has something else where a tuple must be".into()),
        }
    }

    /// A persistent id: torch's way to say which member of the file holds a storage.
    fn storage(&mut self) -> Step<()> {
        let id = self.pop()?;
        let storage = match *self.tuple_of(id)? {
            [
                Value::Text("storage"),
                Value::Known(Known::Storage(element)),
                Value::Text(key),
                Value::Text(_),
                Value::Int(elements),
                ..,
            ] => {
                let elements =
                    u64::try_from(elements).map_err(|_| "has a storage of negative length")?;
                Storage { element, key, elements }
            }
            _ => return Err("refers to what is no storage of a tensor".into()),
        };
        self.make(Object::Storage(storage));
        Ok(())
    }

    fn call(&mut self) -> Step<()> {
        let (arguments, what) = (self.pop()?, self.pop()?);
        let arguments = self.tuple_of(arguments)?;
        match (what, arguments) {
            (Value::Known(Known::OrderedDict), []) => self.make(Object::Dict(Vec::new())),
            (
                Value::Known(Known::RebuildTensor),
                &[storage, Value::Int(offset), shape, strides, ..],
            ) => {
                let storage = match storage {
                    Value::Object(number) => match self.objects.get(number) {
                        Some(&Object::Storage(storage)) => storage,
                        _ => return Err("has a tensor without a storage".into()),
                    },
                    _ => return Err("has a tensor without a storage".into()),
                };
                let tensor = Strided {
                    storage,
                    offset: u64::try_from(offset)
                        .map_err(|_| "has a tensor at a negative place")?,
                    shape: self.sizes(shape)?,
                    strides: self.sizes(strides)?,
                };
                if tensor.shape.len() != tensor.strides.len() {
                    return Err("has a tensor of other strides than its shape".into());
                }
                self.make(Object::Tensor(tensor));
            }
            (Value::Known(Known::RebuildParameter), &[tensor @ Value::Object(number), ..])
                if matches!(self.objects.get(number), Some(Object::Tensor(_))) =>
            {
                self.stack.push(tensor);
            }
            (Value::Known(known), _) => {
                return Err(format!("calls {} with arguments that it cannot have", known.name()));
            }
            _ => return Err("calls something that has no name".into()),
        }
        Ok(())
    }

    fn sizes(&self, value: Value<'a>) -> Step<Vec<u64>> {
        let size = |value: &Value<'a>| match value {
            Value::Int(n) => u64::try_from(*n).ok(),
            _ => None,
        };
        let sizes = self.tuple_of(value)?;
        if sizes.len() > MOST_DIMENSIONS {
            return Err(format!("has a tensor of {} dimensions", sizes.len()));
        }
        let sizes = sizes.iter().map(size).collect::<Option<Vec<_>>>();
        sizes.ok_or_else(|| "has a tensor whose sizes are no numbers".into())
    }
}

fn pairs<'a>(parts: Vec<Value<'a>>) -> Step<Vec<(Value<'a>, Value<'a>)>> {
    let (pairs, rest) = parts.as_chunks::<2>();
    match rest {
        [] => Ok(pairs.iter().map(|&[key, value]| (key, value)).collect()),
        _ => Err("has a key without a value".into()),
    }
}
