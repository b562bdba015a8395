// Arguments of the kernels: mirrors of `arguments.rs`, field for field. A test compares them.

#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// Rows twice: as f32, and rounded to bfloat16 for what tensor cores read. Without tensor cores
// there are no halves.
struct Rows {
    float *values;
    u16 *halves;
    u32 stride, width;
};

// A placed plan.
struct Plan {
    const u32 *counts;   // rows in use, outputs in use
    const uint4 *spans;  // start in the tables, prefix, start in the tree slots, how many
    const u32 *tokens, *positions, *writes, *sources, *outputs, *destinations;
    const u32 *tables, *tree_slots;
};

struct ChangeArgs {
    const uint2 *changes;  // where in the block tables, and the slot
    u32 *tables;
    u32 count, size;
};

struct EmbedArgs {
    Plan plan;
    Rows out;
    const void *table;
    u32 width, tokens;
    float scale;
};

struct NormArgs {
    Rows in, out;
    const float *weight;
    u32 width;
    float epsilon;
};

struct ProjectArgs {
    Rows in, out;
    const u8 *weight;
    const float *bias;
    const float *norm;  // of the input, where the kernel norms it
    float *partial;
    u32 *arrivals;
    u32 inputs, outputs, rows, add, stages;
    u32 last_pass;  // whether the weights are not read again soon
    float epsilon;  // of the norm
};

// What the driver made to describe rows or weights to the copy engine.
struct alignas(128) TensorMap {
    u64 words[16];
};

struct TilesArgs {
    TensorMap rows, weights;
    ProjectArgs project;
    u32 whole, parts;  // tiles that are not divided, and parts of `grain` slices of the others
    u32 grain;         // slices of which what a cluster has of divided tiles is a multiple
    u32 pieces;        // of sums that a thread block leaves at most
};

struct PlainProjectArgs {
    Rows in, out;
    const void *weight;
    const float *bias;
    u32 inputs, outputs, rows, add;
};

struct PackArgs {
    const u16 *in;
    u16 *out;
    u32 rows, inputs, first;
};

struct RandomArgs {
    const u16 *samples;
    void *out;
    u64 state, first, end;
};

struct WriteKvArgs {
    Plan plan;
    Rows qkv;
    const float *query_norm, *key_norm, *cos, *sin;
    void *keys, *values;
    u32 heads, kv_heads, head_dim, half, positions, slots;
    float epsilon;
};

struct AttendArgs {
    Plan plan;
    Rows qkv, out;
    const void *keys, *values;
    float *parts, *stats;  // sums of each block, and its largest score and total; none where no block waits for others
    u32 *arrivals;         // of blocks, by row and key head
    u32 *places;           // of rows that a second kernel merges: blocks before theirs; none where there is no such kernel
    u32 heads, kv_heads, head_dim, slots, first_row, rows;
    u32 room;    // for blocks, each of all heads
    u32 window;  // positions that a row sees at most
    float scale;
};

struct RouteArgs {
    Rows logits;
    u32 *likeliest, *ascending;  // experts of each row by probability, and by id
    float *weights;              // of the ascending ones
    u32 experts, per_token, normalize;
};

struct GroupArgs {
    const u32 *ascending;
    u32 *places;       // pairs, expert by expert
    uint2 *units;      // an expert; 16 times the first of its places, and how many
    u32 *unit_count;
    u32 pairs, experts;
};

struct ExpertsArgs {
    Rows in, out;         // `out` has a row for each pair, and the columns `first` to `end`
    const u64 *matrices;  // the address of each expert's
    const u32 *ascending, *places;
    const uint2 *units;
    const u32 *unit_count;
    u32 sharing;  // pairs that read the same row
    u32 inputs, first, end;
};

struct MixArgs {
    Rows in, out;
    const float *weights;
    u32 per_token, first, width, add;
};

struct RoutedArgs {
    Rows out;
    const u32 *likeliest;
    u32 column, per_token;
};

struct GateArgs {
    Rows in, out;
    u32 width, gelu;
};

struct AddArgs {
    Rows in, out;
    u32 width;
};

struct SoftCapArgs {
    Rows rows;
    float cap;
};

struct GatherArgs {
    const u32 *count, *list;
    Rows in, out;
    u32 rows, first;
};

struct CopyArgs {
    Rows in, out;
    u32 from, to, width;
};

struct ClearArgs {
    Plan plan;
    Rows rows;
};

struct MoveRowsArgs {
    Rows rows;
    const uint2 *moves;
    u32 count, capacity;
};

struct MoveSlotsArgs {
    u16 *keys, *values;
    const uint2 *moves;
    u32 count, slots, width;
};
