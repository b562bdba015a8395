// Projections of 17 rows to a few hundred, 64 at a time, with the sums of `project_skinny.cu`.
//
// Eight thread blocks, a cluster, are the eight slices of a group. Each keeps its slice of the rows in
// shared memory and multiplies it with the weights of one unit of 128 outputs after the other, which
// bulk copies bring through a ring. Of each unit, every thread block then adds the slices' sums of an
// eighth, in order, from the shared memory of all eight.

#include "tensor.cuh"

#if __CUDA_ARCH__ >= 900

#define UNIT_TILES 8     // tiles of 16 outputs of a unit
#define VISIT_BLOCKS 2   // blocks of 32 inputs of one stage
#define VISIT_BYTES (UNIT_TILES * VISIT_BLOCKS * BLOCK_BYTES)
#define MOST_VISITS 16   // stages at most
#define MULTIPLIERS 256  // threads that multiply; one more warp fetches

__device__ __forceinline__ void meet_multipliers() { meet_some<MULTIPLIERS>(); }

// TOKENS: groups of eight rows of a warp; two warps share the rows, four the outputs. GATED: half of
// a unit is tiles of gates, the other half their tiles of ups.
template <int TOKENS, bool GATED> __device__ void middle(const ProjectArgs &a) {
    constexpr u32 OF_TILE = 2 * TOKENS * 128, SUMS = UNIT_TILES * OF_TILE;
    u8 *shared = dynamic_shared();
    u32 thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    float *sums = reinterpret_cast<float *>(shared + a.stages * VISIT_BYTES);
    u64 *barriers = reinterpret_cast<u64 *>(sums + 2 * SUMS);
    u32 full = shared_address(barriers), empty = full + MOST_VISITS * 8, input_barrier = empty + MOST_VISITS * 8;
    u32 ready = input_barrier + 8, read = ready + 16;
    u32 *last_one = reinterpret_cast<u32 *>(barriers + 2 * MOST_VISITS + 5);
    u8 *inputs = reinterpret_cast<u8 *>(barriers + 2 * MOST_VISITS + 6);

    Cut cut(a.inputs);
    u32 rank = blockIdx.x % SLICES, cluster = blockIdx.x / SLICES;
    u32 group = cluster % cut.groups, column = cluster / cut.groups, columns = gridDim.x / SLICES / cut.groups;
    u32 start = cut.slice(group, rank), blocks = cut.slice(group, rank + 1) - start;
    u32 visits = (blocks + VISIT_BLOCKS - 1) / VISIT_BLOCKS;
    u32 tiles = (a.outputs + 15) / 16, half = tiles / 2;
    u32 units = ((GATED ? half : tiles) + (GATED ? UNIT_TILES / 2 : UNIT_TILES) - 1) / (GATED ? UNIT_TILES / 2 : UNIT_TILES);
    u32 mine = units > column ? (units - column + columns - 1) / columns : 0;
    u32 input_stride = blocks * 64 + 16;
    // The number of a unit's tile; beyond the last it may be too large.
    auto tile_of = [&](u32 unit, u32 t) {
        if (!GATED) return unit * UNIT_TILES + t;
        u32 gate = unit * (UNIT_TILES / 2) + t % (UNIT_TILES / 2);
        return t < UNIT_TILES / 2 ? gate : half + min(gate, half - 1);
    };

    let_next_begin();
    if (thread == 0) {
        for (u32 s = 0; s < a.stages; s++) barrier_init(full + s * 8, 1), barrier_init(empty + s * 8, MULTIPLIERS / 32);
        barrier_init(input_barrier, 1);
        for (u32 b = 0; b < 2; b++) barrier_init(ready + b * 8, SLICES), barrier_init(read + b * 8, SLICES);
        publish_barriers();
    }
    __syncwarp();
    meet_cluster();

    if (warp == MULTIPLIERS / 32) {
        u64 policy = evict_first();
        // Rows that come in several passes read the weights again.
        bool once = a.last_pass;
        u32 all = mine * visits, item = 0, visit = 0, unit = column;
        auto fetch = [&]() {
            u32 stage = item % a.stages, count = min((u32)VISIT_BLOCKS, blocks - visit * VISIT_BLOCKS);
            if (lane == 0) barrier_expect(full + stage * 8, UNIT_TILES * count * BLOCK_BYTES);
            __syncwarp();
            if (lane < UNIT_TILES) {
                size_t block = (size_t)min(tile_of(unit, lane), tiles - 1) * cut.blocks + start + visit * VISIT_BLOCKS;
                u32 to = shared_address(shared) + stage * VISIT_BYTES + lane * VISIT_BLOCKS * BLOCK_BYTES;
                const u8 *from = a.weight + block * BLOCK_BYTES;
                if (once) {
                    copy_weights(to, from, count * BLOCK_BYTES, full + stage * 8, policy);
                } else {
                    copy_input(to, reinterpret_cast<const u16 *>(from), count * BLOCK_BYTES, full + stage * 8);
                }
            }
            item++;
            if (++visit == visits) visit = 0, unit += columns;
        };
        while (item < min(all, a.stages)) fetch();
        wait_for_inputs();
        if (blocks > 0) {
            if (lane == 0) barrier_expect(input_barrier, a.rows * blocks * 64);
            __syncwarp();
            for (u32 row = lane; row < a.rows; row += 32)
                copy_input(shared_address(inputs) + row * input_stride, a.in.halves + (size_t)row * a.in.stride + start * 32,
                           blocks * 64, input_barrier);
        }
        while (item < all) {
            barrier_wait(empty + item % a.stages * 8, (item / a.stages + 1) & 1);
            fetch();
        }
    } else {
        wait_for_inputs();
        if (blocks > 0) barrier_wait(input_barrier, 0);
        u32 warp_n = warp % 4, warp_m = warp / 4, stage = 0, phase = 0;
        u32 input = shared_address(inputs) + (warp_m * TOKENS * 8 + lane % 8) * input_stride + lane / 8 * 16;
        // What this thread adds of a unit: four sums of one tile, or of a tile of gates and one of ups.
        constexpr u32 ADDERS = GATED ? TOKENS * 32 : 2 * TOKENS * 32;
        u32 tile = GATED ? rank % (UNIT_TILES / 2) : rank;
        u32 n = (GATED ? rank / (UNIT_TILES / 2) * TOKENS : 0) + thread / 32;
        u32 element = tile * OF_TILE + n * 128 + lane * 4;

        auto put_sums = [&](u32 unit, float4 first, float4 second) {
#pragma unroll
            for (int r = 0; r < 4; r++) {
                float x = r == 0 ? first.x : r == 1 ? first.y : r == 2 ? first.z : first.w;
                float y = r == 0 ? second.x : r == 1 ? second.y : r == 2 ? second.z : second.w;
                u32 row = n * 8 + lane % 4 * 2 + r % 2, output = tile_of(unit, tile) * 16 + lane / 4 + r / 2 * 8;
                if (GATED) {
                    finish_gated(a, row, output, x, y);
                } else {
                    finish(a, row, output, x);
                }
            }
        };
        auto partial = [&](u32 g, u32 unit) {
            return a.partial + (((size_t)g * units + unit) * SLICES + rank) * OF_TILE + thread * (GATED ? 8 : 4);
        };
        // Adds the slices of unit i of this cluster.
        auto add = [&](u32 i) {
            u32 b = i % 2, unit = column + i * columns;
            barrier_hear(ready + b * 8, (i / 2) & 1);
            float4 total[2];
            if (thread < ADDERS) {
#pragma unroll
                for (int p = 0; p < (GATED ? 2 : 1); p++) {
                    u32 at = shared_address(sums + b * SUMS + element + p * (UNIT_TILES / 2) * OF_TILE);
                    total[p] = load_cluster(of_block(at, 0));
#pragma unroll
                    for (u32 s = 1; s < SLICES; s++) {
                        float4 v = load_cluster(of_block(at, s));
                        total[p].x += v.x, total[p].y += v.y, total[p].z += v.z, total[p].w += v.w;
                    }
                }
            }
            meet_multipliers();
            if (thread < SLICES) barrier_tell(read + b * 8, thread);
            if (thread >= ADDERS) return;
            if (cut.groups == 1) {
                put_sums(unit, total[0], total[GATED]);
            } else {
#pragma unroll
                for (int p = 0; p < (GATED ? 2 : 1); p++) reinterpret_cast<float4 *>(partial(group, unit))[p] = total[p];
            }
        };

        for (u32 i = 0; i < mine; i++) {
            float c[2][TOKENS][4];
#pragma unroll
            for (int e = 0; e < 2 * TOKENS * 4; e++) c[e / (TOKENS * 4)][e / 4 % TOKENS][e % 4] = 0.0f;
#pragma unroll 1
            for (u32 visit = 0; visit < visits; visit++) {
                u32 from = shared_address(shared) + stage * VISIT_BYTES + warp_n * 2 * VISIT_BLOCKS * BLOCK_BYTES + lane * 16;
                u32 x = input + visit * VISIT_BLOCKS * 64, count = min((u32)VISIT_BLOCKS, blocks - visit * VISIT_BLOCKS);
                barrier_wait(full + stage * 8, phase);
#pragma unroll
                for (int q = 0; q < VISIT_BLOCKS; q++) {
                    if (q < count) {
                        uint4 w[2][2];
#pragma unroll
                        for (int t = 0; t < 2; t++) {
                            w[t][0] = load_shared(from + (t * VISIT_BLOCKS + q) * BLOCK_BYTES);
                            w[t][1] = load_shared(from + (t * VISIT_BLOCKS + q) * BLOCK_BYTES + BLOCK_BYTES / 2);
                        }
#pragma unroll
                        for (int m = 0; m < TOKENS; m++) {
                            uint4 b = load_matrices(x + m * 8 * input_stride + q * 64);
#pragma unroll
                            for (int t = 0; t < 2; t++) {
                                multiply(c[t][m], w[t][0], b.x, b.y);
                                multiply(c[t][m], w[t][1], b.z, b.w);
                            }
                        }
                    }
                }
                __syncwarp();
                if (lane == 0) barrier_arrive(empty + stage * 8);
                if (++stage == a.stages) stage = 0, phase ^= 1;
            }
            u32 b = i % 2;
            if (i >= 2) barrier_hear(read + b * 8, (i / 2 + 1) & 1);
#pragma unroll
            for (int t = 0; t < 2; t++) {
#pragma unroll
                for (int m = 0; m < TOKENS; m++)
                    *reinterpret_cast<float4 *>(sums + b * SUMS + (warp_n * 2 + t) * OF_TILE + (warp_m * TOKENS + m) * 128 + lane * 4) =
                        make_float4(c[t][m][0], c[t][m][1], c[t][m][2], c[t][m][3]);
            }
            meet_multipliers();
            if (thread < SLICES) barrier_tell(ready + b * 8, thread);
            // A unit late, so that the others have had time.
            if (i > 0) add(i - 1);
        }
        if (mine > 0) add(mine - 1);

        // The last thread block of a column and an eighth adds the groups' sums, in order.
        if (cut.groups > 1) {
            __threadfence();
            meet_multipliers();
            if (thread == 0) {
                u32 *arrivals = a.arrivals + column * SLICES + rank;
                *last_one = atomicAdd(arrivals, 1) + 1 == cut.groups;
                if (*last_one) *arrivals = 0;
            }
            meet_multipliers();
            if (*last_one && thread < ADDERS) {
                __threadfence();
                for (u32 unit = column; unit < units; unit += columns) {
                    float4 total[2];
#pragma unroll
                    for (int p = 0; p < (GATED ? 2 : 1); p++) {
                        total[p] = __ldcg(reinterpret_cast<const float4 *>(partial(0, unit)) + p);
                        for (u32 g = 1; g < cut.groups; g++) {
                            float4 v = __ldcg(reinterpret_cast<const float4 *>(partial(g, unit)) + p);
                            total[p].x += v.x, total[p].y += v.y, total[p].z += v.z, total[p].w += v.w;
                        }
                    }
                    put_sums(unit, total[0], total[GATED]);
                }
            }
        }
    }
    // Nobody leaves while others read from here.
    __syncwarp();
    meet_cluster();
}

#define MIDDLE(NAME, TOKENS, GATED)                                                                   \
    extern "C" __global__ void __cluster_dims__(SLICES, 1, 1) __launch_bounds__(MULTIPLIERS + 32, 1) \
        NAME(const __grid_constant__ ProjectArgs a) {                                                 \
        middle<TOKENS, GATED>(a);                                                                     \
    }
MIDDLE(project_middle_32, 2, false)
MIDDLE(project_middle_64, 4, false)
MIDDLE(project_middle_gated_32, 2, true)
MIDDLE(project_middle_gated_64, 4, true)

#endif
