// Projections of any number of rows, in tiles, with the sums of `project_skinny.cu`.

#include "tensor.cuh"

#define WIDE_STAGES 4
#define ROW_BYTES 80  // of a row of 32 inputs: eight rows are in all banks

// WARPS_N by WARPS_M warps, each of TILES times 16 outputs by TOKENS times 8 rows. MANY: whether
// there is more than one group, and so a third level of sums.
template <int WARPS_N, int WARPS_M, int TILES, int TOKENS, bool MANY> __device__ void wide(const ProjectArgs &a) {
    constexpr u32 THREADS = WARPS_N * WARPS_M * 32, OUTPUT_TILES = WARPS_N * TILES, ROWS = WARPS_M * TOKENS * 8;
    constexpr u32 WEIGHT_BYTES = OUTPUT_TILES * BLOCK_BYTES, STAGE = WEIGHT_BYTES + ROWS * ROW_BYTES;
    u8 *shared = dynamic_shared();
    u32 thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    u32 warp_n = warp % WARPS_N, warp_m = warp / WARPS_N;
    u32 tiles = (a.outputs + 15) / 16, first_tile = blockIdx.x * OUTPUT_TILES, first_row = blockIdx.y * ROWS;
    Cut cut(a.inputs);
    u32 base = shared_address(shared);
    begin();

    // Tiles and rows beyond the last repeat it; their sums are not written.
    auto fetch = [&](u32 block) {
        if (block < cut.blocks) {
            u32 to = base + block % WIDE_STAGES * STAGE;
#pragma unroll
            for (u32 i = thread; i < WEIGHT_BYTES / 16; i += THREADS) {
                u32 tile = min(first_tile + i / (BLOCK_BYTES / 16), tiles - 1);
                copy_async(to + i * 16, a.weight + ((size_t)tile * cut.blocks + block) * BLOCK_BYTES + i % (BLOCK_BYTES / 16) * 16);
            }
#pragma unroll
            for (u32 i = thread; i < ROWS * 4; i += THREADS) {
                u32 row = min(first_row + i / 4, a.rows - 1);
                copy_async(to + WEIGHT_BYTES + i / 4 * ROW_BYTES + i % 4 * 16, a.in.halves + (size_t)row * a.in.stride + block * 32 + i % 4 * 8);
            }
        }
        commit_copies();
    };
#pragma unroll
    for (u32 s = 0; s + 1 < WIDE_STAGES; s++) fetch(s);

    float total[MANY ? TILES : 1][TOKENS][4], group_sum[TILES][TOKENS][4], c[TILES][TOKENS][4];
    u32 block = 0;
    for (u32 g = 0; g < cut.groups; g++) {
#pragma unroll 1
        for (u32 s = 0; s < SLICES; s++) {
#pragma unroll
            for (int i = 0; i < TILES * TOKENS * 4; i++) c[i / (TOKENS * 4)][i / 4 % TOKENS][i % 4] = 0.0f;
            u32 end = cut.slice(g, s + 1);
#pragma unroll 1
            for (; block < end; block++) {
                wait_for_copies<WIDE_STAGES - 2>();
                __syncthreads();
                fetch(block + WIDE_STAGES - 1);
                u32 from = base + block % WIDE_STAGES * STAGE;
                uint4 w[TILES][2];
#pragma unroll
                for (int t = 0; t < TILES; t++) {
                    u32 at = from + (warp_n * TILES + t) * BLOCK_BYTES + lane * 16;
                    w[t][0] = load_shared(at);
                    w[t][1] = load_shared(at + BLOCK_BYTES / 2);
                }
#pragma unroll
                for (int n = 0; n < TOKENS; n++) {
                    uint4 b = load_matrices(from + WEIGHT_BYTES + ((warp_m * TOKENS + n) * 8 + lane % 8) * ROW_BYTES + lane / 8 * 16);
#pragma unroll
                    for (int t = 0; t < TILES; t++) {
                        multiply(c[t][n], w[t][0], b.x, b.y);
                        multiply(c[t][n], w[t][1], b.z, b.w);
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < TILES * TOKENS * 4; i++) {
                float &sum = group_sum[i / (TOKENS * 4)][i / 4 % TOKENS][i % 4];
                float slice = c[i / (TOKENS * 4)][i / 4 % TOKENS][i % 4];
                sum = s == 0 ? slice : sum + slice;
            }
        }
        if (MANY) {
#pragma unroll
            for (int i = 0; i < TILES * TOKENS * 4; i++) {
                float &sum = total[i / (TOKENS * 4)][i / 4 % TOKENS][i % 4];
                float part = group_sum[i / (TOKENS * 4)][i / 4 % TOKENS][i % 4];
                sum = g == 0 ? part : sum + part;
            }
        }
    }
#pragma unroll
    for (int t = 0; t < TILES; t++) {
        auto sum = [&](int e) { return MANY ? total[MANY ? t : 0][e / 4][e % 4] : group_sum[t][e / 4][e % 4]; };
        u32 tile = first_tile + warp_n * TILES + t;
        finish_tile<TOKENS * 8, false>(a, first_row + warp_m * TOKENS * 8, tile * 16, sum, [](int) { return 0.0f; });
    }
}

// 32 outputs by 64 rows, and 128 by 128.
extern "C" __global__ void __launch_bounds__(256, 2) project_wide_64(const __grid_constant__ ProjectArgs a) { wide<2, 4, 1, 2, false>(a); }
extern "C" __global__ void __launch_bounds__(256, 2) project_wide_64_many(const __grid_constant__ ProjectArgs a) { wide<2, 4, 1, 2, true>(a); }
extern "C" __global__ void __launch_bounds__(256, 1) project_wide_128(const __grid_constant__ ProjectArgs a) { wide<4, 2, 2, 8, false>(a); }
extern "C" __global__ void __launch_bounds__(256, 1) project_wide_128_many(const __grid_constant__ ProjectArgs a) { wide<4, 2, 2, 8, true>(a); }
