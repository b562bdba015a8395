//! The names that a pickle of tensors may use; every other is refused.

/// Something of Python or torch that a pickle may name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Known {
    OrderedDict,
    RebuildTensor,
    RebuildParameter,
    Storage(Element),
}

/// The type of a storage's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Element {
    Half,
    BFloat16,
    Float,
    Double,
    Long,
    Int,
    Short,
    Char,
    Byte,
    Bool,
}

const ELEMENTS: &[(&str, Element)] = &[
    ("HalfStorage", Element::Half),
    ("BFloat16Storage", Element::BFloat16),
    ("FloatStorage", Element::Float),
    ("DoubleStorage", Element::Double),
    ("LongStorage", Element::Long),
    ("IntStorage", Element::Int),
    ("ShortStorage", Element::Short),
    ("CharStorage", Element::Char),
    ("ByteStorage", Element::Byte),
    ("BoolStorage", Element::Bool),
];

impl Known {
    /// What `module.name` is; refused by its name where it is not one of ours.
    pub fn named(module: &str, name: &str) -> Result<Self, String> {
        let element = ELEMENTS.iter().find(|(storage, _)| *storage == name);
        match (module, name, element) {
            ("collections", "OrderedDict", _) => Ok(Known::OrderedDict),
            ("torch._utils", "_rebuild_tensor_v2", _) => Ok(Known::RebuildTensor),
            ("torch._utils", "_rebuild_parameter", _) => Ok(Known::RebuildParameter),
            ("torch", _, Some((_, element))) => Ok(Known::Storage(*element)),
            _ => {
                let name: String = format!("{module}.{name}").chars().take(100).collect();
                Err(format!("names {name:?}, which no tensor needs: it is refused, not run"))
            }
        }
    }

    /// The name, for error texts.
    pub fn name(self) -> &'static str {
        match self {
            Known::OrderedDict => "collections.OrderedDict",
            Known::RebuildTensor => "torch._utils._rebuild_tensor_v2",
            Known::RebuildParameter => "torch._utils._rebuild_parameter",
            Known::Storage(_) => "a storage",
        }
    }
}

impl Element {
    /// Bytes of one.
    pub fn size(self) -> usize {
        match self {
            Element::Char | Element::Byte | Element::Bool => 1,
            Element::Half | Element::BFloat16 | Element::Short => 2,
            Element::Float | Element::Int => 4,
            Element::Double | Element::Long => 8,
        }
    }

    /// The name that safetensors gives the type.
    pub fn name(self) -> &'static str {
        match self {
            Element::Half => "F16",
            Element::BFloat16 => "BF16",
            Element::Float => "F32",
            Element::Double => "F64",
            Element::Long => "I64",
            Element::Int => "I32",
            Element::Short => "I16",
            Element::Char => "I8",
            Element::Byte => "U8",
            Element::Bool => "BOOL",
        }
    }
}
