// The choice of tokens: at the target's outputs, and what a draft proposes.
//
// `scan` finds the largest value of each row. `bucket` and `rank` find what top-k and top-p keep, the
// likeliest tokens and sums of weights; `race` adds noise and finds the winner; `near` finds the best
// of those that nearly won. The host leaves out the kernels that no request of a batch needs.
//
// Weights are whole numbers and keys are unique, so no order of adding or comparing is part of the
// result.

#include "choice.cuh"

#define BUCKETS 1024        // of distances from the largest value, 32 to a unit
#define LIST 4096           // keys of one bucket that are sorted at once
#define NEAR 6.0            // scores this far below the best count for nothing
#define NEAR_LIST 2048      // tokens near the best that are sorted at once

// The smallest of the keys of all threads of a thread block; thread 0 has it.
__device__ __forceinline__ u64 smallest(u64 key) {
    __shared__ u64 of_warps[32];
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) {
        u64 other = __shfl_xor_sync(FULL, key, step);
        key = other < key ? other : key;
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = key;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (u32 w = 1; w < blockDim.x / 32; w++) key = of_warps[w] < key ? of_warps[w] : key;
    }
    return key;
}

// The part of a row that a thread block looks at.
__device__ __forceinline__ void part_of(u32 size, u32 &first, u32 &end) {
    u32 part = ((size + gridDim.x - 1) / gridDim.x + 31) / 32 * 32;
    first = min(size, blockIdx.x * part), end = min(size, first + part);
}

// The largest value of each row as a key, after penalties, bias and bans; and before them where
// log-probabilities are asked for.
extern "C" __global__ void __launch_bounds__(256) scan(const __grid_constant__ ChooseArgs a) {
    begin();
    const State &s = a.state;
    u32 o = a.first + blockIdx.y, first, end;
    if (o >= s.round->outputs) return;
    part_of(a.size, first, end);
    Question q = question(s, a.logits, a.ids, a.size, a.draft, a.level, o, first, end, reinterpret_cast<u32 *>(dynamic_shared()));
    u64 best = NO_KEY;
    for (u32 i = first + threadIdx.x; i < end; i += blockDim.x) {
        float x = q.value(i);
        u64 key = key_of(x, q.token(i));
        if (x > NEG_INFINITY && key < best) best = key;
    }
    best = smallest(best);
    if (threadIdx.x == 0 && best != NO_KEY) atomicMin(&s.best[o], best);
    if (!a.logprobs) return;
    best = NO_KEY;
    for (u32 i = first + threadIdx.x; i < end; i += blockDim.x) {
        float x = q.raw_value(i);
        u64 key = key_of(x, i);
        if (x > NEG_INFINITY && key < best) best = key;
    }
    best = smallest(best);
    if (threadIdx.x == 0 && best != NO_KEY) atomicMin(&s.raw_best[o], best);
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
        tops = told > 0 ? told - 1 : 0;
    }
};

__device__ __forceinline__ u32 bucket_of(float z, float max) {
    float steps = (max - z) * 32.0f;
    return steps < (float)(BUCKETS - 1) ? (u32)steps : BUCKETS - 1;
}

// Values of a row at a temperature, by distance from the largest.
template <bool RAW> struct Scaled {
    const Question &q;
    float temperature, max;
    __device__ __forceinline__ float z(u32 i) const { return scaled(RAW ? q.raw_value(i) : q.value(i), temperature); }
    __device__ __forceinline__ u64 key(u32 i, float z) const { return key_of(z, q.token(i)); }
};

template <bool RAW> __device__ void fill_buckets(const State &s, const Scaled<RAW> &row, u32 first, u32 end, u32 *counts, u64 *weights, u32 to) {
    for (u32 b = threadIdx.x; b < BUCKETS; b += blockDim.x) counts[b] = 0, weights[b] = 0;
    __syncthreads();
    for (u32 i = first + threadIdx.x; i < end; i += blockDim.x) {
        float z = row.z(i);
        if (!(z > NEG_INFINITY)) continue;
        u32 b = bucket_of(z, row.max);
        u64 w = weight_units(z - row.max);
        atomicAdd(&counts[b], 1u);
        if (w) atomicAdd(&weights[b], w);
    }
    __syncthreads();
    for (u32 b = threadIdx.x; b < BUCKETS; b += blockDim.x) {
        if (!counts[b]) continue;
        atomicAdd(&s.bucket_counts[(size_t)to * BUCKETS + b], counts[b]);
        if (weights[b]) atomicAdd(&s.bucket_weights[(size_t)to * BUCKETS + b], weights[b]);
    }
    __syncthreads();
}

// Counts the values of rows and adds their weights, by distance from the largest.
extern "C" __global__ void __launch_bounds__(256) bucket(const __grid_constant__ ChooseArgs a) {
    __shared__ u32 counts[BUCKETS];
    __shared__ u64 weights[BUCKETS];
    begin();
    const State &s = a.state;
    u32 o = a.first + blockIdx.y, first, end;
    if (o >= s.round->outputs) return;
    part_of(a.size, first, end);
    Question q = question(s, a.logits, a.ids, a.size, a.draft, a.level, o, first, end, reinterpret_cast<u32 *>(dynamic_shared()));
    Wanted wanted(a, q, s.queries[o]);
    if ((wanted.filter || wanted.candidates) && s.best[o] != NO_KEY) {
        float temperature = wanted.candidates ? 1.0f : q.how->temperature;
        Scaled<false> row = {q, temperature, scaled(key_logit(s.best[o]), temperature)};
        fill_buckets(s, row, first, end, counts, weights, 2 * o);
    }
    if (wanted.logprobs && s.raw_best[o] != NO_KEY) {
        Scaled<true> row = {q, 1.0f, scaled(key_logit(s.raw_best[o]), 1.0f)};
        fill_buckets(s, row, first, end, counts, weights, 2 * o + 1);
    }
}

// The buckets of one row, added up, and room to sort keys.
struct Ranking {
    u32 counts[BUCKETS];   // of this bucket and all before it
    u64 weights[BUCKETS];  // the same
    u64 keys[LIST];
    u32 used, cut;
    u64 found;
};

// Adds up the buckets of a row and leaves zeros behind, for the next one.
__device__ void add_up(const State &s, Ranking &r, u32 from) {
    u32 thread = threadIdx.x;
    for (u32 b = thread; b < BUCKETS; b += blockDim.x) {
        size_t at = (size_t)from * BUCKETS + b;
        r.counts[b] = s.bucket_counts[at], r.weights[b] = s.bucket_weights[at];
        s.bucket_counts[at] = 0, s.bucket_weights[at] = 0;
    }
    for (u32 step = 1; step < BUCKETS; step <<= 1) {
        u32 counts[BUCKETS / 512];
        u64 weights[BUCKETS / 512];
        __syncthreads();
#pragma unroll
        for (u32 j = 0; j < BUCKETS / 512; j++) {
            u32 b = thread + j * 512;
            counts[j] = b >= step ? r.counts[b - step] : 0, weights[j] = b >= step ? r.weights[b - step] : 0;
        }
        __syncthreads();
#pragma unroll
        for (u32 j = 0; j < BUCKETS / 512; j++) r.counts[thread + j * 512] += counts[j], r.weights[thread + j * 512] += weights[j];
    }
    __syncthreads();
}

// Sorts the first `used` keys, ascending; the others up to the next power of two are NO_KEY then.
__device__ void sort_keys(u64 *keys, u32 used) {
    u32 size = 1;
    while (size < used) size *= 2;
    for (u32 i = used + threadIdx.x; i < size; i += blockDim.x) keys[i] = NO_KEY;
    __syncthreads();
    for (u32 width = 2; width <= size; width *= 2) {
        for (u32 step = width / 2; step > 0; step /= 2) {
            for (u32 i = threadIdx.x; i < size; i += blockDim.x) {
                u32 other = i ^ step;
                if (other > i) {
                    u64 x = keys[i], y = keys[other];
                    if ((x > y) == ((i & width) == 0)) keys[i] = y, keys[other] = x;
                }
            }
            __syncthreads();
        }
    }
}

// The key of the last token that is kept: the fewest likeliest ones, at least one, that are `count`
// or whose weights reach `target`, of those not above `upper`. With `by_count`, NO_KEY where there are
// fewer.
template <bool RAW>
__device__ u64 limit_of(const Scaled<RAW> &row, u32 size, Ranking &r, bool by_count, u32 count, double target, u64 upper) {
    u32 thread = threadIdx.x;
    if (thread == 0) r.cut = NONE, r.used = 0, r.found = upper;
    __syncthreads();
    auto reached = [&](u32 b) { return by_count ? r.counts[b] >= count : r.counts[b] > 0 && weight_of_units(r.weights[b]) >= target; };
    for (u32 b = thread; b < BUCKETS; b += blockDim.x) {
        if (reached(b) && (b == 0 || !reached(b - 1))) r.cut = b;
    }
    __syncthreads();
    u32 cut = r.cut;
    if (cut == NONE) return upper;
    u32 counted = cut == 0 ? 0 : r.counts[cut - 1];
    u64 weighed = cut == 0 ? 0 : r.weights[cut - 1];
    for (u32 i = thread; i < size; i += blockDim.x) {
        float z = row.z(i);
        if (!(z > NEG_INFINITY) || bucket_of(z, row.max) != cut) continue;
        u64 key = row.key(i, z);
        if (key > upper) continue;
        u32 at = atomicAdd(&r.used, 1u);
        if (at < LIST) r.keys[at] = key;
    }
    __syncthreads();
    u32 used = r.used;
    if (used <= LIST) {
        sort_keys(r.keys, used);
        if (thread == 0) {
            u64 last = upper;
            for (u32 i = 0; i < used; i++) {
                counted++, weighed += weight_units(key_logit(r.keys[i]) - row.max);
                last = r.keys[i];
                if (by_count ? counted >= count : weight_of_units(weighed) >= target) break;
            }
            r.found = last;
        }
        __syncthreads();
        return r.found;
    }
    // More equal values than fit: the key is found bit by bit.
    u64 low = 0, high = upper;
    while (low < high) {
        u64 middle = low + (high - low) / 2;
        __syncthreads();
        if (thread == 0) r.used = 0, r.found = 0;
        __syncthreads();
        u32 counted_here = 0;
        u64 weighed_here = 0;
        for (u32 i = thread; i < size; i += blockDim.x) {
            float z = row.z(i);
            if (!(z > NEG_INFINITY) || bucket_of(z, row.max) != cut || row.key(i, z) > middle) continue;
            counted_here++, weighed_here += weight_units(z - row.max);
        }
        atomicAdd(&r.used, counted_here);
        atomicAdd(&r.found, weighed_here);
        __syncthreads();
        bool enough = by_count ? counted + r.used >= count : counted + r.used > 0 && weight_of_units(weighed + r.found) >= target;
        if (enough) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    __syncthreads();
    return low;
}

// The keys not above `limit`, best first; answers how many, `most` at most.
template <bool RAW> __device__ u32 gather_keys(const Scaled<RAW> &row, u32 size, Ranking &r, u64 limit, u32 most) {
    __syncthreads();
    if (threadIdx.x == 0) r.used = 0;
    __syncthreads();
    for (u32 i = threadIdx.x; i < size; i += blockDim.x) {
        float z = row.z(i);
        if (!(z > NEG_INFINITY)) continue;
        u64 key = row.key(i, z);
        if (key > limit) continue;
        u32 at = atomicAdd(&r.used, 1u);
        if (at < most) r.keys[at] = key;
    }
    __syncthreads();
    u32 used = min(r.used, most);
    sort_keys(r.keys, used);
    return used;
}

// What top-k and top-p keep, the likeliest tokens, and totals: a thread block of 512 for each row.
extern "C" __global__ void __launch_bounds__(512) rank(const __grid_constant__ ChooseArgs a) {
    begin();
    const State &s = a.state;
    u32 o = a.first + blockIdx.x, thread = threadIdx.x;
    if (o >= s.round->outputs) return;
    Ranking &r = *reinterpret_cast<Ranking *>(dynamic_shared());
    u32 *words = reinterpret_cast<u32 *>(dynamic_shared() + sizeof(Ranking));
    Question q = question(s, a.logits, a.ids, a.size, a.draft, a.level, o, 0, a.size, words);
    Wanted wanted(a, q, s.queries[o]);
    if (wanted.filter && s.best[o] != NO_KEY) {
        const Sampling &how = *q.how;
        add_up(s, r, 2 * o);
        Scaled<false> row = {q, how.temperature, scaled(key_logit(s.best[o]), how.temperature)};
        u64 limit = NO_KEY;
        u64 kept = r.weights[BUCKETS - 1];
        if (how.top_k > 0 && how.top_k < r.counts[BUCKETS - 1]) {
            limit = limit_of(row, a.size, r, true, how.top_k, 0.0, NO_KEY);
            // The weight of what is kept: all buckets before the cut, and a part of the cut.
            u64 mine = 0;
            u32 cut = r.cut;
            kept = cut == 0 ? 0 : r.weights[cut - 1];
            __syncthreads();
            if (thread == 0) r.found = 0;
            __syncthreads();
            for (u32 i = thread; i < a.size; i += blockDim.x) {
                float z = row.z(i);
                if (z > NEG_INFINITY && bucket_of(z, row.max) == cut && row.key(i, z) <= limit) mine += weight_units(z - row.max);
            }
            if (mine) atomicAdd(&r.found, mine);
            __syncthreads();
            kept += r.found;
            __syncthreads();
        }
        if (how.top_p < 1.0f) limit = limit_of(row, a.size, r, false, 0, (double)how.top_p * weight_of_units(kept), limit);
        if (thread == 0) s.limits[o] = limit;
        __syncthreads();
    }
    if (wanted.candidates) {
        u32 count = min(s.round->count, s.candidates), used = 0;
        if (s.best[o] != NO_KEY) {
            add_up(s, r, 2 * o);
            Scaled<false> row = {q, 1.0f, scaled(key_logit(s.best[o]), 1.0f)};
            double total = weight_of_units(r.weights[BUCKETS - 1]);
            u64 limit = limit_of(row, a.size, r, true, count, 0.0, NO_KEY);
            used = gather_keys(row, a.size, r, limit, count);
            for (u32 i = thread; i < used; i += blockDim.x) {
                u64 units = weight_units(key_logit(r.keys[i]) - row.max);
                s.candidate_tokens[(size_t)o * s.candidates + i] = (u32)r.keys[i];
                s.candidate_probabilities[(size_t)o * s.candidates + i] = (float)(weight_of_units(units) / total);
            }
        }
        if (thread == 0) s.counts[o] = used;
        __syncthreads();
    }
    if (wanted.logprobs) {
        double log_total = 0.0;
        u32 used = 0;
        if (s.raw_best[o] != NO_KEY) {
            add_up(s, r, 2 * o + 1);
            Scaled<true> row = {q, 1.0f, scaled(key_logit(s.raw_best[o]), 1.0f)};
            log_total = logarithm(weight_of_units(r.weights[BUCKETS - 1]));
            u32 tops = min(wanted.tops, a.most_tops);
            if (tops > 0) {
                u64 limit = limit_of(row, a.size, r, true, tops, 0.0, NO_KEY);
                used = gather_keys(row, a.size, r, limit, tops);
            }
            for (u32 i = thread; i < used; i += blockDim.x) {
                float logprob = (float)((double)(key_logit(r.keys[i]) - row.max) - log_total);
                a.tops[(size_t)o * a.most_tops + i] = make_uint2((u32)r.keys[i], __float_as_uint(logprob));
            }
        }
        if (thread == 0) s.log_totals[o] = log_total, a.top_counts[o] = used;
    }
}

// A token and its score; of equal scores the lower token is better.
struct Leader {
    double score;
    u32 token;
};
__device__ __forceinline__ bool better(double score, u32 token, const Leader &than) {
    return score > than.score || (score == than.score && token < than.token);
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

// The winner of each sampled row: the largest sum of quotient and noise among what is kept. The last
// thread block of a row compares what all have found.
extern "C" __global__ void __launch_bounds__(256) race(const __grid_constant__ ChooseArgs a) {
    __shared__ double scores[256];
    __shared__ u32 tokens[256];
    __shared__ u32 is_last;
    begin();
    const State &s = a.state;
    u32 o = a.first + blockIdx.y, first, end, thread = threadIdx.x;
    if (o >= s.round->outputs) return;
    Query query = s.queries[o];
    const Row &of = row_of(s, query.row);
    const Sequence &sequence = sequence_of(s, of);
    const Sampling &how = a.draft ? sequence.draft : sequence.sampling;
    bool drawn = a.draft ? is_drawn(sequence) : is_weighed(of, sequence);
    if (how.greedy || drawn || query.given != NONE) return;
    part_of(a.size, first, end);
    Question q = question(s, a.logits, a.ids, a.size, a.draft, a.level, o, first, end, reinterpret_cast<u32 *>(dynamic_shared()));
    Filtered kept(s, q, o);
    Leader leader = {-INFINITY, NONE};
    if (!kept.nothing) {
        u64 key = noise_key(how.seed, sequence.choice, q.position());
        // No token whose bound is below the score of one that takes part can win.
        u32 likely = (u32)s.best[o];
        double least = kept.admits(kept.max, likely) ? (double)kept.max + gumbel(key, likely) : -INFINITY;
        float reach = reach_of(least, kept.max);
        for (u32 i = first + thread; i < end; i += blockDim.x) {
            float z = scaled(q.value(i), kept.temperature);
            u32 token = q.token(i);
            if (!kept.admits(z, token) || bound(z - kept.max, noise_bits(key, token)) < reach) continue;
            double score = (double)z + gumbel(key, token);
            if (better(score, token, leader)) leader = {score, token};
        }
    }
    auto compare = [&] {
        scores[thread] = leader.score, tokens[thread] = leader.token;
        for (u32 half = 128; half > 0; half >>= 1) {
            __syncthreads();
            if (thread < half) {
                Leader own = {scores[thread], tokens[thread]};
                if (better(scores[thread + half], tokens[thread + half], own))
                    scores[thread] = scores[thread + half], tokens[thread] = tokens[thread + half];
            }
        }
    };
    compare();
    size_t at = (size_t)(o - a.first) * gridDim.x + blockIdx.x;
    if (thread == 0) {
        s.part_scores[at] = scores[0], s.part_tokens[at] = tokens[0];
        __threadfence();
        is_last = atomicInc(&s.arrivals[o], gridDim.x - 1) == gridDim.x - 1;
    }
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    at = (size_t)(o - a.first) * gridDim.x + thread;
    leader = {-INFINITY, NONE};
    if (thread < gridDim.x) leader = {__ldcg(s.part_scores + at), __ldcg(s.part_tokens + at)};
    compare();
    if (thread == 0) s.leader_scores[o] = scores[0], s.leaders[o] = tokens[0];
}

// The best of the tokens whose scores are nearly the winner's, for trees of sampled requests: a thread
// block of 512 for each row.
extern "C" __global__ void __launch_bounds__(512) near(const __grid_constant__ ChooseArgs a) {
    __shared__ double scores[NEAR_LIST];
    __shared__ u32 tokens[NEAR_LIST];
    __shared__ u32 used;
    __shared__ u64 total;
    begin();
    const State &s = a.state;
    u32 o = a.first + blockIdx.x, thread = threadIdx.x;
    if (o >= s.round->outputs || s.round->count <= 1) return;
    const Sequence &sequence = sequence_of(s, row_of(s, s.queries[o].row));
    const Sampling &how = sequence.draft;
    if (how.greedy || is_drawn(sequence)) return;
    Question q = question(s, a.logits, a.ids, a.size, a.draft, a.level, o, 0, a.size, reinterpret_cast<u32 *>(dynamic_shared()));
    Filtered kept(s, q, o);
    u32 count = min(s.round->count, s.candidates);
    if (kept.nothing) {
        if (thread == 0) s.counts[o] = 0;
        return;
    }
    if (thread == 0) used = 0, total = 0;
    __syncthreads();
    u64 key = noise_key(how.seed, sequence.choice, q.position());
    double best = s.leader_scores[o], least = best - NEAR;
    float reach = reach_of(least, kept.max);
    auto score_of = [&](u32 i, u32 &token) {
        float z = scaled(q.value(i), kept.temperature);
        token = q.token(i);
        if (!kept.admits(z, token) || bound(z - kept.max, noise_bits(key, token)) < reach) return (double)-INFINITY;
        return (double)z + gumbel(key, token);
    };
    u64 mine = 0;
    for (u32 i = thread; i < a.size; i += blockDim.x) {
        u32 token;
        double score = score_of(i, token);
        if (!(score >= least)) continue;
        mine += weight_units((float)(score - best));
        u32 at = atomicAdd(&used, 1u);
        if (at < NEAR_LIST) scores[at] = score, tokens[at] = token;
    }
    if (mine) atomicAdd(&total, mine);
    __syncthreads();
    u32 found = used;
    auto tell = [&](u32 rank, double score, u32 token) {
        s.candidate_tokens[(size_t)o * s.candidates + rank] = token;
        s.candidate_probabilities[(size_t)o * s.candidates + rank] =
            (float)(weight_of_units(weight_units((float)(score - best))) / weight_of_units(total));
    };
    if (found <= NEAR_LIST) {
        // The rank of each among the others.
        for (u32 i = thread; i < found; i += blockDim.x) {
            u32 rank = 0;
            Leader own = {scores[i], tokens[i]};
            for (u32 j = 0; j < found && rank < count; j++) rank += better(scores[j], tokens[j], own);
            if (rank < count) tell(rank, own.score, own.token);
        }
    } else {
        // More than fit: one after the other.
        Leader last = {INFINITY, NONE};
        for (u32 rank = 0; rank < count; rank++) {
            Leader next = {-INFINITY, NONE};
            for (u32 i = thread; i < a.size; i += blockDim.x) {
                u32 token;
                double score = score_of(i, token);
                bool behind = score < last.score || (score == last.score && token > last.token);
                if (score >= least && (rank == 0 || behind) && better(score, token, next)) next = {score, token};
            }
            __syncthreads();
            scores[thread] = next.score, tokens[thread] = next.token;
            for (u32 half = 256; half > 0; half >>= 1) {
                __syncthreads();
                if (thread < half) {
                    Leader own = {scores[thread], tokens[thread]};
                    if (better(scores[thread + half], tokens[thread + half], own))
                        scores[thread] = scores[thread + half], tokens[thread] = tokens[thread + half];
                }
            }
            __syncthreads();
            last = {scores[0], tokens[0]};
            if (thread == 0) tell(rank, last.score, last.token);
        }
    }
    if (thread == 0) s.counts[o] = min(found, count);
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
    if (!told || is_weighed(row, sequence)) return;
    u32 depth = query.node == NONE ? 0 : tree_of(s, query.row)[query.node].depth;
    u32 token = query.given == NONE ? chosen(s, sequence, o, depth) : query.given;
    a.logprobs[o] = logprob_of(s, a.logits.values + (size_t)o * a.logits.stride, a.size, o, token);
}
