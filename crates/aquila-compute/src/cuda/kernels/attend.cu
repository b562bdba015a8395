// Attention by tensor cores over the slots that each row sees.
//
// Positions come in blocks of ATTEND_BLOCK, aligned to absolute position, each with a softmax of its
// own; of the first block that a window reaches into, only the positions within it count, and the
// blocks before it are skipped. A row's blocks are merged in order: by the thread block that has
// computed all of them, by the last one that is done with one of them or, of long contexts, by a second
// kernel. So neither other rows nor the number of thread blocks changes a bit.
//
// A thread block takes consecutive rows of one start in the block tables together, so that a tile of a
// tensor core holds the query heads of several rows, and keys and values of their common prefix are
// read once. Steps that reach into a tail are each row's own.

#include "tensor.cuh"

#define ATTEND_BLOCK 128
#define ATTEND_STEP 16        // positions of a step
#define ATTEND_STEPS 8        // steps of a block, as many as keys or values in shared memory have room for
#define ATTEND_THREADS 128
#define ATTEND_WARPS 4
#define NO_SLOT 0xffffffffu

// The positions of a block that a row sees.
struct InBlock {
    u32 first, count;
    __device__ __forceinline__ InBlock(const Seen &seen, u32 block) {
        first = max(block * ATTEND_BLOCK, seen.first);
        u32 end = min((block + 1) * ATTEND_BLOCK, seen.end);
        count = end > first ? end - first : 0;
    }
};

// Consecutive rows of one start, `most` at most.
struct Together {
    u32 count = 0;
    u32 first = ~0u, last_first = 0, end = 0;  // where what they see begins first and last, and ends
    u32 prefix = 0, common = ~0u;              // their longest prefix; the shortest of a row with a tail
    __device__ __forceinline__ Together(const uint4 *spans, u32 most, u32 window) {
        do {
            uint4 span = spans[count];
            Seen seen(span, window);
            first = min(first, seen.first), last_first = max(last_first, seen.first), end = max(end, seen.end);
            prefix = max(prefix, span.y);
            if (span.w > 0) common = min(common, span.y);
        } while (++count < most && spans[count].x == spans[0].x);
    }
    __device__ __forceinline__ u32 first_block() const { return first / ATTEND_BLOCK; }
    __device__ __forceinline__ u32 end_block() const { return (end + ATTEND_BLOCK - 1) / ATTEND_BLOCK; }
};

// The steps of a block: those that the rows share, then those that are each row's own, row by row.
// Shared memory takes ATTEND_STEPS of them at a time.
struct Steps {
    u32 shared, all_of_row, own, count;
    __device__ __forceinline__ Steps(const Together &rows, u32 block) {
        u32 start = block * ATTEND_BLOCK, first = max(start, rows.first), end = min(start + ATTEND_BLOCK, rows.end);
        all_of_row = (end - first + ATTEND_STEP - 1) / ATTEND_STEP;
        // Where a row's window begins within the block, its first position takes the first place.
        bool aligned = rows.last_first <= start && rows.common > start;
        shared = aligned ? min(all_of_row, (rows.common - start) / ATTEND_STEP) : 0;
        own = all_of_row - shared;
        count = shared + rows.count * own;
    }
    __device__ __forceinline__ u32 fills() const { return (count + ATTEND_STEPS - 1) / ATTEND_STEPS; }
    // The row, and the step of the block, of a step that is not shared.
    __device__ __forceinline__ u32 row(u32 step) const { return (step - shared) / own; }
    __device__ __forceinline__ u32 of_row(u32 step) const { return shared + (step - shared) % own; }
};

// Where the 16 bytes `unit` of a row lie in shared memory: those of eight rows are in all banks.
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
__device__ __forceinline__ u32 sum_of_threads(u32 x, u32 *warp_sums, u32 &total) {
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, sum = x;
#pragma unroll
    for (u32 step = 1; step < 32; step *= 2) {
        u32 other = __shfl_sync(FULL, sum, lane - step);
        if (lane >= step) sum += other;
    }
    if (lane == 31) warp_sums[warp] = sum;
    __syncthreads();
    u32 before = sum - x;
    total = 0;
    for (u32 w = 0; w < ATTEND_WARPS; w++) {
        if (w < warp) before += warp_sums[w];
        total += warp_sums[w];
    }
    return before;
}

// Where the part of a block of a head of a row lies.
__device__ __forceinline__ size_t part_of(const AttendArgs &a, u32 row, u32 head, u32 block) {
    return ((size_t)(row - a.first_row) * a.heads + head) * a.blocks + block;
}

// A warp merges the blocks of one head of a row, in order, AT_ONCE of which it has under way together.
template <int AT_ONCE> __device__ __forceinline__ void merge(const AttendArgs &a, u32 row, u32 head) {
    u32 lane = threadIdx.x % 32, d = a.head_dim;
    Seen seen(a.plan.spans[row], a.window);
    u32 blocks = (seen.end + ATTEND_BLOCK - 1) / ATTEND_BLOCK - seen.first / ATTEND_BLOCK;
    size_t part = part_of(a, row, head, 0);
    for (u32 from = 0; from < d; from += 128) {
        u32 column = from + lane * 4;
        float largest = -INFINITY, total = 0.0f, sums[4] = {};
        for (u32 at = 0; at < blocks; at += AT_ONCE) {
            float4 parts[AT_ONCE];
#pragma unroll
            for (u32 b = 0; b < AT_ONCE; b++) {
                if (at + b < blocks && column < d) parts[b] = __ldcg(reinterpret_cast<const float4 *>(a.parts + (part + at + b) * d + column));
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
                float scale = __shfl_sync(FULL, old, b), of_part = __shfl_sync(FULL, fresh, b), next = __shfl_sync(FULL, own_total, b);
                if (at + b >= blocks) continue;
                total = fmaf(total, scale, next);
                sums[0] = fmaf(sums[0], scale, parts[b].x * of_part), sums[1] = fmaf(sums[1], scale, parts[b].y * of_part);
                sums[2] = fmaf(sums[2], scale, parts[b].z * of_part), sums[3] = fmaf(sums[3], scale, parts[b].w * of_part);
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
// The work is cut into items: some rows and a key head, with all their blocks or with one. Thread blocks
// take every gridDim.x-th. Warps first divide the positions, then the columns of values; keys of the next block
// arrive while values are multiplied, and values while keys are.
template <int D, int TILES> __device__ __forceinline__ void attend(const AttendArgs &a) {
    constexpr u32 QUERIES = 16 * TILES, WIDTH = D ? D : 128, ROW = 2 * WIDTH, PAIRS = WIDTH / 64;
    constexpr u32 STORE = ATTEND_BLOCK * ROW, WEIGHT_ROW = 2 * ATTEND_BLOCK;
    __shared__ u32 warp_sums[2][ATTEND_WARPS], counts[QUERIES], last_one;
    __shared__ float warp_largest[ATTEND_WARPS][QUERIES], scales[2][QUERIES], inverses[QUERIES];
    begin();
    u32 thread = threadIdx.x, warp = thread / 32, lane = thread % 32, quad = lane % 4, octet = lane / 4;
    u32 d = D ? D : a.head_dim, chunks = D ? 1 : (d + WIDTH - 1) / WIDTH, query_row = chunks * ROW;
    u32 group = a.heads / a.kv_heads, cuts = (group + QUERIES - 1) / QUERIES, heads = (group + cuts - 1) / cuts;
    u32 most = QUERIES / heads, key_heads = a.kv_heads * cuts;

    u8 *shared = dynamic_shared();
    u32 keys_at = shared_address(shared), values_at = keys_at + STORE, weights_at = values_at + STORE;
    u32 queries_at = weights_at + QUERIES * WEIGHT_ROW;
    uint4 *spans = reinterpret_cast<uint4 *>(shared + 2 * STORE + QUERIES * (WEIGHT_ROW + query_row));
    u32 *first_items = reinterpret_cast<u32 *>(spans + a.rows);  // of the rows, without key heads

    // The items. The first of some rows that go together has those of all.
    for (u32 r = thread; r < a.rows; r += ATTEND_THREADS) copy_async(shared_address(spans + r), a.plan.spans + a.first_row + r);
    commit_copies();
    u32 rows = a.plan.counts[0];
    if (rows <= a.first_row) return;
    rows = min(rows - a.first_row, a.rows);
    wait_for_copies<0>();
    __syncthreads();
    auto together = [&](u32 row) { return Together(spans + row, min(rows, (row / most + 1) * most) - row, a.window); };
    u32 each = (rows + ATTEND_THREADS - 1) / ATTEND_THREADS, from = min(rows, thread * each), to = min(rows, from + each);
    u32 blocks = 0, items = 0, total;
    for (u32 r = from; r < to; r++) {
        bool leads = r % most == 0 || spans[r].x != spans[r - 1].x;
        u32 of_rows = 0;
        if (leads) {
            Together t = together(r);
            of_rows = t.end_block() - t.first_block();
        }
        first_items[r] = of_rows, blocks += of_rows;
    }
    sum_of_threads(blocks, warp_sums[0], total);
    // Blocks stay together where thread blocks have about as many to do anyway: merging them takes as
    // long as two.
    u32 fair = (total * key_heads + gridDim.x - 1) / gridDim.x;
    for (u32 r = from; r < to; r++) {
        u32 of_rows = first_items[r];
        bool whole = !a.parts || (a.arrivals && (of_rows == 1 || (D && of_rows <= 2 * fair + 1)));
        first_items[r] = items;
        items += whole && of_rows > 1 ? 1 : of_rows;
    }
    u32 before = sum_of_threads(items, warp_sums[1], total);
    for (u32 r = from; r < to; r++) first_items[r] += before;
    if (thread == 0) first_items[rows] = total;
    __syncthreads();

    for (u32 item = blockIdx.x; item < total * key_heads; item += gridDim.x) {
        // The last row whose items do not begin behind this one.
        u32 index = item / key_heads, key_head = item % key_heads, row = 0;
        for (u32 end = rows; end - row > 1;) {
            u32 middle = (row + end) / 2;
            if (first_items[middle] <= index) row = middle; else end = middle;
        }
        Together taken = together(row);
        u32 block = taken.first_block(), end_block = taken.end_block(), blocks = end_block - block;
        u32 parts = first_items[row + 1] - first_items[row];
        bool whole = parts == 1 && (blocks > 1 || a.arrivals || !a.parts);
        if (!whole) block += index - first_items[row], end_block = block + 1;
        u32 kv_head = key_head / cuts, head = kv_head * group + key_head % cuts * heads, cut_heads = min(heads, (kv_head + 1) * group - head);
        u32 queries = taken.count * heads;
        // A thread keeps what concerns one query.
        u32 own_row = row + min(thread / heads, taken.count - 1);
        Seen own_seen(spans[own_row], a.window);
        float own_largest = -INFINITY;

        // The slot of a thread's place among the steps `fill` of a block.
        auto slot_in = [&](const Steps &steps, u32 block, u32 fill) {
            u32 step = fill * ATTEND_STEPS + thread / ATTEND_STEP, place = thread % ATTEND_STEP;
            if (step >= steps.count) return NO_SLOT;
            if (step < steps.shared) {
                u32 position = block * ATTEND_BLOCK + step * ATTEND_STEP + place;
                return min(a.plan.tables[spans[row].x + min(position, taken.prefix - 1)], a.slots - 1);
            }
            uint4 span = spans[row + steps.row(step)];
            InBlock in(Seen(span, a.window), block);
            u32 first = steps.of_row(step) * ATTEND_STEP;
            return first < in.count ? slot_of(a.plan, span, in.first + min(first + place, in.count - 1), a.slots) : NO_SLOT;
        };
        // Copies columns of the keys or values of a warp's places, whose slots its lanes have.
        auto copy_rows = [&](u32 to, const void *from, u32 slot, u32 chunk) {
            constexpr u32 UNITS = WIDTH / 8, TOGETHER = 32 / UNITS;
            u32 unit = lane % UNITS, column = chunk * WIDTH + unit * 8;
            const u16 *source = static_cast<const u16 *>(from) + (size_t)kv_head * d + column;
#pragma unroll
            for (u32 i = 0; i < 32; i += TOGETHER) {
                u32 place = i + lane / UNITS, of = __shfl_sync(FULL, slot, place), at = to + swizzled(warp * 32 + place, ROW, unit);
                if (of == NO_SLOT) continue;
                if (D || column < d) copy_async(at, source + (size_t)of * a.kv_heads * d);
                else *reinterpret_cast<uint4 *>(shared + (at - keys_at)) = make_uint4(0, 0, 0, 0);
            }
        };
        // Four matrices at 16 rows and 16 columns, as first factors or as values of a step.
        auto at_tile = [&](u32 from, u32 row, u32 row_bytes, u32 unit) { return from + swizzled(row + lane % 16, row_bytes, unit + lane / 16); };
        auto query_tile = [&](int t, u32 chunk, u32 step) { return load_matrices(at_tile(queries_at, t * 16, query_row, chunk * (WIDTH / 8) + step * 2)); };
        auto weight_tile = [&](int t, u32 step) { return load_matrices(at_tile(weights_at, t * 16, WEIGHT_ROW, step * 2)); };
        auto key_tile = [&](u32 place, u32 step) {
            return load_matrices(keys_at + swizzled(place + lane / 16 * 8 + lane % 8, ROW, step * 2 + lane / 8 % 2));
        };
        auto value_tile = [&](u32 place, u32 pair) { return load_matrices_transposed(at_tile(values_at, place, ROW, warp * PAIRS * 2 + pair * 2)); };

        // The queries, and the first keys and values.
        u32 units = query_row / 16;
        for (u32 i = thread; i < QUERIES * units; i += ATTEND_THREADS) {
            u32 query = i / units, unit = i % units, at = queries_at + swizzled(query, query_row, unit);
            u32 of_row = query / heads, of_head = query % heads;
            if (of_row < taken.count && of_head < cut_heads && (D || unit * 8 < d)) {
                copy_async(at, a.qkv.halves + (size_t)(a.first_row + row + of_row) * a.qkv.stride + (size_t)(head + of_head) * d + unit * 8);
            } else {
                *reinterpret_cast<uint4 *>(shared + (at - keys_at)) = make_uint4(0, 0, 0, 0);
            }
        }
        Steps steps(taken, block);
        u32 slot = slot_in(steps, block, 0);
        copy_rows(keys_at, a.keys, slot, 0);
        commit_copies();
        copy_rows(values_at, a.values, slot, 0);
        commit_copies();

        float sums[TILES][2 * PAIRS][4] = {}, totals[2] = {};
        for (; block < end_block; block++) {
            bool more = block + 1 < end_block;
            Steps next_steps(taken, more ? block + 1 : block);
            if (more) slot = slot_in(next_steps, block + 1, 0);
            InBlock own_in(own_seen, block);
            if (thread < QUERIES) counts[thread] = thread < queries ? own_in.count : 0;

            // Scores of 32 positions per warp, as 16 queries by four times eight positions.
            float scores[TILES][4][4] = {};
            for (u32 fill = 0; fill < steps.fills(); fill++) {
                u32 end = min(steps.count, (fill + 1) * ATTEND_STEPS);
                for (u32 chunk = 0; chunk < chunks; chunk++) {
                    if (fill > 0 || chunk > 0) {
                        __syncthreads();
                        copy_rows(keys_at, a.keys, slot_in(steps, block, fill), chunk);
                        commit_copies();
                        wait_for_copies<0>();
                    } else {
                        wait_for_copies<1>();
                    }
                    __syncthreads();
                    if (fill == 0 && warp * 2 < steps.shared) {
                        bool both = warp * 2 + 1 < steps.shared;
#pragma unroll
                        for (u32 k = 0; k < WIDTH / 16; k++) {
                            if (!D && chunk * WIDTH + k * 16 >= d) break;
                            uint4 key[2] = {key_tile(warp * 32, k), key_tile(warp * 32 + 16, k)};
#pragma unroll
                            for (int t = 0; t < TILES; t++) {
                                if (t * 16 >= queries) break;
                                uint4 query = query_tile(t, chunk, k);
                                multiply(scores[t][0], query, key[0].x, key[0].y);
                                multiply(scores[t][1], query, key[0].z, key[0].w);
                                if (!both) continue;
                                multiply(scores[t][2], query, key[1].x, key[1].y);
                                multiply(scores[t][3], query, key[1].z, key[1].w);
                            }
                        }
                    }
                    for (u32 step = max(steps.shared, fill * ATTEND_STEPS); step < end; step++) {
                        u32 of_rows = steps.row(step), place = steps.of_row(step), first = of_rows * heads;
                        if (place / 2 != warp || place * ATTEND_STEP >= InBlock(Seen(spans[row + of_rows], a.window), block).count) continue;
                        for (u32 k = 0; k < WIDTH / 16; k++) {
                            if (!D && chunk * WIDTH + k * 16 >= d) break;
                            uint4 key = key_tile(step % ATTEND_STEPS * ATTEND_STEP, k);
#pragma unroll
                            for (int t = 0; t < TILES; t++) {
                                if (first >= t * 16 + 16 || first + heads <= t * 16) continue;
                                bool mine[2] = {t * 16 + octet - first < heads, t * 16 + octet + 8 - first < heads};
                                uint4 query = query_tile(t, chunk, k);
#pragma unroll
                                for (int i = 0; i < 4; i += 2) {
                                    if (place % 2 != i / 2) continue;
                                    multiply_where(mine, scores[t][i], query, key.x, key.y);
                                    multiply_where(mine, scores[t][i + 1], query, key.z, key.w);
                                }
                            }
                        }
                    }
                }
            }
            float largest[TILES][2];
#pragma unroll
            for (int t = 0; t < TILES; t++) {
                if (t * 16 >= queries) break;
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    u32 query = t * 16 + h * 8 + octet, seen = counts[query];
                    largest[t][h] = -INFINITY;
#pragma unroll
                    for (int i = 0; i < 8; i++) {
                        float &score = scores[t][i / 2][2 * h + i % 2];
                        score = warp * 32 + i / 2 * 8 + quad * 2 + i % 2 < seen ? score * a.scale : -INFINITY;
                        largest[t][h] = fmaxf(largest[t][h], score);
                    }
                    largest[t][h] = fold_max<4>(largest[t][h]);
                    if (quad == 0) warp_largest[warp][query] = largest[t][h];
                }
            }
            __syncthreads();
            if (more) copy_rows(keys_at, a.keys, slot, 0);
            commit_copies();

            // The largest score of a query that sees nothing here counts as 0, so that its weights are.
            auto largest_of = [&](u32 query) {
                float all = warp_largest[0][query];
#pragma unroll
                for (int w = 1; w < ATTEND_WARPS; w++) all = fmaxf(all, warp_largest[w][query]);
                return counts[query] > 0 ? all : 0.0f;
            };
            if (thread < QUERIES && own_in.count > 0) {
                float next = largest_of(thread), both = next > own_largest ? next : own_largest;
                scales[0][thread] = exponential(own_largest - both), scales[1][thread] = exponential(next - both);
                own_largest = both;
            }
#pragma unroll
            for (int t = 0; t < TILES; t++) {
                if (t * 16 >= queries) break;
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    u32 query = t * 16 + h * 8 + octet;
                    largest[t][h] = largest_of(query);
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        u32 even = halve(exponential(scores[t][i][2 * h] - largest[t][h]));
                        u32 odd = halve(exponential(scores[t][i][2 * h + 1] - largest[t][h]));
                        u32 at = weights_at + swizzled(query, WEIGHT_ROW, warp * 4 + i) + quad * 4;
                        *reinterpret_cast<u32 *>(shared + (at - keys_at)) = odd << 16 | even;
                    }
                }
            }

            // Values: a warp takes a quarter of the columns.
            for (u32 chunk = 0; chunk < chunks; chunk++) {
                float of_block[TILES][2 * PAIRS][4] = {}, ones[4] = {};
                for (u32 fill = 0; fill < steps.fills(); fill++) {
                    u32 end = min(steps.count, (fill + 1) * ATTEND_STEPS);
                    if (fill > 0 || chunk > 0) {
                        __syncthreads();
                        copy_rows(values_at, a.values, slot_in(steps, block, fill), chunk);
                        commit_copies();
                        wait_for_copies<0>();
                    } else {
                        wait_for_copies<1>();
                    }
                    __syncthreads();
                    // The total of the weights is what a column of ones would give.
                    auto add_ones = [&](int t, const uint4 &weights) {
                        if ((u32)t == warp) multiply(ones, weights, 0x3f803f80u, 0x3f803f80u);
                    };
                    if (fill == 0) {
#pragma unroll
                        for (u32 step = 0; step < ATTEND_STEPS; step++) {
                            if (step >= steps.shared) break;
                            uint4 values[PAIRS];
#pragma unroll
                            for (u32 p = 0; p < PAIRS; p++) values[p] = value_tile(step * ATTEND_STEP, p);
#pragma unroll
                            for (int t = 0; t < TILES; t++) {
                                if (t * 16 >= queries) break;
                                uint4 weights = weight_tile(t, step);
#pragma unroll
                                for (u32 p = 0; p < PAIRS; p++) {
                                    multiply(of_block[t][2 * p], weights, values[p].x, values[p].y);
                                    multiply(of_block[t][2 * p + 1], weights, values[p].z, values[p].w);
                                }
                                add_ones(t, weights);
                            }
                        }
                        for (u32 step = steps.shared; step < steps.all_of_row; step++) {
#pragma unroll
                            for (int t = 0; t < TILES; t++) {
                                if (t * 16 < queries) add_ones(t, weight_tile(t, step));
                            }
                        }
                    }
                    for (u32 step = max(steps.shared, fill * ATTEND_STEPS); step < end; step++) {
                        u32 of_rows = steps.row(step), place = steps.of_row(step), first = of_rows * heads;
                        if (place * ATTEND_STEP >= InBlock(Seen(spans[row + of_rows], a.window), block).count) continue;
                        uint4 values[PAIRS];
#pragma unroll
                        for (u32 p = 0; p < PAIRS; p++) values[p] = value_tile(step % ATTEND_STEPS * ATTEND_STEP, p);
#pragma unroll
                        for (int t = 0; t < TILES; t++) {
                            if (first >= t * 16 + 16 || first + heads <= t * 16) continue;
                            bool mine[2] = {t * 16 + octet - first < heads, t * 16 + octet + 8 - first < heads};
                            uint4 weights = weight_tile(t, place);
#pragma unroll
                            for (u32 p = 0; p < PAIRS; p++) {
                                multiply_where(mine, of_block[t][2 * p], weights, values[p].x, values[p].y);
                                multiply_where(mine, of_block[t][2 * p + 1], weights, values[p].z, values[p].w);
                            }
                        }
                    }
                }

                // What came out is merged with what the blocks before gave, or left for others to merge.
#pragma unroll
                for (int t = 0; t < TILES; t++) {
#pragma unroll
                    for (int h = 0; h < 2; h++) {
                        u32 query = t * 16 + h * 8 + octet, of_row = query / heads, of_head = query % heads;
                        if (counts[query] == 0 || of_head >= cut_heads) continue;
                        if (whole) {
                            float old = scales[0][query], fresh = scales[1][query];
                            if ((u32)t == warp && chunk == 0) totals[h] = fmaf(totals[h], old, ones[2 * h] * fresh);
#pragma unroll
                            for (u32 n = 0; n < 2 * PAIRS; n++) {
#pragma unroll
                                for (int r = 2 * h; r < 2 * h + 2; r++) sums[t][n][r] = fmaf(D ? sums[t][n][r] : 0.0f, old, of_block[t][n][r] * fresh);
                            }
                        } else {
                            u32 from = Seen(spans[row + of_row], a.window).first / ATTEND_BLOCK;
                            size_t part = part_of(a, a.first_row + row + of_row, head + of_head, block - from);
#pragma unroll
                            for (u32 n = 0; n < 2 * PAIRS; n++) {
                                u32 column = chunk * WIDTH + warp * PAIRS * 16 + n * 8 + quad * 2;
                                if (D || column < d) store_pair(a.parts + part * d + column, of_block[t][n][2 * h], of_block[t][n][2 * h + 1]);
                            }
                            if ((u32)t == warp && chunk == 0 && quad == 0) store_pair(a.stats + 2 * part, largest[t][h], ones[2 * h]);
                        }
                    }
                }
                __syncthreads();
                if (chunk + 1 == chunks && more) copy_rows(values_at, a.values, slot, 0);
                if (chunk + 1 == chunks) commit_copies();
                if (!whole || more) continue;

                // All blocks are merged.
#pragma unroll
                for (int t = 0; t < TILES; t++) {
                    if ((u32)t == warp && chunk == 0 && quad == 0) inverses[t * 16 + octet] = 1.0f / totals[0], inverses[t * 16 + 8 + octet] = 1.0f / totals[1];
                }
                __syncthreads();
#pragma unroll
                for (int t = 0; t < TILES; t++) {
#pragma unroll
                    for (int h = 0; h < 2; h++) {
                        u32 query = t * 16 + h * 8 + octet, of_row = query / heads, of_head = query % heads;
                        if (query >= queries || of_head >= cut_heads) continue;
                        float inverse = inverses[query];
#pragma unroll
                        for (u32 n = 0; n < 2 * PAIRS; n++) {
                            u32 column = chunk * WIDTH + warp * PAIRS * 16 + n * 8 + quad * 2;
                            if (!D && column >= d) continue;
                            put_pair(a.out, a.first_row + row + of_row, (head + of_head) * d + column, sums[t][n][2 * h] * inverse, sums[t][n][2 * h + 1] * inverse);
                        }
                    }
                }
            }
            steps = next_steps;
        }
        wait_for_copies<0>();
        if (whole || !a.arrivals) {
            __syncthreads();
            continue;
        }

        // The last thread block that is done with the rows and these heads merges their blocks.
        __threadfence();
        __syncthreads();
        if (thread == 0) {
            u32 *arrivals = a.arrivals + row * key_heads + key_head;
            last_one = atomicAdd(arrivals, 1) + 1 == blocks;
            if (last_one) *arrivals = 0;
        }
        __syncthreads();
        if (!last_one) continue;
        __threadfence();
        for (u32 query = warp; query < queries; query += ATTEND_WARPS) {
            if (query % heads < cut_heads) merge<8>(a, a.first_row + row + query / heads, head + query % heads);
        }
    }
}

// 16 queries at a time, or 64.
#define ATTEND(NAME, D, TILES, BLOCKS) \
    extern "C" __global__ void __launch_bounds__(ATTEND_THREADS, BLOCKS) NAME(const __grid_constant__ AttendArgs a) { attend<D, TILES>(a); }
ATTEND(attend_tensor, 0, 1, 3)
ATTEND(attend_tensor_64, 64, 1, 3)
ATTEND(attend_tensor_128, 128, 1, 3)
ATTEND(attend_tensor_64_many, 64, 4, 2)
ATTEND(attend_tensor_128_many, 128, 4, 2)

// Merges the blocks of the heads of a row, one head a warp.
extern "C" __global__ void __launch_bounds__(ATTEND_THREADS) attend_merge(const __grid_constant__ AttendArgs a) {
    begin();
    u32 head = blockIdx.x * ATTEND_WARPS + threadIdx.x / 32, row = a.first_row + blockIdx.y;
    if (row < a.plan.counts[0] && head < a.heads) merge<32>(a, row, head);
}
