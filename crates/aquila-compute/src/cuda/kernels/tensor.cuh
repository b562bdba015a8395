// The tensor cores, and how weights lie in memory for them.
//
// `contract.rs` defines what comes out, bit for bit. Of 32 inputs the first step takes those whose
// number has bit 2 clear, the second the others, so that one load of 16 bytes of a plain row holds
// a lane's part of both.

#pragma once

#include "device.cuh"

#define SLICES 8       // slices of a group
#define GROUP 128      // blocks of 32 inputs in a group at most
#define BLOCK_BYTES 1024  // 16 outputs by 32 inputs

// Adds the products of one step of 16 to the accumulators of 16 by 8.
__device__ __forceinline__ void multiply(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void multiply(float (&c)[4], const uint4 &a, u32 b0, u32 b1) {
    multiply(c, a.x, a.y, a.z, a.w, b0, b1);
}

__device__ __forceinline__ u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ uint4 load_shared(u32 address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address));
    return v;
}

// The blocks of 32 inputs are cut into groups, and a group into slices.
struct Cut {
    u32 blocks, groups;
    __device__ __forceinline__ Cut(u32 inputs) {
        blocks = (inputs + 31) / 32;
        groups = max(1u, (blocks + GROUP - 1) / GROUP);
    }
    __device__ __forceinline__ u32 group(u32 g) const { return g * blocks / groups; }
    __device__ __forceinline__ u32 slice(u32 g, u32 s) const {
        u32 first = group(g);
        return first + s * (group(g + 1) - first) / SLICES;
    }
};

// What is done with a finished sum.
__device__ __forceinline__ void finish(const ProjectArgs &a, u32 row, u32 output, float sum) {
    if (row >= a.rows || output >= a.outputs) return;
    if (a.bias) sum += a.bias[output];
    put(a.out, row, output, a.add ? get(a.out, row, output) + sum : sum);
}

__device__ __forceinline__ void finish_gated(const ProjectArgs &a, u32 row, u32 output, float gate, float up) {
    u32 half = a.outputs / 2;
    if (row >= a.rows || output >= half) return;
    if (a.bias) gate += a.bias[output], up += a.bias[half + output];
    put(a.out, row, output, silu(gate) * up);
}
