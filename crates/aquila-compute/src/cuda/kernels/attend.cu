// Attention by tensor cores over the slots that each row sees.
//
// Positions come in blocks of ATTEND_BLOCK, aligned to absolute position, each with a softmax of its
// own; of the first block that a window reaches into, only the positions within it count, and the
// blocks before it are skipped. The blocks of a row are merged in order, by the last thread block that is done with them or, of
// long contexts, by a second kernel. So neither the length of other rows nor the number of thread blocks
// changes a bit.

#include "tensor.cuh"

#define ATTEND_BLOCK 128
#define QUERIES 16  // query heads of one key head that a thread block serves

// The blocks that a row has something to see in.
struct Blocks {
    u32 first, count;
    __device__ __forceinline__ Blocks(const Seen &seen) {
        first = seen.first / ATTEND_BLOCK;
        count = (seen.end + ATTEND_BLOCK - 1) / ATTEND_BLOCK - first;
    }
};

// Merges the blocks of one column of one head of a row, in order. `part` is the first of them.
__device__ __forceinline__ void merge_column(const AttendArgs &a, size_t part, u32 blocks, u32 row, u32 head, u32 column) {
    u32 d = a.head_dim;
    float largest = __ldcg(a.stats + 2 * part), total = __ldcg(a.stats + 2 * part + 1);
    float sum = __ldcg(a.parts + part * d + column);
    for (u32 b = 1; b < blocks; b++) {
        float next = __ldcg(a.stats + 2 * (part + b)), both = next > largest ? next : largest;
        float old = exponential(largest - both), scale = exponential(next - both);
        total = fmaf(total, old, __ldcg(a.stats + 2 * (part + b) + 1) * scale);
        sum = fmaf(sum, old, __ldcg(a.parts + (part + b) * d + column) * scale);
        largest = both;
    }
    put(a.out, row, head * d + column, sum * (1.0f / total));
}

// A thread block of 128 takes one row, one key head and up to QUERIES of its query heads, and every
// gridDim.x-th block of positions. Its warps first divide the positions, then the columns of values.
extern "C" __global__ void __launch_bounds__(128, 4) attend_tensor(AttendArgs a) {
    __shared__ u32 slots[ATTEND_BLOCK];
    __shared__ float warp_largest[4][QUERIES];
    __shared__ __align__(16) u16 weights[QUERIES][ATTEND_BLOCK + 8];
    __shared__ u32 last_one;
    begin();
    u32 row = a.first_row + blockIdx.z, thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    if (row >= a.plan.counts[0]) return;
    uint4 span = a.plan.spans[row];
    Seen seen(span, a.window);
    Blocks blocks(seen);
    u32 d = a.head_dim;
    u32 group = a.heads / a.kv_heads, chunks = (group + QUERIES - 1) / QUERIES;
    u32 kv_head = blockIdx.y / chunks, first = blockIdx.y % chunks * QUERIES, heads = min((u32)QUERIES, group - first);
    u32 head = kv_head * group + first, quad = lane % 4, octet = lane / 4;
    const u16 *query = a.qkv.halves + (size_t)row * a.qkv.stride + (size_t)head * d;
    const u16 *keys = static_cast<const u16 *>(a.keys), *values = static_cast<const u16 *>(a.values);

    for (u32 block = blockIdx.x; block < blocks.count; block += gridDim.x) {
        u32 aligned = (blocks.first + block) * ATTEND_BLOCK, start = max(aligned, seen.first);
        u32 count = min(aligned + ATTEND_BLOCK, seen.end) - start;
        __syncthreads();
        slots[thread] = slot_of(a.plan, span, start + min(thread, count - 1), a.slots);
        __syncthreads();

        // Scores of 32 positions per warp, as 16 query heads by four times eight positions.
        float scores[4][4] = {};
        for (u32 step = 0; step < d; step += 16) {
            u32 e = step + quad * 2;
            auto pair = [&](const u16 *of, bool there, u32 e) { return there && e < d ? *reinterpret_cast<const u32 *>(of + e) : 0; };
            u32 q[4];
#pragma unroll
            for (int j = 0; j < 4; j++) q[j] = pair(query + (octet + j % 2 * 8) * d, octet + j % 2 * 8 < heads, e + j / 2 * 8);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const u16 *key = keys + ((size_t)slots[warp * 32 + i * 8 + octet] * a.kv_heads + kv_head) * d;
                multiply(scores[i], q[0], q[1], q[2], q[3], pair(key, true, e), pair(key, true, e + 8));
            }
        }
        float largest[2] = {-INFINITY, -INFINITY};
#pragma unroll
        for (int i = 0; i < 4; i++) {
#pragma unroll
            for (int r = 0; r < 4; r++) {
                bool there = warp * 32 + i * 8 + quad * 2 + r % 2 < count;
                scores[i][r] = there ? scores[i][r] * a.scale : -INFINITY;
                largest[r / 2] = fmaxf(largest[r / 2], scores[i][r]);
            }
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            largest[h] = fold_max<4>(largest[h]);
            if (quad == 0) warp_largest[warp][octet + h * 8] = largest[h];
        }
        __syncthreads();
#pragma unroll
        for (int h = 0; h < 2; h++) {
            largest[h] = warp_largest[0][octet + h * 8];
#pragma unroll
            for (int w = 1; w < 4; w++) largest[h] = fmaxf(largest[h], warp_largest[w][octet + h * 8]);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                u32 even = halve(exponential(scores[i][2 * h] - largest[h]));
                u32 odd = halve(exponential(scores[i][2 * h + 1] - largest[h]));
                u32 column = warp * 32 + i * 8 + quad * 2;
                *reinterpret_cast<u32 *>(&weights[octet + h * 8][column]) = odd << 16 | even;
            }
        }
        __syncthreads();

        // Values: a warp takes 32 columns, a lane four of them, for four positions of each step.
        size_t part = ((size_t)blockIdx.z * a.heads + head) * a.blocks + block;
        for (u32 chunk = warp; chunk * 32 < d; chunk += 4) {
            float sums[4][4] = {}, totals[4] = {};
            u32 column = chunk * 32 + octet * 4;
#pragma unroll
            for (int step = 0; step < ATTEND_BLOCK / 16; step++) {
                u32 p = step * 16 + quad * 2;
                uint2 v[4];
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    size_t value = ((size_t)slots[p + j % 2 + j / 2 * 8] * a.kv_heads + kv_head) * d + column;
                    v[j] = column < d ? *reinterpret_cast<const uint2 *>(values + value) : make_uint2(0, 0);
                }
                u32 w[4];
#pragma unroll
                for (int j = 0; j < 4; j++)
                    w[j] = *reinterpret_cast<const u32 *>(&weights[octet + j % 2 * 8][p + j / 2 * 8]);
#pragma unroll
                for (int n = 0; n < 4; n++) {
                    // The low or the high halves of two positions.
                    u32 pick = n % 2 == 0 ? 0x5410 : 0x7632;
                    u32 b0 = __byte_perm(n < 2 ? v[0].x : v[0].y, n < 2 ? v[1].x : v[1].y, pick);
                    u32 b1 = __byte_perm(n < 2 ? v[2].x : v[2].y, n < 2 ? v[3].x : v[3].y, pick);
                    multiply(sums[n], w[0], w[1], w[2], w[3], b0, b1);
                }
                // The total of the weights is what a column of ones would give.
                if (chunk == 0) multiply(totals, w[0], w[1], w[2], w[3], 0x3f803f80u, 0x3f803f80u);
            }
#pragma unroll
            for (int n = 0; n < 4; n++) {
#pragma unroll
                for (int r = 0; r < 4; r++) {
                    // Column n * 8 + 2 * quad + r % 2 of the product is column 4 * (2 * quad + r % 2) + n.
                    u32 query_head = octet + r / 2 * 8, to = chunk * 32 + (quad * 2 + r % 2) * 4 + n;
                    if (query_head < heads && to < d) a.parts[(part + (size_t)query_head * a.blocks) * d + to] = sums[n][r];
                }
            }
            if (chunk == 0 && quad == 0) {
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    if (octet + h * 8 < heads) {
                        size_t at = 2 * (part + (size_t)(octet + h * 8) * a.blocks);
                        a.stats[at] = largest[h];
                        a.stats[at + 1] = totals[2 * h];
                    }
                }
            }
        }
    }
    if (!a.arrivals || blockIdx.x >= blocks.count) return;

    // The last thread block that is done with the row and these heads merges their blocks.
    __threadfence();
    __syncthreads();
    if (thread == 0) {
        u32 *arrivals = a.arrivals + blockIdx.z * gridDim.y + blockIdx.y;
        last_one = atomicAdd(arrivals, 1) + 1 == min(blocks.count, gridDim.x);
        if (last_one) *arrivals = 0;
    }
    __syncthreads();
    if (!last_one) return;
    __threadfence();
    size_t first_part = ((size_t)blockIdx.z * a.heads + head) * a.blocks;
    for (u32 i = thread; i < heads * d; i += 128)
        merge_column(a, first_part + (size_t)(i / d) * a.blocks, blocks.count, row, head + i / d, i % d);
}

// Merges the blocks of one head of one row, in order.
extern "C" __global__ void __launch_bounds__(128) attend_merge(AttendArgs a) {
    begin();
    u32 head = blockIdx.x, row = a.first_row + blockIdx.y, d = a.head_dim;
    if (row >= a.plan.counts[0]) return;
    Blocks blocks(Seen(a.plan.spans[row], a.window));
    size_t part = ((size_t)blockIdx.y * a.heads + head) * a.blocks;
    for (u32 column = threadIdx.x; column < d; column += blockDim.x)
        merge_column(a, part, blocks.count, row, head, column);
}
