// Mixtures of experts: which experts each row goes to, what they make of it, and the sum of that.
//
// A row and one of its experts are a pair; pairs are numbered row by row and, of one row, in ascending
// order of experts, which is the order in which they are added. For tensor cores the pairs of one expert
// come together in units, so that the expert's weights are read once for up to eight of them. Which
// experts were chosen is known on the device alone: grids follow from how many pairs and experts there
// are, and thread blocks without a unit have nothing to do.

#include "tensor.cuh"

#define UNIT_PAIRS 8
#define NO_EXPERT 0xffffffffu

// One warp per row: `softmax` and `choose_experts` of `reference.rs`.
extern "C" __global__ void __launch_bounds__(32) route(RouteArgs a) {
    begin();
    float *probabilities = reinterpret_cast<float *>(dynamic_shared()), *taken = probabilities + a.experts;
    u32 *ids = reinterpret_cast<u32 *>(taken + a.per_token);
    u32 lane = threadIdx.x, row = blockIdx.x;
    const float *logits = a.logits.values + (size_t)row * a.logits.stride;
    float largest = -INFINITY;
    for (u32 i = lane; i < a.experts; i += 32) largest = fmaxf(largest, logits[i]);
    largest = fold_max<32>(largest);
    for (u32 i = lane; i < a.experts; i += 32) probabilities[i] = exponential(logits[i] - largest);
    __syncwarp();
    // Both halves of the warp make the same total.
    float total = 0.0f;
    for (u32 i = lane % 16; i < a.experts; i += 16) total += probabilities[i];
    total = fold<16>(total);
    __syncwarp();
    for (u32 i = lane; i < a.experts; i += 32) probabilities[i] = probabilities[i] / total;

    float sum = 0.0f;
    for (u32 place = 0; place < a.per_token; place++) {
        __syncwarp();
        u32 best = NO_EXPERT;
        float most = 0.0f;
        for (u32 i = lane; i < a.experts; i += 32) {
            // Those that were chosen are below zero.
            float p = probabilities[i];
            if (!(p < 0.0f) && (best == NO_EXPERT || p > most)) best = i, most = p;
        }
        // Of equal ones the lowest id; so, too, where none is a number.
#pragma unroll
        for (int step = 16; step > 0; step >>= 1) {
            u32 other = __shfl_xor_sync(FULL, best, step);
            float p = __shfl_xor_sync(FULL, most, step);
            bool better = best == NO_EXPERT || p > most || (!(most > p) && other < best);
            if (other != NO_EXPERT && better) best = other, most = p;
        }
        sum += most;
        __syncwarp();
        if (lane == 0) probabilities[best] = -1.0f, ids[place] = best, taken[place] = most;
    }
    __syncwarp();
    for (u32 place = lane; place < a.per_token; place += 32) {
        u32 id = ids[place], rank = 0;
        for (u32 other = 0; other < a.per_token; other++) rank += ids[other] < id;
        size_t first = (size_t)row * a.per_token;
        a.likeliest[first + place] = id;
        a.ascending[first + rank] = id;
        a.weights[first + rank] = a.normalize ? taken[place] / sum : taken[place];
    }
}

// One thread block: lists the pairs expert by expert, and cuts them into units. In which order the pairs
// of one expert come changes no bit of any of them.
extern "C" __global__ void __launch_bounds__(1024) group_pairs(GroupArgs a) {
    begin();
    u32 *counts = reinterpret_cast<u32 *>(dynamic_shared()), *next = counts + a.experts;
    for (u32 e = threadIdx.x; e < a.experts; e += blockDim.x) counts[e] = 0;
    __syncthreads();
    for (u32 pair = threadIdx.x; pair < a.pairs; pair += blockDim.x) atomicAdd(&counts[a.ascending[pair]], 1);
    __syncthreads();
    for (u32 e = threadIdx.x; e < a.experts; e += blockDim.x) {
        u32 first = 0, unit = 0, end;
        for (u32 before = 0; before < e; before++) first += counts[before], unit += (counts[before] + UNIT_PAIRS - 1) / UNIT_PAIRS;
        next[e] = first, end = first + counts[e];
        for (; first < end; first += UNIT_PAIRS) a.units[unit++] = make_uint2(e, first * 16 + min((u32)UNIT_PAIRS, end - first));
        if (e + 1 == a.experts) *a.unit_count = unit;
    }
    __syncthreads();
    for (u32 pair = threadIdx.x; pair < a.pairs; pair += blockDim.x) a.places[atomicAdd(&next[a.ascending[pair]], 1)] = pair;
}

// A thread block takes a unit and a tile of 16 outputs; its eight warps are the eight slices of a group.
extern "C" __global__ void __launch_bounds__(256) project_experts_tensor(ExpertsArgs a) {
    __shared__ __align__(16) float sums[SLICES][16 * UNIT_PAIRS];
    begin();
    if (blockIdx.x >= *a.unit_count) return;
    u32 thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    uint2 unit = a.units[blockIdx.x];
    const u32 *places = a.places + unit.y / 16;
    u32 pairs = unit.y % 16, tile = a.first / 16 + blockIdx.y;
    Cut cut(a.inputs);
    const u8 *weight = reinterpret_cast<const u8 *>(a.matrices[unit.x]) + (size_t)tile * cut.blocks * BLOCK_BYTES + lane * 16;
    bool there = lane / 4 < pairs;
    const u16 *x = a.in.halves + (size_t)(there ? places[lane / 4] / a.sharing : 0) * a.in.stride + lane % 4 * 2;
    float total = 0.0f;
    for (u32 g = 0; g < cut.groups; g++) {
        float c[4] = {};
        u32 end = cut.slice(g, warp + 1);
#pragma unroll 4
        for (u32 block = cut.slice(g, warp); block < end; block++) {
            const uint4 *w = reinterpret_cast<const uint4 *>(weight + (size_t)block * BLOCK_BYTES);
            u32 b[4] = {};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                if (there) b[i] = *reinterpret_cast<const u32 *>(x + block * 32 + i * 8);
            }
            multiply(c, w[0], b[0], b[1]);
            multiply(c, w[BLOCK_BYTES / 32], b[2], b[3]);
        }
        *reinterpret_cast<float4 *>(&sums[warp][lane * 4]) = make_float4(c[0], c[1], c[2], c[3]);
        __syncthreads();
        if (thread < 16 * UNIT_PAIRS) {
            float sum = sums[0][thread];
#pragma unroll
            for (int s = 1; s < SLICES; s++) sum += sums[s][thread];
            total = g == 0 ? sum : total + sum;
        }
        __syncthreads();
    }
    u32 of_unit = thread / 4 % 4 * 2 + thread % 2, output = tile * 16 + thread / 16 + thread / 2 % 2 * 8;
    if (thread < 16 * UNIT_PAIRS && of_unit < pairs && output < a.end) put(a.out, places[of_unit], output - a.first, total);
}

// A thread adds the products of one output of one pair, one after the other.
template <typename W> __device__ void project_pair(const ExpertsArgs &a) {
    begin();
    u32 pair = blockIdx.x, output = a.first + blockIdx.y * blockDim.x + threadIdx.x;
    if (output >= a.end) return;
    const W *weight = reinterpret_cast<const W *>(a.matrices[a.ascending[pair]]) + (size_t)output * a.inputs;
    float sum = 0.0f;
    for (u32 k = 0; k < a.inputs; k++) sum = fmaf(get(a.in, pair / a.sharing, k), widen(weight[k]), sum);
    put(a.out, pair, output - a.first, sum);
}
extern "C" __global__ void __launch_bounds__(256) project_experts_plain_bf16(ExpertsArgs a) { project_pair<Bf16>(a); }
extern "C" __global__ void __launch_bounds__(256) project_experts_plain_f32(ExpertsArgs a) { project_pair<float>(a); }

// The weighted sum of what a row's experts made, one after the other.
extern "C" __global__ void mix_experts(MixArgs a) {
    begin();
    u32 row = blockIdx.y, column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= a.width) return;
    float sum = 0.0f;
    for (u32 pair = row * a.per_token, end = pair + a.per_token; pair < end; pair++)
        sum = fmaf(a.weights[pair], get(a.in, pair, column), sum);
    put(a.out, row, a.first + column, a.add ? get(a.out, row, a.first + column) + sum : sum);
}

// The ids of a row's experts, the likeliest first, as numbers.
extern "C" __global__ void routed_experts(RoutedArgs a) {
    begin();
    u32 row = blockIdx.y, place = blockIdx.x * blockDim.x + threadIdx.x;
    if (place < a.per_token) put(a.out, row, a.column + place, (float)a.likeliest[(size_t)row * a.per_token + place]);
}
