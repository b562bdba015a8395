// Verification by probability: `verify.rs`, and what drafts are drawn for it. A thread block of 512 for
// each row.
//
// Weights are whole numbers of 2^-34, and what is left of a distribution of 2^-52, so that sums are
// exact in any order.

#include "path.cuh"

#define WEIGHERS 512
#define REST_UNIT 4503599627370496.0  // 2^52

// Streams of noise that must not be those of the target's own choices, nor each other.
#define ACCEPT_STREAM 0x6163636570740001ull
#define LAST_STREAM 0x6c61737400000002ull
#define DRAFT_STREAM 0x6472616674000003ull

// Shared memory of one thread block that weighs.
struct Weighing {
    u64 sums[WEIGHERS];
    u32 removed[MOST_PATH], removed_count;
    u32 part, found;
};

// The sum of `mine` of all threads.
__device__ u64 sum_of(Weighing &w, u64 mine) {
    for (u32 offset = 16; offset > 0; offset >>= 1) mine += __shfl_down_sync(~0u, mine, offset);
    __syncthreads();
    if (threadIdx.x % 32 == 0) w.sums[threadIdx.x / 32] = mine;
    __syncthreads();
    u64 total = 0;
    for (u32 warp = 0; warp < WEIGHERS / 32; warp++) total += w.sums[warp];
    return total;
}

// The token under `target`: the first, in the order of tokens, up to which weights add up to more; the
// last that has any weight where none does, NONE where none has. `units` answers the weight of a value
// of the row, `scale` is that of one unit.
template <typename F> __device__ u32 token_under(Weighing &w, u32 size, double target, double scale, F units) {
    // Every thread has a part of the row, which all lanes of its warp add up.
    u32 thread = threadIdx.x, lane = thread % 32, part = (size + 32 * WEIGHERS - 1) / (32 * WEIGHERS) * 32, last = NONE;
    u64 mine = 0;
    for (u32 of = 0; of < 32; of++) {
        u32 first = (thread - lane + of) * part, end = min(size, first + part);
        u64 sum = 0;
#pragma unroll 4
        for (u32 i = first + lane; i < end; i += 32) {
            u64 unit = units(i);
            sum += unit;
            if (unit) last = i;
        }
        for (u32 lanes = 1; lanes < 32; lanes *= 2) sum += __shfl_xor_sync(FULL, sum, lanes);
        if (lane == of) mine = sum;
    }
    __syncthreads();
    w.sums[thread] = mine;
    if (thread == 0) w.found = NONE, w.part = NONE;
    for (u32 step = 1; step < WEIGHERS; step <<= 1) {
        __syncthreads();
        u64 before = thread >= step ? w.sums[thread - step] : 0;
        __syncthreads();
        w.sums[thread] += before;
    }
    __syncthreads();
    u64 until = w.sums[thread], sum = until - mine;
    if (mine && (double)until * scale > target && !((double)sum * scale > target)) w.part = thread;
    __syncthreads();
    if (w.part != NONE && thread < 32) {
        u32 first = w.part * part, end = min(size, first + part);
        sum = w.part > 0 ? w.sums[w.part - 1] : 0;
        for (u32 row = first; row < end; row += 32) {
            u64 unit = row + lane < end ? units(row + lane) : 0, until = unit;
            for (u32 step = 1; step < 32; step *= 2) {
                u64 before = __shfl_up_sync(FULL, until, step);
                if (lane >= step) until += before;
            }
            u32 over = __ballot_sync(FULL, unit && (double)(sum + until) * scale > target);
            if (over) {
                if (lane == 0) w.found = row + __ffs(over) - 1;
                break;
            }
            sum += __shfl_sync(FULL, until, 31);
        }
    }
    __syncthreads();
    u32 found = w.found;
    __syncthreads();
    if (found != NONE) return found;
    // Only rounding gets here: the last token of all.
    if (thread == 0) w.found = 0;
    __syncthreads();
    if (last != NONE) atomicMax(&w.found, last + 1);
    __syncthreads();
    found = w.found;
    __syncthreads();
    return found - 1;
}

__device__ __forceinline__ bool is_removed(const Weighing &w, u32 token) {
    for (u32 i = 0; i < w.removed_count; i++) {
        if (w.removed[i] == token) return true;
    }
    return false;
}

// Takes a token out. All threads call this.
__device__ void remove_token(Weighing &w, u32 token) {
    __syncthreads();
    if (threadIdx.x == 0 && w.removed_count < MOST_PATH) w.removed[w.removed_count++] = token;
    __syncthreads();
}

// Draws drafts from the draft's own distribution, one after the other without putting back, and keeps
// the distribution.
extern "C" __global__ void __launch_bounds__(WEIGHERS) draw(const __grid_constant__ ChooseArgs a) {
    __shared__ Weighing w;
    begin();
    const State &s = a.state;
    u32 o = a.first + blockIdx.x, thread = threadIdx.x;
    if (o >= s.round->outputs) return;
    Query query = s.queries[o];
    const Row &row = row_of(s, query.row);
    const Sequence &sequence = sequence_of(s, row);
    if (!is_drawn(sequence)) return;
    u32 place = row.task.place;
    u32 to = a.level ? drawn_of_level(s, place, offered_of(s, query.row)[query.node].depth, o - row.first_query) : drawn_of_seed(s, place);
    float *weights = s.drawn + (size_t)to * s.vocabulary;
    Question q = question(s, a.logits, a.ids, a.size, a.draft, a.level, o, whole_row(), reinterpret_cast<u32 *>(dynamic_shared()));
    Filtered kept(s, q, o);
    // Where nothing is possible, the lowest token is certain, whether the draft knows it or not.
    u32 certain = kept.nothing ? lowest_allowed(sequence, q.mask, q.banned, s.vocabulary) : NONE;
    u64 mine = 0;
    for (u32 i = thread; i < s.vocabulary; i += WEIGHERS) weights[i] = 0.0f;
    __syncthreads();
    auto weigh = [&](u32 i, float x) {
        u32 token = q.token(i);
        u64 units = kept.units(x, token);
        mine += units;
        weights[token] = (float)weight_of_units(units);
        return false;
    };
    if (!kept.nothing) each_value<false>(q, weigh, [](u32, float) {});
    if (thread == 0 && kept.nothing) weights[certain] = 1.0f, mine = 17179869184ull;
    u64 total = sum_of(w, mine);
    if (thread == 0) s.drawn_totals[to] = weight_of_units(total), w.removed_count = 0;
    __syncthreads();
    u64 key = noise_key(sequence.draft.seed ^ DRAFT_STREAM, sequence.choice, q.position());
    u32 count = min(s.round->count, s.candidates), drawn = 0;
    auto units = [&](u32 token) { return is_removed(w, token) ? 0 : (u64)((double)weights[token] * 17179869184.0); };
    while (drawn < count) {
        u32 token = token_under(w, s.vocabulary, uniform(key, drawn) * weight_of_units(total), 1.0 / 17179869184.0, units);
        if (token == NONE) break;
        total -= units(token);
        remove_token(w, token);
        if (thread == 0) {
            s.candidate_tokens[(size_t)o * s.candidates + drawn] = token;
            s.candidate_probabilities[(size_t)o * s.candidates + drawn] = s.prior[drawn];
        }
        drawn++;
    }
    if (thread == 0) s.counts[o] = drawn;
}

// The target's distribution at one output.
struct Target {
    const Question &q;
    const Filtered &kept;
    u32 certain;  // the one token that is possible, or NONE

    __device__ __forceinline__ u64 units(u32 token) const {
        if (certain != NONE) return token == certain ? 17179869184ull : 0;
        return kept.units(q.value(token), token);
    }
};

// Goes on with the paths of trees that are verified by probability, to their ends or to nodes whose logits
// come with a later piece. A thread block for each tree; its first thread keeps the path where the answer is.
extern "C" __global__ void __launch_bounds__(WEIGHERS, 1) follow_paths(const __grid_constant__ ChooseArgs a) {
    __shared__ Weighing w;
    begin();
    const State &s = a.state;
    u32 at = blockIdx.x, thread = threadIdx.x;
    if (at >= s.round->rows) return;
    Row &row = row_of(s, at);
    if (!row.live || row.complete) return;
    Sequence &sequence = sequence_of(s, row);
    if (!by_probability(row, sequence)) return;
    const Node *tree = tree_of(s, at);
    double *rest = s.rest + (size_t)at * s.vocabulary;
    u32 *nodes = answer_nodes_of(s, at), *tokens = answer_of(s, at);
    u32 depth = row.followed, node = depth > 0 ? nodes[depth] : 0;
    u32 size = row.tree, position = sequence.tokens, vocabulary = s.vocabulary;
    u64 seed = sequence.sampling.seed;
    bool complete = false;
    // All have read where the path was before it goes on.
    __syncthreads();
    if (thread == 0 && depth == 0) nodes[0] = 0;

    while (!complete) {
        u32 o = row.first_output + node;
        if (o >= a.first + a.count) break;
        u64 coins = noise_key(seed ^ ACCEPT_STREAM, sequence.choice, position + depth);
        Question q = question(s, a.logits, nullptr, a.size, 0, 0, o, whole_row(), reinterpret_cast<u32 *>(dynamic_shared()));
        Filtered kept(s, q, o);
        u32 only = NONE;
        if (q.how->greedy) {
            only = s.best[o] == NO_KEY ? lowest_allowed(sequence, q.mask, q.banned, vocabulary) : (u32)s.best[o];
        } else if (kept.nothing) {
            only = lowest_allowed(sequence, q.mask, q.banned, vocabulary);
        }
        Target target = {q, kept, only};
        u64 mine = 0;
        auto weigh = [&](u32 token, float x) {
            mine += kept.units(x, token);
            return false;
        };
        if (only == NONE) {
            each_value<false>(q, weigh, [](u32, float) {});
        } else if (thread == 0 && only < a.size) {
            mine = target.units(only);
        }
        u64 total = sum_of(w, mine), left = total;
        if (thread == 0) w.removed_count = 0;
        __syncthreads();

        // Until something is subtracted, what is left is the target's weights less tokens taken out;
        // then it is in `rest`.
        bool subtracted = false;
        double scale = 1.0 / 17179869184.0;
        auto rest_units = [&](u32 token) -> u64 {
            if (is_removed(w, token)) return 0;
            return subtracted ? (u64)(rest[token] * REST_UNIT) : target.units(token);
        };
        u32 proposal = tree[node].drawn, sibling = 0, accepted = NONE;
        const float *drawn = proposal == NONE ? nullptr : s.drawn + (size_t)proposal * vocabulary;
        u64 drawn_left = proposal == NONE ? 0 : (u64)(s.drawn_totals[proposal] * 17179869184.0);
        double sum = 0.0;
        for (u32 child = node + 1; child < size && accepted == NONE; child++) {
            if (tree[child].parent != node) continue;
            u32 token = tree[child].token;
            u64 own = token < a.size ? rest_units(token) : 0;
            if (sequence.verify == TARGET_ONLY) {
                double p = weight_of_units(own) / weight_of_units(total);
                sum += p;
                double most = sequence.accumulated > 1e-9 ? sequence.accumulated : 1e-9;
                if (p > 0.0 && (uniform(coins, 0) <= sum / most || p >= sequence.single)) accepted = child;
                if (accepted == NONE) {
                    left -= own;
                    remove_token(w, token);
                }
                continue;
            }
            double p = (double)own * scale / ((double)left * scale), q_of = 1.0;
            // Tokens of siblings that were tried are no longer in the draft's distribution.
            auto drawn_units = [&](u32 t) -> u64 {
                for (u32 c = node + 1; c < child; c++) {
                    if (tree[c].parent == node && tree[c].token == t) return 0;
                }
                return (u64)((double)drawn[t] * 17179869184.0);
            };
            u64 drawn_own = drawn ? drawn_units(token) : 0;
            if (drawn) q_of = weight_of_units(drawn_own) / weight_of_units(drawn_left);
            if (p > 0.0 && uniform(coins, sibling) * q_of < p) accepted = child;
            if (accepted == NONE && drawn) {
                // All of the draft's distribution that is left is taken off, both as probabilities.
                double whole = (double)left * scale, drawn_whole = weight_of_units(drawn_left);
                u64 kept_units = 0;
                for (u32 t = thread; t < a.size; t += WEIGHERS) {
                    double old = (double)(subtracted ? (u64)(rest[t] * REST_UNIT) : target.units(t)) * scale;
                    u64 theirs = drawn[t] > 0.0f ? drawn_units(t) : 0;
                    double less = theirs ? weight_of_units(theirs) / drawn_whole : 0.0;
                    double now = old / whole - less;
                    now = now > 0.0 ? (now + 1.0) - 1.0 : 0.0;
                    rest[t] = now;
                    kept_units += (u64)(now * REST_UNIT);
                }
                left = sum_of(w, kept_units);
                subtracted = true, scale = 1.0 / REST_UNIT;
                drawn_left -= drawn_own;
                __syncthreads();
            } else if (accepted == NONE) {
                left -= own;
                remove_token(w, token);
            }
            if (accepted == NONE && left == 0) accepted = child;
            sibling++;
        }
        u32 token = NONE;
        if (accepted != NONE) {
            token = tree[accepted].token;
        } else {
            double coin = uniform(noise_key(seed ^ LAST_STREAM, sequence.choice, position + depth), 0);
            token = token_under(w, a.size, coin * ((double)left * scale), scale, rest_units);
            if (token == NONE) {
                // Nothing is left: the first token of the target's distribution.
                auto whole = [&](u32 t) { return target.units(t); };
                token = token_under(w, a.size, 0.0, 1.0, whole);
            }
            complete = true;
        }
        if (thread == 0) {
            tokens[depth] = token;
            if (!complete) nodes[depth + 1] = accepted;
            if (a.logprobs && sequence.logprobs) a.logprobs[o] = logprob_of(s, q.raw, a.size, o, token);
        }
        depth++, node = accepted;
        __syncthreads();
    }
    if (thread == 0) row.followed = depth, row.complete = complete;
}
