// Projections and attention in the order of `reference.rs`, by ordinary multiply-adds: the bits are
// those of the CPU backend. Made to be compared with, not to be fast.

#include "device.cuh"

// 32 outputs of 8 rows; a thread adds the products of one output of one row, one after the other.
template <typename W> __device__ void project(const PlainProjectArgs &a) {
    begin();
    __shared__ float weights[32][33], inputs[8][32];
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 output = blockIdx.x * 32 + lane, row = blockIdx.y * 8 + warp;
    const W *weight = static_cast<const W *>(a.weight);
    float sum = 0.0f;
    for (u32 first = 0; first < a.inputs; first += 32) {
        u32 k = first + lane;
        __syncthreads();
        for (u32 n = warp; n < 32; n += 8) {
            u32 from = blockIdx.x * 32 + n;
            bool there = from < a.outputs && k < a.inputs;
            weights[n][lane] = there ? widen(weight[(size_t)from * a.inputs + k]) : 0.0f;
        }
        inputs[warp][lane] = row < a.rows && k < a.inputs ? get(a.in, row, k) : 0.0f;
        __syncthreads();
        u32 count = min(32u, a.inputs - first);
        for (u32 i = 0; i < count; i++) sum = fmaf(inputs[warp][i], weights[lane][i], sum);
    }
    if (row >= a.rows || output >= a.outputs) return;
    if (a.bias) sum += a.bias[output];
    put(a.out, row, output, a.add ? get(a.out, row, output) + sum : sum);
}
extern "C" __global__ void __launch_bounds__(256) project_plain_bf16(PlainProjectArgs a) { project<Bf16>(a); }
extern "C" __global__ void __launch_bounds__(256) project_plain_f32(PlainProjectArgs a) { project<float>(a); }

#define PLAIN_BLOCK 64   // positions of a block, aligned to absolute position
#define PLAIN_WIDTH 512  // width of a head at most

// One thread block of 128 per head and row.
template <typename T> __device__ void attend(const AttendArgs &a) {
    begin();
    __shared__ float query[PLAIN_WIDTH], scores[PLAIN_BLOCK];
    __shared__ u32 slots[PLAIN_BLOCK];
    u32 head = blockIdx.x, row = blockIdx.y, d = a.head_dim;
    if (row >= a.plan.counts[0]) return;
    uint4 span = a.plan.spans[row];
    Seen seen(span, a.window);
    u32 kv_head = head / (a.heads / a.kv_heads);
    u32 thread = threadIdx.x, lane = thread % 32;
    const T *keys = static_cast<const T *>(a.keys), *values = static_cast<const T *>(a.values);
    for (u32 i = thread; i < d; i += 128) query[i] = get(a.qkv, row, head * d + i);
    float largest = 0.0f, total = 0.0f, sums[PLAIN_WIDTH / 128] = {};

    // The first block may begin within a block of absolute positions.
    for (u32 start = seen.first, next; start < seen.end; start = next) {
        next = min(start / PLAIN_BLOCK * PLAIN_BLOCK + PLAIN_BLOCK, seen.end);
        u32 count = next - start;
        bool first_block = start == seen.first;
        __syncthreads();
        if (thread < count) slots[thread] = slot_of(a.plan, span, start + thread, a.slots);
        __syncthreads();
        // Sixteen lanes share a position; both halves of a warp stay together for the shuffles.
        for (u32 first = 0; first < PLAIN_BLOCK; first += 8) {
            u32 i = first + thread / 16;
            const T *key = keys + ((size_t)slots[min(i, count - 1)] * a.kv_heads + kv_head) * d;
            float dot = 0.0f;
            for (u32 e = thread % 16; e < (d + 15) / 16 * 16; e += 16)
                dot = e < d ? fmaf(query[e], widen(key[e]), dot) : fmaf(0.0f, 0.0f, dot);
            dot = fold<16>(dot);
            if (thread % 16 == 0 && i < count) scores[i] = dot * a.scale;
        }
        __syncthreads();
        // Every warp makes the same maximum and the same total for itself.
        float low = lane < count ? scores[lane] : -INFINITY;
        float high = lane + 32 < count ? scores[lane + 32] : -INFINITY;
        float block_largest = fold_max<32>(fmaxf(low, high));
        __syncthreads();
        for (u32 i = thread; i < count; i += 128) scores[i] = exponential(scores[i] - block_largest);
        __syncthreads();
        float lanes = 0.0f;
        for (u32 i = lane % 16; i < (count + 15) / 16 * 16; i += 16) lanes += i < count ? scores[i] : 0.0f;
        float block_total = fold<16>(lanes);

        float both = first_block || block_largest > largest ? block_largest : largest;
        float old = exponential(largest - both), scale = exponential(block_largest - both);
        total = first_block ? block_total : fmaf(total, old, block_total * scale);
        largest = both;
#pragma unroll
        for (int j = 0; j < PLAIN_WIDTH / 128; j++) {
            u32 i = thread + j * 128;
            if (i >= d) break;
            float part = 0.0f;
            for (u32 p = 0; p < count; p++)
                part = fmaf(scores[p], widen(values[((size_t)slots[p] * a.kv_heads + kv_head) * d + i]), part);
            sums[j] = first_block ? part : fmaf(sums[j], old, part * scale);
        }
    }
    float inverse = 1.0f / total;
#pragma unroll
    for (int j = 0; j < PLAIN_WIDTH / 128; j++) {
        u32 i = thread + j * 128;
        if (i < d) put(a.out, row, head * d + i, sums[j] * inverse);
    }
}
extern "C" __global__ void __launch_bounds__(128) attend_plain_bf16(AttendArgs a) { attend<Bf16>(a); }
extern "C" __global__ void __launch_bounds__(128) attend_plain_f32(AttendArgs a) { attend<float>(a); }
