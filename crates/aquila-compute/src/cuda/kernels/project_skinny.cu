// Projections of 1 to 16 rows, at the speed of the memory.
//
// One thread block per multiprocessor. Its eight warps are the eight slices of a group; each has a
// ring of its own in shared memory, which bulk copies fill with weights before the input is there.
// The input's rows lie in shared memory too: copied, or normed by every thread block for itself, which
// for few rows takes less time than to wait for one more kernel. The slices' sums are added in order,
// then the groups'.

#include "tensor.cuh"

#if __CUDA_ARCH__ >= 900

#define STAGE_BLOCKS 4
#define STAGE_BYTES (STAGE_BLOCKS * BLOCK_BYTES)
#define MOST_STAGES 8
#define GROUP_LANES (GROUP * 32 / NORM_LANES)  // values of a thread in a row of one group
#define NORMED_ROWS 4                          // that are normed at a time

// Writes the normed rows, rounded, to shared memory: `rms_norm` of rows that are one group. `weight`
// has this thread's weights, and `lanes` is room for NORM_LANES sums of each row.
__device__ __forceinline__ void norm_inputs(const ProjectArgs &a, const float (&weight)[GROUP_LANES], float *lanes, u8 *inputs, u32 input_stride) {
    u32 thread = threadIdx.x, width = (a.inputs + 31) / 32 * 32;
    for (u32 first = 0; first < a.rows; first += NORMED_ROWS) {
        float x[NORMED_ROWS][GROUP_LANES];
#pragma unroll
        for (int r = 0; r < NORMED_ROWS; r++)
            if (first + r < a.rows) load_lane(x[r], a.in.values + (size_t)(first + r) * a.in.stride, a.inputs);
#pragma unroll
        for (int r = 0; r < NORMED_ROWS; r++) {
            if (first + r >= a.rows) break;
            float sum = 0.0f;
            add_squares(x[r], sum);
            lanes[r * NORM_LANES + thread] = sum;
        }
        __syncthreads();
#pragma unroll
        for (int r = 0; r < NORMED_ROWS; r++) {
            if (first + r >= a.rows) break;
            float scale = norm_scale(fold_lanes(lanes + r * NORM_LANES), a.inputs, a.epsilon);
            u16 *out = reinterpret_cast<u16 *>(inputs + (first + r) * input_stride);
#pragma unroll
            for (int e = 0; e < GROUP_LANES; e++) {
                u32 i = e * NORM_LANES + thread;
                if (i < width) out[i] = halve((x[r][e] * scale) * weight[e]);
            }
        }
        __syncthreads();
    }
}

// TOKENS: groups of eight rows. GATED: a unit of work is a tile of gates and its tile of ups.
template <int TOKENS, bool GATED> __device__ void skinny(const ProjectArgs &a) {
    constexpr int TILES = GATED ? 2 : 1;
    constexpr u32 SUMS = TILES * TOKENS * 128;  // of one warp
    u8 *shared = dynamic_shared();
    u32 thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    u32 ring_bytes = a.stages * STAGE_BYTES;
    u8 *rings = shared;
    float *sums = reinterpret_cast<float *>(shared + SLICES * ring_bytes);
    u64 *barriers = reinterpret_cast<u64 *>(sums + 2 * SLICES * SUMS);
    u64 *input_barrier = barriers + SLICES * MOST_STAGES;
    u32 *last_one = reinterpret_cast<u32 *>(input_barrier + 1);
    u8 *inputs = reinterpret_cast<u8 *>(input_barrier + 2);

    Cut cut(a.inputs);
    u32 group = blockIdx.x % cut.groups, column = blockIdx.x / cut.groups, columns = gridDim.x / cut.groups;
    u32 group_start = cut.group(group), group_blocks = cut.group(group + 1) - group_start;
    u32 start = cut.slice(group, warp), blocks = cut.slice(group, warp + 1) - start;
    u32 visits = (blocks + STAGE_BLOCKS - 1) / STAGE_BLOCKS, last_blocks = blocks - (visits - 1) * STAGE_BLOCKS;
    u32 tiles = (a.outputs + 15) / 16, units = tiles / TILES;
    u32 mine = units > column ? (units - column + columns - 1) / columns : 0;

    // What lane 0 fetches next: the visit, the tile of its unit, and the unit.
    u32 ring = shared_address(rings) + warp * ring_bytes, barrier = shared_address(barriers + warp * MOST_STAGES);
    u64 policy = evict_first();
    u32 fetch_visit = 0, fetch_tile = 0, fetch_unit = column, left = visits * TILES * mine;
    auto fetch = [&](u32 stage) {
        u32 bytes = (fetch_visit + 1 == visits ? last_blocks : STAGE_BLOCKS) * BLOCK_BYTES;
        size_t block = (size_t)(fetch_unit + fetch_tile * units) * cut.blocks + start + fetch_visit * STAGE_BLOCKS;
        barrier_expect(barrier + stage * 8, bytes);
        copy_weights(ring + stage * STAGE_BYTES, a.weight + block * BLOCK_BYTES, bytes, barrier + stage * 8, policy);
        left--;
        if (++fetch_visit < visits) return;
        fetch_visit = 0;
        if (++fetch_tile < TILES) return;
        fetch_tile = 0, fetch_unit += columns;
    };

    let_next_begin();
    if (lane == 0) {
        for (u32 s = 0; s < a.stages; s++) barrier_init(barrier + s * 8, 1);
        if (warp == 0) barrier_init(shared_address(input_barrier), 1);
        publish_barriers();
        for (u32 s = 0; s < a.stages && left > 0; s++) fetch(s);
    }
    // The host lets rows be normed here where they are few and one group.
    bool normed = TOKENS == 1 && a.norm;
    float norm[GROUP_LANES];
    if (normed) load_lane(norm, a.norm, a.inputs);
    wait_for_inputs();

    // Rows are 16 bytes more apart than they need, so that eight of them are in all banks.
    u32 input_stride = group_blocks * 64 + 16;
    __syncthreads();
    if (normed) {
        norm_inputs(a, norm, sums, inputs, input_stride);
    } else {
        if (warp == 0) {
            if (lane == 0) barrier_expect(shared_address(input_barrier), a.rows * group_blocks * 64);
            __syncwarp();
            for (u32 row = lane; row < a.rows && group_blocks > 0; row += 32)
                copy_input(shared_address(inputs) + row * input_stride,
                           a.in.halves + (size_t)row * a.in.stride + group_start * 32, group_blocks * 64,
                           shared_address(input_barrier));
        }
        barrier_wait(shared_address(input_barrier), 0);
    }

    // Which row of which matrix this lane says; rows that are missing repeat the last, and are not used.
    u32 input[TOKENS];
#pragma unroll
    for (int n = 0; n < TOKENS; n++)
        input[n] = shared_address(inputs) + min(n * 8 + lane % 8, a.rows - 1) * input_stride + lane / 8 * 16 + (start - group_start) * 64;
    u32 stage = 0, phase = 0, buffer = 0;
    for (u32 i = 0; i < mine; i++) {
        float *unit_sums = sums + buffer * SLICES * SUMS;
#pragma unroll 1
        for (int tile = 0; tile < TILES; tile++) {
            float c[TOKENS][4];
#pragma unroll
            for (int n = 0; n < TOKENS; n++) c[n][0] = c[n][1] = c[n][2] = c[n][3] = 0.0f;
#pragma unroll 1
            for (u32 visit = 0; visit < visits; visit++) {
                u32 from = ring + stage * STAGE_BYTES + lane * 16, x = visit * STAGE_BLOCKS * 64;
                u32 count = visit + 1 == visits ? last_blocks : STAGE_BLOCKS;
                barrier_wait(barrier + stage * 8, phase);
                uint4 w[STAGE_BLOCKS][2];
#pragma unroll
                for (int q = 0; q < STAGE_BLOCKS; q++) {
                    if (q < count) {
                        w[q][0] = load_shared(from + q * BLOCK_BYTES);
                        w[q][1] = load_shared(from + q * BLOCK_BYTES + BLOCK_BYTES / 2);
                    }
                }
#pragma unroll
                for (int q = 0; q < STAGE_BLOCKS; q++) {
                    if (q < count) {
#pragma unroll
                        for (int n = 0; n < TOKENS; n++) {
                            uint4 b = load_matrices(input[n] + x + q * 64);
                            multiply(c[n], w[q][0], b.x, b.y);
                            multiply(c[n], w[q][1], b.z, b.w);
                        }
                    }
                }
                // Behind the multiplications, which wait for the loads: what fills the stage again does not.
                __syncwarp();
                if (lane == 0 && left > 0) fetch(stage);
                if (++stage == a.stages) stage = 0, phase ^= 1;
            }
#pragma unroll
            for (int n = 0; n < TOKENS; n++)
                *reinterpret_cast<float4 *>(unit_sums + warp * SUMS + (tile * TOKENS + n) * 128 + lane * 4) =
                    make_float4(c[n][0], c[n][1], c[n][2], c[n][3]);
        }
        __syncthreads();
        u32 unit = column + i * columns;
        for (u32 e = thread; e < TOKENS * 128; e += SLICES * 32) {
            float total[TILES];
#pragma unroll
            for (int tile = 0; tile < TILES; tile++) {
                const float *from = unit_sums + tile * TOKENS * 128 + e;
                total[tile] = from[0];
#pragma unroll
                for (int s = 1; s < SLICES; s++) total[tile] += from[s * SUMS];
            }
            u32 row = e / 128 * 8 + e / 4 % 4 * 2 + e % 2, output = unit * 16 + e / 16 % 8 + e / 2 % 2 * 8;
            if (cut.groups > 1) {
#pragma unroll
                for (int tile = 0; tile < TILES; tile++)
                    a.partial[((size_t)group * tiles + unit + tile * units) * TOKENS * 128 + e] = total[tile];
            } else if (GATED) {
                finish_gated(a, row, output, total[0], total[TILES - 1]);
            } else {
                finish(a, row, output, total[0]);
            }
        }
        buffer ^= 1;
    }
    if (cut.groups == 1) return;

    // The last thread block of a column adds the groups' sums, in order.
    __threadfence();
    __syncthreads();
    if (thread == 0) {
        u32 before = atomicAdd(a.arrivals + column, 1);
        *last_one = before + 1 == cut.groups;
        if (*last_one) a.arrivals[column] = 0;
    }
    __syncthreads();
    if (!*last_one) return;
    __threadfence();
    for (u32 item = thread; item < mine * TOKENS * 128; item += SLICES * 32) {
        u32 e = item % (TOKENS * 128), unit = column + item / (TOKENS * 128) * columns;
        float total[TILES];
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            const float *from = a.partial + (size_t)(unit + tile * units) * TOKENS * 128 + e;
            total[tile] = __ldcg(from);
            for (u32 g = 1; g < cut.groups; g++) total[tile] += __ldcg(from + (size_t)g * tiles * TOKENS * 128);
        }
        u32 row = e / 128 * 8 + e / 4 % 4 * 2 + e % 2, output = unit * 16 + e / 16 % 8 + e / 2 % 2 * 8;
        if (GATED) {
            finish_gated(a, row, output, total[0], total[TILES - 1]);
        } else {
            finish(a, row, output, total[0]);
        }
    }
}

#define SKINNY(NAME, TOKENS, GATED) \
    extern "C" __global__ void __launch_bounds__(256, 1) NAME(const __grid_constant__ ProjectArgs a) { skinny<TOKENS, GATED>(a); }
SKINNY(project_skinny_8, 1, false)
SKINNY(project_skinny_16, 2, false)
SKINNY(project_skinny_gated_8, 1, true)
SKINNY(project_skinny_gated_16, 2, true)

#endif
