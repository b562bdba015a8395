//! Structures that Rust and the kernels share.

/// A device address.
pub(super) type Address = u64;

/// A structure of addresses and numbers, of which every bit pattern is a value.
///
/// # Safety
/// It is laid out as C does, without references, and of whole words.
pub(super) unsafe trait CStructure: Copy {
    /// Words of 4 bytes that it takes.
    const WORDS: usize = size_of::<Self>() / 4;

    /// Structure `at` of those that the device has written to `words`.
    fn read(words: &[u32], at: usize) -> Self {
        let words = &words[at * Self::WORDS..][..Self::WORDS];
        // SAFETY: as many words are there, and every bit pattern is a value.
        unsafe { words.as_ptr().cast::<Self>().read_unaligned() }
    }
}

/// Declares structures as C lays them out.
macro_rules! c_structures {
    ($($(#[$doc:meta])* $name:ident { $($field:ident: $type:ty),* $(,)? })*) => {
        $(
        $(#[$doc])*
        #[repr(C)]
        #[derive(Debug, Clone, Copy, Default)]
        pub(super) struct $name { $(pub(super) $field: $type),* }

        // SAFETY: a plain C structure of addresses and numbers, as the kernels declare it.
        unsafe impl cudarc::driver::DeviceRepr for $name {}
        // SAFETY: as above.
        unsafe impl $crate::cuda::c_layout::CStructure for $name {}
        )*

        /// Every structure as Rust lays it out.
        #[cfg(test)]
        fn layouts() -> Vec<$crate::cuda::c_layout::Layout> {
            use $crate::cuda::c_layout::{Field, Layout};
            vec![$(Layout {
                name: stringify!($name).into(),
                size: size_of::<$name>(),
                alignment: align_of::<$name>(),
                fields: vec![$(Field {
                    name: stringify!($field).into(),
                    kind: stringify!($type).into(),
                    offset: std::mem::offset_of!($name, $field),
                }),*],
            }),*]
        }
    };
}
pub(super) use c_structures;

/// A structure in memory.
#[cfg(test)]
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Layout {
    pub name: String,
    pub size: usize,
    pub alignment: usize,
    pub fields: Vec<Field>,
}

/// A field, its type in the words of Rust.
#[cfg(test)]
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Field {
    pub name: String,
    pub kind: String,
    pub offset: usize,
}

/// The structures of C source, laid out as CUDA does for 64 bits: each field at the next multiple
/// of its alignment, the whole a multiple of the largest. `alignas` asks for more.
#[cfg(test)]
fn structures(source: &str) -> std::collections::BTreeMap<String, Layout> {
    let mut found = std::collections::BTreeMap::<String, Layout>::new();
    for text in source.split("\nstruct ").skip(1) {
        let Some((name, rest)) = text.split_once(" {\n") else { continue };
        let (body, _) = rest.split_once("\n};").expect("a structure ends");
        let asked = name.strip_prefix("alignas(").and_then(|rest| rest.split_once(") "));
        let (alignment, name) = asked
            .map_or((1, name), |(bytes, name)| (bytes.parse().expect("a number of bytes"), name));
        let mut layout = Layout { name: name.into(), size: 0, alignment, fields: Vec::new() };
        let lines = body.lines().map(|line| line.split("//").next().unwrap_or_default());
        for declaration in lines.collect::<String>().split(';').map(str::trim) {
            if declaration.is_empty() {
                continue;
            }
            let declaration = declaration.strip_prefix("const ").unwrap_or(declaration);
            let (kind, names) = declaration.split_once(' ').expect("a type and names");
            for name in names.split(',').map(str::trim) {
                let (kind, size, alignment) = match kind {
                    _ if name.starts_with('*') => ("Address", 8, 8),
                    "u32" => ("u32", 4, 4),
                    "u64" => ("u64", 8, 8),
                    "float" => ("f32", 4, 4),
                    "double" => ("f64", 8, 8),
                    other => {
                        let inner = &found[other];
                        (other, inner.size, inner.alignment)
                    }
                };
                // `in` is a keyword of Rust.
                let name = name.trim_start_matches('*');
                let name = if name == "in" { "input" } else { name };
                let (name, kind, size) = match name.trim_end_matches(']').split_once('[') {
                    None => (name, kind.to_owned(), size),
                    Some((name, count)) => {
                        let values: usize = count.parse().expect("a number of values");
                        (name, format!("[{kind}; {count}]"), values * size)
                    }
                };
                let offset = layout.size.next_multiple_of(alignment);
                layout.fields.push(Field { name: name.into(), kind, offset });
                layout.size = offset + size;
                layout.alignment = layout.alignment.max(alignment);
            }
        }
        layout.size = layout.size.next_multiple_of(layout.alignment);
        found.insert(name.into(), layout);
    }
    found
}

/// Compares structures of Rust with those of the header `own`, where all of them are declared and
/// nothing else; `all` has the headers that it needs, too.
#[cfg(test)]
pub(super) fn compare(own: &str, all: &str, ours: Vec<Layout>) {
    let found = structures(all);
    for layout in &ours {
        let in_c = found.get(&layout.name).unwrap_or_else(|| panic!("no {}", layout.name));
        assert_eq!(layout, in_c);
    }
    let declared = own.split("\nstruct ").skip(1).filter(|text| text.contains(" {\n")).count();
    assert_eq!(declared, ours.len(), "the kernels have structures that nothing here fills in");
}
