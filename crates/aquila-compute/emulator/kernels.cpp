// The kernels, compiled for a CPU, and the table in which the driver finds them.

#include "cuda.cuh"

#include "kernels.h"

// Nothing of the kernels is seen elsewhere, so what a template declares as shared memory is of this
// file too, as a section of fixed shared memory needs it.
namespace {

#include "kernels.cu"

// How a kernel is called with arguments that lie somewhere.
template <auto KERNEL> struct Entry;
template <typename Arguments, void (*KERNEL)(Arguments)> struct Entry<KERNEL> {
    static void call(const void *arguments) { KERNEL(*static_cast<const Arguments *>(arguments)); }
    static constexpr emulator::Kernel of(const char *name, uint32_t cluster) { return {name, call, sizeof(Arguments), cluster}; }
};

#define KERNEL(NAME) Entry<&NAME>::of(#NAME, 1)
#define CLUSTERS(BLOCKS, NAME) Entry<&NAME>::of(#NAME, BLOCKS)
#define TILES(ROWS, WEIGHTS, SHARED) \
    CLUSTERS((WEIGHTS) * (SHARED), project_tiles_##ROWS##_##WEIGHTS##x##SHARED), CLUSTERS((WEIGHTS) * (SHARED), project_tiles_##ROWS##_##WEIGHTS##x##SHARED##_gated)

}  // namespace

namespace emulator {

const Kernel KERNELS[] = {
    KERNEL(accept), KERNEL(add), KERNEL(admit), KERNEL(attend_merge), KERNEL(attend_plain_bf16),
    KERNEL(attend_plain_f32), KERNEL(attend_tensor), KERNEL(attend_tensor_128), KERNEL(attend_tensor_128_many),
    KERNEL(attend_tensor_64), KERNEL(attend_tensor_64_many), KERNEL(begin_catch_up), KERNEL(begin_extend), KERNEL(begin_rows),
    KERNEL(build_trees), KERNEL(change_slots), KERNEL(change_tables), KERNEL(clear_first),
    KERNEL(compact_rows), KERNEL(compact_slots), KERNEL(copy_columns), KERNEL(draw), KERNEL(embed_bf16),
    KERNEL(embed_f32), KERNEL(follow_paths), KERNEL(gate), KERNEL(gather), KERNEL(group_pairs), KERNEL(grow), KERNEL(keep_states),
    KERNEL(mix_experts), KERNEL(move_rows), KERNEL(move_slots), KERNEL(near), KERNEL(pack), KERNEL(park_rows),
    KERNEL(plan_extend), KERNEL(plan_layer_level), KERNEL(plan_level), KERNEL(plan_target),
    KERNEL(project_experts_plain_bf16), KERNEL(project_experts_plain_f32), KERNEL(project_experts_tensor),
    KERNEL(project_plain_bf16), KERNEL(project_plain_f32), KERNEL(project_wide_128), KERNEL(project_wide_128_many),
    KERNEL(project_wide_64), KERNEL(project_wide_64_many), KERNEL(prune_trees), KERNEL(publish), KERNEL(race),
    KERNEL(random_bf16), KERNEL(random_f32), KERNEL(rank), KERNEL(retain_nodes), KERNEL(rms_norm_plain), KERNEL(rms_norm_tensor), KERNEL(route),
    KERNEL(routed_experts), KERNEL(scan), KERNEL(scatter), KERNEL(soft_cap), KERNEL(start_trees), KERNEL(take_seeds),
    KERNEL(tell_logprobs), KERNEL(write_kv_plain_bf16), KERNEL(write_kv_plain_f32), KERNEL(write_kv_tensor),
#if __CUDA_ARCH__ >= 900
    KERNEL(project_skinny_16), KERNEL(project_skinny_8), KERNEL(project_skinny_gated_16), KERNEL(project_skinny_gated_8),
    KERNEL(project_many), KERNEL(project_many_groups), KERNEL(project_many_gated), KERNEL(project_many_gated_groups),
    TILES(64, 1, 2), TILES(128, 1, 2), TILES(128, 1, 4), TILES(128, 2, 1), TILES(128, 2, 2), TILES(128, 2, 4),
    CLUSTERS(SLICES, project_middle_32), CLUSTERS(SLICES, project_middle_64), CLUSTERS(SLICES, project_middle_128),
    CLUSTERS(SLICES, project_middle_gated_32), CLUSTERS(SLICES, project_middle_gated_64),
    CLUSTERS(SLICES, project_middle_gated_128),
#endif
};
const size_t KERNEL_COUNT = sizeof(KERNELS) / sizeof(KERNELS[0]);

}  // namespace emulator
