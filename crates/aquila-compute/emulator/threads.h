// Thread blocks on a CPU: every thread of a block, or of all blocks of a cluster, has a stack of its
// own, and one runs at a time until it waits for others.
//
// The one invariant: a thread goes on only where it waits, and which of those that can go on does so
// is drawn anew each time. So what a kernel leaves to chance differs from run to run.
//
// A cluster may begin before kernels in front of its own have run. It then goes as far as it can without
// its inputs, and on when those kernels are over.

#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

namespace emulator {

struct Index {
    uint32_t x, y, z;
};

// Bytes that a thread or a bulk copy brings to shared memory later.
struct Copy {
    uint8_t *to;
    const uint8_t *from;
    size_t bytes;
    struct SharedBarrier *barrier;
    uint8_t sent[16];  // where they come from nowhere else
    // Without a place: what is copied before the barrier counts the bytes, or, without bytes, before a
    // thread arrives there.
    std::vector<Copy> before;
};

// A barrier in shared memory (mbarrier), as 8 bytes of it.
struct SharedBarrier {
    uint32_t phase : 1, expected : 15, pending : 16;
    int32_t bytes;
};
static_assert(sizeof(SharedBarrier) == 8);

// Threads that wait for each other.
struct Meeting {
    uint32_t arrived = 0, generation = 0;
};

constexpr int WORDS = 6;  // that a lane gives to the others of its warp at most

struct Warp {
    Meeting meeting;
    uint32_t lanes = 0, live = 0;
    int operation = 0;
    uint32_t words[2][32][WORDS];
};

struct Block {
    Index index;
    uint32_t rank = 0, live = 0;
    uint8_t *shared = nullptr;
    size_t shared_bytes = 0;
    bool waited = false;  // whether a thread has waited for its inputs
    Meeting all, some[16];
    std::vector<Warp> warps;
    struct Cluster *cluster = nullptr;
};

struct Thread {
    void *stack_pointer = nullptr;  // where it waits
    Index index;
    uint32_t lane = 0;
    Block *block = nullptr;
    Warp *warp = nullptr;
    bool done = false;
    std::vector<Copy> copies;
    std::deque<std::vector<Copy>> groups;
    // By a warpgroup: begun, and committed.
    std::vector<std::function<void()>> multiplications;
    std::deque<std::vector<std::function<void()>>> committed;
};

struct Launch {
    const char *name;
    void (*call)(const void *arguments);
    std::shared_ptr<const void> arguments;
    Index grid, block;
    uint32_t cluster;
    size_t shared_bytes;
};

// The thread blocks of a cluster, or one thread block.
struct Cluster {
    const Launch *launch = nullptr;
    uint32_t first = 0;  // of its thread blocks, in the grid
    bool early = false;  // whether kernels in front of its own have still to run
    std::vector<Block> blocks;
    std::vector<Thread> threads;
    std::vector<Thread *> unstarted, waiting;
    std::vector<Copy> copies;
    Meeting meeting;
    uint32_t live = 0;
    std::vector<uint8_t *> stacks, shared_pages;
    // Shared memory of a fixed size: as it is left while others run, and as it was found.
    std::vector<uint8_t> fixed, untouched;
};

extern Thread *current;
extern Index grid_dim, block_dim;

// Says what is wrong with the kernel that runs, and ends the process.
[[noreturn]] void wrong(const char *what);

// Lets others run until `there` says so.
void let_others_run();
void note_progress();
template <typename F> inline void wait_until(F there) {
    while (!there()) let_others_run();
    note_progress();
}

void meet(Meeting &meeting, uint32_t threads);
void meet_block();
void meet_cluster_threads();
// Gives words to the lanes of the warp and answers those of all lanes. Lanes must do the same thing.
uint32_t (*exchange(int operation, const uint32_t *words, int count))[WORDS];

// Waits until all kernels before are over, and their results there.
void wait_for_inputs();

// Shared memory by its 32-bit address, which says whose thread block's it is.
uint8_t *shared_at(uint32_t address, size_t bytes);
uint32_t shared_address_of(const void *pointer);

void arrive(SharedBarrier &barrier, int32_t bytes);
void start_copy(const Copy &copy);

uint64_t random_bits();

// Begins one cluster of a launch, drawn at random, while kernels in front of it have still to run.
Cluster *begin_early(const Launch &launch);
// Runs a launch to its end; one of its clusters may have begun.
void run(const Launch &launch, Cluster *begun);

}  // namespace emulator
