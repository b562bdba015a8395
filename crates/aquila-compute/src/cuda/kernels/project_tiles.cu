// Projections of more than 16 rows in tiles that the thread blocks of a cluster share, with the sums of
// `project_skinny.cu`. Nothing chooses it yet: `cuda_check` compares and times it.
//
// A thread block makes 128 outputs of ROWS rows: two warpgroups multiply, 64 outputs each, and one thread
// fetches. Of a cluster, SHARE_WEIGHTS thread blocks have the same outputs of other rows, and SHARE_ROWS
// other outputs of the same rows. Each fetches its part of what it shares, and the copy engine writes
// that to all who share it.
//
// A cluster makes every so manieth tile, so that those which read the same weights are made at the same
// time. Of what is left then, which would keep some clusters busy alone, the slices are divided evenly
// among all (as in a stream-K product). A slice is one chain of steps; slices are added in order. Of a
// tile whose slices are divided, each thread block leaves pieces in memory: a slice, or what it makes of a
// group from the group's first slice on. The last one to leave a piece of a tile adds them, in order.

#include "tensor.cuh"

#if __CUDA_ARCH__ >= 900

#define TILES_WEIGHTS 8   // tiles of 16 outputs, four for each warpgroup
#define TILES_BLOCKS 2    // blocks of 32 inputs of a stage
#define TILES_STEPS (2 * TILES_BLOCKS)
#define TILES_ROW_BYTES (TILES_BLOCKS * 64)
#define TILES_STAGE_WEIGHTS (TILES_WEIGHTS * TILES_BLOCKS * BLOCK_BYTES)
#define TILES_MULTIPLIERS 256
#define TILES_FETCHERS 128  // a warpgroup, of which one warp fetches
#define TILES_MOST_STAGES 8
static_assert(TILES_ROW_BYTES == 128, "rows are swizzled by 128 bytes");

// The stages of a cluster, in order: up to TILES_BLOCKS blocks each, never of two slices. A slice has a
// block at least. What is divided comes first.
struct ClusterStages {
    const Cut &cut;
    u32 all, tile, slice;        // slices of a tile; the tile, and the slice of it
    u32 first_slice, end_slice;  // of the tile's, what this cluster has
    u32 left;                    // slices of divided tiles behind this one
    u32 next_whole, step, whole; // the next tile that is not divided, from it to the one behind it, and their end
    u32 group, group_blocks;     // where the group begins, and its blocks
    u32 block, end;              // of the slice: what comes next, and where it ends
    // The slices of divided tiles from `first` to `last`, then tiles from `next_whole` on.
    __device__ __forceinline__ ClusterStages(const Cut &cut, u32 first, u32 last, u32 next_whole, u32 step, u32 whole)
        : cut(cut), all(cut.groups * SLICES), left(last - first), next_whole(next_whole), step(step), whole(whole) {
        tile = whole + first / all, slice = first % all;
        if (left > 0) enter_part(); else enter_whole();
    }
    __device__ __forceinline__ void enter_part() {
        first_slice = slice, end_slice = min(all, slice + left);
        left -= end_slice - first_slice;
        enter_group(), enter_slice();
    }
    __device__ __forceinline__ void enter_whole() {
        tile = next_whole < whole ? next_whole : ~0u, next_whole += step;
        slice = first_slice = 0, end_slice = all;
        enter_group(), enter_slice();
    }
    __device__ __forceinline__ void enter_group() {
        u32 g = slice / SLICES;
        group = cut.group(g), group_blocks = cut.group(g + 1) - group;
    }
    __device__ __forceinline__ void enter_slice() {
        u32 s = slice % SLICES;
        block = group + s * group_blocks / SLICES, end = group + (s + 1) * group_blocks / SLICES;
    }
    __device__ __forceinline__ bool more() const { return tile != ~0u; }
    __device__ __forceinline__ u32 blocks() const { return min((u32)TILES_BLOCKS, end - block); }
    __device__ __forceinline__ bool ends_slice() const { return end - block <= TILES_BLOCKS; }
    __device__ __forceinline__ bool is_last() const { return ends_slice() && slice + 1 == end_slice && left == 0 && next_whole >= whole; }
    __device__ __forceinline__ void next() {
        if (!ends_slice()) {
            block += TILES_BLOCKS;
            return;
        }
        if (++slice == end_slice) {
            if (left == 0) return enter_whole();
            tile++, slice = 0;
            return enter_part();
        }
        if (slice % SLICES == 0) enter_group();
        enter_slice();
    }
};

// A place in the ring.
struct Place {
    u32 stage = 0, phase = 0;
    __device__ __forceinline__ void next(u32 stages) {
        if (++stage == stages) stage = 0, phase ^= 1;
    }
};

// GATED: the first warpgroup's tiles are gates, the second's their ups.
template <u32 ROWS, u32 SHARE_WEIGHTS, u32 SHARE_ROWS, bool GATED> struct TileProjection {
    static constexpr u32 CELLS = ROWS / 8, STAGE_ROWS = ROWS * TILES_ROW_BYTES, STAGE = STAGE_ROWS + TILES_STAGE_WEIGHTS;
    static constexpr u32 CLUSTER = SHARE_WEIGHTS * SHARE_ROWS, SHARING = SHARE_WEIGHTS + SHARE_ROWS - 1;
    static constexpr u32 PIECE = CELLS * TILES_MULTIPLIERS;  // values of four of a piece
    typedef float Sums[CELLS][4];

    const TilesArgs &args;
    const ProjectArgs &a;
    Cut cut;
    u32 thread, warp, lane, rank, cluster, clusters;
    u32 stages, full, empty;  // where they are
    float4 *held, *ups;       // a thread's sums of the groups before, and those of ups
    u32 *last_one;
    u32 all, half, of_unit, row_tiles;  // tiles of 16 outputs; clusters' tiles of rows
    u32 of_tile, whole, parts;          // slices of a tile; tiles that are not divided; parts of the others

    __device__ __forceinline__ TileProjection(const TilesArgs &args) : args(args), a(args.project), cut(args.project.inputs) {
        thread = threadIdx.x, warp = __shfl_sync(FULL, thread / 32, 0), lane = thread % 32;
        rank = blockIdx.x % CLUSTER, cluster = blockIdx.x / CLUSTER, clusters = gridDim.x / CLUSTER;
        u8 *shared = dynamic_shared();
        u32 start = shared_address(shared);
        stages = (start + 1023) / 1024 * 1024;
        full = stages + a.stages * STAGE, empty = full + TILES_MOST_STAGES * 8;
        u8 *behind = shared + (empty - start) + TILES_MOST_STAGES * 8;
        last_one = reinterpret_cast<u32 *>(behind);
        // Each warpgroup has a part. The sums of ups are in the second's, which is all that there is where
        // there is one group.
        held = reinterpret_cast<float4 *>(behind + 16) + thread % 128;
        ups = held + (cut.groups > 1 ? CELLS * 128 : 0);
        if (thread >= 128) held = ups;
        all = (a.outputs + 15) / 16, half = all / 2, of_unit = GATED ? TILES_WEIGHTS / 2 : TILES_WEIGHTS;
        row_tiles = (a.rows + SHARE_WEIGHTS * ROWS - 1) / (SHARE_WEIGHTS * ROWS);
        u32 units = ((GATED ? half : all) + of_unit - 1) / of_unit, tiles = row_tiles * ((units + SHARE_ROWS - 1) / SHARE_ROWS);
        of_tile = cut.groups * SLICES, whole = tiles / clusters * clusters;
        parts = (tiles - whole) * (of_tile / args.grain);
    }

    // Where a cluster's slices of divided tiles begin, and who has a slice of them.
    __device__ __forceinline__ u32 range(u32 cluster) const { return (u32)((u64)cluster * parts / clusters) * args.grain; }
    __device__ __forceinline__ u32 holder(u32 slice) const { return (u32)(((u64)(slice / args.grain + 1) * clusters - 1) / parts); }
    __device__ __forceinline__ ClusterStages stages_of_cluster() const {
        return ClusterStages(cut, range(cluster), range(cluster + 1), cluster, clusters, whole);
    }
    // Tiles are numbered row by row of tiles.
    __device__ __forceinline__ u32 first_row(u32 tile) const { return (tile % row_tiles * SHARE_WEIGHTS + rank % SHARE_WEIGHTS) * ROWS; }
    __device__ __forceinline__ u32 unit(u32 tile) const { return tile / row_tiles * SHARE_ROWS + rank / SHARE_WEIGHTS; }
    // The number of a unit's tile of outputs; beyond the last it may be too large.
    __device__ __forceinline__ u32 tile_of(u32 unit, u32 t) const { return unit * of_unit + t % of_unit + t / of_unit * half; }
    // The thread blocks that share this one's weights, then those that share its rows.
    __device__ __forceinline__ u32 sharing(u32 i) const {
        return i < SHARE_WEIGHTS ? rank / SHARE_WEIGHTS * SHARE_WEIGHTS + i
                                 : rank % SHARE_WEIGHTS + (rank / SHARE_WEIGHTS + i - SHARE_WEIGHTS + 1) % SHARE_ROWS * SHARE_WEIGHTS;
    }

    __device__ __forceinline__ void start() const {
        if (thread == 0) {
            for (u32 s = 0; s < a.stages; s++) {
                barrier_init(full + s * 8, 1);
                // The multiplying warps of all thread blocks that what is fetched here goes to.
                barrier_init(empty + s * 8, SHARING * TILES_MULTIPLIERS / 32);
            }
            publish_barriers();
        }
        __syncwarp();
        meet_cluster();
    }

    // What one thread does. A stage is full when its box of weights and its box of rows are there, or all
    // parts of them; where a slice has an odd number of blocks, the last box has one that nobody multiplies.
    __device__ __forceinline__ void fetch() const {
        constexpr u32 PART_TILES = TILES_WEIGHTS / SHARE_WEIGHTS, PART_ROWS = ROWS / SHARE_ROWS;
        // What this thread block fetches of what it shares: of weights tiles, or the gates or the ups.
        u32 part = rank % SHARE_WEIGHTS, half_of_outputs = GATED ? part : 0, rows_part = rank / SHARE_WEIGHTS;
        u32 with_weights = ((1u << SHARE_WEIGHTS) - 1) << rows_part * SHARE_WEIGHTS, with_rows = 0;
        for (u32 i = 0; i < SHARE_ROWS; i++) with_rows |= 1u << (part + i * SHARE_WEIGHTS);
        u32 to_weights = stages + STAGE_ROWS + part * PART_TILES * TILES_BLOCKS * BLOCK_BYTES;
        u32 to_rows = stages + rows_part * PART_ROWS * TILES_ROW_BYTES;
        u64 policy = a.last_pass ? evict_first() : evict_normal();
        // Of the tile that stages are fetched for: its number, and where its outputs and rows begin.
        u32 tile = ~0u, outputs = 0, row = 0;
        auto enter = [&](const ClusterStages &at) {
            if (at.tile == tile) return;
            tile = at.tile;
            u32 column = tile / row_tiles;
            row = ((tile - column * row_tiles) * SHARE_WEIGHTS + part) * ROWS + rows_part * PART_ROWS;
            outputs = (column * SHARE_ROWS + rows_part) * of_unit + (GATED ? 0 : part * PART_TILES);
        };
        auto fetch_weights = [&](u32 stage, u32 block) {
            u32 barrier = full + stage * 8, to = to_weights + stage * STAGE;
            barrier_expect(barrier, STAGE);
            if (SHARE_WEIGHTS > 1)
                share_weights(to, args.weights, block, outputs, half_of_outputs, barrier, with_weights, policy);
            else
                copy_weights(to, args.weights, block, outputs, half_of_outputs, barrier, policy);
        };

        prefetch_map(args.weights), prefetch_map(args.rows);
        ClusterStages at = stages_of_cluster();
        // Weights are there before the rows are.
        u32 ahead = 0;
        for (ClusterStages first = at; first.more() && ahead < a.stages; first.next(), ahead++) enter(first), fetch_weights(ahead, first.block);
        wait_for_inputs();
        for (Place place; at.more(); at.next(), place.next(a.stages)) {
            enter(at);
            if (ahead > 0) {
                ahead--;
            } else {
                barrier_wait(empty + place.stage * 8, place.phase ^ 1);
                fetch_weights(place.stage, at.block);
            }
            share_rows(to_rows + place.stage * STAGE, args.rows, at.block * 32, row, full + place.stage * 8, with_rows);
        }
    }

    // Waits for a stage and loads a warp's weights of it.
    __device__ __forceinline__ void load(uint4 (&w)[TILES_STEPS], const Place &place) const {
        barrier_wait(full + place.stage * 8, place.phase);
        u32 from = stages + place.stage * STAGE + STAGE_ROWS + warp * TILES_BLOCKS * BLOCK_BYTES + lane * 16;
#pragma unroll
        for (int s = 0; s < TILES_STEPS; s++) w[s] = load_shared(from + s * BLOCK_BYTES / 2);
    }

    // Pieces of a thread block: those of the tile that its range begins in, then those of another. Each has
    // four values of every thread one after the other.
    __device__ __forceinline__ float4 *piece(u32 of_cluster, u32 number) const {
        return reinterpret_cast<float4 *>(a.partial) + ((size_t)(of_cluster * CLUSTER + rank) * args.pieces + number) * PIECE + thread;
    }
    __device__ __forceinline__ void put_piece(u32 number, const Sums &sum) const {
        float4 *to = piece(cluster, number);
#pragma unroll
        for (int i = 0; i < CELLS; i++) to[i * TILES_MULTIPLIERS] = make_float4(sum[i][0], sum[i][1], sum[i][2], sum[i][3]);
    }
    // Adds the sum of a group to those before it.
    __device__ __forceinline__ void add_group(u32 group, Sums &sum) const {
#pragma unroll
        for (int i = 0; i < CELLS; i++) {
            if (group > 0) {
                float4 before = held[i * 128];
                sum[i][0] = before.x + sum[i][0], sum[i][1] = before.y + sum[i][1];
                sum[i][2] = before.z + sum[i][2], sum[i][3] = before.w + sum[i][3];
            }
            if (group + 1 < cut.groups) held[i * 128] = make_float4(sum[i][0], sum[i][1], sum[i][2], sum[i][3]);
        }
    }
    // Whether all slices of a divided tile are in memory when so many more are.
    __device__ __forceinline__ bool is_last(u32 tile, u32 slices) const {
        __threadfence();
        meet_some<1, TILES_MULTIPLIERS>();
        if (thread == 0) {
            // A cluster has the first slice of one such tile at most.
            u32 *arrivals = a.arrivals + holder((tile - whole) * of_tile) * CLUSTER + rank;
            *last_one = atomicAdd(arrivals, slices) + slices == of_tile;
            if (*last_one) *arrivals = 0;
        }
        meet_some<1, TILES_MULTIPLIERS>();
        bool last = *last_one;
        __threadfence();
        return last;
    }
    // Adds the pieces of a divided tile.
    __device__ __forceinline__ void add_pieces(u32 tile, Sums &sum) const {
        u32 first = (tile - whole) * of_tile, end = first + of_tile, slice = first;
        while (slice < end) {
            u32 of_cluster = holder(slice), begin = range(of_cluster), range_end = min(end, range(of_cluster + 1));
            // Behind the pieces of another tile.
            u32 number = begin < first ? pieces(begin, first) : 0;
            while (slice < range_end) {
                const float4 *from = piece(of_cluster, number++);
                float4 x[CELLS];
#pragma unroll
                for (int i = 0; i < CELLS; i++) x[i] = __ldcg(from + i * TILES_MULTIPLIERS);
                bool opens = slice % SLICES == 0;
#pragma unroll
                for (int i = 0; i < CELLS; i++) {
                    sum[i][0] = opens ? x[i].x : sum[i][0] + x[i].x, sum[i][1] = opens ? x[i].y : sum[i][1] + x[i].y;
                    sum[i][2] = opens ? x[i].z : sum[i][2] + x[i].z, sum[i][3] = opens ? x[i].w : sum[i][3] + x[i].w;
                }
                slice = opens ? min(range_end, slice + SLICES) : slice + 1;
                if (slice % SLICES == 0) add_group((slice - first) / SLICES - 1, sum);
            }
        }
    }
    // How many pieces there are of the slices of a tile from one to another.
    __device__ __forceinline__ u32 pieces(u32 from, u32 to) const {
        u32 alone = min(to, (from + SLICES - 1) / SLICES * SLICES) - from;
        return alone + (to - from - alone + SLICES - 1) / SLICES;
    }

    __device__ __forceinline__ void put_tile(u32 tile, const Sums &sum) const {
        bool second = warp >= TILES_WEIGHTS / 2;
        if (GATED) {
            if (second) {
#pragma unroll
                for (int i = 0; i < CELLS; i++) ups[i * 128] = make_float4(sum[i][0], sum[i][1], sum[i][2], sum[i][3]);
            }
            meet_some<1, TILES_MULTIPLIERS>();
        }
        const float *up = reinterpret_cast<const float *>(ups);
        if (!GATED || !second)
            finish_tile<ROWS, GATED>(
                a, first_row(tile), tile_of(unit(tile), warp) * 16, [&](int e) { return sum[e / 4][e % 4]; },
                [&](int e) { return up[e / 4 * 512 + e % 4]; });
        // The ups are read before anything else is held.
        if (GATED) meet_some<1, TILES_MULTIPLIERS>();
    }

    static __device__ __forceinline__ void clear(Sums &c) {
#pragma unroll
        for (int i = 0; i < CELLS; i++) c[i][0] = c[i][1] = c[i][2] = c[i][3] = 0.0f;
    }
    // Adds the products of a stage of so many blocks, whose rows lie at `x`, while the weights of the stage
    // at `place` come.
    template <int BLOCKS>
    __device__ __forceinline__ void multiply_blocks(Sums &c, const uint4 (&w)[TILES_STEPS], u32 x, uint4 (&next)[TILES_STEPS], const Place &place) const {
        begin_multiplying();
#pragma unroll
        for (int step = 0; step < 2 * BLOCKS; step++) multiply_group<ROWS>(c, w[step], swizzled_at(x + step * 32), true);
        commit_multiplying();
        load(next, place);
        wait_for_multiplying<0>(c);
    }
    __device__ __forceinline__ void multiply_stage(Sums &c, u32 blocks, const uint4 (&w)[TILES_STEPS], u32 x, uint4 (&next)[TILES_STEPS], const Place &place) const {
        if (blocks == TILES_BLOCKS) multiply_blocks<TILES_BLOCKS>(c, w, x, next, place); else multiply_blocks<1>(c, w, x, next, place);
    }
    __device__ __forceinline__ void multiply() const {
        u32 number = 0;
        wait_for_inputs();
        Sums sum, c;
        // Of two stages in turn.
        uint4 even[TILES_STEPS], odd[TILES_STEPS];
        bool is_odd = false;
        Place place;
        load(even, place);
        clear(c);
        for (ClusterStages at = stages_of_cluster(); at.more();) {
            u32 now = place.stage, tile = at.tile, s = at.slice, first = at.first_slice, end = at.end_slice;
            if (!at.is_last()) place.next(a.stages);
            u32 x = stages + now * STAGE;
            if (is_odd) multiply_stage(c, at.blocks(), odd, x, even, place); else multiply_stage(c, at.blocks(), even, x, odd, place);
            is_odd = !is_odd;
            __syncwarp();
            // All that was read of the stage has been multiplied, and copies alone fill it again.
            if (lane < SHARING) barrier_arrive_at(empty + now * 8, sharing(lane));

            bool ends = at.ends_slice();
            at.next();
            if (!ends) continue;
            // A slice is over. It is a piece of its own where what is before it in its group is another's.
            bool alone = first > s / SLICES * SLICES, opens = alone || s % SLICES == 0;
            bool closes = alone || s % SLICES == SLICES - 1 || s + 1 == end;
#pragma unroll
            for (int i = 0; i < CELLS; i++) {
#pragma unroll
                for (int r = 0; r < 4; r++) sum[i][r] = opens ? c[i][r] : sum[i][r] + c[i][r];
            }
            clear(c);
            if (!closes) continue;
            bool divided = end - first < of_tile;
            if (divided) put_piece(number++, sum); else add_group(s / SLICES, sum);
            if (s + 1 < end) continue;
            if (divided) {
                if (!is_last(tile, end - first)) continue;
                add_pieces(tile, sum);
            }
            put_tile(tile, sum);
        }
    }
};

template <u32 ROWS, u32 SHARE_WEIGHTS, u32 SHARE_ROWS, bool GATED> __device__ __forceinline__ void tiles(const TilesArgs &args) {
    TileProjection<ROWS, SHARE_WEIGHTS, SHARE_ROWS, GATED> projection(args);
    let_next_begin();
    projection.start();
    if (projection.warp < TILES_MULTIPLIERS / 32) {
        take_registers<232>();
        projection.multiply();
    } else {
        give_registers<40>();
        if (projection.warp == TILES_MULTIPLIERS / 32 && elect()) projection.fetch();
    }
    // Nobody leaves while others copy or arrive here.
    __syncwarp();
    meet_cluster();
}

#define TILES_KERNEL(NAME, ROWS, SHARE_WEIGHTS, SHARE_ROWS, GATED)                                                    \
    extern "C" __global__ void __cluster_dims__(SHARE_WEIGHTS * SHARE_ROWS, 1, 1)                                     \
        __launch_bounds__(TILES_MULTIPLIERS + TILES_FETCHERS, 1) NAME(const __grid_constant__ TilesArgs args) {       \
        tiles<ROWS, SHARE_WEIGHTS, SHARE_ROWS, GATED>(args);                                                          \
    }
#define TILES_KERNELS(ROWS, SHARE_WEIGHTS, SHARE_ROWS)                                                                \
    TILES_KERNEL(project_tiles_##ROWS##_##SHARE_WEIGHTS##x##SHARE_ROWS, ROWS, SHARE_WEIGHTS, SHARE_ROWS, false)       \
    TILES_KERNEL(project_tiles_##ROWS##_##SHARE_WEIGHTS##x##SHARE_ROWS##_gated, ROWS, SHARE_WEIGHTS, SHARE_ROWS, true)
TILES_KERNELS(32, 1, 2)
TILES_KERNELS(32, 1, 4)
TILES_KERNELS(64, 1, 2)
TILES_KERNELS(64, 1, 4)
TILES_KERNELS(128, 1, 2)
TILES_KERNELS(128, 1, 4)
TILES_KERNELS(128, 2, 1)
TILES_KERNELS(128, 2, 2)
TILES_KERNELS(128, 2, 4)

#endif
