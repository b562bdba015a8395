// The rows of the passes of a round: `target.rs`, `recurrent.rs` and `layers.rs`. A thread block for
// each row of the round; the last one counts the rows of the pass.
//
// Positions are computed from lengths, never kept.

#include "choice.cuh"

// A plan that is being written.
struct Planned {
    u32 *counts;
    uint4 *spans;
    u32 *tokens, *positions, *writes, *sources, *outputs, *destinations, *tree_slots;

    __device__ __forceinline__ Planned(const Plan &plan)
        : counts(const_cast<u32 *>(plan.counts)), spans(const_cast<uint4 *>(plan.spans)), tokens(const_cast<u32 *>(plan.tokens)),
          positions(const_cast<u32 *>(plan.positions)), writes(const_cast<u32 *>(plan.writes)),
          sources(const_cast<u32 *>(plan.sources)), outputs(const_cast<u32 *>(plan.outputs)),
          destinations(const_cast<u32 *>(plan.destinations)), tree_slots(const_cast<u32 *>(plan.tree_slots)) {}

    __device__ __forceinline__ void row(u32 at, u32 token, u32 position, u32 write, uint4 span) const {
        tokens[at] = token, positions[at] = position, writes[at] = write, spans[at] = span;
    }
};

// What a row sees that sees nothing but the beginning of its block table.
__device__ __forceinline__ uint4 in_table(u32 start, u32 rows) { return make_uint4(start, rows, 0, 0); }

// Asks about output `o` of the pass.
__device__ __forceinline__ void ask(const State &s, u32 o, u32 row, u32 node, u32 given) {
    s.queries[o] = {row, node, given, 0};
    s.best[o] = ~0ull, s.raw_best[o] = ~0ull, s.leaders[o] = NONE, s.counts[o] = 0;
}

// Whether rows or outputs of a request are more than the host allowed, which the host then hears of. The
// rows that there is room for then see nothing and write nothing, and outputs ask about no node: an earlier
// plan has left others there.
__device__ __forceinline__ bool exceeds(const PlanArgs &a, const Planned &plan, u32 request, u32 first, u32 rows, u32 output, u32 outputs) {
    if (first + rows <= a.most_rows && output + outputs <= a.most_outputs) return false;
    Row &row = row_of(a.state, request);
    row.exceeded = 1;
    for (u32 at = first + threadIdx.x; at < min(first + rows, a.most_rows); at += blockDim.x) plan.row(at, 0, 0, NONE, in_table(NONE, 0));
    for (u32 o = output + threadIdx.x; o < min(output + outputs, a.most_outputs); o += blockDim.x) {
        plan.outputs[o] = 0, plan.destinations[o] = row.task.place;
        ask(a.state, o, request, NONE, NONE);
    }
    return true;
}

// The target's pass: the rows of chunks, and a row for every node of every tree. One thread block of a
// multiprocessor at least, or the compiler would spill registers to make room for 16.
extern "C" __global__ void __launch_bounds__(128, 1) plan_target(const __grid_constant__ PlanArgs a) {
    begin();
    const State &s = a.state;
    Planned plan(a.plan);
    u32 at = blockIdx.x, thread = threadIdx.x, rows = s.round->rows;
    auto rows_of = [](u32, const Row &r) { return !r.live ? 0 : r.task.decodes ? r.tree : r.task.end - r.task.first; };
    auto outputs_of = [](u32, const Row &r) { return !r.live ? 0 : r.task.decodes ? r.tree : r.task.end_output - r.task.first_output; };
    auto nodes_of = [](u32, const Row &r) { return r.live && r.task.decodes ? r.tree : 0; };
    u32 until = min(at, rows);
    u32 first = sum_before(s, until, rows_of), output = sum_before(s, until, outputs_of), nodes = sum_before(s, until, nodes_of);
    bool here = at < rows && row_of(s, at).live;
    if (thread == 0 && at == gridDim.x - 1) {
        u32 more = here ? rows_of(at, row_of(s, at)) : 0, asked = here ? outputs_of(at, row_of(s, at)) : 0;
        plan.counts[0] = min(first + more, a.most_rows), plan.counts[1] = min(output + asked, a.most_outputs);
        s.round->outputs = min(output + asked, a.most_outputs), s.round->count = 1;
    }
    if (!here) return;
    Row &row = row_of(s, at);
    u32 place = row.task.place, start = table_of(s, 0, place), committed = committed_of(s, place, 0);
    const u32 *slots = s.tables + start, *tokens = tokens_of(s, place);
    if (thread == 0) row.first_row = first, row.first_token = committed, row.first_output = output;
    if (exceeds(a, plan, at, first, rows_of(at, row), output, outputs_of(at, row))) return;
    if (!row.task.decodes) {
        u32 known = s.sequences[place].tokens;
        for (u32 t = row.task.first + thread; t < row.task.end; t += blockDim.x) {
            u32 to = first + t - row.task.first;
            plan.row(to, tokens[t], t, slots[t], in_table(start, t + 1));
            if (t < row.task.first_output || t >= row.task.end_output) continue;
            u32 o = output + t - row.task.first_output;
            plan.outputs[o] = to;
            ask(s, o, at, NONE, t + 1 < known ? tokens[t + 1] : NONE);
        }
        return;
    }
    const Node *tree = tree_of(s, at);
    for (u32 n = thread; n < row.tree; n += blockDim.x) {
        u32 depth = tree[n].depth, tail = (nodes + n) * (s.steps + 1), node = n;
        uint4 span = in_table(start, committed + n + 1);
        // The path of other nodes is not what the block table goes on with.
        if (depth < n) {
            span = make_uint4(start, committed, tail, depth + 1);
            for (u32 d = depth + 1; d > 0; d--) {
                // Parents are read before the store, for which they would wait.
                u32 slot = slots[committed + node];
                node = tree[node].parent;
                plan.tree_slots[tail + d - 1] = slot;
            }
        }
        plan.row(first + n, tree[n].token, committed + depth, slots[committed + n], span);
        plan.outputs[output + n] = first + n;
        ask(s, output + n, at, n, NONE);
    }
}

// The certain rows of a draft that recurs, or of one layer of a draft with a layer for each step.
extern "C" __global__ void __launch_bounds__(128) plan_extend(const __grid_constant__ PlanArgs a) {
    begin();
    const State &s = a.state;
    Planned plan(a.plan);
    u32 at = blockIdx.x, thread = threadIdx.x, rows = s.round->rows, layer = a.layer;
    auto rows_of = [&](u32 r, const Row &row) {
        uint2 range = extending_of(s, r, layer);
        return row.live && row.extends ? range.y - range.x : 0;
    };
    auto seeds_of = [&](u32, const Row &row) { return layer == 0 && row.live && row.extends && row.seeds ? 1u : 0u; };
    u32 until = min(at, rows), first = sum_before(s, until, rows_of), output = sum_before(s, until, seeds_of);
    bool here = at < rows && row_of(s, at).live && row_of(s, at).extends;
    if (at == gridDim.x - 1) {
        // As many candidates as any of the requests wants.
        __shared__ u32 count;
        __syncthreads();
        if (thread == 0) count = 1;
        __syncthreads();
        for (u32 r = thread; r < rows; r += blockDim.x) {
            if (seeds_of(r, row_of(s, r))) atomicMax(&count, sequence_of(s, row_of(s, r)).candidates);
        }
        __syncthreads();
        if (thread == 0) {
            u32 more = here ? rows_of(at, row_of(s, at)) : 0, asked = here ? seeds_of(at, row_of(s, at)) : 0;
            plan.counts[0] = min(first + more, a.most_rows), plan.counts[1] = min(output + asked, a.most_outputs);
            // Only the first layer has outputs, and its queries stand until they are answered.
            if (layer == 0) s.round->outputs = min(output + asked, a.most_outputs), s.round->count = count;
        }
    }
    if (!here) return;
    Row &row = row_of(s, at);
    uint2 range = extending_of(s, at, layer);
    u32 place = row.task.place, group = layer + 1, start = table_of(s, group, place), lookahead = s.lookahead[layer];
    if (thread == 0) layer_row_of(s, at, layer) = first;
    if (exceeds(a, plan, at, first, rows_of(at, row), output, seeds_of(at, row))) return;
    u32 before = a.chained ? layer - 1 : 0;  // the layer whose states are taken; the first takes the target's
    for (u32 r = range.x + thread; r < range.y; r += blockDim.x) {
        u32 to = first + r - range.x, position = r + (a.by_layer ? layer : 0);
        plan.row(to, tokens_of(s, place)[r + lookahead], position, s.tables[start + r], in_table(start, r + 1));
        u32 source = row.target_row + r - row.target_token;
        if (layer > 0) {
            u32 fresh = extending_of(s, at, before).x;
            source = r >= fresh ? layer_row_of(s, at, before) + r - fresh : a.kept_rows + place * a.kept_depth + (fresh - 1 - r);
        }
        plan.sources[to] = source;
    }
    if (thread > 0 || !seeds_of(at, row)) return;
    plan.outputs[output] = first + range.y - range.x - 1;
    plan.destinations[output] = place;
    row.first_query = output;
    ask(s, output, at, NONE, NONE);
}

// The widest beam of all trees that are drafted, for all threads.
__device__ u32 widest(const State &s) {
    __shared__ u32 count;
    __syncthreads();
    if (threadIdx.x == 0) count = 1;
    __syncthreads();
    for (u32 r = threadIdx.x; r < s.round->rows; r += blockDim.x) {
        const Row &row = row_of(s, r);
        if (row.live && row.drafts) atomicMax(&count, row.task.topk);
    }
    __syncthreads();
    return count;
}

// A level of the trees of a draft that recurs: a row for every node of every beam. The hidden rows of
// seeds lie at their requests' places.
extern "C" __global__ void __launch_bounds__(128) plan_level(const __grid_constant__ PlanArgs a) {
    begin();
    const State &s = a.state;
    Planned plan(a.plan);
    u32 at = blockIdx.x, thread = threadIdx.x, rows = s.round->rows;
    auto rows_of = [&](u32 r, const Row &row) { return goes_on(s, r, row) ? row.beam : 0; };
    u32 first = sum_before(s, min(at, rows), rows_of);
    bool here = at < rows && goes_on(s, at, row_of(s, at));
    if (at == gridDim.x - 1) {
        u32 count = widest(s);
        if (thread == 0) {
            u32 total = min(first + (here ? row_of(s, at).beam : 0), min(a.most_rows, a.most_outputs));
            plan.counts[0] = total, plan.counts[1] = total;
            s.round->outputs = total, s.round->count = count;
        }
    }
    if (!here) return;
    Row &row = row_of(s, at);
    Offered *pool = offered_of(s, at);
    u32 place = row.task.place, start = table_of(s, 1, place), certain = committed_of(s, place, 1);
    u32 beam = row.beam, taken = row.slots;
    if (exceeds(a, plan, at, first, beam, first, beam)) return;
    __syncthreads();
    for (u32 b = thread; b < beam; b += blockDim.x) {
        u32 node = beam_of(s, at)[b], to = first + b, depth = pool[node].depth, tail = to * (s.steps + 1);
        u32 own = s.tables[start + certain + taken + b], parent = pool[node].parent;
        pool[node].slot = own;
        uint4 span = in_table(start, certain + depth);
        // Where there is more than one node of a level, a path is not what the block table goes on with.
        if (depth < taken + b + 1) {
            span = make_uint4(start, certain, tail, depth);
            u32 ancestor = node;
            for (u32 d = depth; d > 0; d--) {
                u32 slot = pool[ancestor].slot;
                ancestor = pool[ancestor].parent;
                plan.tree_slots[tail + d - 1] = slot;
            }
        }
        plan.sources[to] = parent != NONE && !a.first ? pool[parent].row : place;
        plan.outputs[to] = to, plan.destinations[to] = to;
        plan.row(to, pool[node].token, certain + depth - 1, own, span);
        ask(s, to, at, node, NONE);
    }
    __syncthreads();
    // Rows of parents were read above.
    for (u32 b = thread; b < beam; b += blockDim.x) pool[beam_of(s, at)[b]].row = first + b;
    if (thread == 0) row.slots = taken + beam, row.first_query = first;
}

// A level of the trees of a draft with a layer for each step: as many rows for every node of every beam
// as it is deep, fewer near the beginning of a text.
extern "C" __global__ void __launch_bounds__(128) plan_layer_level(const __grid_constant__ PlanArgs a) {
    begin();
    const State &s = a.state;
    Planned plan(a.plan);
    u32 at = blockIdx.x, thread = threadIdx.x, rows = s.round->rows, depth = a.layer, group = depth + 1;
    auto deep = [&](const Row &row) {
        u32 committed = sequence_of(s, row).tokens - 1, certain = committed_of(s, row.task.place, group);
        return committed > certain ? committed - certain : 0;
    };
    auto rows_of = [&](u32 r, const Row &row) { return goes_on(s, r, row) ? row.beam * deep(row) : 0; };
    auto nodes_of = [&](u32 r, const Row &row) { return goes_on(s, r, row) ? row.beam : 0; };
    u32 until = min(at, rows), first = sum_before(s, until, rows_of), output = sum_before(s, until, nodes_of);
    bool here = at < rows && goes_on(s, at, row_of(s, at));
    if (at == gridDim.x - 1) {
        u32 count = widest(s);
        if (thread == 0) {
            u32 more = here ? rows_of(at, row_of(s, at)) : 0, asked = here ? row_of(s, at).beam : 0;
            plan.counts[0] = min(first + more, a.most_rows), plan.counts[1] = min(output + asked, a.most_outputs);
            s.round->outputs = min(output + asked, a.most_outputs), s.round->count = count;
        }
    }
    if (!here) return;
    Row &row = row_of(s, at);
    Offered *pool = offered_of(s, at);
    u32 place = row.task.place, start = table_of(s, group, place), certain = committed_of(s, place, group);
    u32 committed = sequence_of(s, row).tokens - 1, each = deep(row), beam = row.beam;
    // Where the parent's rows of the layer before begin.
    u32 before = committed > depth - 1 ? committed - (depth - 1) : 0;
    if (exceeds(a, plan, at, first, beam * each, output, beam)) return;
    __syncthreads();
    for (u32 i = thread; i < beam * each; i += blockDim.x) {
        u32 b = i / each, r = certain + i % each, node = beam_of(s, at)[b], to = first + i, tail = first + b * each;
        u32 slot = s.tables[start + certain + i], parent = pool[node].parent;
        // The token of the path that is this far from its end.
        u32 ancestor = node;
        for (u32 d = depth - 1; d > r + depth - committed; d--) ancestor = pool[ancestor].parent;
        u32 source = a.kept_rows + place * a.kept_depth;
        if (!a.chained) {
            source += committed - 1 - r;
        } else if (parent != NONE && depth > 1 && r >= before) {
            source = pool[parent].row + r - before;
        }
        plan.tree_slots[to] = slot;
        plan.sources[to] = source;
        uint4 span = b == 0 ? in_table(start, r + 1) : make_uint4(start, certain, tail, i % each + 1);
        plan.row(to, pool[ancestor].token, r + depth, slot, span);
    }
    for (u32 b = thread; b < beam; b += blockDim.x) {
        plan.outputs[output + b] = first + (b + 1) * each - 1;
        plan.destinations[output + b] = output + b;
        ask(s, output + b, at, beam_of(s, at)[b], NONE);
    }
    __syncthreads();
    for (u32 b = thread; b < beam; b += blockDim.x) pool[beam_of(s, at)[b]].row = first + b * each;
    if (thread == 0) row.first_query = output;
}
