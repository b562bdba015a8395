//! Arguments of the kernels of a forward pass, one structure each, field for field as
//! `kernels/arguments.cuh` has them: a test reads the structures there and compares their layouts.
//!
//! Pointers are device addresses; 0 stands for "not given".

use super::c_layout::{Address, c_structures};

/// What the driver made to describe rows or weights to the copy engine.
#[repr(C, align(128))]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct TensorMap {
    pub(super) words: [u64; 16],
}

c_structures! {
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

    /// Arguments of `project_skinny_*`, `project_middle_*`, `project_many*` and `project_wide_*`.
    Project {
        input: Rows,
        out: Rows,
        weight: Address,
        bias: Address,
        norm: Address,
        partial: Address,
        arrivals: Address,
        inputs: u32,
        outputs: u32,
        rows: u32,
        add: u32,
        stages: u32,
        last_pass: u32,
        epsilon: f32,
    }

    /// Arguments of `project_tiles*`.
    Tiles {
        rows: TensorMap,
        weights: TensorMap,
        project: Project,
        whole: u32,
        parts: u32,
        grain: u32,
        pieces: u32,
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

    /// Arguments of `random_*`.
    Random { samples: Address, out: Address, state: u64, first: u64, end: u64 }

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
        arrivals: Address,
        places: Address,
        heads: u32,
        kv_heads: u32,
        head_dim: u32,
        slots: u32,
        first_row: u32,
        rows: u32,
        room: u32,
        window: u32,
        scale: f32,
    }

    /// Arguments of `route`.
    Route {
        logits: Rows,
        likeliest: Address,
        ascending: Address,
        weights: Address,
        experts: u32,
        per_token: u32,
        normalize: u32,
    }

    /// Arguments of `group_pairs`.
    Group {
        ascending: Address,
        places: Address,
        units: Address,
        unit_count: Address,
        pairs: u32,
        experts: u32,
    }

    /// Arguments of `project_experts_*`.
    Experts {
        input: Rows,
        out: Rows,
        matrices: Address,
        ascending: Address,
        places: Address,
        units: Address,
        unit_count: Address,
        sharing: u32,
        inputs: u32,
        first: u32,
        end: u32,
    }

    /// Arguments of `mix_experts`.
    Mix {
        input: Rows,
        out: Rows,
        weights: Address,
        per_token: u32,
        first: u32,
        width: u32,
        add: u32,
    }

    /// Arguments of `routed_experts`.
    Routed { out: Rows, likeliest: Address, column: u32, per_token: u32 }

    /// Arguments of `gate`.
    Gate { input: Rows, out: Rows, width: u32, gelu: u32 }

    /// Arguments of `add`.
    Add { input: Rows, out: Rows, width: u32 }

    /// Arguments of `soft_cap`.
    SoftCap { rows: Rows, cap: f32 }

    /// Arguments of `gather` and `scatter`.
    Gather { count: Address, list: Address, input: Rows, out: Rows, rows: u32, first: u32 }

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
    use super::TensorMap;
    use crate::cuda::c_layout::{Field, Layout, compare};

    #[test]
    fn arguments_lie_in_memory_as_the_kernels_read_them() {
        let source = include_str!("kernels/arguments.cuh");
        // Arguments are called so there; what they are made of is called the same.
        let theirs = |mut layout: Layout| {
            let kinds = layout.fields.iter_mut().map(|field| &mut field.kind);
            for name in kinds.filter(|kind| *kind == "Project") {
                name.push_str("Args");
            }
            if !matches!(layout.name.as_str(), "Plan" | "Rows") {
                layout.name.push_str("Args");
            }
            layout
        };
        let map = Layout {
            name: "TensorMap".into(),
            size: size_of::<TensorMap>(),
            alignment: align_of::<TensorMap>(),
            fields: vec![Field { name: "words".into(), kind: "[u64; 16]".into(), offset: 0 }],
        };
        let ours = super::layouts().into_iter().map(theirs).chain([map]).collect();
        compare(source, source, ours);
    }
}
