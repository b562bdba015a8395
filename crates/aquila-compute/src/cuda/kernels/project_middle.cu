// Projections of 17 rows to a few hundred, up to 128 at a time, with the sums of `project_skinny.cu`.
//
// Eight thread blocks, a cluster, are the eight slices of a group. Each keeps its slice of the rows in
// shared memory and multiplies it with the weights of one unit of 64 outputs after the other, which
// bulk copies bring through a ring. Two warpgroups take turns with units. Each sends every thread block
// of the cluster the sums of an eighth of the unit, of which four more warps there add the slices, in
// order, while the next units are multiplied.

#include "tensor.cuh"

#if __CUDA_ARCH__ >= 900

#define UNIT_TILES 4     // tiles of 16 outputs of a unit: one for each warp of a warpgroup
#define MOST_VISITS 8    // stages at most, and visits of a slice
#define MULTIPLIERS 256  // threads of the two warpgroups
#define ADDERS 128       // threads that add, behind them; one more warp fetches
#define MIDDLE_THREADS (MULTIPLIERS + ADDERS + 32)
#define SLICE_STEPS (2 * GROUP / SLICES)  // steps of 16 inputs of a slice at most

// Waits until at most so many groups of copies of this thread are under way.
__device__ __forceinline__ void wait_for_copies_but(u32 left) {
    switch (left) {
    case 0: return wait_for_copies<0>();
    case 1: return wait_for_copies<1>();
    case 2: return wait_for_copies<2>();
    case 3: return wait_for_copies<3>();
    case 4: return wait_for_copies<4>();
    case 5: return wait_for_copies<5>();
    case 6: return wait_for_copies<6>();
    default: return wait_for_copies<7>();
    }
}

// ROWS: at a time. VISIT_BLOCKS: blocks of 32 inputs of one stage. BUFFERS: of a unit's sums. GATED: two
// tiles of a unit are gates, the others their ups.
template <int ROWS, int VISIT_BLOCKS, int BUFFERS, bool GATED> __device__ void middle(const ProjectArgs &a) {
    constexpr u32 TILE_BYTES = VISIT_BLOCKS * BLOCK_BYTES, VISIT_BYTES = UNIT_TILES * TILE_BYTES;
    // A cell is 16 outputs by 8 rows; an item a cell, or one of gates and one of ups.
    constexpr u32 CELLS = UNIT_TILES * ROWS / 8, PARTS = GATED ? 2 : 1, ALL_ITEMS = CELLS / PARTS, ITEMS = ALL_ITEMS / SLICES;
    constexpr u32 SUMS = CELLS * 128;  // that a thread block gets of a unit: of each slice those of its items
    static_assert(BUFFERS % 2 == 0, "a buffer belongs to one of the warpgroups");
    u8 *shared = dynamic_shared();
    // By a shuffle, so that the compiler sees that all lanes of a warp have the same number.
    u32 thread = threadIdx.x, warp = __shfl_sync(FULL, thread / 32, 0), lane = thread % 32;
    u32 inputs = shared_address(shared);  // of each 8 inputs a column of rows, 16 bytes a row
    u32 ring = inputs + SLICE_STEPS * ROWS * 32;
    float *sums = reinterpret_cast<float *>(shared + SLICE_STEPS * ROWS * 32 + a.stages * VISIT_BYTES);
    u64 *barriers = reinterpret_cast<u64 *>(sums + BUFFERS * SUMS);
    // A stage is full for one of the warpgroups, each of which has barriers of its own: one that saw only
    // some of the phases of a barrier could not tell them apart.
    u32 full = shared_address(barriers), empty = full + 2 * MOST_VISITS * 8, there = empty + MOST_VISITS * 8;
    u32 ready = there + MOST_VISITS * 8, read = ready + BUFFERS * 8;
    u32 *last_one = reinterpret_cast<u32 *>(barriers + 4 * MOST_VISITS + 2 * BUFFERS);

    Cut cut(a.inputs);
    u32 rank = blockIdx.x % SLICES, cluster = blockIdx.x / SLICES;
    u32 group = cluster % cut.groups, column = cluster / cut.groups, columns = gridDim.x / SLICES / cut.groups;
    u32 start = cut.slice(group, rank), blocks = cut.slice(group, rank + 1) - start;
    u32 visits = (blocks + VISIT_BLOCKS - 1) / VISIT_BLOCKS;
    u32 tiles = (a.outputs + 15) / 16, half = tiles / 2;
    u32 of_unit = GATED ? UNIT_TILES / 2 : UNIT_TILES, units = ((GATED ? half : tiles) + of_unit - 1) / of_unit;
    u32 mine = units > column ? (units - column + columns - 1) / columns : 0;
    auto blocks_of = [&](u32 visit) { return min((u32)VISIT_BLOCKS, blocks - visit * VISIT_BLOCKS); };
    // The number of a unit's tile; beyond the last it may be too large.
    auto tile_of = [&](u32 unit, u32 t) { return unit * of_unit + t % of_unit + (t < of_unit ? 0 : half); };
    // Where the sums of one group, unit and item of this thread block wait for other groups'.
    auto partial = [&](u32 g, u32 unit, u32 item) {
        return reinterpret_cast<float4 *>(a.partial + (((size_t)g * units + unit) * ALL_ITEMS + rank * ITEMS + item) * PARTS * 128) + lane;
    };
    auto put_sums = [&](u32 unit, u32 item, const float4 (&total)[PARTS]) {
        u32 cell = rank * ITEMS + item, tile = cell / (ROWS / 8), n = cell % (ROWS / 8);
        const float sums[4] = {total[0].x, total[0].y, total[0].z, total[0].w};
        const float ups[4] = {total[PARTS - 1].x, total[PARTS - 1].y, total[PARTS - 1].z, total[PARTS - 1].w};
        finish_tile<8, GATED>(a, n * 8, tile_of(unit, tile) * 16, [&](int e) { return sums[e]; }, [&](int e) { return ups[e]; });
    };
    auto add = [](float4 &sum, const float4 &v) { sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w; };

    let_next_begin();
    if (thread == 0) {
        for (u32 s = 0; s < a.stages; s++) {
            barrier_init(full + s * 8, 1), barrier_init(full + (MOST_VISITS + s) * 8, 1);
            barrier_init(empty + s * 8, UNIT_TILES);
        }
        for (u32 visit = 0; visit < visits; visit++) barrier_init(there + visit * 8, ADDERS / 32);
        for (u32 b = 0; b < BUFFERS; b++) barrier_init(ready + b * 8, 1), barrier_init(read + b * 8, SLICES);
        publish_barriers();
    }
    __syncwarp();
    meet_cluster();

    if (warp < MULTIPLIERS / 32) {
        wait_for_inputs();
        u32 warpgroup = warp / UNIT_TILES, tile = warp % UNIT_TILES;
        u32 phases = 0;  // of the stages, a bit each
        full += warpgroup * MOST_VISITS * 8;
        for (u32 i = warpgroup; i < mine; i += 2) {
            float c[ROWS / 8][4];
#pragma unroll
            for (int e = 0; e < ROWS / 2; e++) c[e / 4][e % 4] = 0.0f;
            for (u32 visit = 0; visit < visits; visit++) {
                u32 stage = (i * visits + visit) % a.stages, count = blocks_of(visit);
                u32 from = ring + stage * VISIT_BYTES + tile * TILE_BYTES + lane * 16, x = inputs + visit * VISIT_BLOCKS * ROWS * 64;
                if (i == warpgroup) barrier_wait(there + visit * 8, 0);
                barrier_wait(full + stage * 8, phases >> stage & 1);
                phases ^= 1u << stage;
                if (count == VISIT_BLOCKS) {
                    multiply_blocks<VISIT_BLOCKS, ROWS>(c, from, x);
                } else {
                    for (u32 q = 0; q < count; q++) multiply_blocks<1, ROWS>(c, from + q * BLOCK_BYTES, x + q * ROWS * 64);
                }
                __syncwarp();
                if (lane == 0) barrier_arrive(empty + stage * 8);
            }
            u32 b = i % BUFFERS;
            if (i >= BUFFERS) barrier_hear(read + b * 8, (i / BUFFERS + 1) & 1);
#pragma unroll
            for (int n = 0; n < ROWS / 8; n++) {
                u32 cell = tile * (ROWS / 8) + n, item = cell % ALL_ITEMS, to = (rank * ITEMS + item % ITEMS) * PARTS + cell / ALL_ITEMS;
                send_cluster(shared_address(sums + b * SUMS + to * 128 + lane * 4), make_float4(c[n][0], c[n][1], c[n][2], c[n][3]),
                             ready + b * 8, item / ITEMS);
            }
        }
    } else if (warp < (MULTIPLIERS + ADDERS) / 32) {
        wait_for_inputs();
        u32 adder = warp - MULTIPLIERS / 32;
        RowCopies<ROWS> copies(a.in, 0, a.rows, adder, lane);
        for (u32 visit = 0, block = 0; visit < visits; visit++) {
            for (u32 end = block + blocks_of(visit); block < end; block++) copies.copy(inputs + block * ROWS * 64, (start + block) * 32);
            commit_copies();
        }
        for (u32 visit = 0; visit < visits; visit++) {
            wait_for_copies_but(visits - 1 - visit);
            publish_to_multiplying();
            __syncwarp();
            if (lane == 0) barrier_arrive(there + visit * 8);
        }
        constexpr u32 TURNS = (ITEMS + 3) / 4;
        for (u32 i = 0; i < mine; i++) {
            u32 b = i % BUFFERS, unit = column + i * columns;
            if (thread == MULTIPLIERS) barrier_expect(ready + b * 8, SUMS * 4);
            barrier_wait(ready + b * 8, i / BUFFERS & 1);
            float4 total[TURNS][PARTS];
#pragma unroll
            for (int turn = 0; turn < TURNS; turn++) {
                if (turn * 4 + adder >= ITEMS) continue;
#pragma unroll
                for (int p = 0; p < PARTS; p++) {
                    const float *from = sums + b * SUMS + ((turn * 4 + adder) * PARTS + p) * 128 + lane * 4;
                    total[turn][p] = *reinterpret_cast<const float4 *>(from);
#pragma unroll
                    for (u32 s = 1; s < SLICES; s++)
                        add(total[turn][p], *reinterpret_cast<const float4 *>(from + s * ITEMS * PARTS * 128));
                }
            }
            meet_some<1, ADDERS>();
            if (thread - MULTIPLIERS < SLICES) barrier_tell(read + b * 8, thread - MULTIPLIERS);
#pragma unroll
            for (int turn = 0; turn < TURNS; turn++) {
                u32 item = turn * 4 + adder;
                if (item >= ITEMS) continue;
                if (cut.groups == 1) {
                    put_sums(unit, item, total[turn]);
                } else {
#pragma unroll
                    for (int p = 0; p < PARTS; p++) partial(group, unit, item)[p * 32] = total[turn][p];
                }
            }
        }
        if (cut.groups > 1) {
            __threadfence();
            meet_some<1, ADDERS>();
            if (thread == MULTIPLIERS) {
                u32 *arrivals = a.arrivals + column * SLICES + rank;
                *last_one = atomicAdd(arrivals, 1) + 1 == cut.groups;
                if (*last_one) *arrivals = 0;
            }
        }
    } else {
        u64 policy = evict_first();
        u32 item = 0, filled = full;
        for (u32 unit = column; unit < units; unit += columns) {
            for (u32 visit = 0; visit < visits; visit++, item++) {
                u32 stage = item % a.stages, bytes = blocks_of(visit) * BLOCK_BYTES;
                if (item >= a.stages) barrier_wait(empty + stage * 8, (item / a.stages + 1) & 1);
                if (lane == 0) barrier_expect(filled + stage * 8, UNIT_TILES * bytes);
                __syncwarp();
                if (lane < UNIT_TILES) {
                    size_t block = (size_t)min(tile_of(unit, lane), tiles - 1) * cut.blocks + start + visit * VISIT_BLOCKS;
                    u32 to = ring + stage * VISIT_BYTES + lane * TILE_BYTES;
                    const u8 *from = a.weight + block * BLOCK_BYTES;
                    // Rows that come in several passes read the weights again.
                    if (a.last_pass) {
                        copy_weights(to, from, bytes, filled + stage * 8, policy);
                    } else {
                        copy_input(to, reinterpret_cast<const u16 *>(from), bytes, filled + stage * 8);
                    }
                }
            }
            filled ^= full ^ (full + MOST_VISITS * 8);
        }
        wait_for_inputs();
    }
    // No thread block ends while others send to its shared memory.
    __syncwarp();
    meet_cluster();
    if (cut.groups == 1 || !*last_one) return;
    // The last thread block of a column and an eighth adds the groups' sums, in order.
    __threadfence();
    for (u32 at = warp; at < mine * ITEMS; at += MIDDLE_THREADS / 32) {
        u32 unit = column + at / ITEMS * columns, item = at % ITEMS;
        float4 total[PARTS];
#pragma unroll
        for (int p = 0; p < PARTS; p++) {
            total[p] = __ldcg(partial(0, unit, item) + p * 32);
#pragma unroll 4
            for (u32 g = 1; g < cut.groups; g++) add(total[p], __ldcg(partial(g, unit, item) + p * 32));
        }
        put_sums(unit, item, total);
    }
}

#define MIDDLE(ROWS, VISIT_BLOCKS, BUFFERS)                                                                             \
    extern "C" __global__ void __cluster_dims__(SLICES, 1, 1) __launch_bounds__(MIDDLE_THREADS, 1)                      \
        project_middle_##ROWS(const __grid_constant__ ProjectArgs a) {                                                  \
        middle<ROWS, VISIT_BLOCKS, BUFFERS, false>(a);                                                                  \
    }                                                                                                                   \
    extern "C" __global__ void __cluster_dims__(SLICES, 1, 1) __launch_bounds__(MIDDLE_THREADS, 1)                      \
        project_middle_gated_##ROWS(const __grid_constant__ ProjectArgs a) {                                            \
        middle<ROWS, VISIT_BLOCKS, BUFFERS, true>(a);                                                                   \
    }
MIDDLE(32, 4, 4)
MIDDLE(64, 4, 4)
MIDDLE(128, 2, 2)

#endif
