//! What a pickle of tensors is made of.

use super::names::{Element, Known};

/// A value; what has parts is an [`Object`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Value<'a> {
    None,
    Bool(bool),
    Int(i64),
    /// A number that no tensor needs: it is skipped, not kept.
    Float,
    Text(&'a str),
    Known(Known),
    /// The number of an object.
    Object(usize),
}

/// What has parts.
#[derive(Debug)]
pub(super) enum Object<'a> {
    List(Vec<Value<'a>>),
    Tuple(Vec<Value<'a>>),
    Dict(Vec<(Value<'a>, Value<'a>)>),
    Storage(Storage<'a>),
    Tensor(Strided<'a>),
}

/// The bytes that tensors lie in, kept in a member of the file.
#[derive(Debug, Clone, Copy)]
pub(super) struct Storage<'a> {
    pub element: Element,
    pub key: &'a str,
    pub elements: u64,
}

/// A tensor as a view of a storage, in elements.
#[derive(Debug, Clone)]
pub(super) struct Strided<'a> {
    pub storage: Storage<'a>,
    pub offset: u64,
    pub shape: Vec<u64>,
    pub strides: Vec<u64>,
}
