// From logits to tokens: the functions of `sampling/definition.rs`, `sampling/noise.rs` and `math.rs`,
// operation for operation, so that a choice is the same on the device and on the host.

#pragma once

#include "state.cuh"

#define NEG_INFINITY (-__int_as_float(0x7f800000))

// A bijection of 64-bit words in which every input bit moves about half of the output bits.
__device__ __forceinline__ u64 mix(u64 x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}
__device__ __forceinline__ u64 noise_key(u64 seed, u32 choice, u32 position) {
    u64 counter = (u64)choice << 32 | position;
    return mix(mix(seed ^ 0x9e3779b97f4a7c15ull) + mix(counter + 0x6a09e667f3bcc909ull));
}
__device__ __forceinline__ u64 noise_bits(u64 key, u32 token) { return mix(key + ((u64)token + 1) * 0x9e3779b97f4a7c15ull); }
// A number in (0, 1).
__device__ __forceinline__ double uniform(u64 key, u32 token) {
    return ((double)(noise_bits(key, token) >> 12) + 0.5) * (1.0 / 4503599627370496.0);
}

// The natural logarithm of a positive normal number.
__device__ __forceinline__ double logarithm(double x) {
    u64 bits = (u64)__double_as_longlong(x);
    long long exponent = (long long)(bits >> 52) - 1023;
    double mantissa = __longlong_as_double((long long)((bits & 0x000fffffffffffffull) | 0x3ff0000000000000ull));
    if (mantissa > 1.41421356237309504880) {
        mantissa *= 0.5;
        exponent += 1;
    }
    double s = (mantissa - 1.0) / (mantissa + 1.0), square = s * s, sum = 0.0;
#pragma unroll
    for (int i = 11; i >= 0; i--) sum = sum * square + 1.0 / (double)(2 * i + 1);
    return (double)exponent * 0.693147180559945309417 + 2.0 * s * sum;
}

// A draw of the Gumbel distribution for the token of a key.
__device__ __forceinline__ double gumbel(u64 key, u32 token) {
    double u = uniform(key, token);
    double exponential = u < 1e-9 ? u + u * u * 0.5 : -logarithm(1.0 - u);
    return -logarithm(exponential);
}

// e^d as a multiple of 2^-34, counted in those: `weight` of `definition.rs`. Sums of them are exact in
// any order.
__device__ __forceinline__ u64 weight_units(float d) {
    const float round = 12582912.0f;
    float shifted = d * 1.44269504088896340736f + round, n = shifted - round;
    float r = (d - n * 0.6933594f) - n * -2.1219444e-4f;
    float p = 1.984127e-4f;
    p = p * r + 1.3888889e-3f;
    p = p * r + 8.333334e-3f;
    p = p * r + 4.1666668e-2f;
    p = p * r + 1.6666667e-1f;
    p = p * r + 0.5f;
    p = (p * (r * r) + r) + 1.0f;
    u32 bits = __float_as_uint(shifted) - __float_as_uint(round);
    float power = __uint_as_float((bits + 127) << 23);
    // Exact but for the last step, which rounds half to even.
    return __float2ull_rn(d >= -24.3f ? p * power * 17179869184.0f : 0.0f);
}
__device__ __forceinline__ double weight_of_units(u64 units) { return (double)units * (1.0 / 17179869184.0); }

// A logit divided by the temperature, kept from overflowing upwards.
__device__ __forceinline__ float scaled(float logit, float temperature) {
    float z = temperature == 1.0f ? logit : logit / temperature;
    return z > LARGEST ? LARGEST : z;
}

// Keys in whose ascending order larger logits come first, then lower tokens.
__device__ __forceinline__ u32 reverse(u32 bits) { return bits ^ (((u32)((int)bits >> 31) ^ 0xffffffffu) >> 1); }
__device__ __forceinline__ u64 key_of(float logit, u32 token) { return (u64)reverse(__float_as_uint(logit + 0.0f)) << 32 | token; }
__device__ __forceinline__ float key_logit(u64 key) { return __uint_as_float(reverse((u32)(key >> 32))); }
#define NO_KEY 0xffffffffffffffffull

// The thread blocks of a row take runs of so many values in turn, so that likely tokens, whose ids are
// often close, are spread among them. Their number is a power of two.
#define RUN 1024
struct Part {
    u32 at, log_parts;

    __device__ __forceinline__ bool has(u32 i) const { return (i / RUN & ((1u << log_parts) - 1)) == at; }
    // Where value i of the row is among those of this part.
    __device__ __forceinline__ u32 place(u32 i) const { return (i / RUN >> log_parts) * RUN + i % RUN; }
    // No value of a row of `size` has this place or a later one.
    __device__ __forceinline__ u32 end(u32 size) const {
        u32 runs = (size + RUN - 1) / RUN;
        return ((runs + (1u << log_parts) - 1) >> log_parts) * RUN;
    }
};
__device__ __forceinline__ Part whole_row() { return {0, 0}; }

// Whether a grammar's mask has a token.
__device__ __forceinline__ bool allows(const u32 *mask, u32 token) { return mask[token / 32] >> (token % 32) & 1; }

// What is asked about one row of logits, and the row as penalties, bias and bans leave it.
struct Question {
    const Sequence *sequence;
    const Sampling *how;
    const float *raw;
    const u32 *ids;      // the tokens of the row's values where a draft knows only some, ascending
    const u32 *history;  // where there are penalties
    const u32 *path;     // tokens between the bonus and this row, where there are penalties
    const u32 *mask;     // the tokens that a grammar allows, where there is one
    u32 size;            // values of the row
    u32 depth;           // of the row below the bonus
    u32 banned;          // how many of the stop tokens are banned
    Part part;           // the values that are looked at
    u32 *flags;          // which of those have more to them than history
    bool special;

    __device__ __forceinline__ u32 position() const { return sequence->tokens + depth; }
    __device__ __forceinline__ u32 token(u32 i) const { return ids ? ids[i] : i; }

    // The value of a token in the row, or NONE.
    __device__ u32 find(u32 token) const {
        if (!ids) return token < size ? token : NONE;
        u32 low = 0, high = size;
        while (low < high) {
            u32 middle = (low + high) / 2;
            if (ids[middle] < token) {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        return low < size && ids[low] == token ? low : NONE;
    }

    __device__ __forceinline__ float penalized(float x, u32 output) const {
        if (how->repetition != 1.0f) x = x > 0.0f ? x / how->repetition : x * how->repetition;
        if (output > 0) {
            x -= how->frequency * (float)output;
            x -= how->presence;
        }
        return x;
    }

    __device__ float special_value(float x, u32 token) const {
        if (history) {
            u32 seen = history[token], output = seen & 0x7fffffffu;
            for (u32 d = 0; d < depth; d++) {
                if (path[d] == token) seen = 1, output++;
            }
            if (seen) x = penalized(x, output);
        }
        for (u32 b = 0; b < how->bias_count; b++) {
            if (how->biases[b].x == token) x += __uint_as_float(how->biases[b].y);
        }
        for (u32 b = 0; b < banned; b++) {
            if (sequence->stops[b] == token) x = NEG_INFINITY;
        }
        return x;
    }

    // Value i, minus infinity where it is not a number or a grammar does not allow its token.
    __device__ __forceinline__ float value(u32 i) const {
        if (mask && !allows(mask, token(i))) return NEG_INFINITY;
        float x = raw[i];
        if (special) {
            u32 place = part.place(i);
            if (flags[place / 32] >> (place % 32) & 1) {
                x = special_value(x, token(i));
            } else if (history) {
                u32 seen = history[token(i)];
                if (seen) x = penalized(x, seen & 0x7fffffffu);
            }
        }
        return x != x ? NEG_INFINITY : x;
    }
    __device__ __forceinline__ float raw_value(u32 i) const { return raw[i] != raw[i] ? NEG_INFINITY : raw[i]; }
};

// The tokens that a grammar allows at an output; none where all are.
__device__ __forceinline__ const u32 *mask_of(const State &s, u32 o) {
    u32 at = s.masks ? s.masks[o] : NONE;
    return at == NONE ? nullptr : s.masks + at;
}

// Makes the question of output `o` for a part of its row. `words` is shared memory of MOST_PATH words,
// then one bit for each value of the part. All threads of a thread block call this.
#define MOST_PATH 64
__device__ __forceinline__ Question question(const State &s, const Rows &logits, const u32 *ids, u32 size, u32 draft, u32 level, u32 o,
                                             Part part, u32 *words) {
    Query query = s.queries[o];
    const Row &row = row_of(s, query.row);
    Question q;
    q.sequence = &sequence_of(s, row);
    q.how = draft ? &q.sequence->draft : &q.sequence->sampling;
    q.raw = logits.values + (size_t)o * logits.stride;
    q.ids = ids;
    q.size = size;
    q.history = q.sequence->history;
    q.path = words;
    q.mask = mask_of(s, o);
    q.part = part;
    q.flags = words + MOST_PATH;
    const Offered *offered = offered_of(s, query.row);
    const Node *tree = tree_of(s, query.row);
    q.depth = query.node == NONE ? 0 : level ? offered[query.node].depth : tree[query.node].depth;
    u32 answered = q.sequence->tokens - q.sequence->prompt;
    bool bans = answered + q.depth < q.sequence->min_tokens;
    q.banned = bans ? q.sequence->stop_count : 0;
    q.special = q.history || q.how->bias_count || q.banned;
    if (!q.special) return q;

    u32 thread = threadIdx.x;
    __syncthreads();
    for (u32 i = thread; i < part.end(size) / 32; i += blockDim.x) q.flags[i] = 0;
    if (thread == 0 && q.history) {
        u32 at = query.node;
        for (u32 d = q.depth; d > 0; d--) {
            words[d - 1] = level ? offered[at].token : tree[at].token;
            at = level ? offered[at].parent : tree[at].parent;
        }
    }
    __syncthreads();
    u32 on_path = q.history ? q.depth : 0, listed = on_path + q.how->bias_count + q.banned;
    for (u32 i = thread; i < listed; i += blockDim.x) {
        u32 token = i < on_path                       ? words[i]
                    : i < on_path + q.how->bias_count ? q.how->biases[i - on_path].x
                                                      : q.sequence->stops[i - on_path - q.how->bias_count];
        u32 at = q.find(token);
        if (at != NONE && part.has(at)) atomicOr(&q.flags[part.place(at) / 32], 1u << part.place(at) % 32);
    }
    __syncthreads();
    return q;
}

// Calls `act` with those values of a part of which `test`, which sees all of them, says so; RAW: before
// anything changed them. `test` is short: several vectors of values are on their way at a time, and `act`
// fetches its value once more. A thread meets its values in ascending order. Thread blocks that share a
// row have RUN / 4 threads.
#define VECTORS 4
template <bool RAW, typename Test, typename Act> __device__ __forceinline__ void each_value(const Question &q, Test test, Act act) {
    u32 run = 4 * blockDim.x, step = run << q.part.log_parts;
    for (u32 start = q.part.at * run + 4 * threadIdx.x; start < q.size; start += VECTORS * step) {
        u32 found = 0;
        if (!RAW && (q.special || q.mask)) {
            for (u32 v = 0; v < 4 * VECTORS; v++) {
                u32 i = start + v / 4 * step + v % 4;
                if (i < q.size && test(i, q.value(i))) found |= 1u << v;
            }
        } else {
            // Rows end at a multiple of four values.
            float4 x[VECTORS];
#pragma unroll
            for (u32 v = 0; v < VECTORS; v++) {
                u32 i = start + v * step;
                x[v] = i < q.size ? *reinterpret_cast<const float4 *>(q.raw + i) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            }
#pragma unroll
            for (u32 v = 0; v < VECTORS; v++) {
                const float values[4] = {x[v].x, x[v].y, x[v].z, x[v].w};
#pragma unroll
                for (u32 c = 0; c < 4; c++) {
                    u32 i = start + v * step + c;
                    float value = values[c] != values[c] ? NEG_INFINITY : values[c];
                    if (i < q.size && test(i, value)) found |= 1u << (4 * v + c);
                }
            }
        }
        for (; found; found &= found - 1) {
            u32 v = __ffs(found) - 1, i = start + v / 4 * step + v % 4;
            act(i, RAW ? q.raw_value(i) : q.value(i));
        }
    }
}

// Whether drafts of this request are drawn from the draft's own distribution.
__device__ __forceinline__ bool is_drawn(const Sequence &sequence) { return sequence.verify == REJECTION && !sequence.draft.greedy; }
// Whether a row's tree is verified by the target's distributions rather than its choices.
__device__ __forceinline__ bool by_probability(const Row &row, const Sequence &sequence) { return row.task.decodes && sequence.verify != MATCH; }

// The answer where no token is possible: the lowest token that the grammar allows and that is not
// banned, or else the lowest that the grammar allows.
__device__ __forceinline__ u32 lowest_allowed(const Sequence &sequence, const u32 *mask, u32 banned, u32 vocabulary) {
    u32 first = NONE;
    for (u32 token = 0; token < vocabulary; token++) {
        if (mask && !allows(mask, token)) continue;
        bool allowed = true;
        for (u32 b = 0; b < banned; b++) allowed = allowed && sequence.stops[b] != token;
        if (allowed) return token;
        first = min(first, token);
    }
    return first == NONE ? 0 : first;
}

// Which tokens of a filtered row take part, and their weights.
struct Filtered {
    float temperature, max;
    double floor;
    u64 limit;
    bool nothing;

    __device__ __forceinline__ Filtered(const State &s, const Question &q, u32 o) {
        u64 best = s.best[o];
        temperature = q.how->temperature;
        max = best == NO_KEY ? NEG_INFINITY : scaled(key_logit(best), temperature);
        nothing = max == NEG_INFINITY;
        floor = q.how->floor;
        limit = q.how->top_k > 0 || q.how->top_p < 1.0f ? s.limits[o] : NO_KEY;
    }
    __device__ __forceinline__ bool admits(float z, u32 token) const {
        if (!(z > NEG_INFINITY) || key_of(z, token) > limit) return false;
        return floor == -INFINITY || (double)z - (double)max >= floor;
    }
    __device__ __forceinline__ u64 units(float value, u32 token) const {
        float z = scaled(value, temperature);
        return admits(z, token) ? weight_units(z - max) : 0;
    }
};

// The log-probability of a token before anything changed it, where it was asked for.
__device__ __forceinline__ float logprob_of(const State &s, const float *raw, u32 size, u32 o, u32 token) {
    u64 best = s.raw_best[o];
    float x = token < size && raw[token] == raw[token] ? scaled(raw[token], 1.0f) : NEG_INFINITY;
    if (!(x > NEG_INFINITY)) return NEG_INFINITY;
    float max = best == NO_KEY ? NEG_INFINITY : scaled(key_logit(best), 1.0f);
    return (float)((double)(x - max) - s.log_totals[o]);
}

// The token at an output of the target.
__device__ __forceinline__ u32 chosen(const State &s, const Sequence &sequence, u32 o, u32 depth) {
    const Sampling &how = sequence.sampling;
    u32 token = how.greedy ? (u32)s.best[o] : s.leaders[o];
    bool nothing = how.greedy ? s.best[o] == NO_KEY : token == NONE;
    if (!nothing) return token;
    bool bans = sequence.tokens - sequence.prompt + depth < sequence.min_tokens;
    return lowest_allowed(sequence, mask_of(s, o), bans ? sequence.stop_count : 0, s.vocabulary);
}

// What a draft proposes after an output.
struct Proposed {
    const State &s;
    u32 o;
    bool one;  // one token that is certain
    u32 count, token;

    __device__ __forceinline__ Proposed(const State &s, const Sequence &sequence, u32 o) : s(s), o(o) {
        bool greedy = sequence.draft.greedy;
        one = s.round->count <= 1 && !is_drawn(sequence);
        token = greedy ? (u32)s.best[o] : s.leaders[o];
        count = one ? (greedy ? s.best[o] != NO_KEY : token != NONE) : s.counts[o];
    }
    __device__ __forceinline__ u32 token_at(u32 i) const { return one ? token : s.candidate_tokens[(size_t)o * s.candidates + i]; }
    __device__ __forceinline__ float probability_at(u32 i) const {
        return one ? 1.0f : s.candidate_probabilities[(size_t)o * s.candidates + i];
    }
};
