// The kernels of the CUDA backend, compiled at run time for the device that is there.
//
// The one invariant: what a row computes depends on that row alone. Reductions have a fixed order
// that follows from the width reduced, never from how many rows a launch has, so one row gives the
// same bits alone and among others. Whatever changes from pass to pass (tokens, positions, slots,
// lengths, how many rows are in use) is read from the placed plan, so a captured launch stays valid.

typedef unsigned short u16;
typedef unsigned int u32;

#define FULL 0xffffffffu
#define BLOCK 64     // positions of one attention block, aligned to absolute position
#define SPLITS 32    // attention blocks b, b + SPLITS, ... of a row go to one thread block
#define HEADS 8      // query heads that one thread block of attention serves at most
#define LARGEST 3.402823466e+38f

// Mirrors of the argument structures in `arguments.rs`, in the same order.
struct Plan {
    const u32 *counts;  // rows in use, outputs in use
    const uint4 *spans;  // start, prefix, start of the tree slots, how many
    const u32 *tokens, *positions, *writes, *sources, *outputs, *slots;
};

struct EmbedArgs {
    Plan plan;
    const void *table;
    float *out;
    u32 width, tokens, out_stride;
};

struct NormArgs {
    const float *in, *weight;
    float *out;
    u32 width, in_stride, out_stride;
    float epsilon;
};

struct ProjectArgs {
    const void *weight;
    const float *in, *bias;
    float *out;
    u32 inputs, outputs, weight_stride, in_stride, out_stride, rows, add;
};

struct WriteKvArgs {
    Plan plan;
    float *qkv;
    const float *query_norm, *key_norm, *cos, *sin;
    void *keys, *values;
    u32 heads, kv_heads, head_dim, qkv_stride, half, positions, slots;
    float epsilon;
};

struct AttendArgs {
    Plan plan;
    const float *qkv;
    const void *keys, *values;
    float *parts, *stats, *out;
    u32 heads, kv_heads, head_dim, qkv_stride, out_stride, slots, first_row, heads_per_block;
    float scale;
};

struct SwigluArgs {
    const float *gate_up;
    float *out;
    u32 width, in_stride, out_stride;
};

struct GatherArgs {
    const u32 *count, *list;
    const float *in;
    float *out;
    u32 width, rows, in_stride, out_stride;
};

struct CopyArgs {
    const float *in;
    float *out;
    u32 width, in_stride, out_stride, column;
};

struct MoveArgs {
    void *keys, *values;
    const uint2 *moves;
    u32 count, slots, width;
};

struct Bf16 {
    u16 bits;
};

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(Bf16 x) { return __uint_as_float((u32)x.bits << 16); }

__device__ __forceinline__ void narrow(float x, float *out) { *out = x; }

// Rounds half to even; a NaN stays one.
__device__ __forceinline__ void narrow(float x, Bf16 *out) {
    u32 bits = __float_as_uint(x);
    bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
    out->bits = nan ? (u16)((bits >> 16) | 0x40u) : (u16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

__device__ __forceinline__ float4 load4(const float *p) {
    return *reinterpret_cast<const float4 *>(p);
}
__device__ __forceinline__ float4 load4(const Bf16 *p) {
    uint2 x = *reinterpret_cast<const uint2 *>(p);
    return make_float4(__uint_as_float(x.x << 16), __uint_as_float(x.x & 0xffff0000u),
                       __uint_as_float(x.y << 16), __uint_as_float(x.y & 0xffff0000u));
}

// Eight weights as they stand in memory. Each is read once, so they pass by the caches.
template <typename W> struct Eight;
template <> struct Eight<Bf16> {
    uint4 raw;
    __device__ __forceinline__ void load(const Bf16 *p) {
        raw = __ldcs(reinterpret_cast<const uint4 *>(p));
    }
    __device__ __forceinline__ void widen(float *out) const {
        u32 pairs[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            out[2 * i] = __uint_as_float(pairs[i] << 16);
            out[2 * i + 1] = __uint_as_float(pairs[i] & 0xffff0000u);
        }
    }
};
template <> struct Eight<float> {
    float4 low, high;
    __device__ __forceinline__ void load(const float *p) {
        low = __ldcs(reinterpret_cast<const float4 *>(p));
        high = __ldcs(reinterpret_cast<const float4 *>(p) + 1);
    }
    __device__ __forceinline__ void widen(float *out) const {
        out[0] = low.x, out[1] = low.y, out[2] = low.z, out[3] = low.w;
        out[4] = high.x, out[5] = high.y, out[6] = high.z, out[7] = high.w;
    }
};

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) x += __shfl_xor_sync(FULL, x, step);
    return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) x = fmaxf(x, __shfl_xor_sync(FULL, x, step));
    return x;
}

template <typename T> __device__ void embed(const EmbedArgs &a) {
    u32 row = blockIdx.y, column = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= a.plan.counts[0] || column >= a.width) return;
    u32 token = min(a.plan.tokens[row], a.tokens - 1);
    float x = widen(static_cast<const T *>(a.table)[(size_t)token * a.width + column]);
    a.out[(size_t)row * a.out_stride + column] = x;
}
extern "C" __global__ void embed_bf16(EmbedArgs a) { embed<Bf16>(a); }
extern "C" __global__ void embed_f32(EmbedArgs a) { embed<float>(a); }

// One thread block of 256 per row.
extern "C" __global__ void rms_norm(NormArgs a) {
    __shared__ float sums[8];
    const float *in = a.in + (size_t)blockIdx.x * a.in_stride;
    float *out = a.out + (size_t)blockIdx.x * a.out_stride;
    float sum = 0.0f;
    for (u32 i = threadIdx.x; i < a.width; i += 256) sum = fmaf(in[i], in[i], sum);
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = 0.0f;
    for (int i = 0; i < 8; i++) sum += sums[i];
    float scale = 1.0f / sqrtf(sum / (float)a.width + a.epsilon);
    for (u32 i = threadIdx.x; i < a.width; i += 256) out[i] = (in[i] * scale) * a.weight[i];
}

template <int M, int R>
__device__ __forceinline__ void multiply(const float (&w)[R][8], const float (&x)[8], float (&sum)[R]) {
#pragma unroll
    for (int r = 0; r < R; r++) {
#pragma unroll
        for (int e = 0; e < 8; e++) sum[r] = fmaf(w[r][e], x[e], sum[r]);
    }
}

// M rows by R outputs per warp. A lane takes every 32nd group of eight inputs, in order; the lanes
// then fold. Neither M, R nor the unrolling U changes the order in which one sum is made. Rows beyond
// `rows` are read, since room for rows comes in multiples of eight, and not written.
template <typename W, int M, int R, int U> __device__ __forceinline__ void project(const ProjectArgs &a) {
    u32 lane = threadIdx.x % 32;
    u32 first = (blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32) * R;
    if (first >= a.outputs) return;
    const W *weight[R];
#pragma unroll
    for (int r = 0; r < R; r++)
        weight[r] = static_cast<const W *>(a.weight) + (size_t)min(first + r, a.outputs - 1) * a.weight_stride;
    float sum[M][R];
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int r = 0; r < R; r++) sum[m][r] = 0.0f;
    }

    u32 k = lane * 8;
    for (; k + (U - 1) * 256 + 8 <= a.inputs; k += U * 256) {
        Eight<W> raw[U][R];
#pragma unroll
        for (int u = 0; u < U; u++) {
#pragma unroll
            for (int r = 0; r < R; r++) raw[u][r].load(weight[r] + k + u * 256);
        }
#pragma unroll
        for (int u = 0; u < U; u++) {
            float w[R][8];
#pragma unroll
            for (int r = 0; r < R; r++) raw[u][r].widen(w[r]);
#pragma unroll
            for (int m = 0; m < M; m++) {
                const float4 *p = reinterpret_cast<const float4 *>(a.in + m * a.in_stride + k + u * 256);
                float4 low = __ldg(p), high = __ldg(p + 1);
                float x[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
                multiply<M, R>(w, x, sum[m]);
            }
        }
    }
    // What is left of a lane's groups; the last one may be cut short.
    for (; k < a.inputs; k += 256) {
        float w[R][8];
#pragma unroll
        for (int r = 0; r < R; r++) {
            Eight<W> raw;
            raw.load(weight[r] + k);
            raw.widen(w[r]);
        }
#pragma unroll
        for (int m = 0; m < M; m++) {
            float x[8];
#pragma unroll
            for (int e = 0; e < 8; e++) x[e] = k + e < a.inputs ? a.in[m * a.in_stride + k + e] : 0.0f;
            multiply<M, R>(w, x, sum[m]);
        }
    }

#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int r = 0; r < R; r++) {
            float value = warp_sum(sum[m][r]);
            u32 output = first + r;
            if (lane == (m * R + r) % 32 && m < a.rows && output < a.outputs) {
                if (a.bias) value += a.bias[output];
                float *out = a.out + (size_t)m * a.out_stride + output;
                *out = a.add ? *out + value : value;
            }
        }
    }
}

#define PROJECT(NAME, W, M, R, U)                                                  \
    extern "C" __global__ void __launch_bounds__(256, 2) NAME(ProjectArgs a) {     \
        project<W, M, R, U>(a);                                                    \
    }
PROJECT(project_bf16_1x2, Bf16, 1, 2, 4)
PROJECT(project_bf16_2x2, Bf16, 2, 2, 4)
PROJECT(project_bf16_4x2, Bf16, 4, 2, 4)
PROJECT(project_bf16_8x2, Bf16, 8, 2, 2)
PROJECT(project_bf16_1x4, Bf16, 1, 4, 2)
PROJECT(project_bf16_2x4, Bf16, 2, 4, 2)
PROJECT(project_bf16_4x4, Bf16, 4, 4, 2)
PROJECT(project_bf16_8x4, Bf16, 8, 4, 1)
PROJECT(project_f32_1x2, float, 1, 2, 2)
PROJECT(project_f32_2x2, float, 2, 2, 2)
PROJECT(project_f32_4x2, float, 4, 2, 2)
PROJECT(project_f32_8x2, float, 8, 2, 1)

// One warp per head of queries, of keys or of values.
template <typename T> __device__ void write_kv(const WriteKvArgs &a) {
    u32 lane = threadIdx.x % 32, head = blockIdx.x * 4 + threadIdx.x / 32, row = blockIdx.y;
    u32 turned = a.heads + a.kv_heads;
    if (row >= a.plan.counts[0] || head >= turned + a.kv_heads) return;
    float *x = a.qkv + (size_t)row * a.qkv_stride + (size_t)head * a.head_dim;
    u32 slot = a.plan.writes[row];
    if (slot >= a.slots && head >= a.heads) return;
    size_t kv_row = (size_t)slot * a.kv_heads;
    if (head >= turned) {
        T *out = static_cast<T *>(a.values) + (kv_row + head - turned) * a.head_dim;
        for (u32 i = lane; i < a.head_dim; i += 32) narrow(x[i], out + i);
        return;
    }
    bool query = head < a.heads;
    T *key = static_cast<T *>(a.keys) + (kv_row + (query ? 0 : head - a.heads)) * a.head_dim;
    const float *weight = query ? a.query_norm : a.key_norm;
    float scale = 1.0f;
    if (weight) {
        float sum = 0.0f;
        for (u32 i = lane; i < a.head_dim; i += 32) sum = fmaf(x[i], x[i], sum);
        scale = 1.0f / sqrtf(warp_sum(sum) / (float)a.head_dim + a.epsilon);
    }
    size_t angles = (size_t)min(a.plan.positions[row], a.positions - 1) * a.half;
    for (u32 i = lane; i < a.half; i += 32) {
        float low = x[i], high = x[i + a.half];
        if (weight) {
            low = (low * scale) * weight[i];
            high = (high * scale) * weight[i + a.half];
        }
        float cos = a.cos[angles + i], sin = a.sin[angles + i];
        float first = fmaf(low, cos, -(high * sin)), second = fmaf(high, cos, low * sin);
        if (query) {
            x[i] = first, x[i + a.half] = second;
        } else {
            narrow(first, key + i);
            narrow(second, key + i + a.half);
        }
    }
    for (u32 i = 2 * a.half + lane; i < a.head_dim; i += 32) {
        float value = weight ? (x[i] * scale) * weight[i] : x[i];
        if (query) {
            x[i] = value;
        } else {
            narrow(value, key + i);
        }
    }
}
extern "C" __global__ void write_kv_bf16(WriteKvArgs a) { write_kv<Bf16>(a); }
extern "C" __global__ void write_kv_f32(WriteKvArgs a) { write_kv<float>(a); }

// A thread block of 256 takes one row, up to HEADS query heads of one key head, and every SPLITS-th
// block of positions; each block has a softmax of its own, merged in order.
template <typename T> __device__ void attend(const AttendArgs &a) {
    extern __shared__ __align__(16) float shared[];
    __shared__ float scores[HEADS][BLOCK], largest[HEADS], total[HEADS], keep[HEADS], take[HEADS];
    __shared__ u32 slots[BLOCK];
    u32 row = a.first_row + blockIdx.z, split = blockIdx.x;
    if (row >= a.plan.counts[0]) return;
    uint4 span = a.plan.spans[row];
    u32 length = span.y + span.w, blocks = (length + BLOCK - 1) / BLOCK;
    if (split >= blocks) return;

    u32 group = a.heads / a.kv_heads, chunks = (group + a.heads_per_block - 1) / a.heads_per_block;
    u32 kv_head = blockIdx.y / chunks, chunk = blockIdx.y % chunks;
    u32 head = kv_head * group + chunk * a.heads_per_block;
    u32 heads = min(a.heads_per_block, group - chunk * a.heads_per_block);
    u32 d = a.head_dim, thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    float *query = shared, *sum = shared + a.heads_per_block * d;
    for (u32 i = thread; i < heads * d; i += 256)
        query[i] = a.qkv[(size_t)row * a.qkv_stride + (size_t)head * d + i];

    for (u32 block = split; block < blocks; block += SPLITS) {
        u32 start = block * BLOCK, count = min((u32)BLOCK, length - start);
        __syncthreads();
        if (thread < BLOCK) {
            u32 p = start + min(thread, count - 1);
            u32 at = p < span.y ? span.x + p : span.z + (p - span.y);
            slots[thread] = min(a.plan.slots[at], a.slots - 1);
        }
        __syncthreads();
        // Eight lanes share a position.
        for (u32 i = thread / 8; i < BLOCK; i += 32) {
            const T *key = static_cast<const T *>(a.keys) + ((size_t)slots[i] * a.kv_heads + kv_head) * d;
            float dot[HEADS];
#pragma unroll
            for (int h = 0; h < HEADS; h++) dot[h] = 0.0f;
            for (u32 e = (thread % 8) * 4; e < d; e += 32) {
                float4 k = load4(key + e);
#pragma unroll
                for (int h = 0; h < HEADS; h++) {
                    if (h < heads) {
                        float4 q = load4(query + h * d + e);
                        dot[h] = fmaf(q.x, k.x, dot[h]);
                        dot[h] = fmaf(q.y, k.y, dot[h]);
                        dot[h] = fmaf(q.z, k.z, dot[h]);
                        dot[h] = fmaf(q.w, k.w, dot[h]);
                    }
                }
            }
#pragma unroll
            for (int h = 0; h < HEADS; h++) {
                if (h < heads) {
                    for (int step = 4; step > 0; step >>= 1) dot[h] += __shfl_xor_sync(FULL, dot[h], step);
                    if (thread % 8 == 0) scores[h][i] = i < count ? dot[h] * a.scale : -LARGEST;
                }
            }
        }
        __syncthreads();
        if (warp < heads) {
            float low = scores[warp][lane], high = scores[warp][lane + 32];
            float block_max = warp_max(fmaxf(low, high));
            low = lane < count ? expf(low - block_max) : 0.0f;
            high = lane + 32 < count ? expf(high - block_max) : 0.0f;
            float block_total = warp_sum(low + high);
            scores[warp][lane] = low;
            scores[warp][lane + 32] = high;
            if (lane == 0) {
                if (block == split) {
                    largest[warp] = block_max, total[warp] = block_total;
                    keep[warp] = 0.0f, take[warp] = 1.0f;
                } else {
                    float both = fmaxf(largest[warp], block_max);
                    keep[warp] = expf(largest[warp] - both), take[warp] = expf(block_max - both);
                    total[warp] = fmaf(total[warp], keep[warp], block_total * take[warp]);
                    largest[warp] = both;
                }
            }
        }
        __syncthreads();
        for (u32 item = thread; item < heads * d; item += 256) {
            u32 h = item / d;
            const T *value = static_cast<const T *>(a.values) + (size_t)kv_head * d + item % d;
            float part = 0.0f;
#pragma unroll 8
            for (u32 i = 0; i < count; i++)
                part = fmaf(scores[h][i], widen(value[(size_t)slots[i] * a.kv_heads * d]), part);
            sum[item] = block == split ? part : fmaf(sum[item], keep[h], part * take[h]);
        }
    }
    __syncthreads();
    for (u32 item = thread; item < heads * d; item += 256) {
        size_t part = ((size_t)blockIdx.z * a.heads + head + item / d) * SPLITS + split;
        a.parts[part * d + item % d] = sum[item];
    }
    if (thread < heads) {
        size_t part = ((size_t)blockIdx.z * a.heads + head + thread) * SPLITS + split;
        a.stats[part * 2] = largest[thread];
        a.stats[part * 2 + 1] = total[thread];
    }
}
extern "C" __global__ void attend_bf16(AttendArgs a) { attend<Bf16>(a); }
extern "C" __global__ void attend_f32(AttendArgs a) { attend<float>(a); }

// Joins the splits of one head of one row, in order.
extern "C" __global__ void attend_merge(AttendArgs a) {
    u32 head = blockIdx.x, row = a.first_row + blockIdx.y, d = a.head_dim;
    if (row >= a.plan.counts[0]) return;
    uint4 span = a.plan.spans[row];
    u32 splits = min((u32)SPLITS, (span.y + span.w + BLOCK - 1) / BLOCK);
    size_t first = ((size_t)blockIdx.y * a.heads + head) * SPLITS;
    float largest = -LARGEST, total = 0.0f;
    for (u32 s = 0; s < splits; s++) largest = fmaxf(largest, a.stats[(first + s) * 2]);
    for (u32 s = 0; s < splits; s++)
        total = fmaf(a.stats[(first + s) * 2 + 1], expf(a.stats[(first + s) * 2] - largest), total);
    for (u32 i = threadIdx.x; i < d; i += blockDim.x) {
        float sum = 0.0f;
        for (u32 s = 0; s < splits; s++)
            sum = fmaf(a.parts[(first + s) * d + i], expf(a.stats[(first + s) * 2] - largest), sum);
        a.out[(size_t)row * a.out_stride + (size_t)head * d + i] = sum / total;
    }
}

extern "C" __global__ void swiglu(SwigluArgs a) {
    u32 column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= a.width) return;
    const float *in = a.gate_up + (size_t)blockIdx.y * a.in_stride;
    float gate = in[column], up = in[a.width + column];
    a.out[(size_t)blockIdx.y * a.out_stride + column] = gate / (1.0f + expf(-gate)) * up;
}

extern "C" __global__ void gather(GatherArgs a) {
    u32 row = blockIdx.y, column = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= *a.count || column >= a.width) return;
    u32 from = min(a.list[row], a.rows - 1);
    a.out[(size_t)row * a.out_stride + column] = a.in[(size_t)from * a.in_stride + column];
}

extern "C" __global__ void copy_columns(CopyArgs a) {
    u32 row = blockIdx.y, column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= a.width) return;
    a.out[(size_t)row * a.out_stride + a.column + column] = a.in[(size_t)row * a.in_stride + column];
}

// A thread owns one column of one layer and walks the moves, so they happen in the order given.
template <typename T> __device__ void move_slots(const MoveArgs &a) {
    u32 column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= a.width) return;
    T *keys = static_cast<T *>(a.keys) + (size_t)blockIdx.y * a.slots * a.width + column;
    T *values = static_cast<T *>(a.values) + (size_t)blockIdx.y * a.slots * a.width + column;
    for (u32 i = 0; i < a.count; i++) {
        uint2 move = a.moves[i];
        if (move.x >= a.slots || move.y >= a.slots) continue;
        keys[(size_t)move.y * a.width] = keys[(size_t)move.x * a.width];
        values[(size_t)move.y * a.width] = values[(size_t)move.x * a.width];
    }
}
extern "C" __global__ void move_bf16(MoveArgs a) { move_slots<Bf16>(a); }
extern "C" __global__ void move_f32(MoveArgs a) { move_slots<float>(a); }
