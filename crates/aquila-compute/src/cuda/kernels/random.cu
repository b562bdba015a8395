// Random weights, as `random_weights.rs` defines them.

#include "choice.cuh"

// Elements `first` to `end` of a tensor; a thread draws those of the five of its number.
template <typename T> __device__ void draw_weights(const RandomArgs &a) {
    begin();
    u64 place = a.first / 5 + (u64)blockIdx.x * blockDim.x + threadIdx.x;
    u64 bits = mix(a.state + (place + 1) * 0x9e3779b97f4a7c15ull);
    for (u32 i = 0; i < 5; i++, bits >>= 12) {
        u64 element = 5 * place + i;
        if (element < a.first || element >= a.end) continue;
        narrow(widen(Bf16{a.samples[bits % 4096]}), static_cast<T *>(a.out) + (element - a.first));
    }
}
extern "C" __global__ void random_bf16(RandomArgs a) { draw_weights<Bf16>(a); }
extern "C" __global__ void random_f32(RandomArgs a) { draw_weights<float>(a); }
