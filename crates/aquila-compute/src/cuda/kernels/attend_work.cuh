// How attention is divided: which rows go together, and which steps of a block of positions they share.
//
// A step lies in the prefix of all rows that go together, or each of them has one of its own.

#pragma once

#include "tensor.cuh"

#define ATTEND_BLOCK 128
#define ATTEND_STEP 16        // positions of a step
#define ATTEND_STEPS 8        // steps of a block, as many as keys or values in shared memory have room for
#define ATTEND_THREADS 128
#define ATTEND_WARPS 4
#define ATTEND_MERGED 32      // blocks that a thread block merges of one row at most: `MERGED_BLOCKS` of `attention.rs`
#define NO_SLOT 0xffffffffu
#define NOWHERE 0xffffffffu

// The positions of a block that a row sees.
struct InBlock {
    u32 first, count;
    __device__ __forceinline__ InBlock(const Seen &seen, u32 block) {
        first = max(block * ATTEND_BLOCK, seen.first);
        u32 end = min((block + 1) * ATTEND_BLOCK, seen.end);
        count = end > first ? end - first : 0;
    }
};

// The blocks in which a row sees something, and where their parts lie: behind those of the rows before.
struct Blocks {
    u32 first, count, place;
    __device__ __forceinline__ Blocks(const Seen &seen, u32 place) : place(place) {
        first = seen.first / ATTEND_BLOCK, count = (seen.end + ATTEND_BLOCK - 1) / ATTEND_BLOCK - first;
    }
};

struct Range {
    u32 first, end;
};

// Consecutive rows of one start, `most` at most.
struct Together {
    u32 count = 0;
    u32 first = ~0u, last_first = 0, end = 0;  // where what they see begins first and last, and ends
    u32 prefix = 0, common = ~0u;              // their longest prefix; the shortest of a row with a tail
    Together() = default;
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
    __device__ __forceinline__ u32 blocks() const { return (end + ATTEND_BLOCK - 1) / ATTEND_BLOCK - first_block(); }
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
