// The choice of tokens: at the target's outputs, and what a draft proposes.
//
// `scan` finds the largest value of each row. `rank` finds what top-k and top-p keep and the likeliest
// tokens; `race` adds noise and finds the winner; `near` finds the best of those that nearly won. The
// host leaves out the kernels that no request of a batch needs. Several thread blocks share a row, and
// the last of them to arrive concludes from what all have found.
//
// Weights are whole numbers and keys are unique, so no order of adding or comparing is part of the
// result.

#include "choice.cuh"

#define CHOOSERS 256   // threads of a thread block: RUN / 4
#define MAXIMA 256     // shares of a row of which the largest value is kept, one for each thread
#define RANKED 192     // likeliest tokens that these find; more of them would let too many others through
#define LISTED 2048    // tokens of a row that are listed at most
#define LIST 4096      // keys that are sorted at once
#define LOG_DIGITS 10  // bits of a key that are looked at at a time
#define DIGITS (1u << LOG_DIGITS)
#define NEAR 6.0       // scores this far below the best count for nothing

__device__ __forceinline__ Part part_of_block() { return {blockIdx.x, 31 - (u32)__clz(gridDim.x)}; }

__device__ __forceinline__ Question question_of(const ChooseArgs &a, u32 o, Part part, u8 *words) {
    return question(a.state, a.logits, a.ids, a.size, a.draft, a.level, o, part, reinterpret_cast<u32 *>(words));
}

// Whether this thread block is the last of its row; then it sees what the others wrote before.
__device__ bool is_last(const State &s, u32 o) {
    __shared__ u32 last;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicInc(&s.arrivals[o], gridDim.x - 1) == gridDim.x - 1;
        __threadfence();
    }
    __syncthreads();
    return last;
}

// Adds up `mine` of this thread and of those before it, and of all.
template <typename T> __device__ T sum_up(T mine, T &all) {
    __shared__ T of_warps[CHOOSERS / 32];
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (u32 step = 1; step < 32; step *= 2) {
        T before = __shfl_up_sync(FULL, mine, step);
        if (lane >= step) mine += before;
    }
    __syncthreads();
    if (lane == 31) of_warps[warp] = mine;
    __syncthreads();
    all = 0;
#pragma unroll
    for (u32 w = 0; w < CHOOSERS / 32; w++) {
        if (w == warp) mine += all;
        all += of_warps[w];
    }
    return mine;
}

// Lists of a row, and what lies beside them: of its tokens, and of those before anything changed them.
__device__ __forceinline__ size_t list_of(u32 o, bool raw) { return 2 * (size_t)o + raw; }

// Leaves the largest value of each row as a key, and where tokens are ranked those of its shares.
template <bool RAW> __device__ void find_largest(const ChooseArgs &a, const Question &q, u32 o) {
    __shared__ u64 of_warps[CHOOSERS / 32];
    const State &s = a.state;
    u32 thread = threadIdx.x, parts = gridDim.x, at = NONE;
    float largest = NEG_INFINITY;
    auto compare = [&](u32 i, float x) {
        if (x > largest) largest = x, at = i;
        return false;
    };
    each_value<RAW>(q, compare, [](u32, float) {});
    u64 best = at == NONE ? NO_KEY : key_of(largest, q.token(at));
    // As many lanes as there are parts have a share, so that all parts together have as many as a
    // thread block has threads.
#pragma unroll
    for (u32 lanes = 1; lanes <= 32; lanes *= 2) {
        if (a.ranks && lanes == parts && thread % lanes == 0) {
            s.maxima[list_of(o, RAW) * MAXIMA + (blockIdx.x * MAXIMA + thread) / parts] = best;
        }
        if (lanes < 32) best = min(best, __shfl_xor_sync(FULL, best, lanes));
    }
    __syncthreads();
    if (thread % 32 == 0) of_warps[thread / 32] = best;
    __syncthreads();
    if (thread > 0) return;
    for (u32 w = 1; w < CHOOSERS / 32; w++) best = min(best, of_warps[w]);
    if (best != NO_KEY) atomicMin(RAW ? &s.raw_best[o] : &s.best[o], best);
}

// The largest value of each row, after penalties, bias and bans; and before them where
// log-probabilities are asked for.
extern "C" __global__ void __launch_bounds__(CHOOSERS) scan(const __grid_constant__ ChooseArgs a) {
    begin();
    u32 o = a.first + blockIdx.y;
    if (o >= a.state.round->outputs) return;
    Question q = question_of(a, o, part_of_block(), dynamic_shared());
    find_largest<false>(a, q, o);
    if (a.logprobs) find_largest<true>(a, q, o);
}

// What is wanted of a row beside its largest value.
struct Wanted {
    bool filter;      // what top-k and top-p keep
    bool candidates;  // the likeliest tokens of a greedy draft
    bool logprobs;    // the total and the likeliest tokens before anything changed them
    u32 tops;

    __device__ __forceinline__ Wanted(const ChooseArgs &a, const Question &q, const Query &query) {
        const Sampling &how = *q.how;
        filter = !how.greedy && (how.top_k > 0 || how.top_p < 1.0f) && query.given == NONE;
        candidates = a.draft && how.greedy && a.state.round->count > 1;
        u32 told = query.given == NONE ? q.sequence->logprobs : q.sequence->prompt_logprobs;
        logprobs = a.logprobs && told > 0;
        tops = told > 0 ? min(told - 1, a.most_tops) : 0;
    }
};

// Shared memory of a thread block that ranks.
struct Ranking {
    union {
        u64 keys[LIST];
        struct {
            u64 weights[DIGITS];
            u32 counts[DIGITS];
        } digits;
    };
    u64 last, sum;
    u32 at, count;
};

// Sorts the first `used` of items, ascending; those up to the next power of two are `last` then.
template <typename T> __device__ void sort(T *items, u32 used, T last) {
    u32 size = 1;
    while (size < used) size *= 2;
    for (u32 i = used + threadIdx.x; i < size; i += CHOOSERS) items[i] = last;
    __syncthreads();
    for (u32 width = 2; width <= size; width *= 2) {
        for (u32 step = width / 2; step > 0; step /= 2) {
            for (u32 pair = threadIdx.x; pair < size / 2; pair += CHOOSERS) {
                u32 i = 2 * pair - pair % step, other = i + step;
                T x = items[i], y = items[other];
                if ((y < x) == ((i & width) == 0)) items[i] = y, items[other] = x;
            }
            __syncthreads();
        }
    }
}

// The likeliest tokens down to one: its key, or NO_KEY where those are all, and what they weigh.
struct Kept {
    u64 last, weight;
};

// The tokens of a row from the likeliest on, by value at a temperature; RAW: before anything changed
// the values. Every thread of a thread block calls what this has.
template <bool RAW> struct Order {
    const ChooseArgs &a;
    Ranking &r;
    u32 o;
    float temperature, max;
    u32 listed = 0;     // keys that are listed: the likeliest ones, and in shared memory at the end
    bool whole = false;  // whether those are all
    u64 total = 0;

    __device__ Order(const ChooseArgs &a, Ranking &r, u32 o, float temperature) : a(a), r(r), o(o), temperature(temperature) {
        u64 best = RAW ? a.state.raw_best[o] : a.state.best[o];
        max = best == NO_KEY ? NEG_INFINITY : scaled(key_logit(best), temperature);
    }
    __device__ __forceinline__ u64 key(float z, u32 token) const { return z > NEG_INFINITY ? key_of(z, token) : NO_KEY; }

    // The key that at least so many tokens do not come behind: of the largest values of as many shares,
    // the last. Where so many shares have none, no token comes behind it.
    __device__ u64 least_of(u32 count) {
        u64 own = a.state.maxima[list_of(o, RAW) * MAXIMA + threadIdx.x];
        if (own != NO_KEY) own = key(scaled(key_logit(own), temperature), (u32)own);
        __syncthreads();
        r.keys[threadIdx.x] = own;
        if (threadIdx.x == 0) r.last = NO_KEY - 1;
        __syncthreads();
        u32 before = 0;
#pragma unroll 16
        for (u32 i = 0; i < MAXIMA; i++) before += r.keys[i] < own;
        if (own != NO_KEY && before + 1 == count) r.last = own;
        __syncthreads();
        return r.last;
    }

    // Lists the likeliest tokens of a part, `count` of the row at least unless there are fewer, and adds
    // up the weights of all.
    __device__ void list(const Question &q, u32 count, bool weighed) {
        size_t at = list_of(o, RAW);
        u64 last = least_of(count), mine = 0, all;
        whole = last == NO_KEY - 1;
        float least = whole ? -LARGEST : key_logit(last);
        auto test = [&](u32, float x) {
            float z = scaled(x, temperature);
            if (weighed) mine += weight_units(z - max);
            return z >= least;
        };
        auto act = [&](u32 i, float x) {
            u64 own = key_of(scaled(x, temperature), q.token(i));
            if (own > last) return;
            u32 place = atomicAdd(&a.state.list_counts[at], 1u);
            if (place < LISTED) a.state.lists[at * LISTED + place] = own;
        };
        each_value<RAW>(q, test, act);
        if (!weighed) return;
        sum_up(mine, all);
        if (threadIdx.x == 0 && all) atomicAdd(&a.state.totals[at], all);
    }

    // Takes what all parts have listed, and leaves nothing behind for the next row.
    __device__ void take() {
        size_t at = list_of(o, RAW);
        const State &s = a.state;
        listed = __ldcg(s.list_counts + at), total = __ldcg(s.totals + at);
        __syncthreads();
        if (threadIdx.x == 0) s.list_counts[at] = 0, s.totals[at] = 0;
        if (listed > LISTED) {
            listed = 0, whole = false;
            return;
        }
        for (u32 i = threadIdx.x; i < listed; i += CHOOSERS) r.keys[i] = __ldcg(s.lists + at * LISTED + i);
        sort(r.keys, listed, NO_KEY);
    }

    // The same as `keep` among so many sorted keys, behind others of which there are `counted` that weigh
    // `weighed`.
    __device__ Kept keep_sorted(u32 keys, u32 counted, u64 weighed, u32 count, double target) {
        u32 thread = threadIdx.x;
        __syncthreads();
        if (thread == 0) r.at = NONE;
        for (u32 first = 0; first < keys; first += CHOOSERS) {
            u32 i = first + thread;
            u64 all, sum = weighed + sum_up(i < keys ? weight_units(key_logit(r.keys[i]) - max) : 0, all);
            if (i < keys && (counted + i + 1 >= count || weight_of_units(sum) >= target)) atomicMin(&r.at, i);
            __syncthreads();
            if (r.at != NONE) {
                if (i == r.at) r.last = r.keys[i], r.sum = sum;
                __syncthreads();
                return {r.last, r.sum};
            }
            weighed += all;
        }
        return {NO_KEY, weighed};
    }

    // The fewest likeliest tokens, at least one, that are `count` or weigh `target`; all where all are
    // fewer and weigh less.
    __device__ Kept keep(u32 count, double target) {
        if (listed > 0 || whole) {
            Kept kept = keep_sorted(listed, 0, 0, count, target);
            if (kept.last != NO_KEY || whole) return kept;
        }
        listed = 0;
        return search(count, target);
    }

    // The question of the whole row, for what the lists do not say.
    __device__ Question all_of_row() { return question_of(a, o, whole_row(), dynamic_shared() + sizeof(Ranking)); }

    // The same as `keep` among all tokens, digit after digit of their keys.
    __device__ Kept search(u32 count, double target) {
        Question q = all_of_row();
        u32 thread = threadIdx.x, counted = 0, shift = 64;
        u64 low = 0, high = NO_KEY - 1, weighed = 0;
        do {
            shift = shift > LOG_DIGITS ? shift - LOG_DIGITS : 0;
            __syncthreads();
            for (u32 d = thread; d < DIGITS; d += CHOOSERS) r.digits.counts[d] = 0, r.digits.weights[d] = 0;
            if (thread == 0) r.at = NONE;
            __syncthreads();
            auto add = [&](u32 i, float x) {
                float z = scaled(x, temperature);
                u64 own = key(z, q.token(i));
                if (own < low || own > high) return;
                atomicAdd(&r.digits.counts[(own - low) >> shift], 1u);
                atomicAdd(&r.digits.weights[(own - low) >> shift], weight_units(z - max));
            };
            each_value<RAW>(q, [&](u32, float x) { return x > NEG_INFINITY; }, add);
            __syncthreads();
            const u32 each = DIGITS / CHOOSERS;
            u32 counts = 0, all;
            u64 weights = 0, whole_weight;
            for (u32 d = thread * each; d < (thread + 1) * each; d++) counts += r.digits.counts[d], weights += r.digits.weights[d];
            u32 count_before = counted + sum_up(counts, all) - counts;
            u64 weight_before = weighed + sum_up(weights, whole_weight) - weights;
            for (u32 d = thread * each; d < (thread + 1) * each; d++) {
                u32 until = count_before + r.digits.counts[d];
                u64 sum = weight_before + r.digits.weights[d];
                auto reaches = [&](u32 n, u64 w) { return n > 0 && (n >= count || weight_of_units(w) >= target); };
                if (reaches(until, sum) && !reaches(count_before, weight_before)) {
                    r.at = d, r.count = count_before, r.sum = weight_before;
                }
                count_before = until, weight_before = sum;
            }
            __syncthreads();
            if (r.at == NONE) return {NO_KEY, weighed + whole_weight};
            counted = r.count, weighed = r.sum;
            listed = r.digits.counts[r.at];
            low += (u64)r.at << shift, high = min(high, low + ((u64)1 << shift) - 1);
        } while (listed > LIST);
        gather(q, low, high);
        Kept kept = keep_sorted(listed, counted, weighed, count, target);
        listed = 0;
        return kept;
    }

    // Sorts the keys from `low` to `high`, of which there are LIST at most.
    __device__ void gather(const Question &q, u64 low, u64 high) {
        __syncthreads();
        if (threadIdx.x == 0) r.count = 0;
        __syncthreads();
        auto add = [&](u32 i, float x) {
            u64 own = key(scaled(x, temperature), q.token(i));
            if (own < low || own > high) return;
            u32 place = atomicAdd(&r.count, 1u);
            if (place < LIST) r.keys[place] = own;
        };
        each_value<RAW>(q, [&](u32, float x) { return x > NEG_INFINITY; }, add);
        __syncthreads();
        listed = min(r.count, (u32)LIST);
        sort(r.keys, listed, NO_KEY);
    }

    // Leaves the likeliest tokens in shared memory, best first; answers how many, `count` at most.
    __device__ u32 likeliest(u32 count) {
        if (listed < count && !whole) {
            Kept kept = search(count, INFINITY);
            gather(all_of_row(), 0, min(kept.last, NO_KEY - 1));
        }
        return min(listed, count);
    }
};

// What top-k and top-p keep, the likeliest tokens, and totals.
extern "C" __global__ void __launch_bounds__(CHOOSERS, 3) rank(const __grid_constant__ ChooseArgs a) {
    begin();
    const State &s = a.state;
    u32 o = a.first + blockIdx.y, thread = threadIdx.x;
    if (o >= s.round->outputs) return;
    Ranking &r = *reinterpret_cast<Ranking *>(dynamic_shared());
    Question q = question_of(a, o, part_of_block(), dynamic_shared() + sizeof(Ranking));
    Wanted wanted(a, q, s.queries[o]);
    if (!wanted.filter && !wanted.candidates && !wanted.logprobs) return;
    const Sampling &how = *q.how;
    // As many as the row has values are all.
    u32 top_k = how.top_k > 0 && how.top_k < a.size ? how.top_k : NONE;
    u32 count = min(min(s.round->count, s.candidates), LIST);
    Order<false> order(a, r, o, wanted.candidates ? 1.0f : how.temperature);
    Order<true> raw(a, r, o, 1.0f);
    if (wanted.filter || wanted.candidates) order.list(q, min(wanted.filter ? top_k : count, RANKED), wanted.candidates || top_k == NONE);
    if (wanted.logprobs) raw.list(q, min(max(wanted.tops, 1u), RANKED), true);
    if (!is_last(s, o)) return;

    if (wanted.filter) {
        order.take();
        Kept kept = {NO_KEY, order.total};
        if (top_k != NONE) kept = order.keep(top_k, INFINITY);
        if (how.top_p < 1.0f) {
            Kept nucleus = order.keep(NONE, (double)how.top_p * weight_of_units(kept.weight));
            kept.last = min(kept.last, nucleus.last);
        }
        if (thread == 0) s.limits[o] = kept.last;
    }
    if (wanted.candidates) {
        order.take();
        double total = weight_of_units(order.total);
        u32 used = order.likeliest(count);
        for (u32 i = thread; i < used; i += CHOOSERS) {
            u64 units = weight_units(key_logit(r.keys[i]) - order.max);
            s.candidate_tokens[(size_t)o * s.candidates + i] = (u32)r.keys[i];
            s.candidate_probabilities[(size_t)o * s.candidates + i] = (float)(weight_of_units(units) / total);
        }
        if (thread == 0) s.counts[o] = used;
    }
    if (wanted.logprobs) {
        __syncthreads();
        raw.take();
        double log_total = raw.total ? logarithm(weight_of_units(raw.total)) : 0.0;
        u32 used = wanted.tops > 0 ? raw.likeliest(wanted.tops) : 0;
        for (u32 i = thread; i < used; i += CHOOSERS) {
            float logprob = (float)((double)(key_logit(r.keys[i]) - raw.max) - log_total);
            a.tops[(size_t)o * a.most_tops + i] = make_uint2((u32)r.keys[i], __float_as_uint(logprob));
        }
        if (thread == 0) s.log_totals[o] = log_total, a.top_counts[o] = used;
    }
}

// A token and its score; of equal scores the lower token is better.
struct Leader {
    double score;
    u32 token;
};
__device__ __forceinline__ Leader no_leader() { return {-INFINITY, NONE}; }
__device__ __forceinline__ bool operator<(const Leader &a, const Leader &b) {
    return a.score > b.score || (a.score == b.score && a.token < b.token);
}

// The best of the leaders of all threads.
__device__ Leader best_of(Leader own) {
    __shared__ Leader of_warps[CHOOSERS / 32];
#pragma unroll
    for (u32 lanes = 1; lanes < 32; lanes *= 2) {
        Leader other = {__shfl_xor_sync(FULL, own.score, lanes), __shfl_xor_sync(FULL, own.token, lanes)};
        if (other < own) own = other;
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = own;
    __syncthreads();
    for (u32 w = 0; w < CHOOSERS / 32; w++) {
        if (of_warps[w] < own) own = of_warps[w];
    }
    return own;
}

// Not less than logit plus noise relative to the largest logit, up to the slack of `reach_of`.
__device__ __forceinline__ float bound(float d, u64 bits) {
    float u = (float)(int)(bits >> 33) * (1.0f / 2147483648.0f);
    float log = (float)(int)__float_as_uint(u) * (1.0f / 8388608.0f) - 127.0f;
    return d - log * 0.693147180559945309417f;
}
__device__ __forceinline__ float reach_of(double score, float max) {
    return (float)(score - (double)max - (1e-3 + fabs((double)max) * 1e-15));
}

// Calls `act` with the tokens of a part that are kept and whose scores are `least` or more, and perhaps
// with others: no token whose bound is below that can have such a score.
template <typename Act> __device__ __forceinline__ void each_score(const Question &q, const Filtered &kept, u64 key, double least, Act act) {
    float reach = reach_of(least, kept.max);
    auto may = [&](u32 i, float x) {
        float z = scaled(x, kept.temperature);
        u32 token = q.token(i);
        return kept.admits(z, token) && bound(z - kept.max, noise_bits(key, token)) >= reach;
    };
    auto score = [&](u32 i, float x) {
        u32 token = q.token(i);
        act((double)scaled(x, kept.temperature) + gumbel(key, token), token);
    };
    each_value<false>(q, may, score);
}

// The winner of each sampled row: the largest sum of quotient and noise among what is kept.
extern "C" __global__ void __launch_bounds__(CHOOSERS, 3) race(const __grid_constant__ ChooseArgs a) {
    begin();
    const State &s = a.state;
    u32 o = a.first + blockIdx.y, thread = threadIdx.x;
    if (o >= s.round->outputs) return;
    Query query = s.queries[o];
    const Row &of = row_of(s, query.row);
    const Sequence &sequence = sequence_of(s, of);
    const Sampling &how = a.draft ? sequence.draft : sequence.sampling;
    bool drawn = a.draft ? is_drawn(sequence) : by_probability(of, sequence);
    if (how.greedy || drawn || query.given != NONE) return;
    Question q = question_of(a, o, part_of_block(), dynamic_shared());
    Filtered kept(s, q, o);
    Leader leader = no_leader();
    if (!kept.nothing) {
        u64 key = noise_key(how.seed, sequence.choice, q.position());
        // Who wins is not behind one that takes part.
        u32 likely = (u32)s.best[o];
        double least = kept.admits(kept.max, likely) ? (double)kept.max + gumbel(key, likely) : -INFINITY;
        each_score(q, kept, key, least, [&](double score, u32 token) {
            Leader own = {score, token};
            if (own < leader) leader = own;
        });
    }
    leader = best_of(leader);
    size_t at = (size_t)(o - a.first) * gridDim.x;
    if (thread == 0) s.part_scores[at + blockIdx.x] = leader.score, s.part_tokens[at + blockIdx.x] = leader.token;
    if (!is_last(s, o)) return;
    leader = no_leader();
    if (thread < gridDim.x) leader = {__ldcg(s.part_scores + at + thread), __ldcg(s.part_tokens + at + thread)};
    leader = best_of(leader);
    if (thread == 0) s.leader_scores[o] = leader.score, s.leaders[o] = leader.token;
}

// The best of the tokens whose scores are nearly the winner's, for trees of sampled requests.
extern "C" __global__ void __launch_bounds__(CHOOSERS, 3) near(const __grid_constant__ ChooseArgs a) {
    begin();
    const State &s = a.state;
    u32 o = a.first + blockIdx.y, thread = threadIdx.x;
    if (o >= s.round->outputs || s.round->count <= 1) return;
    const Sequence &sequence = sequence_of(s, row_of(s, s.queries[o].row));
    const Sampling &how = sequence.draft;
    if (how.greedy || is_drawn(sequence)) return;
    Leader *leaders = reinterpret_cast<Leader *>(dynamic_shared());
    u8 *words = dynamic_shared() + LISTED * sizeof(Leader);
    Question q = question_of(a, o, part_of_block(), words);
    Filtered kept(s, q, o);
    // Nothing is kept, and no candidate was counted.
    if (kept.nothing) return;
    u64 key = noise_key(how.seed, sequence.choice, q.position()), mine = 0, total;
    double best = s.leader_scores[o], least = best - NEAR;
    auto weight_of = [&](double score) { return weight_units((float)(score - best)); };
    // A list of scores, and one of tokens beside it.
    size_t at = list_of(o, false);
    u64 *listed_scores = s.lists + at * LISTED, *listed_tokens = listed_scores + LISTED;
    each_score(q, kept, key, least, [&](double score, u32 token) {
        if (!(score >= least)) return;
        mine += weight_of(score);
        u32 place = atomicAdd(&s.list_counts[at], 1u);
        if (place < LISTED) listed_scores[place] = (u64)__double_as_longlong(score), listed_tokens[place] = token;
    });
    sum_up(mine, total);
    if (thread == 0 && total) atomicAdd(&s.totals[at], total);
    if (!is_last(s, o)) return;

    u32 found = __ldcg(s.list_counts + at), count = min(found, min(s.round->count, s.candidates));
    total = __ldcg(s.totals + at);
    __syncthreads();
    if (thread == 0) s.list_counts[at] = 0, s.totals[at] = 0, s.counts[o] = count;
    auto tell = [&](u32 rank, Leader of) {
        s.candidate_tokens[(size_t)o * s.candidates + rank] = of.token;
        s.candidate_probabilities[(size_t)o * s.candidates + rank] = (float)(weight_of_units(weight_of(of.score)) / weight_of_units(total));
    };
    if (found <= LISTED) {
        for (u32 i = thread; i < found; i += CHOOSERS) {
            leaders[i] = {__longlong_as_double((long long)__ldcg(listed_scores + i)), (u32)__ldcg(listed_tokens + i)};
        }
        sort(leaders, found, no_leader());
        for (u32 i = thread; i < count; i += CHOOSERS) tell(i, leaders[i]);
        return;
    }
    // More than fit: one after the other.
    Question all = question_of(a, o, whole_row(), words);
    Leader last = {INFINITY, NONE};
    for (u32 rank = 0; rank < count; rank++) {
        Leader next = no_leader();
        each_score(all, kept, key, least, [&](double score, u32 token) {
            Leader own = {score, token};
            if (last < own && own < next) next = own;
        });
        last = best_of(next);
        if (thread == 0) tell(rank, last);
    }
}

// Log-probabilities of the tokens at the target's outputs; a thread for each.
extern "C" __global__ void __launch_bounds__(128) tell_logprobs(const __grid_constant__ ChooseArgs a) {
    begin();
    const State &s = a.state;
    u32 o = a.first + blockIdx.x * blockDim.x + threadIdx.x;
    if (o >= min(s.round->outputs, a.first + a.count)) return;
    Query query = s.queries[o];
    const Row &row = row_of(s, query.row);
    const Sequence &sequence = sequence_of(s, row);
    u32 told = query.given == NONE ? sequence.logprobs : sequence.prompt_logprobs;
    if (!told || by_probability(row, sequence)) return;
    u32 depth = query.node == NONE ? 0 : tree_of(s, query.row)[query.node].depth;
    u32 token = query.given == NONE ? chosen(s, sequence, o, depth) : query.given;
    a.logprobs[o] = logprob_of(s, a.logits.values + (size_t)o * a.logits.stride, a.size, o, token);
}
