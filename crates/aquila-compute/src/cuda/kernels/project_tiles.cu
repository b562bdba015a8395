// Projections of many rows, in tiles that thread blocks of a cluster share, with the sums of
// `project_skinny.cu`. Nothing chooses it yet: `cuda_check` compares and times it.
//
// A thread block makes 128 outputs of 128 rows: two warpgroups multiply, 64 outputs each, and one warp
// fetches. A cluster makes the outputs of 256 rows: two thread blocks share weights, and with four of
// them, which make 256 outputs, two share rows, too. Each fetches its part of what it shares, and the
// copy engine writes that to all who share it. So a stage takes three quarters or half of the bytes of
// the cache that it takes where each thread block fetches for itself. The slices of a group come one
// after the other; each is added to the sum of those before it.

#include "tensor.cuh"

#if __CUDA_ARCH__ >= 900

#define TILES_ROWS 128
#define TILES_WEIGHTS 8   // tiles of 16 outputs, four for each warpgroup
#define TILES_BLOCKS 2    // blocks of 32 inputs of a stage
#define TILES_STAGES 6
#define TILES_ROW_BYTES (TILES_BLOCKS * 64)
#define TILES_STAGE_ROWS (TILES_ROWS * TILES_ROW_BYTES)
#define TILES_STAGE (TILES_STAGE_ROWS + TILES_WEIGHTS * TILES_BLOCKS * BLOCK_BYTES)
#define TILES_MULTIPLIERS 256
#define TILES_FETCHERS 128  // a warpgroup, of which one warp fetches
static_assert(TILES_ROW_BYTES == 128, "rows are swizzled by 128 bytes");

// What a thread block does of one tile of its cluster.
struct SharedTile {
    u32 first_row, unit;
    // Tiles are numbered pair of rows by pair of rows, so that those which read the same weights run at
    // the same time.
    __device__ __forceinline__ SharedTile(u32 number, u32 row_pairs, u32 rank, u32 units)
        : first_row((number % row_pairs * 2 + rank % 2) * TILES_ROWS), unit(number / row_pairs * units + rank / 2) {}
};

// CLUSTER: two or four thread blocks. GATED: the first warpgroup's tiles are gates, the second's their
// ups. GROUPS: whether there is more than one group, and so a third level of sums.
template <u32 CLUSTER, bool GATED, bool GROUPS> __device__ void tiles(const TilesArgs &args) {
    constexpr int CELLS = TILES_ROWS / 8;
    // How many share a thread block's rows, and each of its barriers.
    constexpr u32 SHARING_ROWS = CLUSTER / 2, SHARING = SHARING_ROWS + 1;
    const ProjectArgs &a = args.project;
    u8 *shared = dynamic_shared();
    u32 thread = threadIdx.x, warp = __shfl_sync(FULL, thread / 32, 0), lane = thread % 32;
    u32 stages = (shared_address(shared) + 1023) / 1024 * 1024;
    float *ups = reinterpret_cast<float *>(shared + (stages - shared_address(shared)) + TILES_STAGES * TILES_STAGE);
    u32 full = stages + TILES_STAGES * TILES_STAGE + (GATED ? TILES_ROWS * 64 * 4 : 0), empty = full + TILES_STAGES * 8;
    Cut cut(a.inputs);
    u32 rank = blockIdx.x % CLUSTER, cluster = blockIdx.x / CLUSTER, clusters = gridDim.x / CLUSTER;
    u32 all = (a.outputs + 15) / 16, half = all / 2, of_unit = GATED ? TILES_WEIGHTS / 2 : TILES_WEIGHTS;
    u32 units = ((GATED ? half : all) + of_unit - 1) / of_unit, row_pairs = (a.rows + 2 * TILES_ROWS - 1) / (2 * TILES_ROWS);
    u32 tiles = row_pairs * ((units + SHARING_ROWS - 1) / SHARING_ROWS);
    // Who shares this thread block's weights, and its rows.
    u32 of_weights = rank ^ 1, of_rows = rank ^ (CLUSTER == 4 ? 2 : 0);
    // The number of a unit's tile of outputs; beyond the last it may be too large.
    auto tile_of = [&](u32 unit, u32 t) { return unit * of_unit + t % of_unit + t / of_unit * half; };

    let_next_begin();
    if (thread == 0) {
        for (u32 s = 0; s < TILES_STAGES; s++) {
            barrier_init(full + s * 8, 1);
            // The multiplying warps of all thread blocks that what is fetched here goes to.
            barrier_init(empty + s * 8, SHARING * TILES_MULTIPLIERS / 32);
        }
        publish_barriers();
    }
    __syncwarp();
    meet_cluster();

    if (warp >= TILES_MULTIPLIERS / 32) {
        give_registers<40>();
        if (warp == TILES_MULTIPLIERS / 32) {
            auto fetch_weights = [&](u32 item, const SharedTile &tile, const Stages<TILES_BLOCKS> &at) {
                u32 stage = item % TILES_STAGES, bytes = at.blocks() * BLOCK_BYTES;
                if (lane == 0) barrier_expect(full + stage * 8, TILES_STAGE_ROWS + TILES_WEIGHTS * bytes);
                __syncwarp();
                if (lane >= TILES_WEIGHTS / 2) return;
                u32 t = rank % 2 * (TILES_WEIGHTS / 2) + lane;
                size_t block = (size_t)min(tile_of(tile.unit, t), all - 1) * cut.blocks + at.block;
                share_weights(stages + stage * TILES_STAGE + TILES_STAGE_ROWS + t * TILES_BLOCKS * BLOCK_BYTES, a.weight + block * BLOCK_BYTES,
                              bytes, full + stage * 8, 1u << rank | 1u << of_weights);
            };
            auto fetch_rows = [&](u32 item, const SharedTile &tile, const Stages<TILES_BLOCKS> &at) {
                u32 stage = item % TILES_STAGES, first = rank / 2 * (TILES_ROWS / SHARING_ROWS);
                if (lane == 0)
                    share_rows(stages + stage * TILES_STAGE + first * TILES_ROW_BYTES, args.rows, at.block * 32, tile.first_row + first,
                               full + stage * 8, 1u << rank | 1u << of_rows);
            };
            // Weights are there before the rows are.
            u32 ahead = 0;
            for (Stages<TILES_BLOCKS> at(cut); cluster < tiles && ahead < TILES_STAGES && at.more(); at.next(), ahead++)
                fetch_weights(ahead, SharedTile(cluster, row_pairs, rank, SHARING_ROWS), at);
            wait_for_inputs();
            u32 item = 0;
            for (u32 number = cluster; number < tiles; number += clusters) {
                SharedTile tile(number, row_pairs, rank, SHARING_ROWS);
                for (Stages<TILES_BLOCKS> at(cut); at.more(); at.next(), item++) {
                    if (item >= TILES_STAGES) barrier_wait(empty + item % TILES_STAGES * 8, (item / TILES_STAGES + 1) & 1);
                    if (item >= ahead) fetch_weights(item, tile, at);
                    fetch_rows(item, tile, at);
                }
            }
        }
        __syncwarp();
        meet_cluster();
        return;
    }

    take_registers<232>();
    wait_for_inputs();
    float total[GROUPS ? CELLS : 1][4], sum[CELLS][4], c[CELLS][4];
    u32 from = stages + TILES_STAGE_ROWS + warp * TILES_BLOCKS * BLOCK_BYTES + lane * 16, item = 0;
    for (u32 number = cluster; number < tiles; number += clusters) {
        for (u32 g = 0; g < cut.groups; g++) {
            for (u32 s = 0; s < SLICES; s++) {
#pragma unroll
                for (int e = 0; e < CELLS * 4; e++) c[e / 4][e % 4] = 0.0f;
                u32 end = cut.slice(g, s + 1);
                for (u32 block = cut.slice(g, s); block < end; block += TILES_BLOCKS, item++) {
                    u32 at = item % TILES_STAGES * TILES_STAGE, stage = item % TILES_STAGES * 8;
                    barrier_wait(full + stage, item / TILES_STAGES & 1);
                    if (end - block >= TILES_BLOCKS) {
                        multiply_swizzled<TILES_BLOCKS, TILES_ROWS>(c, from + at, stages + at);
                    } else {
                        multiply_swizzled<1, TILES_ROWS>(c, from + at, stages + at);
                    }
                    __syncwarp();
                    // All that was read of the stage has been multiplied, and copies alone fill it again.
                    if (lane < SHARING) barrier_arrive_at(empty + stage, lane == 0 ? rank : lane == 1 ? of_weights : of_rows);
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
        SharedTile tile(number, row_pairs, rank, SHARING_ROWS);
        bool second = warp >= TILES_WEIGHTS / 2;
        if (GATED) {
            if (second) {
#pragma unroll
                for (int e = 0; e < CELLS * 4; e++) ups[e * 128 + thread % 128] = result(e);
            }
            meet_some<1, TILES_MULTIPLIERS>();
        }
        auto up = [&](int e) { return ups[e * 128 + thread]; };
        if (!GATED || !second) finish_tile<TILES_ROWS, GATED>(a, tile.first_row, tile_of(tile.unit, warp) * 16, result, up);
        // The ups are read before those of the next tile are written.
        if (GATED) meet_some<1, TILES_MULTIPLIERS>();
    }
    // Nobody leaves while others copy or arrive here.
    __syncwarp();
    meet_cluster();
}

#define TILES_KERNEL(NAME, CLUSTER, GATED, GROUPS)                                                                    \
    extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(TILES_MULTIPLIERS + TILES_FETCHERS, 1) \
        NAME(const __grid_constant__ TilesArgs args) {                                                                \
        tiles<CLUSTER, GATED, GROUPS>(args);                                                                          \
    }
TILES_KERNEL(project_tiles_2, 2, false, false)
TILES_KERNEL(project_tiles_2_groups, 2, false, true)
TILES_KERNEL(project_tiles_2_gated, 2, true, false)
TILES_KERNEL(project_tiles_2_gated_groups, 2, true, true)
TILES_KERNEL(project_tiles_4, 4, false, false)
TILES_KERNEL(project_tiles_4_groups, 4, false, true)
TILES_KERNEL(project_tiles_4_gated, 4, true, false)
TILES_KERNEL(project_tiles_4_gated_groups, 4, true, true)

#endif
