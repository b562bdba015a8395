//! The crate through its public surface.

mod bits;
mod configs;
mod files;
mod fused_heads;
mod fused_layouts;
mod golden;
mod head;
mod head_acceptance;
mod head_refusals;
mod inspection;
mod places;
mod random_weights;
mod sequence;
mod tiny;
mod torch_files;
