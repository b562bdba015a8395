// What of the trees is accepted: `verify.rs`, `simulate.rs`, `target.rs`; and the moves that follow.

#include "path.cuh"

// The first child of a node that carries `token`, or any where that is NONE; NONE where there is none. All lanes of a warp call this.
__device__ __forceinline__ u32 child_of(const Node *tree, u32 size, u32 parent, u32 token) {
    u32 lane = threadIdx.x % 32;
    for (u32 first = parent + 1; first < size; first += 32) {
        u32 node = first + lane;
        bool found = node < size && tree[node].parent == parent && (token == NONE || tree[node].token == token);
        u32 all = __ballot_sync(FULL, found);
        if (all) return first + __ffs(all) - 1;
    }
    return NONE;
}

// The whole part of a length and one more as often as the mean needs; or drafts in a row that are right
// with the same probability.
__device__ u32 simulated(const State &s, const AcceptArgs &a, const Sequence &sequence, u32 drafts) {
    auto draw = [&](u32 which) { return uniform(noise_key(sequence.id, which, (u32)sequence.rounds), 0); };
    if (a.simulate == SIMULATE_LENGTH) {
        double wanted = a.mean - 1.0;
        wanted = wanted < 0.0 ? 0.0 : wanted > (double)drafts ? (double)drafts : wanted;
        u32 whole = (u32)wanted;
        return whole + (draw(0) < wanted - (double)whole ? 1 : 0);
    }
    double rate = a.rates[min(drafts, s.steps)];
    u32 correct = 0;
    while (correct < drafts && draw(correct) < rate) correct++;
    return correct;
}

// Follows what was chosen down the trees, or what a simulation says, and adds what is accepted to the
// texts. A warp for each row. Paths by probability have been followed before (`verify.cu`).
extern "C" __global__ void __launch_bounds__(32) accept(const __grid_constant__ AcceptArgs a) {
    begin();
    const State &s = a.state;
    u32 at = blockIdx.x, lane = threadIdx.x;
    if (at >= s.round->rows) return;
    Row &row = row_of(s, at);
    if (!row.live) return;
    Sequence &sequence = sequence_of(s, row);
    Path path = {answer_nodes_of(s, at), answer_of(s, at), 0};
    if (!row.task.decodes) {
        if (lane > 0) return;
        u32 outputs = row.task.end_output - row.task.first_output, end = row.task.end_output;
        // The last output has nothing known behind it where the prompt ends with it.
        bool answers = outputs > 0 && end >= sequence.tokens;
        row.prompted = outputs - (answers ? 1 : 0);
        committed_of(s, row.task.place, 0) += row.task.end - row.task.first;
        if (answers) {
            path.tokens[0] = chosen(s, sequence, row.first_output + outputs - 1, 0);
            path.nodes[0] = outputs - 1;
            row.answered = take(s, row, path.tokens, 1);
        } else if (row.task.last && sequence.tokens >= sequence.longest) {
            sequence.ended = 1, row.ended = ENDED_BY_LENGTH;
        }
        return;
    }
    if (by_probability(row, sequence)) {
        path.length = row.followed;
        if (lane == 0 && row.complete) settle(s, at, row, path);
        return;
    }
    const Node *tree = tree_of(s, at);
    u32 node = 0, size = row.tree;
    if (a.simulate == SIMULATE_NOTHING) {
        while (true) {
            u32 token = chosen(s, sequence, row.first_output + node, tree[node].depth);
            if (lane == 0) path.nodes[path.length] = node, path.tokens[path.length] = token;
            path.length++;
            u32 child = child_of(tree, size, node, token);
            if (child == NONE) break;
            node = child;
        }
    } else {
        // First children as far as there are any, then as many of them as the simulation says.
        u32 drafts = 0;
        while (true) {
            if (lane == 0) path.nodes[drafts] = node;
            u32 child = child_of(tree, size, node, NONE);
            if (child == NONE) break;
            node = child, drafts++;
        }
        __syncwarp();
        u32 correct = simulated(s, a, sequence, drafts);
        path.length = correct + 1;
        u32 last = path.nodes[correct];
        for (u32 i = lane; i < correct; i += 32) path.tokens[i] = tree[path.nodes[i + 1]].token;
        u32 token = chosen(s, sequence, row.first_output + last, tree[last].depth);
        if (lane == 0) path.tokens[correct] = token;
    }
    __syncwarp();
    if (lane == 0) settle(s, at, row, path);
}

// Moves keys and values of all layers to where the accepted paths belong; `width` counts words of 16
// bits. A thread owns a column and walks the path, so that none is overwritten before it has moved.
extern "C" __global__ void __launch_bounds__(256) compact_slots(const __grid_constant__ CompactSlotsArgs a) {
    begin();
    const State &s = a.state;
    u32 at = blockIdx.z, column = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= s.round->rows || column >= a.width) return;
    const Row &row = row_of(s, at);
    if (!row.live || !row.task.decodes) return;
    size_t layer = (size_t)blockIdx.y * a.slots * a.width + column;
    u16 *keys = a.keys + layer, *values = a.values + layer;
    for (u32 i = 0; i < row.answered; i++) {
        uint4 move = s.moves[(size_t)at * (s.steps + 1) + i];
        if (move.x == move.y || max(move.x, move.y) >= a.slots) continue;
        keys[(size_t)move.y * a.width] = keys[(size_t)move.x * a.width];
        values[(size_t)move.y * a.width] = values[(size_t)move.x * a.width];
    }
}

// The same for what has a row for each row of the target's pass.
extern "C" __global__ void __launch_bounds__(256) compact_rows(const __grid_constant__ CompactRowsArgs a) {
    begin();
    const State &s = a.state;
    u32 at = blockIdx.y, column = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= s.round->rows || column >= a.rows.width) return;
    const Row &row = row_of(s, at);
    if (!row.live || !row.task.decodes) return;
    for (u32 i = 0; i < row.answered; i++) {
        uint4 move = s.moves[(size_t)at * (s.steps + 1) + i];
        if (move.z == move.w || max(move.z, move.w) >= a.capacity) continue;
        put(a.rows, move.w, column, get(a.rows, move.z, column));
    }
}

// Moves the hidden rows that paused drafts will need to where they are kept.
extern "C" __global__ void __launch_bounds__(256) park_rows(const __grid_constant__ CompactRowsArgs a) {
    begin();
    const State &s = a.state;
    u32 at = blockIdx.y, column = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= s.round->rows || column >= a.rows.width) return;
    const Row &row = row_of(s, at);
    if (!row.live || max(row.park_to, row.first_row) >= a.capacity) return;
    put(a.rows, row.park_to, column, get(a.rows, row.first_row, column));
}

// Keeps the last states of the rows that a layer has made certain, from the oldest on, so that none is
// overwritten before it has moved.
extern "C" __global__ void __launch_bounds__(256) keep_states(const __grid_constant__ KeepArgs a) {
    begin();
    const State &s = a.state;
    u32 at = blockIdx.y, column = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= s.round->rows || column >= a.rows.width) return;
    const Row &row = row_of(s, at);
    if (!row.live || !row.extends) return;
    uint2 range = extending_of(s, at, a.layer);
    u32 made = range.y - range.x, first = layer_row_of(s, at, a.layer), kept = a.kept_rows + row.task.place * a.kept_depth;
    if (made == 0) return;
    for (u32 back = a.kept_depth; back-- > 0;) {
        u32 from = back < made ? first + made - 1 - back : kept + back - made, to = kept + back;
        if (max(from, to) < a.capacity) put(a.rows, to, column, get(a.rows, from, column));
    }
}
