// Every instruction that CUDA C++ has no function for, and shared memory whose size a launch says:
// all inline assembly of the kernels. The emulated driver has a file of this name with the same
// functions, so no other file may hold `asm` or `extern __shared__`.

#pragma once

#include "arguments.cuh"

// Lets the next kernel of the stream begin, and waits for the results of the one before. At least one
// thread of every thread block waits: then the wait reaches back through all kernels before. In front of
// it a kernel touches nothing but weights, angles, plans and block tables: behind a kernel that writes
// one of those, the host has the next launch begin when all before it is over (`Device::next_waits`).
// Plans and block tables are read from the second-level cache (`__ldcg`), which all multiprocessors share.
__device__ __forceinline__ void let_next_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_inputs() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// bfloat16, rounded half to even.
__device__ __forceinline__ u16 halve(float x) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}

// Two of them, the first in the lower half.
__device__ __forceinline__ u32 halve_pair(float x, float y) {
    u32 bits;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(y), "f"(x));
    return bits;
}

// 1 / x, off by a unit of the last place at most, of normal numbers whose quotient is one.
__device__ __forceinline__ float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Adds the products of one step of 16 to the accumulators of 16 by 8.
__device__ __forceinline__ void multiply(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Shared memory of the size that the launch says.
__device__ __forceinline__ u8 *dynamic_shared() {
    extern __shared__ __align__(128) u8 shared[];
    return shared;
}
__device__ __forceinline__ u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ uint4 load_shared(u32 address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address));
    return v;
}

// Four matrices of 8 rows of 16 bytes: lane l says where row l % 8 of matrix l / 8 is, and gets the
// two halves at 2 * (l % 4) of row l / 4 of each.
__device__ __forceinline__ uint4 load_matrices(u32 address) {
    uint4 v;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}

// Copies of 16 bytes to shared memory, which a thread starts, groups and waits for.
__device__ __forceinline__ void copy_async(u32 to, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from));
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most LEFT groups of copies of this thread are under way.
template <int LEFT> __device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

#if __CUDA_ARCH__ >= 900

// Arrives at a barrier once all copies that this thread has started are done.
__device__ __forceinline__ void arrive_after_copies(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Chooses one thread of a warp, of which all are here.
__device__ __forceinline__ bool elect() {
    u32 chosen;
    asm volatile(
        "{\n"
        ".reg .pred chosen;\n"
        "elect.sync _|chosen, 0xffffffff;\n"
        "selp.u32 %0, 1, 0, chosen;\n"
        "}\n"
        : "=r"(chosen));
    return chosen;
}

// Barriers in shared memory (mbarriers).
__device__ __forceinline__ void barrier_init(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}
// Lets the thread blocks of the cluster and bulk copies see barriers that were initialised.
__device__ __forceinline__ void publish_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 phase) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}\n" ::"r"(barrier),
        "r"(phase)
        : "memory");
}

// Bulk copies, which complete on a barrier. Weights are read once, so they are the first to leave the
// cache.
__device__ __forceinline__ u64 evict_first() {
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
__device__ __forceinline__ u64 evict_normal() {
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
__device__ __forceinline__ void copy_weights(u32 to, const u8 *from, u32 bytes, u32 barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
        : "memory");
}
__device__ __forceinline__ void copy_input(u32 to, const u16 *from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

// Lets the copy engine read what describes rows or weights before it is used.
__device__ __forceinline__ void prefetch_map(const TensorMap &map) { asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory"); }
// Copies a box of weights: some blocks, from `block` on, of some tiles, from `tile` on, of one half of the
// outputs or of both. Beyond the last come zeros.
__device__ __forceinline__ void copy_weights(u32 to, const TensorMap &map, u32 block, u32 tile, u32 half, u32 barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(to),
        "l"(&map), "r"(0), "r"(block), "r"(tile), "r"(half), "r"(barrier), "l"(policy)
        : "memory");
}
// The same to one place of all thread blocks of the cluster whose ranks' bits are set, each of which
// counts the bytes on its own barrier.
__device__ __forceinline__ void share_weights(u32 to, const TensorMap &map, u32 block, u32 tile, u32 half, u32 barrier, u32 ranks, u64 policy) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint "
        "[%0], [%1, {%2, %3, %4, %5}], [%6], %7, %8;" ::"r"(to),
        "l"(&map), "r"(0), "r"(block), "r"(tile), "r"(half), "r"(barrier), "h"((u16)ranks), "l"(policy)
        : "memory");
}
// And a box of rows, swizzled.
__device__ __forceinline__ void share_rows(u32 to, const TensorMap &map, u32 column, u32 row, u32 barrier, u32 ranks) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
        "l"(&map), "r"(column), "r"(row), "r"(barrier), "h"((u16)ranks)
        : "memory");
}

// Shared memory and barriers of the other thread blocks of a cluster.
__device__ __forceinline__ u32 of_block(u32 address, u32 rank) {
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}
// Sends 16 bytes, which the barrier there counts when they have come.
__device__ __forceinline__ void send_cluster(u32 address, float4 v, u32 barrier, u32 rank) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(
                     of_block(address, rank)),
                 "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(of_block(barrier, rank))
                 : "memory");
}
// Arrives at the barrier of the thread block of this rank, which hears nothing else by it.
__device__ __forceinline__ void barrier_arrive_at(u32 barrier, u32 rank) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(of_block(barrier, rank)) : "memory");
}
// Tells the thread block of this rank, behind all that this thread has seen and done.
__device__ __forceinline__ void barrier_tell(u32 barrier, u32 rank) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(of_block(barrier, rank)) : "memory");
}
__device__ __forceinline__ void barrier_hear(u32 barrier, u32 phase) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}\n" ::"r"(barrier),
        "r"(phase)
        : "memory");
}
// `meet_cluster_first` publishes nothing but barriers that `publish_barriers` has.
__device__ __forceinline__ void meet_cluster_first() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}
__device__ __forceinline__ void meet_cluster() {
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}
// Meets so many threads of the thread block, which are not all of it.
// Those that meet at one time and those at another say different numbers, from 1 to 15.
template <int NUMBER, int THREADS> __device__ __forceinline__ void meet_some() {
    asm volatile("bar.sync %0, %1;" ::"n"(NUMBER), "n"(THREADS) : "memory");
}

// The registers that each thread of a warpgroup has: fewer or more than it began with.
template <int COUNT> __device__ __forceinline__ void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <int COUNT> __device__ __forceinline__ void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }

// Multiplications by a warpgroup, four warps whose first has a number that four divides. They are
// begun, committed, and waited for; until then no thread may touch the sums, the first factors or
// the shared memory of the second.

// Where the second factors of a step lie in shared memory: matrices of 8 rows of 16 bytes, row by row;
// so many bytes from one matrix to that of the next 8 inputs, and to that of the next 8 rows.
__device__ __forceinline__ u64 matrices_at(u32 address, u32 to_next_inputs, u32 to_next_rows) {
    return (address & 0x3ffff) >> 4 | (u64)(to_next_inputs >> 4) << 16 | (u64)(to_next_rows >> 4) << 32;
}
// The same of rows of 128 bytes, which begin at a multiple of 1,024 and whose pieces of 16 bytes are
// swizzled: piece p of row r lies at p ^ r % 8.
__device__ __forceinline__ u64 swizzled_at(u32 address) {
    return (address & 0x3ffff) >> 4 | (u64)1 << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}
// Before the first multiplication, and after registers of one were written.
__device__ __forceinline__ void begin_multiplying() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_multiplying() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most LEFT of the committed groups are left. The sums pass through here, so that the
// compiler reads none of them before.
template <int LEFT, int GROUPS> __device__ __forceinline__ void wait_for_multiplying(float (&c)[GROUPS][4]) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
#pragma unroll
    for (int i = 0; i < GROUPS * 4; i++) asm volatile("" : "+f"(c[i / 4][i % 4])::"memory");
}
// Lets multiplications see what was written to shared memory and this thread has seen.
__device__ __forceinline__ void publish_to_multiplying() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

#define SUMS_OF_4(i) "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
#define SUMS_OF_16(i) SUMS_OF_4(i), SUMS_OF_4(i + 1), SUMS_OF_4(i + 2), SUMS_OF_4(i + 3)
// Adds the products of one step of 16 to the sums of 64 by ROWS, of which a warp has 16 by ROWS as
// `multiply` has them; without `add` the sums begin at zero.
template <int ROWS> __device__ __forceinline__ void multiply_group(float (&c)[ROWS / 8][4], const uint4 &a, u64 matrices, bool add);
template <> __device__ __forceinline__ void multiply_group<32>(float (&c)[4][4], const uint4 &a, u64 matrices, bool add) {
    asm volatile(
        "{\n"
        ".reg .pred adds;\n"
        "setp.ne.b32 adds, %21, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
        "{%16, %17, %18, %19}, %20, adds, 1, 1, 0;\n"
        "}\n"
        : SUMS_OF_16(0)
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(matrices), "r"((u32)add));
}
template <> __device__ __forceinline__ void multiply_group<64>(float (&c)[8][4], const uint4 &a, u64 matrices, bool add) {
    asm volatile(
        "{\n"
        ".reg .pred adds;\n"
        "setp.ne.b32 adds, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "{%32, %33, %34, %35}, %36, adds, 1, 1, 0;\n"
        "}\n"
        : SUMS_OF_16(0), SUMS_OF_16(4)
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(matrices), "r"((u32)add));
}
template <> __device__ __forceinline__ void multiply_group<128>(float (&c)[16][4], const uint4 &a, u64 matrices, bool add) {
    asm volatile(
        "{\n"
        ".reg .pred adds;\n"
        "setp.ne.b32 adds, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31,"
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47,"
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "{%64, %65, %66, %67}, %68, adds, 1, 1, 0;\n"
        "}\n"
        : SUMS_OF_16(0), SUMS_OF_16(4), SUMS_OF_16(8), SUMS_OF_16(12)
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(matrices), "r"((u32)add));
}

#endif

// As `load_matrices`, but a lane gets column l / 4 of the two rows at 2 * (l % 4) of each.
__device__ __forceinline__ uint4 load_matrices_transposed(u32 address) {
    uint4 v;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}
