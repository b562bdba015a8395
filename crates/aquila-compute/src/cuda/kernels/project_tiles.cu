// Projections of more than 16 rows in tiles that the thread blocks of a cluster share, with the sums of
// `project_skinny.cu`. Nothing chooses it yet: `cuda_check` compares and times it.
//
// A thread block makes 128 outputs of ROWS rows: two warpgroups multiply, 64 outputs each, and one thread
// fetches. Of a cluster, SHARE_WEIGHTS thread blocks have the same outputs of other rows, and SHARE_ROWS
// other outputs of the same rows. Each fetches its part of what it shares, and the copy engine writes
// that to all who share it.
//
// Of n clusters, each makes every n-th tile, so that tiles which read the same weights are made at the same
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
    static constexpr u32 ADDED_CELLS = 8;                    // of pieces that are added at a time
    static constexpr u32 OF_UNIT = GATED ? TILES_WEIGHTS / 2 : TILES_WEIGHTS;  // tiles of outputs of each half
    typedef float Sums[CELLS][4];

    // Little is kept here: what multiplies has no registers left.
    const TilesArgs &args;
    const ProjectArgs &a;
    Cut cut;
    u32 warp, rank, stages;  // where they are

    __device__ __forceinline__ TileProjection(const TilesArgs &args) : args(args), a(args.project), cut(args.project.inputs) {
        warp = __shfl_sync(FULL, threadIdx.x / 32, 0), rank = blockIdx.x % CLUSTER;
        stages = (shared_address(dynamic_shared()) + 1023) / 1024 * 1024;
    }

    static __device__ __forceinline__ u32 lane() { return threadIdx.x % 32; }
    static __device__ __forceinline__ u32 cluster() { return blockIdx.x / CLUSTER; }
    static __device__ __forceinline__ u32 clusters() { return gridDim.x / CLUSTER; }
    // Barriers: that a stage is there, and that it may be filled again.
    __device__ __forceinline__ u32 full() const { return stages + a.stages * STAGE; }
    __device__ __forceinline__ u32 empty() const { return full() + TILES_MOST_STAGES * 8; }
    __device__ __forceinline__ u32 *last_one() const {
        u8 *shared = dynamic_shared();
        return reinterpret_cast<u32 *>(shared + (empty() - shared_address(shared)) + TILES_MOST_STAGES * 8);
    }
    // What a thread of a warpgroup holds of the groups before. Gates and ups exchange half of it, so one part
    // is enough where there is one group.
    __device__ __forceinline__ float4 *held(bool second) const {
        return reinterpret_cast<float4 *>(last_one() + 4) + threadIdx.x % 128 + (second && cut.groups > 1 ? CELLS * 128 : 0);
    }
    __device__ __forceinline__ bool is_second() const { return warp >= TILES_WEIGHTS / 2; }
    __device__ __forceinline__ u32 row_tiles() const { return (a.rows + SHARE_WEIGHTS * ROWS - 1) / (SHARE_WEIGHTS * ROWS); }
    __device__ __forceinline__ u32 of_tile() const { return cut.groups * SLICES; }  // slices

    // Where a cluster's slices of divided tiles begin, and who has a slice of them.
    // There are fewer than `clusters` such tiles, so products stay far below 2^32.
    __device__ __forceinline__ u32 range(u32 cluster) const { return cluster * args.parts / clusters() * args.grain; }
    __device__ __forceinline__ u32 holder(u32 slice) const { return ((slice / args.grain + 1) * clusters() - 1) / args.parts; }
    __device__ __forceinline__ ClusterStages stages_of_cluster() const {
        return ClusterStages(cut, range(cluster()), range(cluster() + 1), cluster(), clusters(), args.whole);
    }
    // Tiles are numbered column by column of `row_tiles`. Where the rows of a thread block begin, of a
    // cluster's row of tiles.
    __device__ __forceinline__ u32 first_row(u32 row_tile) const { return (row_tile * SHARE_WEIGHTS + rank % SHARE_WEIGHTS) * ROWS; }
    // The thread blocks that share this one's weights, then those that share its rows.
    __device__ __forceinline__ u32 sharing(u32 i) const {
        return i < SHARE_WEIGHTS ? rank / SHARE_WEIGHTS * SHARE_WEIGHTS + i
                                 : rank % SHARE_WEIGHTS + (rank / SHARE_WEIGHTS + i - SHARE_WEIGHTS + 1) % SHARE_ROWS * SHARE_WEIGHTS;
    }

    __device__ __forceinline__ void start() const {
        if (threadIdx.x == 0) {
            for (u32 s = 0; s < a.stages; s++) {
                barrier_init(full() + s * 8, 1);
                // The multiplying warps of all thread blocks that what is fetched here goes to.
                barrier_init(empty() + s * 8, SHARING * TILES_MULTIPLIERS / 32);
            }
            publish_barriers();
        }
        if (threadIdx.x == TILES_MULTIPLIERS) prefetch_map(args.weights), prefetch_map(args.rows);
        __syncwarp();
        meet_cluster_first();
    }

    // What one thread does. A stage is full when its box of weights and its box of rows are there, or all
    // parts of them; where a slice has an odd number of blocks, the last box has one that is not multiplied.
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
            u32 column = tile / row_tiles();
            row = first_row(tile - column * row_tiles()) + rows_part * PART_ROWS;
            outputs = (column * SHARE_ROWS + rows_part) * OF_UNIT + (GATED ? 0 : part * PART_TILES);
        };
        auto fetch_weights = [&](u32 stage, u32 block) {
            u32 barrier = full() + stage * 8, to = to_weights + stage * STAGE;
            barrier_expect(barrier, STAGE);
            if (SHARE_WEIGHTS > 1)
                share_weights(to, args.weights, block, outputs, half_of_outputs, barrier, with_weights, policy);
            else
                copy_weights(to, args.weights, block, outputs, half_of_outputs, barrier, policy);
        };

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
                barrier_wait(empty() + place.stage * 8, place.phase ^ 1);
                fetch_weights(place.stage, at.block);
            }
            share_rows(to_rows + place.stage * STAGE, args.rows, at.block * 32, row, full() + place.stage * 8, with_rows);
        }
    }

    // Waits for a stage and loads a warp's weights of it.
    __device__ __forceinline__ void load(uint4 (&w)[TILES_STEPS], const Place &place) const {
        barrier_wait(full() + place.stage * 8, place.phase);
        u32 from = stages + place.stage * STAGE + STAGE_ROWS + warp * TILES_BLOCKS * BLOCK_BYTES + lane() * 16;
#pragma unroll
        for (int s = 0; s < TILES_STEPS; s++) w[s] = load_shared(from + s * BLOCK_BYTES / 2);
    }

    // Pieces of a thread block: those of the tile that its range begins in, then those of another. Each has
    // four values of every thread one after the other.
    __device__ __forceinline__ float4 *piece(u32 of_cluster, u32 number) const {
        return reinterpret_cast<float4 *>(a.partial) + ((size_t)(of_cluster * CLUSTER + rank) * args.pieces + number) * PIECE + threadIdx.x;
    }
    __device__ __forceinline__ void put_piece(u32 number, const Sums &sum) const {
        float4 *to = piece(cluster(), number);
#pragma unroll
        for (int i = 0; i < CELLS; i++) to[i * TILES_MULTIPLIERS] = make_float4(sum[i][0], sum[i][1], sum[i][2], sum[i][3]);
    }
    // Adds the sum of a group, some cells of it, to those before it.
    __device__ __forceinline__ void add_group(u32 group, Sums &sum, int from = 0, int to = CELLS) const {
        float4 *mine = held(is_second());
#pragma unroll
        for (int i = from; i < to; i++) {
            if (group > 0) {
                float4 before = mine[i * 128];
                sum[i][0] = before.x + sum[i][0], sum[i][1] = before.y + sum[i][1];
                sum[i][2] = before.z + sum[i][2], sum[i][3] = before.w + sum[i][3];
            }
            if (group + 1 < cut.groups) mine[i * 128] = make_float4(sum[i][0], sum[i][1], sum[i][2], sum[i][3]);
        }
    }
    // Whether all slices of a divided tile are in memory when so many more are.
    __device__ __forceinline__ bool is_last(u32 tile, u32 slices) const {
        __threadfence();
        meet_some<1, TILES_MULTIPLIERS>();
        if (threadIdx.x == 0) {
            // A cluster has the first slice of one such tile at most.
            u32 *arrivals = a.arrivals + holder((tile - args.whole) * of_tile()) * CLUSTER + rank;
            *last_one() = atomicAdd(arrivals, slices) + slices == of_tile();
            if (*last_one()) *arrivals = 0;
        }
        meet_some<1, TILES_MULTIPLIERS>();
        bool last = *last_one();
        __threadfence();
        return last;
    }
    // Adds the pieces of a divided tile, some cells at a time, so that several pieces are under way at once.
    __device__ __forceinline__ void add_pieces(u32 tile, Sums &sum) const {
        clear(sum);
#pragma unroll
        for (int from = 0; from < CELLS; from += ADDED_CELLS) add_pieces_of(tile, from, sum);
    }
    __device__ __forceinline__ void add_pieces_of(u32 tile, int from, Sums &sum) const {
        constexpr int AHEAD = 3;
        u32 first = (tile - args.whole) * of_tile(), end = first + of_tile();
        // The next piece to load: its first slice, whose it is, where what that cluster has ends, and its
        // number, behind the pieces of another tile.
        u32 to_load = first, of_cluster = holder(first), begin = range(of_cluster), range_end = range(of_cluster + 1);
        u32 number = begin < first ? pieces(begin, first) : 0;
        // Set, so that the compiler keeps nothing of them from tile to tile.
        float4 x[AHEAD][ADDED_CELLS] = {};
        u32 ends[AHEAD];
        auto load = [&](float4 (&to)[ADDED_CELLS], u32 &piece_end) {
            if (to_load == end) return;
            const float4 *at = piece(of_cluster, number++) + from * TILES_MULTIPLIERS;
#pragma unroll
            for (int i = 0; i < ADDED_CELLS; i++) to[i] = __ldcg(at + i * TILES_MULTIPLIERS);
            to_load = piece_end = to_load % SLICES == 0 ? min(range_end, to_load + SLICES) : to_load + 1;
            if (to_load == range_end) of_cluster = holder(to_load), range_end = range(of_cluster + 1), number = 0;
        };
#pragma unroll
        for (int p = 0; p < AHEAD; p++) load(x[p], ends[p]);
        for (u32 slice = first; slice < end;) {
#pragma unroll
            for (int p = 0; p < AHEAD; p++) {
                if (slice == end) break;
                bool opens = slice % SLICES == 0;
#pragma unroll
                for (int i = 0; i < ADDED_CELLS; i++) {
                    float(&to)[4] = sum[from + i];
                    if (opens) to[0] = to[1] = to[2] = to[3] = -0.0f;
                    to[0] += x[p][i].x, to[1] += x[p][i].y, to[2] += x[p][i].z, to[3] += x[p][i].w;
                }
                slice = ends[p];
                load(x[p], ends[p]);
                if (slice % SLICES == 0) add_group((slice - first) / SLICES - 1, sum, from, from + ADDED_CELLS);
            }
        }
    }
    // Adding to -0 changes nothing, so sums begin with it.
    static __device__ __forceinline__ void clear(Sums &sum) {
#pragma unroll
        for (int i = 0; i < CELLS; i++) sum[i][0] = sum[i][1] = sum[i][2] = sum[i][3] = -0.0f;
    }
    // How many pieces there are of the slices of a tile from one to another.
    __device__ __forceinline__ u32 pieces(u32 from, u32 to) const {
        u32 alone = min(to, (from + SLICES - 1) / SLICES * SLICES) - from;
        return alone + (to - from - alone + SLICES - 1) / SLICES;
    }

    __device__ __forceinline__ void put_tile(u32 tile, const Sums &sum) const {
        u32 column = tile / row_tiles(), row = first_row(tile - column * row_tiles()), of_cluster = column * SHARE_ROWS + rank / SHARE_WEIGHTS;
        if constexpr (!GATED) {
            auto of_sum = [&](int e) { return sum[e / 4][e % 4]; };
            finish_tile<ROWS, false>(a, row, (of_cluster * OF_UNIT + warp) * 16, of_sum, of_sum);
        } else {
            // The first warpgroup finishes half of the rows, the second the others: each gives what it has of
            // the other's.
            constexpr int HALF = CELLS / 2;
            bool second = is_second();
            float4 *mine = held(second);
#pragma unroll
            for (int i = 0; i < HALF; i++) {
                float given[4];
#pragma unroll
                for (int r = 0; r < 4; r++) given[r] = second ? sum[i][r] : sum[i + HALF][r];
                mine[(second ? i : i + HALF) * 128] = make_float4(given[0], given[1], given[2], given[3]);
            }
            meet_some<1, TILES_MULTIPLIERS>();
            const float *got = reinterpret_cast<const float *>(held(!second) + (second ? HALF * 128 : 0));
            auto own = [&](int e) { return second ? sum[e / 4 + HALF][e % 4] : sum[e / 4][e % 4]; };
            auto other = [&](int e) { return got[e / 4 * 512 + e % 4]; };
            finish_tile<ROWS / 2, true>(
                a, row + (second ? ROWS / 2 : 0), (of_cluster * OF_UNIT + warp % (TILES_WEIGHTS / 2)) * 16,
                [&](int e) { return second ? other(e) : own(e); }, [&](int e) { return second ? own(e) : other(e); });
            // All of it is read before anything else is held.
            meet_some<1, TILES_MULTIPLIERS>();
        }
    }

    // Adds the products of a stage of so many blocks, whose rows lie at `x`, while the weights of the stage
    // at `place` come. A stage that opens a slice has nothing to add to.
    template <int BLOCKS>
    __device__ __forceinline__ void multiply_blocks(Sums &c, bool opens, const uint4 (&w)[TILES_STEPS], u32 x, uint4 (&next)[TILES_STEPS], const Place &place) const {
        begin_multiplying();
#pragma unroll
        for (int step = 0; step < 2 * BLOCKS; step++) multiply_group<ROWS>(c, w[step], swizzled_at(x + step * 32), step > 0 || !opens);
        commit_multiplying();
        load(next, place);
        wait_for_multiplying<0>(c);
    }
    __device__ __forceinline__ void multiply_stage(Sums &c, bool opens, u32 blocks, const uint4 (&w)[TILES_STEPS], u32 x, uint4 (&next)[TILES_STEPS], const Place &place) const {
        if (blocks == TILES_BLOCKS) multiply_blocks<TILES_BLOCKS>(c, opens, w, x, next, place); else multiply_blocks<1>(c, opens, w, x, next, place);
    }
    __device__ __forceinline__ void multiply() const {
        u32 number = 0;
        ClusterStages at = stages_of_cluster();
        wait_for_inputs();
        Sums sum, c;
        clear(sum), clear(c);
        // Of two stages in turn.
        uint4 even[TILES_STEPS], odd[TILES_STEPS];
        bool is_odd = false;
        Place place;
        load(even, place);
        while (at.more()) {
            u32 tile = at.tile, s = at.slice, first = at.first_slice, end = at.end_slice;
            for (bool opens = true, more = true; more; opens = false) {
                u32 now = place.stage;
                if (!at.is_last()) place.next(a.stages);
                u32 x = stages + now * STAGE;
                if (is_odd) multiply_stage(c, opens, at.blocks(), odd, x, even, place); else multiply_stage(c, opens, at.blocks(), even, x, odd, place);
                is_odd = !is_odd;
                __syncwarp();
                // All that was read of the stage has been multiplied, and copies alone fill it again.
                if (lane() < SHARING) barrier_arrive_at(empty() + now * 8, sharing(lane()));
                more = !at.ends_slice();
                at.next();
            }
#pragma unroll
            for (int i = 0; i < CELLS; i++) {
#pragma unroll
                for (int r = 0; r < 4; r++) sum[i][r] += c[i][r];
            }
            // A slice is over. It is a piece of its own where what is before it in its group is another's.
            bool alone = first > s / SLICES * SLICES;
            if (!alone && s % SLICES != SLICES - 1 && s + 1 != end) continue;
            bool divided = end - first < of_tile();
            if (divided) put_piece(number++, sum); else add_group(s / SLICES, sum);
            if (s + 1 == end && (!divided || is_last(tile, end - first))) {
                if (divided) add_pieces(tile, sum);
                put_tile(tile, sum);
                // Once more, so that no registers keep them until here.
                load(even, place);
                is_odd = false;
            }
            // A slice writes all of c first; set here, it needs no registers until then.
            clear(sum), clear(c);
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
    // No thread block ends while others copy to its shared memory or arrive at its barriers.
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
TILES_KERNELS(64, 1, 2)
TILES_KERNELS(128, 1, 2)
TILES_KERNELS(128, 1, 4)
TILES_KERNELS(128, 2, 1)
TILES_KERNELS(128, 2, 2)
TILES_KERNELS(128, 2, 4)

#endif
