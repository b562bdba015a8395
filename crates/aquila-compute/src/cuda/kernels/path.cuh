// Accepted paths: what is taken of them, and what follows.

#pragma once

#include "choice.cuh"

// A request's path through its tree, and the tokens that it yields.
struct Path {
    u32 *nodes, *tokens;
    u32 length;  // nodes, which are as many as tokens
};

// Takes tokens of the answer until the request's own rules end it; answers how many.
__device__ u32 take(const State &s, Row &row, const u32 *tokens, u32 count) {
    Sequence &sequence = sequence_of(s, row);
    u32 *text = tokens_of(s, row.task.place), taken = 0;
    while (taken < count && !row.ended) {
        u32 token = tokens[taken++];
        if (sequence.tokens < s.tokens_stride) text[sequence.tokens] = token;
        sequence.tokens++;
        if (sequence.history && token < s.vocabulary) sequence.history[token]++;
        bool stops = false;
        for (u32 i = 0; i < sequence.stop_count; i++) stops = stops || sequence.stops[i] == token;
        if (stops) {
            row.ended = ENDED_BY_TOKEN, row.ended_token = token;
        } else if (sequence.tokens >= sequence.longest) {
            row.ended = ENDED_BY_LENGTH;
        }
    }
    sequence.ended = row.ended != 0;
    return taken;
}

// Commits a path and notes what follows from it. One thread.
__device__ void settle(const State &s, u32 at, Row &row, const Path &path) {
    Sequence &sequence = sequence_of(s, row);
    const Node *tree = tree_of(s, at);
    u32 place = row.task.place, &committed = committed_of(s, place, 0), depth = 0, refused = 0;
    u32 end = path.nodes[path.length - 1];
    for (u32 n = 1; n < row.tree; n++) {
        depth = max(depth, tree[n].depth);
        refused += tree[n].parent == end;
    }
    for (u32 i = 0; i + 1 < path.length; i++) {
        u32 rank = 0;
        for (u32 n = path.nodes[i] + 1; n < path.nodes[i + 1]; n++) rank += tree[n].parent == path.nodes[i];
        ranks_of(s, at)[i] = min(rank, 255u);
    }
    row.proposed = row.tree - 1, row.correct = path.length - 1, row.depth = depth, row.refused = refused;
    row.answered = take(s, row, path.tokens, path.length);
    const u32 *slots = s.tables + table_of(s, 0, place) + committed;
    for (u32 i = 0; i < row.answered; i++) {
        u32 node = path.nodes[i];
        s.moves[(size_t)at * (s.steps + 1) + i] = make_uint4(slots[node], slots[i], row.first_row + node, row.first_row + i);
    }
    committed += row.answered;
    sequence.rounds += sequence.drafts;
}
