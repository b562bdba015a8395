// The tensor cores, and how weights lie in memory for them.
//
// `contract.rs` defines what comes out, bit for bit. A block of weights is 16 outputs by 32 inputs, as
// the first factors of two steps, lane by lane; the second factors of both, of eight rows, are the four
// matrices of 8 by 8 that `load_matrices` reads.

#pragma once

#include "device.cuh"

#define SLICES 8       // slices of a group
#define GROUP 128      // blocks of 32 inputs in a group at most
#define BLOCK_BYTES 1024  // 16 outputs by 32 inputs

__device__ __forceinline__ void multiply(float (&c)[4], const uint4 &a, u32 b0, u32 b1) {
    multiply(c, a.x, a.y, a.z, a.w, b0, b1);
}

// The blocks of 32 inputs are cut into groups, and a group into slices.
struct Cut {
    u32 blocks, groups;
    __device__ __forceinline__ Cut(u32 inputs) {
        blocks = (inputs + 31) / 32;
        groups = max(1u, (blocks + GROUP - 1) / GROUP);
    }
    __device__ __forceinline__ u32 group(u32 g) const { return g * blocks / groups; }
    __device__ __forceinline__ u32 slice(u32 g, u32 s) const {
        u32 first = group(g);
        return first + s * (group(g + 1) - first) / SLICES;
    }
};

// The stages of a sum, in order: up to BLOCKS blocks each, never of two slices.
template <int BLOCKS> struct Stages {
    const Cut &cut;
    u32 group = 0, slice = 0, block = 0, end;
    __device__ __forceinline__ Stages(const Cut &cut) : cut(cut), end(cut.slice(0, 1)) { skip(); }
    __device__ __forceinline__ bool more() const { return group < cut.groups; }
    __device__ __forceinline__ u32 blocks() const { return min((u32)BLOCKS, end - block); }
    __device__ __forceinline__ void next() { block += blocks(), skip(); }
    __device__ __forceinline__ void skip() {
        while (block == end && more()) {
            if (++slice == SLICES) slice = 0, group++;
            if (more()) end = cut.slice(group, slice + 1);
        }
    }
};

// What is done with a finished sum.
__device__ __forceinline__ void finish(const ProjectArgs &a, u32 row, u32 output, float sum) {
    if (row >= a.rows || output >= a.outputs) return;
    float base = a.add ? get(a.out, row, output) : 0.0f;
    if (a.bias) sum += a.bias[output];
    put(a.out, row, output, a.add ? base + sum : sum);
}

__device__ __forceinline__ void finish_gated(const ProjectArgs &a, u32 row, u32 output, float gate, float up) {
    u32 half = a.outputs / 2;
    if (row >= a.rows || output >= half) return;
    if (a.bias) gate += a.bias[output], up += a.bias[half + output];
    put(a.out, row, output, silu(gate) * up);
}

// Writes two neighbouring values of a row in both their forms. The first column is even.
__device__ __forceinline__ void put_pair(const Rows &rows, u32 row, u32 column, float2 pair) {
    size_t at = (size_t)row * rows.stride + column;
    *reinterpret_cast<float2 *>(rows.values + at) = pair;
    if (rows.halves) *reinterpret_cast<u32 *>(rows.halves + at) = halve_pair(pair.x, pair.y);
}

// `silu` of some values, step by step for all, so that none waits for another. The quotient is made as the
// compiler makes it, which is exact where nothing overflows or underflows on the way; a zero gets its sign
// last. Where that could happen, or a value is no number, all are divided one by one.
template <int COUNT> __device__ __forceinline__ void silu_all(float (&x)[COUNT]) {
    float divisor[COUNT];
    bool exact = true;
#pragma unroll
    for (int e = 0; e < COUNT; e++) {
        divisor[e] = 1.0f + exponential(-x[e]);
        exact = exact && x[e] > -86.0f && x[e] <= LARGEST;
    }
    if (exact) {
#pragma unroll
        for (int e = 0; e < COUNT; e++) {
            float r = reciprocal(divisor[e]);
            r = fmaf(r, fmaf(-divisor[e], r, 1.0f), r);
            float quotient = x[e] * r;
            quotient = fmaf(r, fmaf(-divisor[e], quotient, x[e]), quotient);
            x[e] = copysignf(quotient, x[e]);
        }
    } else {
#pragma unroll
        for (int e = 0; e < COUNT; e++) x[e] = x[e] / divisor[e];
    }
}

// What is done with a warp's sums of 16 outputs, from `first_output` on, of ROWS rows, from `first_row` on:
// `sum` answers what a lane has of them as `multiply` leaves it, `up` the same of the ups of gates. All lanes
// are here.
template <int ROWS, bool GATED, typename F, typename G>
__device__ __forceinline__ void finish_tile(const ProjectArgs &a, u32 first_row, u32 first_output, F sum, G up) {
    constexpr int CELLS = ROWS / 8;
    // Gates are whole tiles.
    u32 lane = threadIdx.x % 32, outputs = GATED ? a.outputs / 2 : a.outputs;
    if (first_output >= outputs) return;
    // Lanes four apart have neighbouring outputs of the same two rows. They exchange values, so that each
    // writes both outputs of one row.
    bool second = lane / 4 % 2;
    u32 row = first_row + lane % 4 * 2 + second, column = first_output + lane / 8 * 2;
    // The bias of the outputs that the lane has sums of. Adding -0 changes nothing.
    float bias[2], up_bias[2];
#pragma unroll
    for (int u = 0; u < 2; u++) {
        u32 output = first_output + u * 8 + lane / 4;
        bool biased = a.bias && output < outputs;
        bias[u] = biased ? a.bias[output] : -0.0f;
        up_bias[u] = GATED && biased ? a.bias[outputs + output] : -0.0f;
    }
    // What they are added to: all of it is read first, as the compiler lets no load pass a store that may be
    // of the same memory.
    constexpr int BASES = GATED ? 1 : CELLS;
    float2 bases[BASES][2];
#pragma unroll
    for (int i = 0; i < BASES; i++) {
#pragma unroll
        for (int u = 0; u < 2; u++) {
            float2 &base = bases[i][u] = make_float2(-0.0f, -0.0f);
            if (GATED || !a.add || row + i * 8 >= a.rows || column + u * 8 >= outputs) continue;
            // Rows are even, so that there is a second one.
            base = *reinterpret_cast<const float2 *>(a.out.values + (size_t)(row + i * 8) * a.out.stride + column + u * 8);
        }
    }
#pragma unroll
    for (int i = 0; i < CELLS; i++) {
        float x[4];
#pragma unroll
        for (int e = 0; e < 4; e++) x[e] = sum(i * 4 + e) + bias[e / 2];
        if constexpr (GATED) {
            silu_all(x);
#pragma unroll
            for (int e = 0; e < 4; e++) x[e] *= up(i * 4 + e) + up_bias[e / 2];
        }
#pragma unroll
        for (int u = 0; u < 2; u++) {
            float own = second ? x[2 * u + 1] : x[2 * u];
            float other = __shfl_xor_sync(FULL, second ? x[2 * u] : x[2 * u + 1], 4);
            float2 pair = second ? make_float2(other, own) : make_float2(own, other);
            if constexpr (!GATED) pair.x = bases[i][u].x + pair.x, pair.y = bases[i][u].y + pair.y;
            if (row + i * 8 >= a.rows) continue;
            if (GATED || column + u * 8 + 1 < outputs) {
                put_pair(a.out, row + i * 8, column + u * 8, pair);
            } else if (column + u * 8 < outputs) {
                put(a.out, row + i * 8, column + u * 8, pair.x);
            }
        }
    }
}

#if __CUDA_ARCH__ >= 900

// What a warp of four copies to shared memory of some rows: eight lanes 16 bytes of eight rows each, so
// that they write to all banks. Of each 8 inputs there is a column of ROWS rows. Rows beyond the last
// repeat it, and are not used.
template <int ROWS> struct RowCopies {
    const u16 *from[ROWS / 32];
    u32 to;
    __device__ __forceinline__ RowCopies(const Rows &in, u32 first, u32 rows, u32 warp, u32 lane) {
#pragma unroll
        for (int j = 0; j < ROWS / 32; j++) from[j] = in.halves + (size_t)min(first + row(j, warp, lane), rows - 1) * in.stride + lane / 8 * 8;
        to = (lane / 8 * ROWS + row(0, warp, lane)) * 16;
    }
    static __device__ __forceinline__ u32 row(u32 j, u32 warp, u32 lane) { return (warp + 4 * j) * 8 + lane % 8; }
    // Copies a block of 32 inputs, which begins at `input`.
    __device__ __forceinline__ void copy(u32 shared, u32 input) const {
#pragma unroll
        for (int j = 0; j < ROWS / 32; j++) copy_async(shared + to + j * 32 * 16, from[j] + input);
    }
};

// Adds the products of some blocks of one tile of weights a warp, which lie at `from`, and of the rows at
// `x`. Both were read when this returns; a barrier that is told before may be ahead of the loads.
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

// The same with rows that lie swizzled, 128 bytes a row.
template <int BLOCKS, int ROWS> __device__ __forceinline__ void multiply_swizzled(float (&c)[ROWS / 8][4], u32 from, u32 x) {
    uint4 w[2 * BLOCKS];
#pragma unroll
    for (int s = 0; s < 2 * BLOCKS; s++) w[s] = load_shared(from + s * BLOCK_BYTES / 2);
    begin_multiplying();
#pragma unroll
    for (int s = 0; s < 2 * BLOCKS; s++) multiply_group<ROWS>(c, w[s], swizzled_at(x + s * 32), true);
    commit_multiplying();
    wait_for_multiplying<0>(c);
}

#endif
