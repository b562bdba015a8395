//! Arguments of the kernels, one structure each, field for field as `kernels.cu` has them.
//!
//! Pointers are device addresses; 0 stands for "not given".

use cudarc::driver::DeviceRepr;

/// A device address.
pub(super) type Address = u64;

macro_rules! arguments {
    ($($(#[$doc:meta])* $name:ident { $($field:ident: $type:ty),* $(,)? })*) => {$(
        $(#[$doc])*
        #[repr(C)]
        #[derive(Debug, Clone, Copy)]
        pub(super) struct $name { $(pub(super) $field: $type),* }

        // SAFETY: a plain C structure of addresses and numbers, as the kernels declare it.
        unsafe impl DeviceRepr for $name {}
    )*};
}

arguments! {
    /// Where the parts of a placed plan are.
    Plan {
        counts: Address,
        sights: Address,
        tokens: Address,
        positions: Address,
        writes: Address,
        sources: Address,
        outputs: Address,
        slots: Address,
    }

    /// Arguments of `embed_*`.
    Embed { plan: Plan, table: Address, out: Address, width: u32, tokens: u32, out_stride: u32 }

    /// Arguments of `rms_norm`.
    Norm {
        input: Address,
        weight: Address,
        out: Address,
        width: u32,
        in_stride: u32,
        out_stride: u32,
        epsilon: f32,
    }

    /// Arguments of `project_*`.
    Project {
        weight: Address,
        input: Address,
        bias: Address,
        out: Address,
        inputs: u32,
        outputs: u32,
        weight_stride: u32,
        in_stride: u32,
        out_stride: u32,
        rows: u32,
        add: u32,
    }

    /// Arguments of `write_kv_*`.
    WriteKv {
        plan: Plan,
        qkv: Address,
        query_norm: Address,
        key_norm: Address,
        cos: Address,
        sin: Address,
        keys: Address,
        values: Address,
        heads: u32,
        kv_heads: u32,
        head_dim: u32,
        qkv_stride: u32,
        half: u32,
        positions: u32,
        slots: u32,
        epsilon: f32,
    }

    /// Arguments of `attend_*` and `attend_merge`.
    Attend {
        plan: Plan,
        qkv: Address,
        keys: Address,
        values: Address,
        parts: Address,
        stats: Address,
        out: Address,
        heads: u32,
        kv_heads: u32,
        head_dim: u32,
        qkv_stride: u32,
        out_stride: u32,
        slots: u32,
        first_row: u32,
        heads_per_block: u32,
        scale: f32,
    }

    /// Arguments of `swiglu`.
    Swiglu { gate_up: Address, out: Address, width: u32, in_stride: u32, out_stride: u32 }

    /// Arguments of `gather`.
    Gather {
        count: Address,
        list: Address,
        input: Address,
        out: Address,
        width: u32,
        rows: u32,
        in_stride: u32,
        out_stride: u32,
    }

    /// Arguments of `copy_columns`.
    Copy {
        input: Address,
        out: Address,
        width: u32,
        in_stride: u32,
        out_stride: u32,
        column: u32,
    }

    /// Arguments of `move_*`.
    Move { keys: Address, values: Address, moves: Address, count: u32, slots: u32, width: u32 }
}
