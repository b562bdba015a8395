// Draft trees: `draft_tree.rs` and `row_budget.rs`. A thread block for each row of the round.

#include "choice.cuh"

#define SCORES 2048    // scores that are compared in shared memory
#define GROWERS 128    // threads of a thread block that numbers nodes
#define MOST_BEAM 256  // nodes of a level that go on at most

// A probability that rounding pushed above one must not lift a child over its parent.
__device__ __forceinline__ float child_score(float score, float probability) { return fmaxf(fminf(score * probability, score), 0.0f); }

// Whether a score comes before another; of equal ones the earlier node does.
__device__ __forceinline__ bool before(float a, u32 a_at, float b, u32 b_at) {
    u32 x = __float_as_uint(a), y = __float_as_uint(b);
    return x > y || (x == y && a_at < b_at);
}

// Scores of the nodes offered from `first` to `end`, in shared memory as far as there is room. All threads
// of a thread block make them.
struct Scores {
    const Offered *pool;
    float *shared;
    u32 first, end, in_shared;

    __device__ __forceinline__ Scores(const Offered *pool, u32 first, u32 end) : pool(pool), first(first), end(end) {
        __shared__ float scores[SCORES];
        shared = scores, in_shared = min(end - first, (u32)SCORES);
        for (u32 i = threadIdx.x; i < in_shared; i += blockDim.x) scores[i] = pool[first + i].score;
        __syncthreads();
    }
    // How many come before node i.
    __device__ __forceinline__ u32 rank(u32 i) const {
        float own = i - first < in_shared ? shared[i - first] : pool[i].score;
        u32 rank = 0;
#pragma unroll 8
        for (u32 j = 0; j < in_shared; j++) rank += before(shared[j], first + j, own, i);
        for (u32 j = first + in_shared; j < end; j++) rank += before(pool[j].score, j, own, i);
        return rank;
    }
};

// Makes the best of the nodes offered from `first` on the beam, best first.
__device__ void choose_beam(const State &s, u32 at, Row &row, u32 first, u32 end) {
    Scores scores(offered_of(s, at), first, end);
    for (u32 i = first + threadIdx.x; i < end; i += blockDim.x) {
        u32 rank = scores.rank(i);
        if (rank < row.task.topk) beam_of(s, at)[rank] = i;
    }
    __syncthreads();
    if (threadIdx.x == 0) row.pool = end, row.beam = min(end - first, row.task.topk);
}

// How many of the threads before this one say yes, and how many of all.
__device__ u32 count_before(bool yes, u32 &all) {
    __shared__ u32 of_warps[GROWERS / 32];
    u32 votes = __ballot_sync(FULL, yes), warp = threadIdx.x / 32;
    __syncthreads();
    if (threadIdx.x % 32 == 0) of_warps[warp] = __popc(votes);
    __syncthreads();
    u32 before = __popc(votes & ((1u << threadIdx.x % 32) - 1));
    all = 0;
    for (u32 w = 0; w < GROWERS / 32; w++) {
        if (w < warp) before += of_warps[w];
        all += of_warps[w];
    }
    return before;
}

// Starts the trees of all rows that decode; those that the host has drafted are whole already.
extern "C" __global__ void __launch_bounds__(64) start_trees(const __grid_constant__ StartArgs a) {
    begin();
    const State &s = a.state;
    u32 at = blockIdx.x, thread = threadIdx.x;
    if (at >= s.round->rows) return;
    Row &row = row_of(s, at);
    if (!row.live || !row.task.decodes) return;
    u32 place = row.task.place;
    for (u32 g = 0; g < a.given_count; g++) {
        uint4 given = a.given[g];  // place, nodes, where in the words
        if (given.x != place) continue;
        for (u32 n = thread; n < given.y; n += blockDim.x) {
            const u32 *from = a.words + given.z + 4 * n;
            tree_of(s, at)[n] = {from[0], from[1], from[2], __uint_as_float(from[3]), NONE, 1, 0.0f};
        }
        __syncthreads();
        if (thread == 0) row.tree = given.y, row.seeded = 0;
        return;
    }
    if (!row.seeded) return;
    const Sequence &sequence = sequence_of(s, row);
    u32 count = min(sequence.seed_count, row.task.topk);
    for (u32 i = thread; i < count; i += blockDim.x) {
        float score = child_score(1.0f, s.seed_probabilities[place * s.candidates + i]);
        offered_of(s, at)[i] = {s.seed_tokens[place * s.candidates + i], NONE, 1, score, 0, 0, NONE, NONE};
    }
    __syncthreads();
    choose_beam(s, at, row, 0, count);
    if (thread > 0) return;
    row.seeded = 0, row.drafts = 1, row.slots = 0;
    tree_of(s, at)[0].drawn = sequence.seed_drawn ? drawn_of_seed(s, place) : NONE;
}

// Grows the trees by what was proposed after each node of their beams.
extern "C" __global__ void __launch_bounds__(GROWERS) grow(const __grid_constant__ StepArgs a) {
    __shared__ u32 beam[MOST_BEAM], firsts[MOST_BEAM + 1];
    begin();
    const State &s = a.state;
    u32 at = blockIdx.x, thread = threadIdx.x;
    if (at >= s.round->rows) return;
    Row &row = row_of(s, at);
    if (!goes_on(s, at, row)) return;
    const Sequence &sequence = sequence_of(s, row);
    Offered *pool = offered_of(s, at);
    u32 nodes = row.beam, first = row.pool, depth = pool[beam_of(s, at)[0]].depth;
    bool drawn = is_drawn(sequence);
    __syncthreads();
    for (u32 b = thread; b < nodes; b += blockDim.x) {
        beam[b] = beam_of(s, at)[b];
        firsts[b + 1] = min(Proposed(s, sequence, row.first_query + b).count, row.task.topk);
        if (drawn) pool[beam[b]].drawn = drawn_of_level(s, row.task.place, depth, b);
    }
    __syncthreads();
    if (thread == 0) {
        firsts[0] = first;
        for (u32 b = 0; b < nodes; b++) firsts[b + 1] += firsts[b];
    }
    __syncthreads();
    for (u32 i = thread; i < nodes * row.task.topk; i += blockDim.x) {
        u32 b = i / row.task.topk, child = i % row.task.topk;
        if (child >= firsts[b + 1] - firsts[b]) continue;
        Proposed proposed(s, sequence, row.first_query + b);
        float score = child_score(pool[beam[b]].score, proposed.probability_at(child));
        pool[firsts[b] + child] = {proposed.token_at(child), beam[b], depth + 1, score, 0, 0, NONE, NONE};
    }
    __syncthreads();
    choose_beam(s, at, row, first, firsts[nodes]);
}

// x to the power of n, by squaring.
__device__ __forceinline__ float power(float x, u32 n) {
    float result = 1.0f;
    while (true) {
        if (n & 1) result *= x;
        n >>= 1;
        if (n == 0) return result;
        x *= x;
    }
}

// What a row budget compares: the score of a node times how likely the drafts of its request are.
__device__ void weigh_nodes(const State &s, u32 at, const Row &row, const Sequence &sequence) {
    Node *tree = tree_of(s, at);
    float rate = row.task.rate < 0.0f ? 0.0f : row.task.rate > 1.0f ? 1.0f : row.task.rate;
    bool drawn = sequence.verify == REJECTION;
    for (u32 n = 1 + threadIdx.x; n < row.tree; n += blockDim.x) {
        float score = tree[n].score;
        if (drawn) {
            // By rank alone: half for each sibling before a node of its path.
            score = 1.0f;
            for (u32 node = n; node != 0; node = tree[node].parent) {
                for (u32 sibling = tree[node].parent + 1; sibling < node; sibling++) {
                    if (tree[sibling].parent == tree[node].parent) score *= 0.5f;
                }
            }
        }
        tree[n].worth = score * power(rate, tree[n].depth);
    }
}

// Ends the trees that were drafted: the best nodes of each, in the order of being offered; fills them
// up where asked to.
extern "C" __global__ void __launch_bounds__(GROWERS) build_trees(const __grid_constant__ BuildArgs a) {
    begin();
    const State &s = a.state;
    u32 at = blockIdx.x, thread = threadIdx.x;
    if (at >= s.round->rows) return;
    Row &row = row_of(s, at);
    if (!row.live || !row.task.decodes) return;
    Offered *pool = offered_of(s, at);
    Node *tree = tree_of(s, at);
    bool drafted = row.drafts;
    if (drafted) {
        u32 size = row.pool, most = row.task.nodes - 1, next = 1;
        Scores scores(pool, 0, size);
        for (u32 first = 0; first < size; first += GROWERS) {
            u32 i = first + thread, kept;
            bool stays = i < size && scores.rank(i) < most;
            u32 place = next + count_before(stays, kept);
            if (i < size) pool[i].kept = stays ? place : NONE;
            next += kept;
        }
        __syncthreads();
        for (u32 i = thread; i < size; i += GROWERS) {
            const Offered &offered = pool[i];
            if (offered.kept == NONE) continue;
            u32 parent = offered.parent == NONE ? 0 : pool[offered.parent].kept;
            tree[offered.kept] = {offered.token, parent, offered.depth, offered.score, offered.drawn, 1, 0.0f};
        }
        __syncthreads();
        if (thread == 0) row.tree = next, row.drafts = 0;
        __syncthreads();
    }
    if (a.fill && thread == 0) {
        u32 size = row.tree;
        while (size < row.task.nodes) {
            u32 deepest = size - 1;
            while (deepest > 0 && tree[deepest].depth >= row.task.steps) deepest--;
            tree[size] = {tree[0].token, deepest, tree[deepest].depth + 1, 0.0f, NONE, 1, 0.0f};
            size++;
        }
        row.tree = size;
    }
    if (!a.weigh) return;
    __syncthreads();
    weigh_nodes(s, at, row, sequence_of(s, row));
}

// Says which nodes are worth the most, as many of all trees together as the round's budget says; roots
// always stay.
extern "C" __global__ void __launch_bounds__(128) prune_trees(const __grid_constant__ StepArgs a) {
    begin();
    const State &s = a.state;
    u32 at = blockIdx.x, thread = threadIdx.x, rows = s.round->rows, budget = s.round->budget;
    if (at >= rows) return;
    auto nodes_of = [](u32, const Row &row) { return row.live && row.task.decodes ? row.tree : 0; };
    auto is_tree = [](u32, const Row &row) { return row.live && row.task.decodes ? 1u : 0u; };
    u32 nodes = sum_before(s, rows, nodes_of), trees = sum_before(s, rows, is_tree);
    const Row &row = row_of(s, at);
    if (!row.live || !row.task.decodes) return;
    bool all = nodes <= budget;
    u32 most = budget > trees ? budget - trees : 0;
    Node *tree = tree_of(s, at);
    for (u32 n = 1 + thread; n < row.tree; n += blockDim.x) {
        u32 rank = 0, worth = __float_as_uint(tree[n].worth), depth = tree[n].depth;
        for (u32 r = 0; r < rows && !all && rank < most; r++) {
            u32 others = nodes_of(r, row_of(s, r));
            const Node *other = tree_of(s, r);
            // All nodes of a tree: where what was read decides whether to go on, nothing is read ahead.
#pragma unroll 8
            for (u32 m = 1; m < others; m++) {
                u32 theirs = __float_as_uint(other[m].worth), deep = other[m].depth;
                bool first = deep != depth ? deep < depth : r != at ? r < at : m < n;
                rank += theirs > worth || (theirs == worth && first);
            }
        }
        tree[n].kept = all || rank < most;
    }
}

// Keeps those nodes. A node goes to a place that is not behind its own; `kept` says where.
extern "C" __global__ void __launch_bounds__(GROWERS) retain_nodes(const __grid_constant__ StepArgs a) {
    begin();
    const State &s = a.state;
    u32 at = blockIdx.x, thread = threadIdx.x;
    if (at >= s.round->rows) return;
    Row &row = row_of(s, at);
    if (!row.live || !row.task.decodes) return;
    Node *tree = tree_of(s, at);
    u32 size = row.tree, next = 1;
    for (u32 first = 1; first < size; first += GROWERS) {
        u32 n = first + thread, kept;
        bool stays = n < size && tree[n].kept;
        u32 place = next + count_before(stays, kept);
        if (n < size) tree[n].kept = stays ? place : NONE;
        next += kept;
    }
    __syncthreads();
    for (u32 first = 1; first < size; first += GROWERS) {
        u32 n = first + thread, place = n < size ? tree[n].kept : NONE;
        Node node;
        if (place != NONE) node = tree[n], node.parent = node.parent > 0 ? tree[node.parent].kept : 0;
        // All nodes that are overwritten have been read.
        __syncthreads();
        if (place == NONE) continue;
        Node &to = tree[place];
        to.token = node.token, to.parent = node.parent, to.depth = node.depth, to.score = node.score, to.drawn = node.drawn;
    }
    if (thread == 0) row.tree = next;
}
