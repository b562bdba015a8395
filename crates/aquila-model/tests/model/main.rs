//! The crate through its public surface.

mod bits;
mod configs;
mod files;
mod fused_heads;
mod fused_layouts;
mod golden;
mod head;
mod head_acceptance;
mod head_files;
mod head_layouts;
mod head_refusals;
mod head_variants;
mod hub;
mod hub_server;
mod inspection;
mod places;
mod random_weights;
mod safetensors_writer;
mod sequence;
mod tiny;
mod token_maps;
mod torch_files;
mod torch_writer;
