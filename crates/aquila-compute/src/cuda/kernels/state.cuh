// The rows of all running requests and the round that runs, as they lie on the device.
//
// `round/*.rs` defines what the steps do with them. A request has a place for as long as it holds KV;
// a round has a row for each request of its batch. Rows of requests that have ended are void.
//
// Mirrors of `layout.rs`, field for field. A test compares them.

#pragma once

#include "device.cuh"

#define NONE 0xffffffffu
#define MOST_GROUPS 16

// How tokens are chosen.
struct Sampling {
    u64 seed;
    const uint2 *biases;  // token, bits of the bias
    double floor;         // how far below the largest quotient min-p keeps tokens
    float temperature, top_p, repetition, presence, frequency;
    u32 top_k, greedy, bias_count;
};

// A request's row of the state.
struct Sequence {
    u64 id, rounds;
    Sampling sampling, draft;
    const u32 *stops;
    u32 *history;  // of each token: how often the answer has it; the highest bit: the prompt has it
    double single, accumulated;
    u32 stop_count, choice, prompt, longest, min_tokens;
    u32 verify;  // MATCH, TARGET_ONLY or REJECTION
    u32 drafts, steps, candidates;
    u32 logprobs, prompt_logprobs;  // one more than how many likely tokens are told, or 0
    u32 tokens, extended, ended;
    u32 paused, paused_token, missed;
    u32 seeded, seed_count, seed_drawn;
};
#define MATCH 0
#define TARGET_ONLY 1
#define REJECTION 2

// What the host tells of one request of a batch.
struct Task {
    u32 place, decodes;
    u32 first, end, first_output, end_output, last;  // of a chunk
    u32 steps, topk, nodes, pause;                   // of a tree
    float rate;
};

// What one request does in the round, and what comes of it. Behind it lie the tokens of its answer,
// the nodes at which they were chosen, and the ranks of the drafts among them.
struct Row {
    Task task;
    u32 live;
    u32 seeded;             // whether a seed waits for a tree
    u32 drafts;             // whether its tree is being drafted
    u32 pool, beam, slots;  // nodes offered, nodes that go on, nodes that have slots
    u32 tree;               // nodes of its tree
    u32 first_row, first_token, first_output;  // in the target's pass
    u32 first_query;                           // in the draft's pass that was planned last
    u32 next;                                  // whether its draft processes what the round made certain
    u32 resumed, before, parked_row, parked_token;  // of a draft that resumes
    u32 extends, seeds, target_row, target_token;   // of an extend
    u32 park_to;                                    // where its hidden row is kept, or NONE
    u32 followed;  // of a path by probability, the nodes that have their tokens; in the answer lies one more
    u32 complete;  // whether that path has come to its end
    // What the host reads.
    u32 exceeded;  // whether a pass had more rows than the host allowed
    u32 answered, prompted, proposed, correct, ended, ended_token, known, depth, refused;
};
#define ENDED_BY_TOKEN 1
#define ENDED_BY_LENGTH 2

// A node that a draft offered.
struct Offered {
    u32 token, parent, depth;
    float score;
    u32 slot, row;  // where it ran: its slot, and its first row in the pass of the level before
    u32 drawn;      // which distribution its children were drawn from, or NONE
    u32 kept;       // its place in the tree, or NONE
};

// A node of a tree.
struct Node {
    u32 token, parent, depth;
    float score;
    u32 drawn;    // as above
    u32 kept;     // whether a row budget keeps it
    float worth;  // for that budget
};

// What is asked about one output of a pass.
struct Query {
    u32 row, node, given, unused;
};

// What all rows of a round share; the host sends it with the batch.
struct Round {
    u64 number;
    u32 rows;     // of the batch
    u32 outputs;  // queries of the pass that was planned last
    u32 count;    // candidates that are asked for
    u32 resumes;  // whether the extend that runs is one of drafts that resume
    u32 budget;   // rows that all trees together may have, where that is bounded
    u32 unused;
};

struct State {
    u32 places, groups, tokens_stride, table_stride;
    u32 drafts, hidden, first_parked, parked_rows, chunk;
    u32 pool, nodes, topk, steps, candidates, record;  // most of each; bytes of a row's record
    u32 vocabulary;
    const u32 *lookahead;  // of each group of the draft
    const float *prior;    // of a drawn draft, by rank
    Round *round;
    const Task *tasks;
    u8 *records;
    Sequence *sequences;
    u32 *committed;  // rows of each place in each group
    u32 *tokens, *tables;
    u32 *seed_tokens;
    float *seed_probabilities;
    Offered *offered;
    u32 *beams;
    Node *trees;
    uint2 *extending;  // of each row and group of the draft: first row and end
    u32 *layer_rows;   // of each row and group of the draft: its first row in the pass of that layer
    uint4 *moves;      // of each row, by token: slots from and to, rows from and to
    Query *queries;
    // Answers to queries.
    u64 *best, *raw_best, *limits;
    double *leader_scores, *log_totals, *part_scores;
    u32 *leaders, *part_tokens, *arrivals;
    u32 *counts;  // candidates of each query
    u32 *candidate_tokens;
    float *candidate_probabilities;
    u64 *maxima;       // the largest values of shares of each row
    u64 *lists;        // the likeliest tokens of each row, and the same before anything changed them
    u64 *totals;       // weights of all tokens, for each list
    u32 *list_counts;
    float *drawn;         // distributions of drafts: f32 weights
    double *drawn_totals;
    double *rest;         // what verification leaves of a distribution
    const u32 *masks;     // by output where its mask begins, or NONE; then masks, a bit for each token; or none
};

__device__ __forceinline__ Row &row_of(const State &s, u32 row) {
    return *reinterpret_cast<Row *>(s.records + (size_t)row * s.record);
}
// Behind a row: tokens, nodes, ranks, each as many as a path has nodes at most.
__device__ __forceinline__ u32 *answer_of(const State &s, u32 row) { return reinterpret_cast<u32 *>(&row_of(s, row) + 1); }
__device__ __forceinline__ u32 *answer_nodes_of(const State &s, u32 row) { return answer_of(s, row) + s.steps + 1; }
__device__ __forceinline__ u32 *ranks_of(const State &s, u32 row) { return answer_of(s, row) + 2 * (s.steps + 1); }

__device__ __forceinline__ Sequence &sequence_of(const State &s, const Row &row) { return s.sequences[row.task.place]; }
__device__ __forceinline__ u32 *tokens_of(const State &s, u32 place) { return s.tokens + (size_t)place * s.tokens_stride; }
// Where a request's block table of a group begins.
__device__ __forceinline__ u32 table_of(const State &s, u32 group, u32 place) { return (group * s.places + place) * s.table_stride; }
__device__ __forceinline__ u32 &committed_of(const State &s, u32 place, u32 group) { return s.committed[place * MOST_GROUPS + group]; }
__device__ __forceinline__ Offered *offered_of(const State &s, u32 row) { return s.offered + (size_t)row * s.pool; }
__device__ __forceinline__ u32 *beam_of(const State &s, u32 row) { return s.beams + (size_t)row * s.topk; }
__device__ __forceinline__ Node *tree_of(const State &s, u32 row) { return s.trees + (size_t)row * s.nodes; }
__device__ __forceinline__ uint2 &extending_of(const State &s, u32 row, u32 group) { return s.extending[row * MOST_GROUPS + group]; }
__device__ __forceinline__ u32 &layer_row_of(const State &s, u32 row, u32 layer) { return s.layer_rows[row * MOST_GROUPS + layer]; }

// The depth of a row's beam, which ends the tree where there is none.
__device__ __forceinline__ bool goes_on(const State &s, u32 at, const Row &row) {
    return row.live && row.drafts && row.beam > 0 && offered_of(s, at)[beam_of(s, at)[0]].depth < row.task.steps;
}

// Which distribution the children of a row's seed, or of a node of a level's beam, were drawn from.
__device__ __forceinline__ u32 drawn_of_seed(const State &s, u32 place) { return place * (1 + (max(s.steps, 1u) - 1) * s.topk); }
__device__ __forceinline__ u32 drawn_of_level(const State &s, u32 place, u32 depth, u32 rank) {
    return drawn_of_seed(s, place) + 1 + (depth - 1) * s.topk + rank;
}

// The sum over the rows before `row` of what `count` says of each, the same for all threads.
template <typename F> __device__ __forceinline__ u32 sum_before(const State &s, u32 row, F count) {
    __shared__ u32 total;
    __syncthreads();
    if (threadIdx.x == 0) total = 0;
    __syncthreads();
    u32 mine = 0;
    for (u32 r = threadIdx.x; r < row; r += blockDim.x) mine += count(r, row_of(s, r));
    if (mine) atomicAdd(&total, mine);
    __syncthreads();
    return total;
}

// Arguments of the steps.

struct StepArgs {
    State state;
    u32 pass;
};

struct Admission {
    Sequence sequence;
    u32 place, matched, tokens_at;
    u32 complete;  // whether its rows came from another engine: all that are certain, in every group
};

struct AdmitArgs {
    State state;
    const Admission *admissions;
    const u32 *words;
};

struct ChangeSlotsArgs {
    State state;
    const uint4 *changes;
    const u32 *words;
};

struct StartArgs {
    State state;
    const uint4 *given;
    const u32 *words;
    u32 given_count;
};

struct BuildArgs {
    State state;
    u32 fill, weigh;
};

struct PlanArgs {
    State state;
    Plan plan;
    u32 most_rows, most_outputs;
    u32 first;  // whether a level is the first
    u32 layer, by_layer, chained, kept_rows, kept_depth;
};

struct ChooseArgs {
    State state;
    Rows logits;
    const u32 *ids;   // the tokens that a draft knows, where those are not all
    float *logprobs;  // none where no request asked for any
    u32 *top_counts;
    uint2 *tops;
    u32 size, draft, level, most_tops;
    u32 first;  // the output whose logits come first; what lies by output in pieces is moved back by it
    u32 count;  // outputs that have logits
    u32 ranks;  // whether tokens are ranked
};

struct AcceptArgs {
    State state;
    const double *rates;  // by the drafts of a tree
    double mean;
    u32 simulate;
};
#define SIMULATE_NOTHING 0
#define SIMULATE_LENGTH 1
#define SIMULATE_RATE 2

struct CompactSlotsArgs {
    State state;
    u16 *keys, *values;
    u32 slots, width;
};

struct CompactRowsArgs {
    State state;
    Rows rows;
    u32 capacity;
};

struct KeepArgs {
    State state;
    Rows rows;
    u32 layer, kept_rows, kept_depth, capacity;
};
