// Projections of 17 rows to a few hundred, up to 128 at a time, with the sums of `project_skinny.cu`.
//
// Eight thread blocks, a cluster, are the eight slices of a group. Each keeps its slice of the rows in
// shared memory and multiplies it with the weights of one unit of 64 outputs after the other, which
// bulk copies bring through a ring. Two warpgroups take turns with units. Each sends every thread block
// of the cluster the sums of an eighth of the unit, of which four more warps there add the slices, in
// order, while the next unit is multiplied.

#include "tensor.cuh"

#if __CUDA_ARCH__ >= 900

#define UNIT_TILES 4     // tiles of 16 outputs of a unit: one for each warp of a warpgroup
#define VISIT_BLOCKS 4   // blocks of 32 inputs of one stage
#define VISIT_BYTES (UNIT_TILES * VISIT_BLOCKS * BLOCK_BYTES)
#define MOST_VISITS 8    // stages at most
#define MULTIPLIERS 256  // threads of the two warpgroups
#define ADDERS 128       // threads that add, behind them; one more warp fetches
#define SLICE_STEPS (2 * GROUP / SLICES)  // steps of 16 inputs of a slice at most

// Adds the products of some blocks of one tile of weights a warp, which lie at `from`, and of the rows at
// `x`.
template <int BLOCKS, int ROWS> __device__ __forceinline__ void multiply_blocks(float (&c)[ROWS / 8][4], u32 from, u32 x) {
    uint4 w[2 * BLOCKS];
#pragma unroll
    for (int s = 0; s < 2 * BLOCKS; s++) w[s] = load_shared(from + s * BLOCK_BYTES / 2);
    begin_multiplying();
#pragma unroll
    for (int s = 0; s < 2 * BLOCKS; s++) multiply_group<ROWS>(c, w[s], matrices_at(x + s * ROWS * 32, ROWS * 16, 128), true);
    commit_multiplying();
    wait_for_multiplying<0>(c);
}

// ROWS: at a time. BUFFERS: of a unit's sums. GATED: two tiles of a unit are gates, the others their ups.
template <int ROWS, int BUFFERS, bool GATED> __device__ void middle(const ProjectArgs &a) {
    // A cell is 16 outputs by 8 rows; an item a cell, or one of gates and one of ups.
    constexpr u32 CELLS = UNIT_TILES * ROWS / 8, PARTS = GATED ? 2 : 1, ALL_ITEMS = CELLS / PARTS, ITEMS = ALL_ITEMS / SLICES;
    constexpr u32 SUMS = CELLS * 128;  // that a thread block gets of a unit: of each slice those of its items
    u8 *shared = dynamic_shared();
    // By a shuffle, so that the compiler sees that all lanes of a warp have the same number.
    u32 thread = threadIdx.x, warp = __shfl_sync(FULL, thread / 32, 0), lane = thread % 32;
    u32 inputs = shared_address(shared);  // of each 8 inputs a column of rows, 16 bytes a row
    u32 ring = inputs + SLICE_STEPS * ROWS * 32;
    float *sums = reinterpret_cast<float *>(shared + SLICE_STEPS * ROWS * 32 + a.stages * VISIT_BYTES);
    u64 *barriers = reinterpret_cast<u64 *>(sums + BUFFERS * SUMS);
    // A stage is full for one of the warpgroups, and a buffer read for one, each of which has barriers
    // of its own: one that saw only some of the phases of a barrier could not tell them apart.
    u32 full = shared_address(barriers), empty = full + 2 * MOST_VISITS * 8, ready = empty + MOST_VISITS * 8, read = ready + 16;
    u32 *last_one = reinterpret_cast<u32 *>(barriers + 3 * MOST_VISITS + 4);

    Cut cut(a.inputs);
    u32 rank = blockIdx.x % SLICES, cluster = blockIdx.x / SLICES;
    u32 group = cluster % cut.groups, column = cluster / cut.groups, columns = gridDim.x / SLICES / cut.groups;
    u32 start = cut.slice(group, rank), blocks = cut.slice(group, rank + 1) - start;
    u32 visits = (blocks + VISIT_BLOCKS - 1) / VISIT_BLOCKS;
    u32 tiles = (a.outputs + 15) / 16, half = tiles / 2;
    u32 of_unit = GATED ? UNIT_TILES / 2 : UNIT_TILES, units = ((GATED ? half : tiles) + of_unit - 1) / of_unit;
    u32 mine = units > column ? (units - column + columns - 1) / columns : 0;
    // The number of a unit's tile; beyond the last it may be too large.
    auto tile_of = [&](u32 unit, u32 t) { return unit * of_unit + t % of_unit + (t < of_unit ? 0 : half); };

    let_next_begin();
    if (thread == 0) {
        for (u32 s = 0; s < a.stages; s++) {
            barrier_init(full + s * 8, 1), barrier_init(full + (MOST_VISITS + s) * 8, 1);
            barrier_init(empty + s * 8, UNIT_TILES);
        }
        for (u32 b = 0; b < 2; b++) barrier_init(ready + b * 8, 1), barrier_init(read + b * 8, SLICES);
        publish_barriers();
    }
    __syncwarp();
    meet_cluster();

    if (warp < MULTIPLIERS / 32) {
        wait_for_inputs();
        // Eight lanes copy 16 bytes of eight rows each, so that they write to all banks.
        u32 columns_of_8 = blocks * 4;
        for (u32 i = thread; i < columns_of_8 * ROWS; i += MULTIPLIERS) {
            u32 row = i / 32 % (ROWS / 8) * 8 + i % 8, at = i / (4 * ROWS) * 4 + i / 8 % 4;
            if (row < a.rows) copy_async(inputs + (at * ROWS + row) * 16, a.in.halves + (size_t)row * a.in.stride + start * 32 + at * 8);
        }
        commit_copies();
        wait_for_copies<0>();
        publish_to_multiplying();
        meet_some<1, MULTIPLIERS>();

        u32 warpgroup = warp / UNIT_TILES, tile = warp % UNIT_TILES;
        u32 phases = 0;  // of the stages, a bit each
        full += warpgroup * MOST_VISITS * 8;
        for (u32 i = warpgroup; i < mine; i += 2) {
            float c[ROWS / 8][4];
#pragma unroll
            for (int e = 0; e < ROWS / 2; e++) c[e / 4][e % 4] = 0.0f;
            for (u32 visit = 0; visit < visits; visit++) {
                u32 item = i * visits + visit, stage = item % a.stages, count = min((u32)VISIT_BLOCKS, blocks - visit * VISIT_BLOCKS);
                u32 from = ring + stage * VISIT_BYTES + tile * VISIT_BLOCKS * BLOCK_BYTES + lane * 16;
                barrier_wait(full + stage * 8, phases >> stage & 1);
                phases ^= 1u << stage;
                u32 x = inputs + visit * VISIT_BLOCKS * ROWS * 64;
                if (count == VISIT_BLOCKS) {
                    multiply_blocks<VISIT_BLOCKS, ROWS>(c, from, x);
                } else {
                    for (u32 q = 0; q < count; q++) multiply_blocks<1, ROWS>(c, from + q * BLOCK_BYTES, x + q * ROWS * 64);
                }
                __syncwarp();
                if (lane == 0) barrier_arrive(empty + stage * 8);
            }
            u32 b = i % BUFFERS;
            if (i >= BUFFERS) barrier_hear(read + (i - BUFFERS) % 2 * 8, (i - BUFFERS) / 2 & 1);
#pragma unroll
            for (int n = 0; n < ROWS / 8; n++) {
                u32 cell = tile * (ROWS / 8) + n, item = cell % ALL_ITEMS, to = (rank * ITEMS + item % ITEMS) * PARTS + cell / ALL_ITEMS;
                send_cluster(shared_address(sums + b * SUMS + to * 128 + lane * 4), make_float4(c[n][0], c[n][1], c[n][2], c[n][3]),
                             ready + b * 8, item / ITEMS);
            }
        }
    } else if (warp < (MULTIPLIERS + ADDERS) / 32) {
        wait_for_inputs();
        constexpr u32 TURNS = (ITEMS + 3) / 4;
        u32 adder = warp - MULTIPLIERS / 32;
        auto put_sums = [&](u32 unit, u32 turn, const float4 (&total)[PARTS]) {
            u32 item = rank * ITEMS + turn * 4 + adder, tile = item / (ROWS / 8), n = item % (ROWS / 8);
#pragma unroll
            for (int r = 0; r < 4; r++) {
                auto of = [r](const float4 &v) { return r == 0 ? v.x : r == 1 ? v.y : r == 2 ? v.z : v.w; };
                u32 row = n * 8 + lane % 4 * 2 + r % 2, output = tile_of(unit, tile) * 16 + lane / 4 + r / 2 * 8;
                if (GATED) {
                    finish_gated(a, row, output, of(total[0]), of(total[PARTS - 1]));
                } else {
                    finish(a, row, output, of(total[0]));
                }
            }
        };
        auto partial = [&](u32 g, u32 unit, u32 turn) {
            size_t item = ((size_t)g * units + unit) * ALL_ITEMS + rank * ITEMS + turn * 4 + adder;
            return reinterpret_cast<float4 *>(a.partial + item * PARTS * 128) + lane;
        };
        for (u32 i = 0; i < mine; i++) {
            u32 b = i % BUFFERS, unit = column + i * columns;
            if (thread == MULTIPLIERS) barrier_expect(ready + b * 8, SUMS * 4);
            barrier_wait(ready + b * 8, (i / BUFFERS) & 1);
            float4 total[TURNS][PARTS];
#pragma unroll
            for (int turn = 0; turn < TURNS; turn++) {
                if (turn * 4 + adder >= ITEMS) continue;
#pragma unroll
                for (int p = 0; p < PARTS; p++) {
                    const float *from = sums + b * SUMS + ((turn * 4 + adder) * PARTS + p) * 128 + lane * 4;
                    float4 &sum = total[turn][p];
                    sum = *reinterpret_cast<const float4 *>(from);
#pragma unroll
                    for (u32 s = 1; s < SLICES; s++) {
                        float4 v = *reinterpret_cast<const float4 *>(from + s * ITEMS * PARTS * 128);
                        sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
                    }
                }
            }
            meet_some<2, ADDERS>();
            if (thread - MULTIPLIERS < SLICES) barrier_tell(read + i % 2 * 8, thread - MULTIPLIERS);
#pragma unroll
            for (int turn = 0; turn < TURNS; turn++) {
                if (turn * 4 + adder >= ITEMS) continue;
                if (cut.groups == 1) {
                    put_sums(unit, turn, total[turn]);
                } else {
#pragma unroll
                    for (int p = 0; p < PARTS; p++) partial(group, unit, turn)[p * 32] = total[turn][p];
                }
            }
        }
        // The last thread block of a column and an eighth adds the groups' sums, in order.
        if (cut.groups > 1) {
            __threadfence();
            meet_some<2, ADDERS>();
            if (thread == MULTIPLIERS) {
                u32 *arrivals = a.arrivals + column * SLICES + rank;
                *last_one = atomicAdd(arrivals, 1) + 1 == cut.groups;
                if (*last_one) *arrivals = 0;
            }
            meet_some<2, ADDERS>();
            if (*last_one) {
                __threadfence();
                for (u32 unit = column; unit < units; unit += columns) {
#pragma unroll
                    for (int turn = 0; turn < TURNS; turn++) {
                        if (turn * 4 + adder >= ITEMS) continue;
                        float4 total[PARTS];
#pragma unroll
                        for (int p = 0; p < PARTS; p++) {
                            total[p] = __ldcg(partial(0, unit, turn) + p * 32);
                            for (u32 g = 1; g < cut.groups; g++) {
                                float4 v = __ldcg(partial(g, unit, turn) + p * 32);
                                total[p].x += v.x, total[p].y += v.y, total[p].z += v.z, total[p].w += v.w;
                            }
                        }
                        put_sums(unit, turn, total);
                    }
                }
            }
        }
    } else {
        u64 policy = evict_first();
        u32 item = 0, filled = full;
        for (u32 unit = column; unit < units; unit += columns) {
            for (u32 visit = 0; visit < visits; visit++, item++) {
                u32 stage = item % a.stages, count = min((u32)VISIT_BLOCKS, blocks - visit * VISIT_BLOCKS);
                if (item >= a.stages) barrier_wait(empty + stage * 8, (item / a.stages + 1) & 1);
                if (lane == 0) barrier_expect(filled + stage * 8, UNIT_TILES * count * BLOCK_BYTES);
                __syncwarp();
                if (lane < UNIT_TILES) {
                    size_t block = (size_t)min(tile_of(unit, lane), tiles - 1) * cut.blocks + start + visit * VISIT_BLOCKS;
                    u32 to = ring + stage * VISIT_BYTES + lane * VISIT_BLOCKS * BLOCK_BYTES;
                    const u8 *from = a.weight + block * BLOCK_BYTES;
                    // Rows that come in several passes read the weights again.
                    if (a.last_pass) {
                        copy_weights(to, from, count * BLOCK_BYTES, filled + stage * 8, policy);
                    } else {
                        copy_input(to, reinterpret_cast<const u16 *>(from), count * BLOCK_BYTES, filled + stage * 8);
                    }
                }
            }
            filled ^= full ^ (full + MOST_VISITS * 8);
        }
        wait_for_inputs();
    }
    // Nobody leaves while others read from here.
    __syncwarp();
    meet_cluster();
}

#define MIDDLE(ROWS, BUFFERS)                                                                             \
    extern "C" __global__ void __cluster_dims__(SLICES, 1, 1) __launch_bounds__(MULTIPLIERS + ADDERS + 32, 1) \
        project_middle_##ROWS(const __grid_constant__ ProjectArgs a) {                                    \
        middle<ROWS, BUFFERS, false>(a);                                                                  \
    }                                                                                                     \
    extern "C" __global__ void __cluster_dims__(SLICES, 1, 1) __launch_bounds__(MULTIPLIERS + ADDERS + 32, 1) \
        project_middle_gated_##ROWS(const __grid_constant__ ProjectArgs a) {                              \
        middle<ROWS, BUFFERS, true>(a);                                                                   \
    }
MIDDLE(32, 2)
MIDDLE(64, 2)
MIDDLE(128, 1)

#endif
