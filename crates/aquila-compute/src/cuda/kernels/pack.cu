// Weights into the order in which tensor cores take them: by 16 outputs, by 32 inputs, two steps,
// 16 bytes for each of 32 lanes. What is missing of the last outputs and inputs is zero.

#include "tensor.cuh"

// `in` has `rows` outputs of `inputs`, the first of which is output `first`; two inputs per thread.
extern "C" __global__ void pack(PackArgs a) {
    begin();
    u32 n = a.first + blockIdx.y, k = 2 * (blockIdx.x * blockDim.x + threadIdx.x);
    if (k >= a.inputs) return;
    const u16 *in = a.in + (size_t)blockIdx.y * a.inputs + k;
    u32 low = in[0], high = k + 1 < a.inputs ? in[1] : 0;
    u32 blocks = (a.inputs + 31) / 32;
    u32 lane = n % 8 * 4 + k % 8 / 2, step = k / 16 % 2, word = k / 8 % 2 * 2 + n / 8 % 2;
    size_t at = ((((size_t)(n / 16) * blocks + k / 32) * 2 + step) * 32 + lane) * 4 + word;
    reinterpret_cast<u32 *>(a.out)[at] = high << 16 | low;
}
