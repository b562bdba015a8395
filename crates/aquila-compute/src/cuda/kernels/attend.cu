// Attention by tensor cores over the slots that each row sees.
//
// Positions come in blocks of ATTEND_BLOCK, aligned to absolute position, each with a softmax of its
// own; of the first block that a window reaches into, only the positions within it count, and the
// blocks before it are skipped. A row's blocks are merged in order: by the thread block that has
// computed all of them, by the last one that is done with one of them or, of long contexts, by a second
// kernel. So neither other rows nor the number of thread blocks changes a bit. Blocks that wait to be
// merged lie row by row, as many as each row has; the blocks of rows for which no room is left stay with
// one thread block.
//
// A thread block takes consecutive rows of one start in the block tables together, so that a tile of a
// tensor core holds the query heads of several rows, and keys and values of their common prefix are
// read once. Steps that reach into a tail are each row's own.

#include "attend_work.cuh"

// Where the 16 bytes `unit` of a row lie in shared memory: those of eight rows are in all banks. A
// multiple of eight rows further on they lie as much further on, and n units further on, where n and
// the unit have no bit in common, at this place with 16 * n xored to it.
__device__ __forceinline__ u32 swizzled(u32 row, u32 row_bytes, u32 unit) { return row * row_bytes + (unit ^ row % 8) * 16; }

// Multiplies, and keeps what comes out where a lane says so: in its upper and in its lower row.
__device__ __forceinline__ void multiply_where(const bool (&mine)[2], float (&c)[4], const uint4 &a, u32 b0, u32 b1) {
    float sums[4] = {c[0], c[1], c[2], c[3]};
    multiply(sums, a, b0, b1);
#pragma unroll
    for (int r = 0; r < 4; r++) c[r] = mine[r / 2] ? sums[r] : c[r];
}

// Writes two neighbouring values of a row in both their forms.
__device__ __forceinline__ void store_pair(float *to, float x, float y) {
    *reinterpret_cast<uint2 *>(to) = make_uint2(__float_as_uint(x), __float_as_uint(y));
}
__device__ __forceinline__ void put_pair(const Rows &rows, u32 row, u32 column, float x, float y) {
    size_t at = (size_t)row * rows.stride + column;
    store_pair(rows.values + at, x, y);
    if (rows.halves) *reinterpret_cast<u32 *>(rows.halves + at) = (u32)halve(y) << 16 | halve(x);
}

// The sum of what the threads before this one have, and of all.
__device__ __forceinline__ u64 sum_of_threads(u64 x, u64 *warp_sums, u64 &total) {
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u64 sum = x;
#pragma unroll
    for (u32 step = 1; step < 32; step *= 2) {
        u64 other = __shfl_sync(FULL, sum, lane - step);
        if (lane >= step) sum += other;
    }
    if (lane == 31) warp_sums[warp] = sum;
    __syncthreads();
    u64 before = sum - x;
    total = 0;
    for (u32 w = 0; w < ATTEND_WARPS; w++) {
        if (w < warp) before += warp_sums[w];
        total += warp_sums[w];
    }
    return before;
}

// Where the parts of a head of a row begin.
__device__ __forceinline__ size_t part_of(const AttendArgs &a, const Blocks &blocks, u32 head) {
    return (size_t)blocks.place * a.heads + head * blocks.count;
}

// A warp merges the blocks of one head of a row, in order, AT_ONCE of which it has under way together.
template <int AT_ONCE> __device__ __forceinline__ void merge(const AttendArgs &a, const Blocks &of_row, u32 row, u32 head) {
    u32 lane = threadIdx.x % 32, d = a.head_dim, blocks = of_row.count;
    size_t part = part_of(a, of_row, head);
    for (u32 from = 0; from < d; from += 128) {
        u32 column = from + lane * 4;
        float largest = -INFINITY, total = 0.0f, sums[4] = {};
        for (u32 at = 0; at < blocks; at += AT_ONCE) {
            float4 parts[AT_ONCE];
#pragma unroll
            for (u32 b = 0; b < AT_ONCE; b++) {
                const float *of_block = a.parts + (part + at + b) * d + column;
                if (at + b < blocks && column < d) parts[b] = __ldcg(reinterpret_cast<const float4 *>(of_block));
            }
            // Each lane finds for one block what it counts for, and what all before it then do.
            bool there = lane < AT_ONCE && at + lane < blocks;
            const float *stats = a.stats + 2 * (part + at + (there ? lane : 0));
            float own = there ? __ldcg(stats) : -INFINITY, own_total = __ldcg(stats + 1), both = own;
#pragma unroll
            for (u32 step = 1; step < AT_ONCE; step *= 2) {
                float other = __shfl_sync(FULL, both, lane - step);
                if (lane >= step) both = fmaxf(both, other);
            }
            both = fmaxf(both, largest);
            float before = __shfl_sync(FULL, both, lane - 1);
            float old = exponential((lane > 0 ? before : largest) - both), fresh = exponential(own - both);
            largest = __shfl_sync(FULL, both, AT_ONCE - 1);
            own_total *= fresh;
#pragma unroll
            for (u32 b = 0; b < AT_ONCE; b++) {
                float scale = __shfl_sync(FULL, old, b), own_scale = __shfl_sync(FULL, fresh, b), next = __shfl_sync(FULL, own_total, b);
                if (at + b >= blocks) continue;
                total = fmaf(total, scale, next);
                sums[0] = fmaf(sums[0], scale, parts[b].x * own_scale), sums[1] = fmaf(sums[1], scale, parts[b].y * own_scale);
                sums[2] = fmaf(sums[2], scale, parts[b].z * own_scale), sums[3] = fmaf(sums[3], scale, parts[b].w * own_scale);
            }
        }
        if (column >= d) continue;
        float inverse = 1.0f / total;
        put_pair(a.out, row, head * d + column, sums[0] * inverse, sums[1] * inverse);
        put_pair(a.out, row, head * d + column + 2, sums[2] * inverse, sums[3] * inverse);
    }
}

// Heads of width D, or of any width, 128 columns at a time; TILES times 16 queries at a time.
//
// The blocks of all rows that go together, for each of their key heads, are divided evenly among the
// thread blocks, so that all are busy to the end. What a thread block has all blocks of it merges in
// registers. Warps first divide the positions, then the columns of values; keys of the next block arrive
// while values are multiplied, and values while keys are.
template <int D, int TILES> struct Attending {
    static constexpr u32 QUERIES = 16 * TILES, WIDTH = D ? D : 128, PAIRS = WIDTH / 64;  // pairs of 8 columns of a warp
    // Bytes of a row of keys or values and of weights, and where the parts of shared memory begin.
    static constexpr u32 ROW = 2 * WIDTH, WEIGHT_ROW = 2 * ATTEND_BLOCK;
    static constexpr u32 VALUES = ATTEND_BLOCK * ROW, WEIGHTS = 2 * VALUES, QUERY_ROWS = WEIGHTS + QUERIES * WEIGHT_ROW;
    typedef float Sums[TILES][2 * PAIRS][4];
    typedef float Scores[TILES][4][4];  // of 32 positions of a warp, 8 by 8

    struct Shared {
        u64 warp_sums[ATTEND_WARPS];
        u32 counts[QUERIES], last_one;
        float warp_largest[ATTEND_WARPS][QUERIES], old[QUERIES], fresh[QUERIES], inverses[QUERIES];
    };

    const AttendArgs &a;
    Shared &s;
    u8 *shared;
    u32 base, thread, warp, lane, quad, octet;
    u32 d, chunks, query_row;             // columns, in how many chunks, and bytes of a query
    u32 heads, most, key_heads, cuts;     // query heads and rows that go together at most; key heads, once for each cut
    u32 rows, total;                      // of the launch: rows, and units of a key head
    uint4 *spans;
    u64 *before;                          // of each row: units of a key head, and in the upper half blocks, of all rows before it

    // What is attended to at a time: some rows and a key head, with some of their blocks.
    u32 key_head, kv_head, row, head, cut_heads, queries;
    bool whole, merges;  // with all blocks; whether the last thread block that is done merges them
    Together taken;

    __device__ __forceinline__ Attending(const AttendArgs &a, Shared &s) : a(a), s(s) {
        thread = threadIdx.x, warp = thread / 32, lane = thread % 32, quad = lane % 4, octet = lane / 4;
        shared = dynamic_shared(), base = shared_address(shared);
        d = D ? D : a.head_dim, chunks = D ? 1 : (d + WIDTH - 1) / WIDTH, query_row = chunks * ROW;
        u32 group = a.heads / a.kv_heads;
        cuts = (group + QUERIES - 1) / QUERIES, key_heads = a.kv_heads * cuts;
        heads = (group + cuts - 1) / cuts, most = QUERIES / heads;
        spans = reinterpret_cast<uint4 *>(shared + QUERY_ROWS + QUERIES * query_row);
        before = reinterpret_cast<u64 *>(spans + a.rows);
    }

    __device__ __forceinline__ Together together(u32 row) const {
        return Together(spans + row, min(rows, (row / most + 1) * most) - row, a.window);
    }
    __device__ __forceinline__ Blocks blocks_of(u32 row) const { return Blocks(Seen(spans[row], a.window), before[row] >> 32); }

    // Lists the units: the first of some rows that go together has those of all. A unit is a block, or all
    // blocks where none may be left for others to merge.
    __device__ __forceinline__ bool list_units() {
        const uint4 *all_spans = a.plan.spans + a.first_row;
        for (u32 r = thread; r < a.rows; r += ATTEND_THREADS) copy_async(shared_address(spans + r), all_spans + r);
        commit_copies();
        u32 count = __ldcg(a.plan.counts);
        if (count <= a.first_row) {
            // Shared memory is given up with nothing on its way there.
            wait_for_copies<0>();
            return false;
        }
        rows = min(count - a.first_row, a.rows);
        wait_for_copies<0>();
        __syncthreads();
        u32 each = (rows + ATTEND_THREADS - 1) / ATTEND_THREADS;
        u32 from = min(rows, thread * each), to = min(rows, from + each);
        u64 sum = 0, all;
        for (u32 r = from; r < to; r++) {
            bool leads = r % most == 0 || spans[r].x != spans[r - 1].x;
            u32 units = !leads ? 0 : a.parts ? together(r).blocks() : 1;
            u64 of_row = (u64)Blocks(Seen(spans[r], a.window), 0).count << 32 | units;
            before[r] = of_row, sum += of_row;
        }
        sum = sum_of_threads(sum, s.warp_sums, all);
        for (u32 r = from; r < to; r++) {
            u64 of_row = before[r];
            before[r] = sum, sum += of_row;
        }
        total = (u32)all;
        __syncthreads();
        return true;
    }

    // The slot of a thread's place among the steps `fill` of a block.
    __device__ __forceinline__ u32 slot_in(const Steps &steps, u32 block, u32 fill) const {
        u32 step = fill * ATTEND_STEPS + thread / ATTEND_STEP, place = thread % ATTEND_STEP;
        if (step >= steps.count) return NO_SLOT;
        if (step < steps.shared) {
            u32 position = block * ATTEND_BLOCK + step * ATTEND_STEP + place;
            return min(__ldcg(a.plan.tables + spans[row].x + min(position, taken.prefix - 1)), a.slots - 1);
        }
        uint4 span = spans[row + steps.row(step)];
        InBlock in(Seen(span, a.window), block);
        u32 first = steps.of_row(step) * ATTEND_STEP;
        return first < in.count ? slot_of(a.plan, span, in.first + min(first + place, in.count - 1), a.slots) : NO_SLOT;
    }

    // Copies columns of the keys or values of a warp's places, whose slots its lanes have.
    __device__ __forceinline__ void copy_rows(u32 to, const void *from, u32 slot, u32 chunk) const {
        constexpr u32 UNITS = WIDTH / 8, AT_ONCE = 32 / UNITS;
        u32 unit = lane % UNITS, column = chunk * WIDTH + unit * 8, stride = a.kv_heads * d;
        const u16 *source = static_cast<const u16 *>(from) + kv_head * d + column;
#pragma unroll
        for (u32 i = 0; i < 32; i += AT_ONCE) {
            u32 of = __shfl_sync(FULL, slot, i + lane / UNITS);
            u32 at = to + (warp * 32 + i) * ROW + (swizzled(lane / UNITS, ROW, unit) ^ i % 8 * 16);
            if (of == NO_SLOT) continue;
            if (D || column < d) copy_async(base + at, source + (size_t)of * stride);
            else *reinterpret_cast<uint4 *>(shared + at) = make_uint4(0, 0, 0, 0);
        }
    }
    __device__ __forceinline__ void copy_queries() const {
        u32 units = query_row / 16;
        for (u32 i = thread; i < QUERIES * units; i += ATTEND_THREADS) {
            u32 query = i / units, unit = i % units, at = QUERY_ROWS + swizzled(query, query_row, unit);
            u32 of_row = query / heads, of_head = query % heads;
            if (of_row < taken.count && of_head < cut_heads && (D || unit * 8 < d)) {
                const u16 *from = a.qkv.halves + (size_t)(a.first_row + row + of_row) * a.qkv.stride;
                copy_async(base + at, from + (head + of_head) * d + unit * 8);
            } else {
                *reinterpret_cast<uint4 *>(shared + at) = make_uint4(0, 0, 0, 0);
            }
        }
    }
    // Has keys or values of these steps there for all threads: the first ones are under way already.
    __device__ __forceinline__ void fetch(u32 to, const void *from, const Steps &steps, u32 block, u32 fill, u32 chunk) const {
        if (fill > 0 || chunk > 0) {
            __syncthreads();
            copy_rows(to, from, slot_in(steps, block, fill), chunk);
            commit_copies();
            wait_for_copies<0>();
        } else {
            wait_for_copies<1>();
        }
        __syncthreads();
    }

    // 16 rows by 16 columns as first factors, 16 keys, and 16 columns of values of 16 positions.
    __device__ __forceinline__ u32 tile(u32 at, u32 row, u32 row_bytes, u32 unit) const {
        return base + at + row * row_bytes + (swizzled(lane % 16, row_bytes, lane / 16) ^ unit * 16);
    }
    __device__ __forceinline__ uint4 query_tile(u32 t, u32 chunk, u32 step) const {
        return load_matrices(tile(QUERY_ROWS + chunk * ROW, t * 16, query_row, step * 2));
    }
    __device__ __forceinline__ uint4 weight_tile(u32 t, u32 step) const {
        return load_matrices(tile(WEIGHTS, t * 16, WEIGHT_ROW, step * 2));
    }
    __device__ __forceinline__ uint4 key_tile(u32 place, u32 step) const {
        return load_matrices(base + place * ROW + (swizzled(lane / 16 * 8 + lane % 8, ROW, lane / 8 % 2) ^ step * 32));
    }
    __device__ __forceinline__ uint4 value_tile(u32 place, u32 pair) const {
        return load_matrices_transposed(tile(VALUES, place, ROW, (warp * PAIRS + pair) * 2));
    }
    __device__ __forceinline__ bool ends(u32 chunk, u32 step) const { return !D && chunk * WIDTH + step * 16 >= d; }

    // Adds the products of queries of the first ACTIVE tiles with a warp's keys that rows share.
    template <int ACTIVE> __device__ __forceinline__ void multiply_keys(Scores &scores, const Steps &steps, u32 chunk) const {
        bool both = warp * 2 + 1 < steps.shared;
#pragma unroll
        for (u32 k = 0; k < WIDTH / 16; k++) {
            if (ends(chunk, k)) break;
            uint4 key = key_tile(warp * 32, k), next = key_tile(warp * 32 + 16, k);
            // A step that is each row's own begins with sums of zero.
            if (!both) next = make_uint4(0, 0, 0, 0);
#pragma unroll
            for (int t = 0; t < ACTIVE; t++) {
                uint4 query = query_tile(t, chunk, k);
                multiply(scores[t][0], query, key.x, key.y);
                multiply(scores[t][1], query, key.z, key.w);
                multiply(scores[t][2], query, next.x, next.y);
                multiply(scores[t][3], query, next.z, next.w);
            }
        }
    }
    // The total of the weights of a tile, one for each warp, is what a column of ones would give.
    __device__ __forceinline__ void total_weights(float (&ones)[4], u32 step) const {
        multiply(ones, weight_tile(warp % TILES, step), 0x3f803f80u, 0x3f803f80u);
    }
    // Adds the products of weights of the first ACTIVE tiles with the values of a step that rows share.
    template <int ACTIVE> __device__ __forceinline__ void multiply_values(Sums &sums, float (&ones)[4], u32 step) const {
        uint4 values[PAIRS];
#pragma unroll
        for (u32 p = 0; p < PAIRS; p++) values[p] = value_tile(step * ATTEND_STEP, p);
#pragma unroll
        for (int t = 0; t < ACTIVE; t++) {
            uint4 weights = weight_tile(t, step);
#pragma unroll
            for (u32 p = 0; p < PAIRS; p++) {
                multiply(sums[t][2 * p], weights, values[p].x, values[p].y);
                multiply(sums[t][2 * p + 1], weights, values[p].z, values[p].w);
            }
        }
        total_weights(ones, step);
    }
    template <int ACTIVE> __device__ __forceinline__ void multiply_values(Sums &sums, float (&ones)[4], const Steps &steps) const {
        if (steps.shared == ATTEND_STEPS) {
#pragma unroll
            for (u32 step = 0; step < ATTEND_STEPS; step++) multiply_values<ACTIVE>(sums, ones, step);
        } else {
#pragma unroll 1
            for (u32 step = 0; step < steps.shared; step++) multiply_values<ACTIVE>(sums, ones, step);
        }
    }

    // Calls `f` with the steps of a fill that are each row's own: where a step lies in shared memory, which
    // of the row's it is, and the row's first query.
    template <typename F> __device__ __forceinline__ void each_own_step(const Steps &steps, u32 block, u32 fill, F f) const {
        u32 end = min(steps.count, (fill + 1) * ATTEND_STEPS);
#pragma unroll 1
        for (u32 step = max(steps.shared, fill * ATTEND_STEPS); step < end; step++) {
            u32 of_rows = steps.row(step), of_row = steps.of_row(step);
            InBlock in(Seen(spans[row + of_rows], a.window), block);
            if (of_row * ATTEND_STEP < in.count) f(step % ATTEND_STEPS * ATTEND_STEP, of_row, of_rows * heads);
        }
    }
    // Whether a row whose queries begin at `first` has some in a tile, and which of a lane's two are.
    __device__ __forceinline__ bool in_tile(u32 t, u32 first, bool (&mine)[2]) const {
#pragma unroll
        for (u32 h = 0; h < 2; h++) mine[h] = t * 16 + h * 8 + octet - first < heads;
        return first < t * 16 + 16 && first + heads > t * 16;
    }
    __device__ __forceinline__ void multiply_own_keys(Scores &scores, const Steps &steps, u32 block, u32 fill, u32 chunk) const {
        each_own_step(steps, block, fill, [&](u32 place, u32 step, u32 first) {
            if (step / 2 != warp) return;
#pragma unroll 1
            for (u32 k = 0; k < WIDTH / 16; k++) {
                if (ends(chunk, k)) break;
                uint4 key = key_tile(place, k);
#pragma unroll
                for (u32 t = 0; t < TILES; t++) {
                    bool mine[2];
                    if (!in_tile(t, first, mine)) continue;
                    uint4 query = query_tile(t, chunk, k);
#pragma unroll
                    for (u32 i = 0; i < 4; i += 2) {
                        if (step % 2 != i / 2) continue;
                        multiply_where(mine, scores[t][i], query, key.x, key.y);
                        multiply_where(mine, scores[t][i + 1], query, key.z, key.w);
                    }
                }
            }
        });
    }
    __device__ __forceinline__ void multiply_own_values(Sums &sums, const Steps &steps, u32 block, u32 fill) const {
        each_own_step(steps, block, fill, [&](u32 place, u32 step, u32 first) {
            uint4 values[PAIRS];
#pragma unroll
            for (u32 p = 0; p < PAIRS; p++) values[p] = value_tile(place, p);
#pragma unroll
            for (u32 t = 0; t < TILES; t++) {
                bool mine[2];
                if (!in_tile(t, first, mine)) continue;
                uint4 weights = weight_tile(t, step);
#pragma unroll
                for (u32 p = 0; p < PAIRS; p++) {
                    multiply_where(mine, sums[t][2 * p], weights, values[p].x, values[p].y);
                    multiply_where(mine, sums[t][2 * p + 1], weights, values[p].z, values[p].w);
                }
            }
        });
    }
    // Calls `f` for the two queries that a lane has of each tile, where there are queries.
    template <typename F> __device__ __forceinline__ void each_query(F f) const {
#pragma unroll
        for (u32 t = 0; t < TILES; t++) {
            if (t > 0 && t * 16 >= queries) break;
#pragma unroll
            for (u32 h = 0; h < 2; h++) f(t, h, t * 16 + h * 8 + octet);
        }
    }
    // Calls `f` for each pair of columns that a lane has of sums.
    template <typename F> __device__ __forceinline__ void each_pair(u32 chunk, F f) const {
#pragma unroll
        for (u32 n = 0; n < 2 * PAIRS; n++) {
            u32 column = chunk * WIDTH + warp * PAIRS * 16 + n * 8 + quad * 2;
            if (D || column < d) f(n, column);
        }
    }

    // The largest score of a query. Of one that sees nothing it counts as 0, so that its weights are 0.
    __device__ __forceinline__ float largest_of(u32 query) const {
        float all = s.warp_largest[0][query];
#pragma unroll
        for (u32 w = 1; w < ATTEND_WARPS; w++) all = fmaxf(all, s.warp_largest[w][query]);
        return s.counts[query] > 0 ? all : 0.0f;
    }
    // Leaves out what a query does not see, and finds the largest of a warp's scores.
    __device__ __forceinline__ void find_largest(Scores &scores) const {
        each_query([&](u32 t, u32 h, u32 query) {
            u32 seen = s.counts[query];
            float largest = -INFINITY;
#pragma unroll
            for (u32 i = 0; i < 8; i++) {
                float &score = scores[t][i / 2][2 * h + i % 2];
                score = warp * 32 + i / 2 * 8 + quad * 2 + i % 2 < seen ? score * a.scale : -INFINITY;
                largest = fmaxf(largest, score);
            }
            largest = fold_max<4>(largest);
            if (quad == 0) s.warp_largest[warp][query] = largest;
        });
    }
    __device__ __forceinline__ void weigh(const Scores &scores) const {
        each_query([&](u32 t, u32 h, u32 query) {
            float largest = largest_of(query);
            u32 at = WEIGHTS + (t * 16 + h * 8) * WEIGHT_ROW + quad * 4, first = swizzled(octet, WEIGHT_ROW, warp * 4);
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                u32 even = halve(exponential(scores[t][i][2 * h] - largest));
                u32 odd = halve(exponential(scores[t][i][2 * h + 1] - largest));
                *reinterpret_cast<u32 *>(shared + at + (first ^ i * 16)) = odd << 16 | even;
            }
        });
    }

    // Merges the sums of a block with those of the blocks before it.
    __device__ __forceinline__ void merge_block(Sums &sums, float (&totals)[2], const Sums &of_block, const float (&ones)[4]) const {
        each_query([&](u32 t, u32 h, u32 query) {
            if (s.counts[query] == 0) return;
            float old = s.old[query], fresh = s.fresh[query];
            if (t == warp) totals[h] = fmaf(totals[h], old, ones[2 * h] * fresh);
#pragma unroll
            for (u32 n = 0; n < 2 * PAIRS; n++) {
#pragma unroll
                for (u32 r = 2 * h; r < 2 * h + 2; r++) sums[t][n][r] = fmaf(sums[t][n][r], old, of_block[t][n][r] * fresh);
            }
        });
    }
    // Leaves them for another thread block to merge.
    __device__ __forceinline__ void store_block(const Sums &of_block, const float (&ones)[4], u32 block, u32 chunk) const {
        each_query([&](u32 t, u32 h, u32 query) {
            if (s.counts[query] == 0) return;
            u32 of_row = query / heads, of_head = query % heads;
            Blocks blocks = blocks_of(row + of_row);
            size_t part = part_of(a, blocks, head + of_head) + block - blocks.first;
            each_pair(chunk, [&](u32 n, u32 column) {
                store_pair(a.parts + part * d + column, of_block[t][n][2 * h], of_block[t][n][2 * h + 1]);
            });
            if (t == warp && chunk == 0 && quad == 0) store_pair(a.stats + 2 * part, largest_of(query), ones[2 * h]);
        });
    }
    __device__ __forceinline__ void put_sums(const Sums &sums, const float (&totals)[2]) const {
#pragma unroll
        for (u32 h = 0; h < 2; h++) {
            if (quad == 0 && warp < TILES) s.inverses[warp * 16 + h * 8 + octet] = 1.0f / totals[h];
        }
        __syncthreads();
        each_query([&](u32 t, u32 h, u32 query) {
            u32 of_row = a.first_row + row + query / heads, of_head = query % heads, first = (head + of_head) * d;
            if (query >= queries || of_head >= cut_heads) return;
            float inverse = s.inverses[query];
            each_pair(0, [&](u32 n, u32 column) {
                put_pair(a.out, of_row, first + column, sums[t][n][2 * h] * inverse, sums[t][n][2 * h + 1] * inverse);
            });
        });
    }
    // The last thread block that is done with so many blocks of the rows and these heads merges all of them.
    __device__ __forceinline__ void merge_stored(u32 blocks) const {
        __threadfence();
        __syncthreads();
        if (thread == 0) {
            u32 *arrivals = a.arrivals + row * key_heads + key_head;
            s.last_one = atomicAdd(arrivals, blocks) + blocks == taken.blocks();
            if (s.last_one) *arrivals = 0;
        }
        __syncthreads();
        if (!s.last_one) return;
        __threadfence();
        for (u32 query = warp; query < queries; query += ATTEND_WARPS) {
            u32 of_row = row + query / heads;
            if (query % heads < cut_heads) merge<8>(a, blocks_of(of_row), a.first_row + of_row, head + query % heads);
        }
    }

    // Finds rows, heads and blocks of a unit and as many behind it as are of the same rows and heads, `limit`
    // at most. Where there is no room for their parts, the thread block with the first of the blocks takes all.
    __device__ __forceinline__ Range take(u32 unit, u32 limit) {
        u32 index = unit / key_heads, group = a.heads / a.kv_heads;
        // The last row whose units do not begin behind this one.
        row = 0;
        for (u32 end = rows; end - row > 1;) {
            u32 middle = (row + end) / 2;
            if ((u32)before[middle] <= index) row = middle; else end = middle;
        }
        taken = together(row), queries = taken.count * heads;
        u32 first = taken.first_block(), blocks = taken.blocks(), of_head = a.parts ? blocks : 1;
        u32 at = unit - (u32)before[row] * key_heads, from = at % of_head, count = min(limit, blocks - from);
        key_head = at / of_head, kv_head = key_head / cuts, head = kv_head * group + key_head % cuts * heads;
        cut_heads = min(heads, (kv_head + 1) * group - head);
        Blocks last = blocks_of(row + taken.count - 1);
        bool divided = a.parts && last.place + last.count <= a.room;
        if (!divided) count = D && from == 0 ? blocks : 0;
        merges = !a.places || blocks <= ATTEND_MERGED, whole = D && count == blocks && (merges || !divided);
        return {first + from, first + from + count};
    }

    // Attends to a unit and those behind it of the same rows and heads, `limit` at most; answers to how many.
    __device__ __forceinline__ u32 attend(u32 unit, u32 limit) {
        auto [block, end_block] = take(unit, limit);
        u32 count = end_block - block;
        if (count == 0) return min(limit, taken.first_block() + taken.blocks() - block);
        Steps steps(taken, block);
        u32 slot = slot_in(steps, block, 0);
        // What was read so far is of the plan.
        wait_for_inputs();
        if (a.places && key_head == 0 && block == taken.first_block() && thread < taken.count)
            a.places[row + thread] = whole || merges ? NOWHERE : blocks_of(row + thread).place;
        copy_queries();
        copy_rows(0, a.keys, slot, 0);
        commit_copies();
        copy_rows(VALUES, a.values, slot, 0);
        commit_copies();

        // What concerns one query is kept by one thread.
        Seen own_seen(spans[row + min(thread / heads, taken.count - 1)], a.window);
        bool one_tile = TILES == 1 || queries <= 16, own_query = thread < queries && thread % heads < cut_heads;
        float own_largest = -INFINITY;
        Sums sums = {};
        float totals[2] = {};
        for (; block < end_block; block++) {
            bool more = block + 1 < end_block;
            Steps next_steps(taken, more ? block + 1 : block);
            slot = more ? slot_in(next_steps, block + 1, 0) : NO_SLOT;
            u32 seen = own_query ? InBlock(own_seen, block).count : 0;
            if (thread < QUERIES) s.counts[thread] = seen;

            Scores scores = {};
            for (u32 fill = 0; fill < steps.fills(); fill++) {
                for (u32 chunk = 0; chunk < chunks; chunk++) {
                    fetch(0, a.keys, steps, block, fill, chunk);
                    if (fill == 0 && warp * 2 < steps.shared) {
                        if (one_tile) multiply_keys<1>(scores, steps, chunk); else multiply_keys<TILES>(scores, steps, chunk);
                    }
                    multiply_own_keys(scores, steps, block, fill, chunk);
                }
            }
            find_largest(scores);
            __syncthreads();
            copy_rows(0, a.keys, slot, 0);
            commit_copies();
            if (seen > 0) {
                float next = largest_of(thread), both = next > own_largest ? next : own_largest;
                s.old[thread] = exponential(own_largest - both), s.fresh[thread] = exponential(next - both);
                own_largest = both;
            }
            weigh(scores);

            for (u32 chunk = 0; chunk < chunks; chunk++) {
                Sums of_block = {};
                float ones[4] = {};
                for (u32 fill = 0; fill < steps.fills(); fill++) {
                    fetch(VALUES, a.values, steps, block, fill, chunk);
                    if (fill == 0) {
                        if (one_tile) multiply_values<1>(of_block, ones, steps); else multiply_values<TILES>(of_block, ones, steps);
                        for (u32 step = steps.shared; step < steps.all_of_row; step++) total_weights(ones, step);
                    }
                    multiply_own_values(of_block, steps, block, fill);
                }
                if (whole) merge_block(sums, totals, of_block, ones); else store_block(of_block, ones, block, chunk);
            }
            __syncthreads();
            copy_rows(VALUES, a.values, slot, 0);
            commit_copies();
            steps = next_steps;
        }
        wait_for_copies<0>();
        if (whole) put_sums(sums, totals); else if (merges) merge_stored(count);
        return count;
    }
};

template <int D, int TILES> __device__ __forceinline__ void attend(const AttendArgs &a) {
    __shared__ typename Attending<D, TILES>::Shared shared;
    let_next_begin();
    Attending<D, TILES> attending(a, shared);
    u32 units = attending.list_units() ? attending.total * attending.key_heads : 0;
    // Whole ones of later rows may take longer, so thread blocks take turns with those.
    u32 unit = a.parts ? (u32)((u64)units * blockIdx.x / gridDim.x) : blockIdx.x;
    u32 end = a.parts ? (u32)((u64)units * (blockIdx.x + 1) / gridDim.x) : units;
    while (unit < end) {
        __syncthreads();
        u32 count = attending.attend(unit, end - unit);
        unit += a.parts ? count : gridDim.x;
    }
    // Those without a unit wait, too.
    wait_for_inputs();
}

// 16 queries at a time, or 64.
#define ATTEND(NAME, D, TILES, BLOCKS) \
    extern "C" __global__ void __launch_bounds__(ATTEND_THREADS, BLOCKS) NAME(const __grid_constant__ AttendArgs a) { attend<D, TILES>(a); }
ATTEND(attend_tensor, 0, 1, 3)
ATTEND(attend_tensor_64, 64, 1, 3)
ATTEND(attend_tensor_128, 128, 1, 3)
ATTEND(attend_tensor_64_many, 64, 4, 2)
ATTEND(attend_tensor_128_many, 128, 4, 2)

// Merges the blocks of the heads of a row that has so many, one head a warp.
extern "C" __global__ void __launch_bounds__(ATTEND_THREADS) attend_merge(const __grid_constant__ AttendArgs a) {
    let_next_begin();
    u32 head = blockIdx.x * ATTEND_WARPS + threadIdx.x / 32, row = a.first_row + blockIdx.y;
    bool there = row < __ldcg(a.plan.counts) && head < a.heads;
    Seen seen(__ldcg(a.plan.spans + row), a.window);
    wait_for_inputs();
    Blocks blocks(seen, __ldcg(a.places + blockIdx.y));
    if (there && blocks.place < a.room && blocks.count <= a.room - blocks.place) merge<16>(a, blocks, row, head);
}
