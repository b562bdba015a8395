// The instructions of `../src/cuda/kernels/ptx.cuh` on a CPU. Every kernel lets the next one begin at its
// start, so the driver begins thread blocks early without being told.

#pragma once

#include "arguments.cuh"

inline void let_next_begin() {}
inline void wait_for_inputs() { emulator::wait_for_inputs(); }

inline u16 halve(float x) {
    u32 bits = __float_as_uint(x);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;
    return (u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline u32 halve_pair(float x, float y) { return (u32)halve(y) << 16 | halve(x); }
// Off by a unit, now and then.
inline float reciprocal(float x) { return __uint_as_float(__float_as_uint(1.0f / x) + __float_as_uint(x) % 3 - 1); }

inline float of_half(u32 bits) { return __uint_as_float(bits << 16); }

// One sum of a step: every term is cut toward zero 25 bits below the largest exponent, the cut terms
// are added, and their sum is cut to f32. `step` of `contract.rs` says the same of a Hopper.
inline float add_products(float sum, const u16 *x, const u16 *w) {
    u32 bits = __float_as_uint(sum);
    int field = bits >> 23 & 0xff, infinite = field == 0xff, largest = -1000;
    // Of each product: its significand, 14 bits of which are a fraction, and its exponent.
    int significands[16], signs[16], exponents[16];
    for (int k = 0; k < 16; k++) {
        int a = x[k], b = w[k], a_field = a >> 7 & 0xff, b_field = b >> 7 & 0xff;
        infinite |= (a_field == 0xff) | (b_field == 0xff);
        significands[k] = ((a_field > 0) << 7 | (a & 0x7f)) * ((b_field > 0) << 7 | (b & 0x7f));
        signs[k] = (a ^ b) & 0x8000;
        exponents[k] = (a_field > 0 ? a_field : 1) + (b_field > 0 ? b_field : 1) - 254;
        int counts = significands[k] > 0 ? exponents[k] : -1000;
        largest = counts > largest ? counts : largest;
    }
    if (infinite) {
        for (int k = 0; k < 16; k++) sum += of_half(x[k]) * of_half(w[k]);
        return sum;
    }
    int of_sum = (field > 0) << 23 | (bits & 0x7fffff), exponent = (field > 0 ? field : 1) - 127;
    if (of_sum > 0 && exponent > largest) largest = exponent;
    if (largest == -1000) return 0.0f;
    // Units are 2^(largest - 25).
    auto cut = [=](int significand, int exponent, int fraction) {
        int shift = 25 - fraction - (largest - exponent), up = shift > 0 ? shift : 0, down = shift < 0 ? -shift : 0;
        up = up < 25 ? up : 0, down = down < 31 ? down : 31;
        return significand << up >> down;
    };
    long long total = cut(of_sum, exponent, 23);
    if (bits >> 31) total = -total;
    int products = 0;
    for (int k = 0; k < 16; k++) {
        int term = cut(significands[k], exponents[k], 14);
        products += signs[k] ? -term : term;
    }
    total += products;
    if (total == 0) return 0.0f;
    u64 magnitude = (u64)(total < 0 ? -total : total);
    int unit = largest - 25, highest = 63 - __builtin_clzll(magnitude) + unit, last = highest - 23 > -149 ? highest - 23 : -149;
    u64 kept = last > unit ? magnitude >> (last - unit < 63 ? last - unit : 63) : magnitude << (unit - last);
    float value = (float)((double)kept * bits_as<double>((u64)(last + 1023) << 52));
    return total < 0 ? -value : value;
}

// Which parts of the two inputs a lane holds: rows lane / 4 and eight more of the first, column lane / 4
// of the second, and of both the pairs of k that begin at twice lane % 4 and eight more.
inline void multiply(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    u32 words[6] = {a0, a1, a2, a3, b0, b1};
    auto all = emulator::exchange(MULTIPLY, words, 6);
    u32 lane = lane_of_thread();
    for (int out = 0; out < 4; out++) {
        u32 row = lane / 4, upper = out / 2, column = lane % 4 * 2 + out % 2;
        u16 x[16], w[16];
        for (u32 pair = 0; pair < 8; pair++) {
            u32 of_row = all[row * 4 + pair % 4][pair / 4 * 2 + upper], of_column = all[column * 4 + pair % 4][4 + pair / 4];
            x[2 * pair] = (u16)of_row, x[2 * pair + 1] = (u16)(of_row >> 16);
            w[2 * pair] = (u16)of_column, w[2 * pair + 1] = (u16)(of_column >> 16);
        }
        c[out] = add_products(c[out], x, w);
    }
}

inline u8 *dynamic_shared() { return emulator::current->block->shared; }
inline u32 shared_address(const void *p) { return emulator::shared_address_of(p); }
inline uint4 load_shared(u32 address) {
    if (address % 16) emulator::wrong("16 bytes of shared memory that are not aligned");
    return *reinterpret_cast<uint4 *>(emulator::shared_at(address, 16));
}

inline uint4 load_matrices(u32 address) {
    auto all = emulator::exchange(LOAD_MATRICES, &address, 1);
    u32 lane = lane_of_thread(), words[4];
    for (u32 matrix = 0; matrix < 4; matrix++) {
        u32 row = all[matrix * 8 + lane / 4][0];
        if (row % 16) emulator::wrong("a row of a matrix that is not aligned");
        words[matrix] = reinterpret_cast<const u32 *>(emulator::shared_at(row, 16))[lane % 4];
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

inline void copy_async(u32 to, const void *from) {
    if (to % 16 || (size_t)from % 16) emulator::wrong("a copy of 16 bytes that is not aligned");
    emulator::current->copies.push_back({emulator::shared_at(to, 16), static_cast<const u8 *>(from), 16, nullptr});
}
inline void commit_copies() {
    emulator::Thread &thread = *emulator::current;
    thread.groups.push_back(std::move(thread.copies));
    thread.copies.clear();
}
// As late as they may come.
template <int LEFT> inline void wait_for_copies() {
    auto &groups = emulator::current->groups;
    while (groups.size() > LEFT) {
        for (const emulator::Copy &copy : groups.front()) memcpy(copy.to, copy.from, copy.bytes);
        groups.pop_front();
    }
}

#if __CUDA_ARCH__ >= 900

inline bool elect() { return lane_of_thread() == 0; }

inline emulator::SharedBarrier &barrier_at(u32 address) {
    if (address % 8) emulator::wrong("a barrier that is not aligned");
    return *reinterpret_cast<emulator::SharedBarrier *>(emulator::shared_at(address, 8));
}
inline void barrier_init(u32 barrier, u32 count) {
    auto &b = barrier_at(barrier);
    b.phase = 0, b.expected = count, b.pending = count, b.bytes = 0;
}
inline void publish_barriers() {}
inline void barrier_arrive(u32 barrier) { emulator::arrive(barrier_at(barrier), 0); }
inline void barrier_expect(u32 barrier, u32 bytes) { emulator::arrive(barrier_at(barrier), (int32_t)bytes); }
inline void barrier_wait(u32 barrier, u32 phase) {
    emulator::wait_until([&] { return barrier_at(barrier).phase != phase; });
}

inline void arrive_after_copies(u32 barrier) {
    emulator::Copy copy = {nullptr, nullptr, 0, &barrier_at(barrier)};
    copy.before = std::move(emulator::current->copies);
    emulator::current->copies.clear();
    emulator::start_copy(copy);
}

inline u64 evict_first() { return 0; }
inline u64 evict_normal() { return 0; }
inline void copy_bulk(u32 to, const void *from, u32 bytes, u32 barrier) {
    if (to % 16 || (size_t)from % 16 || bytes % 16) emulator::wrong("a bulk copy that is not aligned");
    emulator::start_copy({emulator::shared_at(to, bytes), static_cast<const u8 *>(from), bytes, &barrier_at(barrier)});
}
inline void copy_weights(u32 to, const u8 *from, u32 bytes, u32 barrier, u64) { copy_bulk(to, from, bytes, barrier); }
inline void copy_input(u32 to, const u16 *from, u32 bytes, u32 barrier) { copy_bulk(to, from, bytes, barrier); }

inline u32 of_block(u32 address, u32 rank) { return (address & 0xffffff) | rank << 24; }
inline void prefetch_map(const TensorMap &map) {
    if ((size_t)&map % 64) emulator::wrong("a tensor map that is not aligned");
}
// What `cuTensorMapEncodeTiled` of the driver writes.
inline void share_weights(u32 to, const TensorMap &map, u32 block, u32 tile, u32 half, u32 barrier, u32 ranks, u64) {
    const u64 *m = map.words, *sizes = m + 1, *strides = m + 5, *box = m + 8;
    if (to % 128) emulator::wrong("a box that does not begin at a multiple of 128 bytes");
    for (u32 rank = 0; rank < 16; rank++) {
        if (!(ranks >> rank & 1)) continue;
        u64 bytes = box[0] * box[1] * box[2] * box[3] * 4;
        emulator::Copy copy = {nullptr, nullptr, bytes, &barrier_at(of_block(barrier, rank))};
        u32 at = of_block(to, rank);
        for (u64 h = half; h < half + box[3]; h++) {
            for (u64 t = tile; t < tile + box[2]; t++) {
                for (u64 b = block; b < block + box[1]; b++) {
                    const u8 *from = reinterpret_cast<const u8 *>(m[0]) + h * strides[2] + t * strides[1] + b * strides[0];
                    u32 piece = h < sizes[3] && t < sizes[2] && b < sizes[1] ? (u32)box[0] * 4 : 16;
                    for (u32 end = at + (u32)box[0] * 4; at < end; at += piece) {
                        copy.before.push_back({emulator::shared_at(at, piece), piece > 16 ? from : nullptr, piece, nullptr});
                        memset(copy.before.back().sent, 0, 16);
                    }
                }
            }
        }
        emulator::start_copy(copy);
    }
}
inline void copy_weights(u32 to, const TensorMap &map, u32 block, u32 tile, u32 half, u32 barrier, u64 policy) {
    u32 rank = emulator::current->block->rank;
    share_weights(to, map, block, tile, half, barrier, 1u << rank, policy);
}
inline void share_rows(u32 to, const TensorMap &map, u32 column, u32 row, u32 barrier, u32 ranks) {
    const u64 *m = map.words;
    u64 width = m[1], rows = m[2], stride = m[3], box_width = m[4], box_rows = m[5];
    if (to % 1024) emulator::wrong("swizzled rows that do not begin at a multiple of 1,024 bytes");
    for (u32 rank = 0; rank < 16; rank++) {
        if (!(ranks >> rank & 1)) continue;
        emulator::Copy copy = {nullptr, nullptr, box_width * box_rows * 2, &barrier_at(of_block(barrier, rank))};
        for (u32 r = 0; r < box_rows; r++) {
            for (u32 c = 0; c < box_width; c += 8) {
                u32 at = of_block(to, rank) + r * (u32)box_width * 2 + c * 2;
                emulator::Copy piece = {emulator::shared_at(at ^ (at >> 7 & 7) << 4, 16), nullptr, 16, nullptr};
                memset(piece.sent, 0, 16);
                if (row + r < rows && column + c < width) piece.from = reinterpret_cast<const u8 *>(m[0]) + (row + r) * stride + (column + c) * 2;
                copy.before.push_back(piece);
            }
        }
        emulator::start_copy(copy);
    }
}
inline void send_cluster(u32 address, float4 v, u32 barrier, u32 rank) {
    if (address % 16) emulator::wrong("16 bytes to send that are not aligned");
    emulator::Copy copy = {emulator::shared_at(of_block(address, rank), 16), nullptr, 16, &barrier_at(of_block(barrier, rank))};
    memcpy(copy.sent, &v, 16);
    emulator::start_copy(copy);
}
inline void barrier_arrive_at(u32 barrier, u32 rank) { barrier_arrive(of_block(barrier, rank)); }
inline void barrier_tell(u32 barrier, u32 rank) { barrier_arrive(of_block(barrier, rank)); }
inline void barrier_hear(u32 barrier, u32 phase) { barrier_wait(barrier, phase); }
inline void meet_cluster_first() { emulator::meet_cluster_threads(); }
inline void meet_cluster() { emulator::meet_cluster_threads(); }
template <int NUMBER, int THREADS> inline void meet_some() { emulator::meet(emulator::current->block->some[NUMBER], THREADS); }

template <int COUNT> inline void give_registers() {}
template <int COUNT> inline void take_registers() {}

inline u64 matrices_at(u32 address, u32 to_next_inputs, u32 to_next_rows) {
    if (address % 16 || to_next_inputs % 16 || to_next_rows % 16) emulator::wrong("factors that are not aligned");
    return (address & 0x3ffff) >> 4 | (u64)(to_next_inputs >> 4) << 16 | (u64)(to_next_rows >> 4) << 32;
}
inline u64 swizzled_at(u32 address) {
    if (address % 32) emulator::wrong("factors that are not aligned");
    return (address & 0x3ffff) >> 4 | (u64)1 << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}
inline void begin_multiplying() {}
inline void publish_to_multiplying() {}
inline void commit_multiplying() {
    emulator::Thread &thread = *emulator::current;
    thread.committed.push_back(std::move(thread.multiplications));
    thread.multiplications.clear();
}
// As late as they may come.
template <int LEFT, int GROUPS> inline void wait_for_multiplying(float (&)[GROUPS][4]) {
    auto &committed = emulator::current->committed;
    while (committed.size() > LEFT) {
        for (const auto &multiplication : committed.front()) multiplication();
        committed.pop_front();
    }
}
template <int ROWS> inline void multiply_group(float (&c)[ROWS / 8][4], const uint4 &a, u64 matrices, bool add) {
    u32 words[4] = {a.x, a.y, a.z, a.w}, lane = lane_of_thread();
    auto all = emulator::exchange(MULTIPLY, words, 4);
    struct {
        u16 of[2][16];
    } first;
    for (u32 upper = 0; upper < 2; upper++) {
        for (u32 pair = 0; pair < 8; pair++) {
            u32 both = all[lane / 4 * 4 + pair % 4][pair / 4 * 2 + upper];
            first.of[upper][2 * pair] = (u16)both, first.of[upper][2 * pair + 1] = (u16)(both >> 16);
        }
    }
    emulator::current->multiplications.push_back([=, &c] {
        u32 base = emulator::current->block->rank << 24;
        u32 at = (u32)(matrices & 0x3fff) << 4, next_inputs = (u32)(matrices >> 16 & 0x3fff) << 4, next_rows = (u32)(matrices >> 32 & 0x3fff) << 4;
        bool swizzled = matrices >> 62 == 1;
        // Where the 16 bytes of a row and of 8 inputs are.
        auto place = [=](u32 n, u32 row, u32 half) {
            if (!swizzled) return at + n * next_rows + half * next_inputs + row * 16;
            u32 plain = at + n * next_rows + row * 128 + half * 16;
            return plain ^ (plain >> 7 & 7) << 4;
        };
        for (u32 n = 0; n < ROWS / 8; n++) {
            for (u32 odd = 0; odd < 2; odd++) {
                u16 second[16];
                for (u32 half = 0; half < 2; half++)
                    memcpy(second + 8 * half, emulator::shared_at(base | place(n, lane % 4 * 2 + odd, half), 16), 16);
                for (u32 upper = 0; upper < 2; upper++) {
                    float &sum = c[n][upper * 2 + odd];
                    sum = add_products(add ? sum : 0.0f, first.of[upper], second);
                }
            }
        }
    });
}

#endif

inline uint4 load_matrices_transposed(u32 address) {
    auto all = emulator::exchange(LOAD_MATRICES, &address, 1);
    u32 lane = lane_of_thread(), words[4] = {};
    for (u32 i = 0; i < 8; i++) {
        u32 row = all[i / 2 * 8 + lane % 4 * 2 + i % 2][0];
        if (row % 16) emulator::wrong("a row of a matrix that is not aligned");
        words[i / 2] |= (u32) reinterpret_cast<const u16 *>(emulator::shared_at(row, 16))[lane / 4] << i % 2 * 16;
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}
