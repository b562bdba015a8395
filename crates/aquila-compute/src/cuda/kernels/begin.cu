// What the host tells a round: requests that come, slots, what runs.

#include "choice.cuh"

// Writes the row of a request that begins, or goes on after it was preempted: a thread block for each.
extern "C" __global__ void __launch_bounds__(256) admit(const __grid_constant__ AdmitArgs a) {
    begin();
    const State &s = a.state;
    const Admission &admitted = a.admissions[blockIdx.x];
    u32 thread = threadIdx.x, place = admitted.place;
    const u32 *from = reinterpret_cast<const u32 *>(&admitted.sequence);
    u32 *to = reinterpret_cast<u32 *>(s.sequences + place);
    for (u32 i = thread; i < sizeof(Sequence) / 4; i += blockDim.x) to[i] = from[i];
    const u32 *tokens = a.words + admitted.tokens_at;
    u32 count = admitted.sequence.tokens;
    for (u32 i = thread; i < count; i += blockDim.x) tokens_of(s, place)[i] = tokens[i];
    if (thread < MOST_GROUPS) {
        u32 rows = admitted.matched;
        if (admitted.complete && thread < s.groups) {
            u32 ahead = thread == 0 ? 1 : s.lookahead[thread - 1];
            rows = count > ahead ? count - ahead : 0;
        }
        committed_of(s, place, thread) = rows;
    }

    u32 *history = admitted.sequence.history;
    if (!history) return;
    for (u32 i = thread; i < s.vocabulary; i += blockDim.x) history[i] = 0;
    __syncthreads();
    for (u32 i = thread; i < count; i += blockDim.x) {
        if (tokens[i] >= s.vocabulary) continue;
        if (i < admitted.sequence.prompt) {
            atomicOr(&history[tokens[i]], 0x80000000u);
        } else {
            atomicAdd(&history[tokens[i]], 1u);
        }
    }
}

// Changes block tables: a thread block for each change.
extern "C" __global__ void __launch_bounds__(256) change_slots(const __grid_constant__ ChangeSlotsArgs a) {
    begin();
    uint4 change = a.changes[blockIdx.x];  // where in the tables, how many, where in the words
    for (u32 i = threadIdx.x; i < change.y; i += blockDim.x) a.state.tables[change.x + i] = a.words[change.z + i];
}

// The deepest tree of a round that begins with so many tokens.
__device__ __forceinline__ u32 most_steps(const Sequence &sequence, u32 tokens) {
    u32 left = sequence.longest > tokens + 1 ? sequence.longest - (tokens + 1) : 0;
    return min(sequence.steps, left);
}

// Begins the rows of a round; a thread for each. Requests that have ended are void in it.
extern "C" __global__ void __launch_bounds__(128) begin_rows(const __grid_constant__ StepArgs a) {
    begin();
    const State &s = a.state;
    u32 at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= s.round->rows) return;
    Row &row = row_of(s, at);
    u32 *words = reinterpret_cast<u32 *>(&row);
    for (u32 i = 0; i < sizeof(Row) / 4; i++) words[i] = 0;
    row.task = s.tasks[at];
    row.park_to = NONE;
    u32 place = row.task.place;
    Sequence &sequence = s.sequences[place];
    row.live = !sequence.ended;
    row.known = sequence.extended;
    if (!row.live || !row.task.decodes) return;

    u32 most = most_steps(sequence, sequence.tokens);
    if (most == 0) {
        row.task.steps = 0, row.task.topk = 1, row.task.nodes = 1;
    } else if (most < row.task.steps) {
        u64 nodes = (u64)row.task.topk * row.task.topk * (most - 1) + 1 + row.task.topk;
        row.task.steps = most, row.task.nodes = (u32)min((u64)row.task.nodes, nodes);
    }
    row.tree = 1;
    tree_of(s, at)[0] = {tokens_of(s, place)[committed_of(s, place, 0)], 0, 0, 1.0f, NONE, 1, 0.0f};
    if (!s.drafts || !sequence.drafts) return;
    if (!sequence.paused) {
        row.seeded = sequence.seeded == 2 && row.task.steps > 0;
        sequence.seeded = 0;
    } else if (row.task.steps > 0 && (!s.hidden || sequence.missed <= s.parked_rows)) {
        row.resumed = 1;
        row.parked_row = s.hidden ? s.first_parked + place * s.parked_rows : 0;
        row.parked_token = sequence.paused_token;
        u32 last = s.steps + 1, goal = sequence.tokens > last ? sequence.tokens - last : 0;
        row.before = goal > sequence.extended ? goal - sequence.extended : 0;
    }
}

// Decides which drafts process what the round made certain, and which are paused; a thread for each row.
extern "C" __global__ void __launch_bounds__(128) publish(const __grid_constant__ StepArgs a) {
    begin();
    const State &s = a.state;
    u32 at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= s.round->rows) return;
    Row &row = row_of(s, at);
    row.next = 0, row.park_to = NONE;
    if (!row.live) return;
    Sequence &sequence = sequence_of(s, row);
    row.known = sequence.extended;
    if (!s.drafts || sequence.ended || !sequence.drafts) return;
    if (!sequence.paused && (!row.task.decodes || row.task.steps > 0 || !row.task.pause)) {
        row.next = 1;
        return;
    }
    if (!sequence.paused) sequence.paused = 1, sequence.paused_token = row.first_token, sequence.missed = 0;
    u32 missed = sequence.missed++;
    if (s.hidden && missed < s.parked_rows) row.park_to = s.first_parked + row.task.place * s.parked_rows + missed;
}

// Lets the draft of a row know `tokens` of its text.
__device__ void extend_to(const State &s, u32 at, Row &row, u32 tokens, bool whole) {
    Sequence &sequence = sequence_of(s, row);
    u32 place = row.task.place, read = committed_of(s, place, 0);
    for (u32 g = 0; g + 1 < s.groups; g++) {
        u32 certain = tokens > s.lookahead[g] ? tokens - s.lookahead[g] : 0;
        if (!whole) certain = min(certain, read);
        u32 &rows = committed_of(s, place, g + 1);
        extending_of(s, at, g) = make_uint2(rows, max(rows, certain));
        rows = max(rows, certain);
    }
    sequence.extended = tokens;
    row.extends = 1;
}

// Says which tokens drafts process next, those that a round made certain: one thread block.
extern "C" __global__ void __launch_bounds__(256) begin_extend(const __grid_constant__ StepArgs a) {
    begin();
    const State &s = a.state;
    if (threadIdx.x == 0) s.round->resumes = 0;
    for (u32 at = threadIdx.x; at < s.round->rows; at += blockDim.x) {
        Row &row = row_of(s, at);
        row.extends = 0, row.seeds = 0;
        if (!row.live || !row.next) continue;
        Sequence &sequence = sequence_of(s, row);
        bool whole = row.task.decodes || row.task.last;
        row.target_row = row.first_row, row.target_token = row.first_token;
        row.seeds = whole && most_steps(sequence, sequence.tokens) > 0;
        if (!row.seeds) sequence.seeded = 1;
        extend_to(s, at, row, sequence.tokens, whole);
        row.known = sequence.tokens;
    }
}

// The same for what paused drafts missed: pass `a.pass` of those in which resumed drafts process it.
// What they missed lies on a line, request after request, of which a pass takes a chunk; only the last
// pass, which leaves the seeds, takes what is common after a round.
extern "C" __global__ void __launch_bounds__(256) begin_catch_up(const __grid_constant__ StepArgs a) {
    begin();
    const State &s = a.state;
    u32 rows = s.round->rows;
    auto before = [](u32, const Row &row) { return row.live && row.resumed ? row.before : 0; };
    u32 line = sum_before(s, rows, before), passes = (line + s.chunk - 1) / s.chunk;
    if (threadIdx.x == 0) s.round->resumes = 1;
    for (u32 at = threadIdx.x; at < rows; at += blockDim.x) {
        Row &row = row_of(s, at);
        row.extends = 0, row.seeds = 0;
        if (!row.live || !row.resumed || a.pass > passes) continue;
        Sequence &sequence = sequence_of(s, row);
        row.target_row = row.parked_row, row.target_token = row.parked_token;
        if (a.pass == passes) {
            sequence.paused = 0;
            row.seeds = 1;
            extend_to(s, at, row, sequence.tokens, true);
            continue;
        }
        u32 start = 0;
        for (u32 r = 0; r < at; r++) start += before(r, row_of(s, r));
        u32 first = a.pass * s.chunk, end = first + s.chunk;
        if (row.before == 0 || start >= end || start + row.before <= first) continue;
        u32 last = s.steps + 1, known = sequence.tokens - last - row.before;
        extend_to(s, at, row, known + min(row.before, end - start), true);
    }
}

// Leaves what drafts propose as the seeds of trees; a thread block for each row.
extern "C" __global__ void __launch_bounds__(64) take_seeds(const __grid_constant__ StepArgs a) {
    begin();
    const State &s = a.state;
    u32 at = blockIdx.x;
    if (at >= s.round->rows) return;
    Row &row = row_of(s, at);
    if (!row.live || !row.extends || !row.seeds) return;
    Sequence &sequence = sequence_of(s, row);
    Proposed proposed(s, sequence, row.first_query);
    u32 place = row.task.place, count = min(proposed.count, s.candidates);
    for (u32 i = threadIdx.x; i < count; i += blockDim.x) {
        s.seed_tokens[place * s.candidates + i] = proposed.token_at(i);
        s.seed_probabilities[place * s.candidates + i] = proposed.probability_at(i);
    }
    if (threadIdx.x > 0) return;
    sequence.seed_count = count, sequence.seed_drawn = is_drawn(sequence);
    if (s.round->resumes) {
        row.seeded = 1;
    } else {
        sequence.seeded = 2;
    }
}
