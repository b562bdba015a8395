// What CUDA C++ has beyond C++, as far as the kernels use it.

#pragma once

#include <cmath>
#include <cstring>

#include "threads.h"

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __shared__ static __attribute__((section("emulated_shared")))

#define threadIdx (emulator::current->index)
#define blockIdx (emulator::current->block->index)
#define blockDim (emulator::block_dim)
#define gridDim (emulator::grid_dim)

struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

template <typename To, typename From> inline To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &from, sizeof(to));
    return to;
}
inline float __uint_as_float(unsigned x) { return bits_as<float>(x); }
inline float __int_as_float(int x) { return bits_as<float>(x); }
inline unsigned __float_as_uint(float x) { return bits_as<unsigned>(x); }
inline double __longlong_as_double(long long x) { return bits_as<double>(x); }
inline long long __double_as_longlong(double x) { return bits_as<long long>(x); }
inline int __ffs(unsigned x) { return __builtin_ffs((int)x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(unsigned x) { return x ? __builtin_clz(x) : 32; }
inline unsigned long long __float2ull_rn(float x) { return (unsigned long long)llrintf(x); }
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned s) {
    unsigned long long both = (unsigned long long)y << 32 | x;
    unsigned out = 0;
    for (int i = 0; i < 4; i++) out |= (unsigned)(both >> (s >> (4 * i) & 7) * 8 & 0xff) << 8 * i;
    return out;
}

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline unsigned min(unsigned a, int b) { return min(a, (unsigned)b); }
inline unsigned max(unsigned a, int b) { return max(a, (unsigned)b); }
inline unsigned min(int a, unsigned b) { return min((unsigned)a, b); }
inline unsigned max(int a, unsigned b) { return max((unsigned)a, b); }
inline unsigned long long min(unsigned long long a, unsigned long long b) { return a < b ? a : b; }
inline unsigned long long max(unsigned long long a, unsigned long long b) { return a > b ? a : b; }

// One thread runs at a time, so an atomic operation is an ordinary one.
template <typename T> inline T atomicAdd(T *p, T x) {
    T old = *p;
    *p = old + x;
    return old;
}
inline unsigned atomicAdd(unsigned *p, int x) { return atomicAdd(p, (unsigned)x); }
template <typename T> inline T atomicMin(T *p, T x) {
    T old = *p;
    *p = x < old ? x : old;
    return old;
}
template <typename T> inline T atomicMax(T *p, T x) {
    T old = *p;
    *p = x > old ? x : old;
    return old;
}
inline unsigned atomicOr(unsigned *p, unsigned x) {
    unsigned old = *p;
    *p = old | x;
    return old;
}
inline unsigned atomicInc(unsigned *p, unsigned most) {
    unsigned old = *p;
    *p = old >= most ? 0 : old + 1;
    return old;
}
inline void __threadfence() {}
template <typename T> inline T __ldcg(const T *p) { return *p; }

inline void __syncthreads() { emulator::meet_block(); }

enum Operation { SYNC_WARP, SHUFFLE, BALLOT, MULTIPLY, LOAD_MATRICES };
inline void __syncwarp() { emulator::exchange(SYNC_WARP, nullptr, 0); }
// The value of the lane that `from` names.
template <typename T> inline T shuffled(T x, unsigned from) {
    unsigned words[2] = {}, out[2];
    memcpy(words, &x, sizeof(x));
    auto all = emulator::exchange(SHUFFLE, words, 2);
    memcpy(out, all[from % 32], 8);
    memcpy(&x, out, sizeof(x));
    return x;
}
inline unsigned lane_of_thread() { return emulator::current->lane; }
template <typename T> inline T __shfl_xor_sync(unsigned, T x, unsigned mask) { return shuffled(x, lane_of_thread() ^ mask); }
template <typename T> inline T __shfl_sync(unsigned, T x, unsigned lane) { return shuffled(x, lane); }
template <typename T> inline T __shfl_down_sync(unsigned, T x, unsigned by) {
    unsigned lane = lane_of_thread();
    return shuffled(x, lane + by < 32 ? lane + by : lane);
}
template <typename T> inline T __shfl_up_sync(unsigned, T x, unsigned by) {
    unsigned lane = lane_of_thread();
    return shuffled(x, lane >= by ? lane - by : lane);
}
inline unsigned __ballot_sync(unsigned, bool vote) {
    unsigned word = vote, votes = 0;
    auto all = emulator::exchange(BALLOT, &word, 1);
    for (int lane = 0; lane < 32; lane++) votes |= all[lane][0] << lane;
    return votes;
}
