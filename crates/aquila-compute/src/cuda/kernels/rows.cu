// Operations on rows, one thread per value or one thread block per row. What changes from pass to
// pass is read from the placed plan, so that a captured launch stays valid.

#include "device.cuh"

extern "C" __global__ void change_tables(ChangeArgs a) {
    begin();
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= a.count || a.changes[i].x >= a.size) return;
    a.tables[a.changes[i].x] = a.changes[i].y;
}

template <typename T> __device__ void embed(const EmbedArgs &a) {
    begin();
    u32 row = blockIdx.y, column = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= a.plan.counts[0] || column >= a.width) return;
    u32 token = min(a.plan.tokens[row], a.tokens - 1);
    put(a.out, row, column, widen(static_cast<const T *>(a.table)[(size_t)token * a.width + column]) * a.scale);
}
extern "C" __global__ void embed_bf16(EmbedArgs a) { embed<Bf16>(a); }
extern "C" __global__ void embed_f32(EmbedArgs a) { embed<float>(a); }

// The factor of a root-mean-square norm, in a thread block of LANES threads or more: element i goes
// to lane i mod LANES.
template <int LANES> __device__ float norm_scale(const float *x, u32 width, float epsilon) {
    __shared__ float lanes[LANES];
    u32 thread = threadIdx.x;
    float sum = 0.0f;
    if (thread < LANES) {
        for (u32 i = thread; i < width; i += LANES) sum = fmaf(x[i], x[i], sum);
        lanes[thread] = sum;
    }
#pragma unroll
    for (int half = LANES / 2; half > 0; half >>= 1) {
        __syncthreads();
        if (thread < half) lanes[thread] += lanes[thread + half];
    }
    __syncthreads();
    return 1.0f / sqrtf(lanes[0] / (float)width + epsilon);
}

template <int LANES> __device__ void rms_norm(const NormArgs &a) {
    begin();
    u32 row = blockIdx.x;
    const float *in = a.in.values + (size_t)row * a.in.stride;
    float scale = norm_scale<LANES>(in, a.width, a.epsilon);
    for (u32 i = threadIdx.x; i < a.width; i += blockDim.x) put(a.out, row, i, (in[i] * scale) * a.weight[i]);
}
extern "C" __global__ void rms_norm_plain(NormArgs a) { rms_norm<16>(a); }
extern "C" __global__ void rms_norm_tensor(NormArgs a) { rms_norm<256>(a); }

// One warp per head of queries, of keys or of values. The norm of a head adds up in LANES lanes.
template <typename T, int LANES> __device__ void write_kv(const WriteKvArgs &a) {
    begin();
    u32 lane = threadIdx.x % 32, head = blockIdx.x * 4 + threadIdx.x / 32, row = blockIdx.y;
    u32 turned = a.heads + a.kv_heads, d = a.head_dim;
    if (row >= a.plan.counts[0] || head >= turned + a.kv_heads) return;
    u32 column = head * d;
    const float *x = a.qkv.values + (size_t)row * a.qkv.stride + column;
    u32 slot = a.plan.writes[row];
    if (slot >= a.slots && head >= a.heads) return;
    size_t kv_row = (size_t)slot * a.kv_heads;
    if (head >= turned) {
        T *out = static_cast<T *>(a.values) + (kv_row + head - turned) * d;
        for (u32 i = lane; i < d; i += 32) narrow(x[i], out + i);
        return;
    }
    bool query = head < a.heads;
    T *key = static_cast<T *>(a.keys) + (query ? 0 : (kv_row + head - a.heads) * d);
    const float *weight = query ? a.query_norm : a.key_norm;
    float scale = 1.0f;
    if (weight) {
        float sum = 0.0f;
        for (u32 i = lane; lane < LANES && i < d; i += LANES) sum = fmaf(x[i], x[i], sum);
        sum = __shfl_sync(FULL, fold<LANES>(sum), 0);
        scale = 1.0f / sqrtf(sum / (float)d + a.epsilon);
    }
    size_t angles = (size_t)min(a.plan.positions[row], a.positions - 1) * a.half;
    for (u32 i = lane; i < d; i += 32) {
        // Pairs that turn are done by the lane of their first element.
        if (i >= a.half && i < 2 * a.half) continue;
        float low = weight ? (x[i] * scale) * weight[i] : x[i];
        if (i < a.half) {
            u32 j = i + a.half;
            float high = weight ? (x[j] * scale) * weight[j] : x[j];
            float cos = a.cos[angles + i], sin = a.sin[angles + i];
            float second = fmaf(high, cos, low * sin);
            low = fmaf(low, cos, -(high * sin));
            if (query) {
                put(a.qkv, row, column + j, second);
            } else {
                narrow(second, key + j);
            }
        }
        if (query) {
            put(a.qkv, row, column + i, low);
        } else {
            narrow(low, key + i);
        }
    }
}
extern "C" __global__ void write_kv_plain_bf16(WriteKvArgs a) { write_kv<Bf16, 16>(a); }
extern "C" __global__ void write_kv_plain_f32(WriteKvArgs a) { write_kv<float, 16>(a); }
extern "C" __global__ void write_kv_tensor(WriteKvArgs a) { write_kv<Bf16, 32>(a); }

// activation(gate) * up, of rows that hold gates, then ups.
extern "C" __global__ void gate(GateArgs a) {
    begin();
    u32 row = blockIdx.y, column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= a.width) return;
    float x = get(a.in, row, column);
    put(a.out, row, column, (a.gelu ? gelu(x) : silu(x)) * get(a.in, row, a.width + column));
}

extern "C" __global__ void add(AddArgs a) {
    begin();
    u32 row = blockIdx.y, column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column < a.width) put(a.out, row, column, get(a.out, row, column) + get(a.in, row, column));
}

extern "C" __global__ void soft_cap(SoftCapArgs a) {
    begin();
    u32 row = blockIdx.y, column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column < a.rows.width) put(a.rows, row, column, a.cap * tangent(get(a.rows, row, column) / a.cap));
}

// out[i] = in[list[first + i]], for as many as `count` says.
extern "C" __global__ void gather(GatherArgs a) {
    begin();
    u32 row = blockIdx.y, column = blockIdx.x * blockDim.x + threadIdx.x;
    if (a.first + row >= *a.count || column >= a.out.width) return;
    put(a.out, row, column, get(a.in, min(a.list[a.first + row], a.rows - 1), column));
}

// out[list[i]] = in[i], for as many as `count` says.
extern "C" __global__ void scatter(GatherArgs a) {
    begin();
    u32 row = blockIdx.y, column = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= *a.count || column >= a.out.width) return;
    u32 to = a.list[row];
    if (to < a.rows) put(a.out, to, column, get(a.in, row, column));
}

extern "C" __global__ void copy_columns(CopyArgs a) {
    begin();
    u32 row = blockIdx.y, column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column < a.width) put(a.out, row, a.to + column, get(a.in, row, a.from + column));
}

// Sets the rows at position 0 to zeros.
extern "C" __global__ void clear_first(ClearArgs a) {
    begin();
    u32 row = blockIdx.y, column = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= a.plan.counts[0] || a.plan.positions[row] != 0 || column >= a.rows.width) return;
    put(a.rows, row, column, 0.0f);
}

// A thread owns a column and walks the moves, so they happen in the order given.
extern "C" __global__ void move_rows(MoveRowsArgs a) {
    begin();
    u32 column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= a.rows.width) return;
    for (u32 i = 0; i < a.count; i++) {
        uint2 move = a.moves[i];
        if (max(move.x, move.y) < a.capacity) put(a.rows, move.y, column, get(a.rows, move.x, column));
    }
}

// The same for keys and values of all layers; `width` counts words of 16 bits.
extern "C" __global__ void move_slots(MoveSlotsArgs a) {
    begin();
    u32 column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= a.width) return;
    size_t layer = (size_t)blockIdx.y * a.slots * a.width + column;
    u16 *keys = a.keys + layer, *values = a.values + layer;
    for (u32 i = 0; i < a.count; i++) {
        uint2 move = a.moves[i];
        if (max(move.x, move.y) >= a.slots) continue;
        keys[(size_t)move.y * a.width] = keys[(size_t)move.x * a.width];
        values[(size_t)move.y * a.width] = values[(size_t)move.x * a.width];
    }
}
