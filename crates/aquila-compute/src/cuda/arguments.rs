//! Arguments of the kernels, one structure each, field for field as `kernels/arguments.cuh` has them: a test
//! reads the structures there and compares their layouts.
//!
//! Pointers are device addresses; 0 stands for "not given".

use cudarc::driver::DeviceRepr;

/// A device address.
pub(super) type Address = u64;

macro_rules! arguments {
    ($($(#[$doc:meta])* $name:ident { $($field:ident: $type:ty),* $(,)? })*) => {
        $(
        $(#[$doc])*
        #[repr(C)]
        #[derive(Debug, Clone, Copy)]
        pub(super) struct $name { $(pub(super) $field: $type),* }

        // SAFETY: a plain C structure of addresses and numbers, as the kernels declare it.
        unsafe impl DeviceRepr for $name {}
        )*

        /// Every structure as Rust lays it out.
        #[cfg(test)]
        fn layouts() -> Vec<tests::Layout> {
            vec![$(tests::Layout {
                name: stringify!($name).into(),
                size: size_of::<$name>(),
                alignment: align_of::<$name>(),
                fields: vec![$(tests::Field {
                    name: stringify!($field).into(),
                    kind: stringify!($type).into(),
                    offset: std::mem::offset_of!($name, $field),
                }),*],
            }),*]
        }
    };
}

arguments! {
    /// Rows in both their forms.
    Rows { values: Address, halves: Address, stride: u32, width: u32 }

    /// Where the parts of a placed plan are.
    Plan {
        counts: Address,
        spans: Address,
        tokens: Address,
        positions: Address,
        writes: Address,
        sources: Address,
        outputs: Address,
        destinations: Address,
        tables: Address,
        tree_slots: Address,
    }

    /// Arguments of `change_tables`.
    Change { changes: Address, tables: Address, count: u32, size: u32 }

    /// Arguments of `embed_*`.
    Embed { plan: Plan, out: Rows, table: Address, width: u32, tokens: u32, scale: f32 }

    /// Arguments of `rms_norm_*`.
    Norm { input: Rows, out: Rows, weight: Address, width: u32, epsilon: f32 }

    /// Arguments of `project_skinny_*`, `project_middle_*` and `project_wide_*`.
    Project {
        input: Rows,
        out: Rows,
        weight: Address,
        bias: Address,
        partial: Address,
        arrivals: Address,
        inputs: u32,
        outputs: u32,
        rows: u32,
        add: u32,
        stages: u32,
        last_pass: u32,
    }

    /// Arguments of `project_plain_*`.
    PlainProject {
        input: Rows,
        out: Rows,
        weight: Address,
        bias: Address,
        inputs: u32,
        outputs: u32,
        rows: u32,
        add: u32,
    }

    /// Arguments of `pack`.
    Pack { input: Address, out: Address, rows: u32, inputs: u32, first: u32 }

    /// Arguments of `write_kv_*`.
    WriteKv {
        plan: Plan,
        qkv: Rows,
        query_norm: Address,
        key_norm: Address,
        cos: Address,
        sin: Address,
        keys: Address,
        values: Address,
        heads: u32,
        kv_heads: u32,
        head_dim: u32,
        half: u32,
        positions: u32,
        slots: u32,
        epsilon: f32,
    }

    /// Arguments of `attend_*`.
    Attend {
        plan: Plan,
        qkv: Rows,
        out: Rows,
        keys: Address,
        values: Address,
        parts: Address,
        stats: Address,
        heads: u32,
        kv_heads: u32,
        head_dim: u32,
        slots: u32,
        first_row: u32,
        blocks: u32,
        scale: f32,
    }

    /// Arguments of `gate`.
    Gate { input: Rows, out: Rows, width: u32, gelu: u32 }

    /// Arguments of `add`.
    Add { input: Rows, out: Rows, width: u32 }

    /// Arguments of `soft_cap`.
    SoftCap { rows: Rows, cap: f32 }

    /// Arguments of `gather` and `scatter`.
    Gather { count: Address, list: Address, input: Rows, out: Rows, rows: u32 }

    /// Arguments of `copy_columns`.
    Copy { input: Rows, out: Rows, from: u32, to: u32, width: u32 }

    /// Arguments of `clear_first`.
    Clear { plan: Plan, rows: Rows }

    /// Arguments of `move_rows`.
    MoveRows { rows: Rows, moves: Address, count: u32, capacity: u32 }

    /// Arguments of `move_slots`.
    MoveSlots {
        keys: Address,
        values: Address,
        moves: Address,
        count: u32,
        slots: u32,
        width: u32,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    /// A structure in memory.
    #[derive(Debug, Clone, PartialEq)]
    pub struct Layout {
        pub name: String,
        pub size: usize,
        pub alignment: usize,
        pub fields: Vec<Field>,
    }

    /// A field, its type in the words of `arguments.rs`.
    #[derive(Debug, Clone, PartialEq)]
    pub struct Field {
        pub name: String,
        pub kind: String,
        pub offset: usize,
    }

    /// The structures of C source whose names are in `wanted`, laid out as CUDA does for 64 bits:
    /// each field at the next multiple of its alignment, the whole a multiple of the largest.
    fn structures(source: &str, wanted: &[String]) -> BTreeMap<String, Layout> {
        let mut found: BTreeMap<String, Layout> = BTreeMap::new();
        for text in source.split("\nstruct ").skip(1) {
            let (name, rest) = text.split_once(" {\n").expect("a structure begins");
            if !wanted.iter().any(|wanted| wanted == name) {
                continue;
            }
            let (body, _) = rest.split_once("};").expect("a structure ends");
            let mut layout =
                Layout { name: name.into(), size: 0, alignment: 1, fields: Vec::new() };
            let lines = body.lines().map(|line| line.split("//").next().unwrap_or_default());
            for declaration in lines.collect::<String>().split(';').map(str::trim) {
                if declaration.is_empty() {
                    continue;
                }
                let declaration = declaration.strip_prefix("const ").unwrap_or(declaration);
                let (kind, names) = declaration.split_once(' ').expect("a type and names");
                for name in names.split(',').map(str::trim) {
                    let pointer = name.starts_with('*');
                    let (kind, size, alignment) = match kind {
                        _ if pointer => ("Address", 8, 8),
                        "u32" => ("u32", 4, 4),
                        "float" => ("f32", 4, 4),
                        other => {
                            let inner = &found[other];
                            (other, inner.size, inner.alignment)
                        }
                    };
                    // `in` is a keyword of Rust.
                    let name = name.trim_start_matches('*');
                    let name = if name == "in" { "input" } else { name };
                    let offset = layout.size.next_multiple_of(alignment);
                    layout.fields.push(Field { name: name.into(), kind: kind.into(), offset });
                    layout.size = offset + size;
                    layout.alignment = layout.alignment.max(alignment);
                }
            }
            layout.size = layout.size.next_multiple_of(layout.alignment);
            found.insert(name.into(), layout);
        }
        found
    }

    #[test]
    fn arguments_lie_in_memory_as_the_kernels_read_them() {
        let ours = super::layouts();
        // Only what is part of others is called the same.
        let theirs = |name: &str| match name {
            "Plan" | "Rows" => name.to_owned(),
            _ => format!("{name}Args"),
        };
        let wanted: Vec<String> = ours.iter().map(|ours| theirs(&ours.name)).collect();
        let source = include_str!("kernels/arguments.cuh");
        let found = structures(source, &wanted);
        assert_eq!(found.len(), ours.len(), "structures that the kernels lack: {wanted:?}");
        for layout in ours {
            let in_c = &found[&theirs(&layout.name)];
            assert_eq!(layout, Layout { name: layout.name.clone(), ..in_c.clone() });
        }
        let named = source.matches("Args {\n").count();
        assert_eq!(named + 2, found.len(), "the kernels have arguments that nothing here fills in");
    }
}
