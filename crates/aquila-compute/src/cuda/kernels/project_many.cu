// Projections of more rows than `project_middle.cu` is fast for, with the sums of `project_skinny.cu`.
//
// A thread block makes 128 outputs of 128 rows. Two warpgroups multiply, 64 outputs each; four more warps
// bring stages of weights and rows. The slices of a group, which other kernels divide among warps or
// thread blocks, come one after the other here: each is added to the sum of those before it.

#include "tensor.cuh"

#if __CUDA_ARCH__ >= 900

#define MANY_ROWS 128
#define MANY_TILES 8    // tiles of 16 outputs, four for each warpgroup
#define MANY_BLOCKS 2   // blocks of 32 inputs of a stage
#define MANY_STAGES 6
#define MANY_WEIGHTS (MANY_TILES * MANY_BLOCKS * BLOCK_BYTES)
#define MANY_STAGE (MANY_WEIGHTS + MANY_ROWS * MANY_BLOCKS * 64)
#define MANY_MULTIPLIERS 256
#define MANY_LOADERS 128  // four warps, as RowCopies has them
static_assert(MANY_BLOCKS == 2, "a stage has one block or two");

// GATED: the first warpgroup's tiles are gates, the second's their ups. GROUPS: whether there is more
// than one group, and so a third level of sums.
template <bool GATED, bool GROUPS> __device__ void many(const ProjectArgs &a) {
    constexpr int CELLS = MANY_ROWS / 8;
    u8 *shared = dynamic_shared();
    u32 thread = threadIdx.x, warp = __shfl_sync(FULL, thread / 32, 0), lane = thread % 32;
    float *ups = reinterpret_cast<float *>(shared + MANY_STAGES * MANY_STAGE);
    u32 stages = shared_address(shared);
    u32 full = stages + MANY_STAGES * MANY_STAGE + (GATED ? MANY_ROWS * 64 * 4 : 0), empty = full + MANY_STAGES * 8;
    Cut cut(a.inputs);
    u32 tiles = (a.outputs + 15) / 16, half = tiles / 2, first_row = blockIdx.x * MANY_ROWS, unit = blockIdx.y;
    // The number of a tile; beyond the last it may be too large.
    auto tile_of = [&](u32 t) { return GATED ? unit * (MANY_TILES / 2) + t % (MANY_TILES / 2) + t / (MANY_TILES / 2) * half : unit * MANY_TILES + t; };

    let_next_begin();
    if (thread == 0) {
        for (u32 s = 0; s < MANY_STAGES; s++) {
            // The threads that bring rows, and the one that brings weights.
            barrier_init(full + s * 8, MANY_LOADERS + 1);
            barrier_init(empty + s * 8, MANY_MULTIPLIERS / 32);
        }
        publish_barriers();
    }
    __syncthreads();

    if (warp >= MANY_MULTIPLIERS / 32) {
        give_registers<40>();
        u32 loader = thread - MANY_MULTIPLIERS;
        auto fetch_weights = [&](u32 item, const Stages<MANY_BLOCKS> &at) {
            u32 stage = item % MANY_STAGES, bytes = at.blocks() * BLOCK_BYTES;
            if (lane == 0) barrier_expect(full + stage * 8, MANY_TILES * bytes);
            __syncwarp();
            if (lane < MANY_TILES)
                copy_input(stages + stage * MANY_STAGE + lane * MANY_BLOCKS * BLOCK_BYTES,
                           reinterpret_cast<const u16 *>(a.weight + ((size_t)min(tile_of(lane), tiles - 1) * cut.blocks + at.block) * BLOCK_BYTES),
                           bytes, full + stage * 8);
        };
        // Weights are there before the rows are.
        if (loader < 32) {
            Stages<MANY_BLOCKS> at(cut);
            for (u32 item = 0; item < MANY_STAGES && at.more(); item++, at.next()) fetch_weights(item, at);
        }
        wait_for_inputs();
        RowCopies<MANY_ROWS> copies(a.in, first_row, a.rows, loader / 32, lane);
        u32 item = 0;
        for (Stages<MANY_BLOCKS> at(cut); at.more(); at.next(), item++) {
            u32 stage = item % MANY_STAGES;
            if (item >= MANY_STAGES) {
                barrier_wait(empty + stage * 8, (item / MANY_STAGES + 1) & 1);
                if (loader < 32) fetch_weights(item, at);
            }
            u32 to = stages + stage * MANY_STAGE + MANY_WEIGHTS;
            copies.copy(to, at.block * 32);
            if (at.blocks() == MANY_BLOCKS) copies.copy(to + MANY_ROWS * 64, (at.block + 1) * 32);
            arrive_after_copies(full + stage * 8);
        }
        return;
    }

    take_registers<232>();
    float total[GROUPS ? CELLS : 1][4], sum[CELLS][4], c[CELLS][4];
    u32 from = stages + warp * MANY_BLOCKS * BLOCK_BYTES + lane * 16, item = 0;
    for (u32 g = 0; g < cut.groups; g++) {
        for (u32 s = 0; s < SLICES; s++) {
#pragma unroll
            for (int e = 0; e < CELLS * 4; e++) c[e / 4][e % 4] = 0.0f;
            u32 end = cut.slice(g, s + 1);
            for (u32 block = cut.slice(g, s); block < end; block += MANY_BLOCKS, item++) {
                u32 at = item % MANY_STAGES * MANY_STAGE, stage = item % MANY_STAGES * 8;
                barrier_wait(full + stage, item / MANY_STAGES & 1);
                publish_to_multiplying();
                if (end - block >= MANY_BLOCKS) {
                    multiply_blocks<MANY_BLOCKS, MANY_ROWS>(c, from + at, stages + at + MANY_WEIGHTS);
                } else {
                    multiply_blocks<1, MANY_ROWS>(c, from + at, stages + at + MANY_WEIGHTS);
                }
                __syncwarp();
                if (lane == 0) barrier_arrive(empty + stage);
            }
#pragma unroll
            for (int e = 0; e < CELLS * 4; e++) sum[e / 4][e % 4] = s == 0 ? c[e / 4][e % 4] : sum[e / 4][e % 4] + c[e / 4][e % 4];
        }
        if (GROUPS) {
#pragma unroll
            for (int e = 0; e < CELLS * 4; e++) total[e / 4][e % 4] = g == 0 ? sum[e / 4][e % 4] : total[e / 4][e % 4] + sum[e / 4][e % 4];
        }
    }
    auto result = [&](int e) { return GROUPS ? total[e / 4][e % 4] : sum[e / 4][e % 4]; };
    bool second = warp >= MANY_TILES / 2;
    if (GATED) {
        if (second) {
#pragma unroll
            for (int e = 0; e < CELLS * 4; e++) ups[e * 128 + thread % 128] = result(e);
        }
        meet_some<1, MANY_MULTIPLIERS>();
        if (second) return;
    }
    finish_tile<MANY_ROWS, GATED>(a, first_row, tile_of(warp) * 16, result, [&](int e) { return ups[e * 128 + thread]; });
}

#define MANY_KERNEL(NAME, GATED, GROUPS)                                                           \
    extern "C" __global__ void __launch_bounds__(MANY_MULTIPLIERS + MANY_LOADERS, 1)              \
        NAME(const __grid_constant__ ProjectArgs a) {                                             \
        many<GATED, GROUPS>(a);                                                                   \
    }
MANY_KERNEL(project_many, false, false)
MANY_KERNEL(project_many_groups, false, true)
MANY_KERNEL(project_many_gated, true, false)
MANY_KERNEL(project_many_gated_groups, true, true)

#endif
