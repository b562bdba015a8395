// What all kernels use: bfloat16, our own exp, sums in a fixed order.
//
// Compiled without contraction of multiplications and additions: where a result is rounded once,
// `fmaf` says so.

#pragma once

#include "arguments.cuh"
#include <ptx.cuh>

#define FULL 0xffffffffu
#define LARGEST 3.402823466e+38f

// Every kernel begins with this, or with its two halves.
__device__ __forceinline__ void begin() {
    let_next_begin();
    wait_for_inputs();
}

struct Bf16 {
    u16 bits;
};

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(Bf16 x) { return __uint_as_float((u32)x.bits << 16); }

__device__ __forceinline__ void narrow(float x, float *out) { *out = x; }
__device__ __forceinline__ void narrow(float x, Bf16 *out) { out->bits = halve(x); }

// Writes one value of a row in both its forms.
__device__ __forceinline__ void put(const Rows &rows, u32 row, u32 column, float x) {
    size_t at = (size_t)row * rows.stride + column;
    rows.values[at] = x;
    if (rows.halves) rows.halves[at] = halve(x);
}

__device__ __forceinline__ float get(const Rows &rows, u32 row, u32 column) {
    return rows.values[(size_t)row * rows.stride + column];
}

// `exp_parts` of `math.rs`, operation for operation: e^r - 1, and the power of two.
__device__ __forceinline__ float exponential_parts(float x, float &power) {
    const float round = 12582912.0f;
    float n = (x * 1.44269504088896340736f + round) - round;
    float r = fmaf(n, -0.6933594f, x);
    r = fmaf(n, 2.1219444e-4f, r);
    float p = 1.984127e-4f;
    p = fmaf(p, r, 1.3888889e-3f);
    p = fmaf(p, r, 8.333334e-3f);
    p = fmaf(p, r, 4.1666668e-2f);
    p = fmaf(p, r, 1.6666667e-1f);
    p = fmaf(p, r, 0.5f);
    power = __uint_as_float((u32)((int)n + 127) << 23);
    return fmaf(p, r * r, r);
}

// `exp`, `tanh`, `silu` and `gelu_tanh` of `math.rs`.
__device__ __forceinline__ float exponential(float x) {
    float power, p = exponential_parts(x > 88.0f ? 88.0f : x, power);
    return x < -87.0f ? 0.0f : (p + 1.0f) * power;
}
__device__ __forceinline__ float tangent(float x) {
    float y = 2.0f * x;
    y = y > 88.0f ? 88.0f : y;
    float power, p = exponential_parts(y < -87.0f ? -87.0f : y, power);
    float e = fmaf(p, power, power - 1.0f);
    return e / (e + 2.0f);
}
__device__ __forceinline__ float silu(float x) { return x / (1.0f + exponential(-x)); }
__device__ __forceinline__ float gelu(float x) {
    return x / (1.0f + exponential(x * fmaf(x * x, -0.071354814f, -1.5957691f)));
}

// Adds up the first LANES lanes of a warp, the upper half onto the lower until one is left; all of
// them get the sum.
template <int LANES> __device__ __forceinline__ float fold(float x) {
#pragma unroll
    for (int step = LANES / 2; step > 0; step >>= 1) x += __shfl_xor_sync(FULL, x, step);
    return x;
}

template <int LANES> __device__ __forceinline__ float fold_max(float x) {
#pragma unroll
    for (int step = LANES / 2; step > 0; step >>= 1) x = fmaxf(x, __shfl_xor_sync(FULL, x, step));
    return x;
}

// The factor of a root-mean-square norm of a row whose squares have this sum.
__device__ __forceinline__ float norm_scale(float squares, u32 width, float epsilon) {
    return 1.0f / sqrtf(squares / (float)width + epsilon);
}

// The norm of a row by tensor cores' arithmetic adds squares in NORM_LANES lanes, one a thread: element
// i goes to lane i mod NORM_LANES.
#define NORM_LANES 256

// This thread's values of a row, zeros beyond its width.
template <int EACH> __device__ __forceinline__ void load_lane(float (&x)[EACH], const float *row, u32 width) {
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        u32 i = e * NORM_LANES + threadIdx.x;
        x[e] = i < width ? row[i] : 0.0f;
    }
}
template <int EACH> __device__ __forceinline__ void add_squares(const float (&x)[EACH], float &sum) {
#pragma unroll
    for (int e = 0; e < EACH; e++) sum = fmaf(x[e], x[e], sum);
}

// Adds up NORM_LANES lanes in shared memory as `fold` does those of a warp; every warp does all of it,
// so that none waits for another.
__device__ __forceinline__ float fold_lanes(const float *lanes) {
    float x[NORM_LANES / 32];
#pragma unroll
    for (int e = 0; e < NORM_LANES / 32; e++) x[e] = lanes[e * 32 + threadIdx.x % 32];
#pragma unroll
    for (int step = NORM_LANES / 64; step > 0; step >>= 1) {
#pragma unroll
        for (int e = 0; e < step; e++) x[e] += x[e + step];
    }
    return fold<32>(x[0]);
}

// The positions that a row sees: those of its span that are within the window.
struct Seen {
    u32 first, end;
    __device__ __forceinline__ Seen(uint4 span, u32 window) {
        end = span.y + span.w;
        first = end - min(end, window);
    }
};

// The slot of position p of a row.
__device__ __forceinline__ u32 slot_of(const Plan &plan, uint4 span, u32 p, u32 slots) {
    u32 slot = __ldcg(p < span.y ? plan.tables + span.x + p : plan.tree_slots + span.z + (p - span.y));
    return min(slot, slots - 1);
}
