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

// A norm whose squares are added in 16 lanes, as on the CPU: element i goes to lane i mod 16.
extern "C" __global__ void rms_norm_plain(NormArgs a) {
    __shared__ float scale;
    begin();
    u32 row = blockIdx.x;
    const float *in = a.in.values + (size_t)row * a.in.stride;
    if (threadIdx.x < 32) {
        float sum = 0.0f;
        for (u32 i = threadIdx.x; threadIdx.x < 16 && i < a.width; i += 16) sum = fmaf(in[i], in[i], sum);
        sum = fold<16>(sum);
        if (threadIdx.x == 0) scale = norm_scale(sum, a.width, a.epsilon);
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < a.width; i += blockDim.x) put(a.out, row, i, (in[i] * scale) * a.weight[i]);
}

// The same in NORM_LANES lanes, which are the threads of the block. A pass of few rows waits for
// nothing but this, so all loads are under way at once, weights before the row is there, and a row is
// read once. Of a row wider than EACH values a thread, what comes behind those is read again.
template <int EACH> __device__ void rms_norm(const NormArgs &a) {
    __shared__ float lanes[NORM_LANES];
    u32 row = blockIdx.x, thread = threadIdx.x;
    const float *in = a.in.values + (size_t)row * a.in.stride;
    let_next_begin();
    float w[EACH], x[EACH], sum = 0.0f;
    load_lane(w, a.weight, a.width);
    wait_for_inputs();
    load_lane(x, in, a.width);
    add_squares(x, sum);
    for (u32 i = EACH * NORM_LANES + thread; i < a.width; i += NORM_LANES) sum = fmaf(in[i], in[i], sum);
    lanes[thread] = sum;
    __syncthreads();
    float scale = norm_scale(fold_lanes(lanes), a.width, a.epsilon);
#pragma unroll
    for (int e = 0; e < EACH; e++) {
        u32 i = e * NORM_LANES + thread;
        if (i < a.width) put(a.out, row, i, (x[e] * scale) * w[e]);
    }
    for (u32 i = EACH * NORM_LANES + thread; i < a.width; i += NORM_LANES)
        put(a.out, row, i, (in[i] * scale) * a.weight[i]);
}
extern "C" __global__ void __launch_bounds__(NORM_LANES) rms_norm_tensor(const __grid_constant__ NormArgs a) {
    if (a.width <= 16 * NORM_LANES) {
        rms_norm<16>(a);
    } else {
        rms_norm<32>(a);
    }
}

// One warp per head of queries, of keys or of values. The norm of a head adds up in LANES lanes. What
// does not depend on each other is read before any of it is used, angles and weights before the heads are
// there: a pass waits for nothing but this.
template <typename T, int LANES> __device__ void write_kv(const WriteKvArgs &a) {
    constexpr int EACH = 4;  // values or pairs of a lane at a time
    let_next_begin();
    u32 lane = threadIdx.x % 32, head = blockIdx.x * 4 + threadIdx.x / 32, row = blockIdx.y;
    u32 turned = a.heads + a.kv_heads, d = a.head_dim;
    u32 rows = __ldcg(a.plan.counts), slot = __ldcg(a.plan.writes + row), position = __ldcg(a.plan.positions + row);
    bool there = row < rows && head < turned + a.kv_heads && (slot < a.slots || head < a.heads);
    bool query = head < a.heads, value = head >= turned;
    u32 column = head * d, half = value ? 0 : a.half;
    const float *x = a.qkv.values + (size_t)row * a.qkv.stride + column;
    size_t kv_row = (size_t)slot * a.kv_heads;
    T *out = value ? static_cast<T *>(a.values) + (kv_row + head - turned) * d
                   : static_cast<T *>(a.keys) + (query ? 0 : (kv_row + head - a.heads) * d);
    auto write = [&](u32 i, float result) {
        if (query) {
            put(a.qkv, row, column + i, result);
        } else {
            narrow(result, out + i);
        }
    };
    const float *weight = value ? nullptr : query ? a.query_norm : a.key_norm;
    size_t angles = (size_t)min(position, a.positions - 1) * a.half;
    // Of pairs: angles, and weights of a norm.
    float cos[EACH], sin[EACH], low_weight[EACH], high_weight[EACH];
    auto read = [&](u32 first) {
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            u32 i = first + e * 32;
            if (i >= half) break;
            cos[e] = a.cos[angles + i], sin[e] = a.sin[angles + i];
            if (weight) low_weight[e] = weight[i], high_weight[e] = weight[i + half];
        }
    };
    if (there) read(lane);
    wait_for_inputs();
    if (!there) return;
    float scale = 1.0f;
    if (weight) {
        float sum = 0.0f;
        for (u32 i = lane; lane < LANES && i < d; i += LANES) sum = fmaf(x[i], x[i], sum);
        scale = norm_scale(__shfl_sync(FULL, fold<LANES>(sum), 0), d, a.epsilon);
    }
    auto normed = [&](float x, float w) { return weight ? (x * scale) * w : x; };
    for (u32 first = lane; first < half; first += EACH * 32) {
        if (first > lane) read(first);
        float low[EACH], high[EACH];
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            u32 i = first + e * 32;
            if (i < half) low[e] = normed(x[i], low_weight[e]), high[e] = normed(x[i + half], high_weight[e]);
        }
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            u32 i = first + e * 32;
            if (i >= half) break;
            write(i, fmaf(low[e], cos[e], -(high[e] * sin[e])));
            write(i + half, fmaf(high[e], cos[e], low[e] * sin[e]));
        }
    }
    // What does not turn.
    for (u32 first = 2 * half + lane; first < d; first += EACH * 32) {
        float kept[EACH];
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            u32 i = first + e * 32;
            if (i < d) kept[e] = normed(x[i], weight ? weight[i] : 1.0f);
        }
#pragma unroll
        for (int e = 0; e < EACH; e++)
            if (first + e * 32 < d) write(first + e * 32, kept[e]);
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
