#include "threads.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sys/mman.h>
#include <unistd.h>

// What kernels declare as shared memory of a fixed size, of the one thread block that runs.
extern uint8_t __start_emulated_shared[] __attribute__((weak)), __stop_emulated_shared[] __attribute__((weak));

namespace emulator {

Thread *current = nullptr;
Index grid_dim, block_dim;

namespace {

constexpr size_t STACK = 128 << 10;
constexpr uint8_t POISON = 0xfb;  // a large negative number, as a float and as an integer

Cluster *running = nullptr;
// Never destroyed: a process may end while a kernel runs.
std::vector<Thread> &pool = *new std::vector<Thread>;
std::vector<uint8_t *> &stacks = *new std::vector<uint8_t *>, &shared_pages = *new std::vector<uint8_t *>;
size_t stacks_used = 0;
void *scheduler_stack = nullptr;
bool progress = false;
uint64_t random_state = 0;

}  // namespace

uint64_t random_bits() {
    if (random_state == 0) {
        const char *seed = getenv("AQUILA_EMULATOR_SEED");
        random_state = (seed ? strtoull(seed, nullptr, 10) : 0) * 2 + 0x9e3779b97f4a7c15ull;
    }
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state;
}

void wrong(const char *what) {
    fprintf(stderr, "emulated kernel %s: %s", running ? running->launch->name : "?", what);
    if (current) {
        const Index &b = current->block->index, &t = current->index;
        fprintf(stderr, " (thread %u of block %u, %u, %u)", t.x, b.x, b.y, b.z);
    }
    fprintf(stderr, "\n");
    abort();
}

// Goes to another stack: what a function must keep is on the one that is left.
extern "C" void emulator_switch(void **from, void *to);
#if defined(__x86_64__)
asm(R"(
.text
.globl emulator_switch
.hidden emulator_switch
emulator_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");
constexpr size_t SAVED = 6;
#else
#error "the emulator knows how to change stacks on x86-64 alone"
#endif

namespace {

// A thread has left: those that wait for all threads wait for one less.
void leave(Thread &thread) {
    Block &block = *thread.block;
    thread.done = true;
    progress = true;
    thread.warp->live--, block.live--, running->live--;
    auto release = [](Meeting &meeting, uint32_t live) {
        if (meeting.arrived > 0 && meeting.arrived == live) meeting.arrived = 0, meeting.generation++;
    };
    release(block.all, block.live);
    release(running->meeting, running->live);
    if (!thread.multiplications.empty() || !thread.committed.empty()) wrong("multiplications that nobody waited for");
    if (thread.warp->meeting.arrived > 0) wrong("a lane left while others of its warp wait for it");
}

// What runs on a stack: one thread after the other, for as long as none of them waits.
void run_threads() {
    while (true) {
        while (!running->unstarted.empty()) {
            current = running->unstarted.back();
            running->unstarted.pop_back();
            running->launch->call(running->launch->arguments);
            leave(*current);
        }
        void *stack = nullptr;
        emulator_switch(&stack, scheduler_stack);
    }
}

// A stack on which nothing runs yet.
void *new_stack() {
    if (stacks_used == stacks.size()) {
        void *stack = mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (stack == MAP_FAILED) wrong("no memory for its threads");
        mprotect(stack, 4096, PROT_NONE);
        stacks.push_back(static_cast<uint8_t *>(stack));
    }
    // A return address, though nothing returns, leaves the stack aligned as a call would.
    void **top = reinterpret_cast<void **>(stacks[stacks_used++] + STACK) - 1;
    *top = nullptr;
    *--top = reinterpret_cast<void *>(&run_threads);
    for (size_t i = 0; i < SAVED; i++) *--top = nullptr;
    return top;
}

void complete(const Copy &copy) {
    for (const Copy &before : copy.before) memcpy(before.to, before.from ? before.from : before.sent, before.bytes);
    if (copy.bytes == 0) return arrive(*copy.barrier, 0);
    if (copy.to) memcpy(copy.to, copy.from ? copy.from : copy.sent, copy.bytes);
    if (!copy.barrier) return;
    copy.barrier->bytes -= (int32_t)copy.bytes;
    SharedBarrier &barrier = *copy.barrier;
    if (barrier.pending == 0 && barrier.bytes == 0) barrier.phase ^= 1, barrier.pending = barrier.expected;
}

// Completes bulk copies: some of them, or all where nothing else goes on.
bool complete_copies(bool all) {
    if (running->copies.empty()) return false;
    std::vector<Copy> waiting;
    std::swap(waiting, running->copies);
    bool any = false;
    for (const Copy &copy : waiting) {
        if (all || random_bits() % 2) {
            complete(copy), any = true;
        } else {
            running->copies.push_back(copy);
        }
    }
    return any;
}

template <typename T> void shuffle(std::vector<T> &items) {
    for (size_t i = items.size(); i > 1; i--) std::swap(items[i - 1], items[random_bits() % i]);
}

// Runs the thread blocks of one cluster, or one thread block, to their end; `anew` where it is the
// first of a launch.
void run_cluster(Cluster &cluster, bool anew) {
    running = &cluster;
    size_t fixed = __stop_emulated_shared - __start_emulated_shared;
    if (fixed > 0 && (anew || random_bits() % 8 == 0)) memset(__start_emulated_shared, POISON, fixed);
    std::vector<uint8_t> untouched;
    if (cluster.blocks.size() > 1 && fixed > 0) untouched.assign(__start_emulated_shared, __stop_emulated_shared);
    if (random_bits() % 4 == 0) shuffle(cluster.unstarted);
    // Warps that stay behind the others for as long as those get on.
    uint64_t slow = 0;
    progress = true;
    while (cluster.live > 0) {
        bool all = !progress;
        progress = false;
        if (random_bits() % 64 == 0) slow = random_bits() % 2 ? random_bits() & random_bits() : 0;
        // Those that wait are asked in any order whether they still have to.
        if (random_bits() % 4 == 0) shuffle(cluster.waiting);
        size_t left = 0;
        for (size_t i = 0; i < cluster.waiting.size(); i++) {
            current = cluster.waiting[i];
            uint32_t warp = current->block->rank * 13 + current->index.x / 32;
            if (all || !(slow >> warp % 64 & 1)) emulator_switch(&scheduler_stack, current->stack_pointer);
            if (!cluster.waiting[i]->done) cluster.waiting[left++] = cluster.waiting[i];
        }
        cluster.waiting.resize(left);
        while (!cluster.unstarted.empty()) {
            emulator_switch(&scheduler_stack, new_stack());
            if (current && !current->done) cluster.waiting.push_back(current);
        }
        current = nullptr;
        bool copied = complete_copies(!progress);
        if (!progress && !copied && all) {
            current = cluster.waiting.back();
            wrong("its threads wait for each other for ever");
        }
    }
    stacks_used = 0;
    if (!cluster.copies.empty()) wrong("a bulk copy was never waited for");
    if (!untouched.empty() && memcmp(untouched.data(), __start_emulated_shared, fixed) != 0)
        wrong("thread blocks of a cluster may not have shared memory of a fixed size");
    running = nullptr;
}

// Shared memory that ends at a page that nobody may touch.
uint8_t *shared_pages_of(size_t rank, size_t bytes) {
    constexpr size_t MOST = 256 << 10;
    if (bytes > MOST) wrong("more shared memory than there is");
    while (shared_pages.size() <= rank) {
        void *pages = mmap(nullptr, MOST + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (pages == MAP_FAILED) wrong("no shared memory");
        mprotect(static_cast<uint8_t *>(pages) + MOST, 4096, PROT_NONE);
        shared_pages.push_back(static_cast<uint8_t *>(pages));
    }
    return shared_pages[rank] + MOST - (bytes + 127) / 128 * 128;
}

}  // namespace

void let_others_run() { emulator_switch(&current->stack_pointer, scheduler_stack); }
void note_progress() { progress = true; }

void meet(Meeting &meeting, uint32_t threads) {
    uint32_t generation = meeting.generation;
    if (++meeting.arrived == threads) {
        meeting.arrived = 0, meeting.generation++;
        note_progress();
    } else {
        wait_until([&] { return meeting.generation != generation; });
    }
}
void meet_block() { meet(current->block->all, current->block->live); }
void meet_cluster_threads() { meet(running->meeting, running->live); }

uint32_t (*exchange(int operation, const uint32_t *words, int count))[WORDS] {
    Warp &warp = *current->warp;
    if (warp.live != warp.lanes) wrong("lanes of its warp have left");
    if (warp.meeting.arrived > 0 && warp.operation != operation) wrong("lanes of a warp do different things together");
    warp.operation = operation;
    // A lane cannot be two exchanges ahead of another, so two buffers suffice.
    auto &all = warp.words[warp.meeting.generation % 2];
    for (int i = 0; i < count; i++) all[current->lane][i] = words[i];
    meet(warp.meeting, warp.lanes);
    return all;
}

uint8_t *shared_at(uint32_t address, size_t bytes) {
    uint32_t rank = address >> 24, offset = address & 0xffffff;
    if (rank >= running->blocks.size()) wrong("an address of no thread block of its cluster");
    Block &block = running->blocks[rank];
    if (offset + bytes > block.shared_bytes) wrong("an address beyond shared memory");
    return block.shared + offset;
}
uint32_t shared_address_of(const void *pointer) {
    Block &block = *current->block;
    size_t offset = static_cast<const uint8_t *>(pointer) - block.shared;
    if (offset > block.shared_bytes) wrong("an address that is not in the shared memory of its launch");
    return block.rank << 24 | (uint32_t)offset;
}

void arrive(SharedBarrier &barrier, int32_t bytes) {
    if (barrier.pending == 0) wrong("more arrive at a barrier than it was initialised for");
    barrier.bytes += bytes, barrier.pending--;
    if (barrier.pending == 0 && barrier.bytes == 0) barrier.phase ^= 1, barrier.pending = barrier.expected;
    note_progress();
}

void start_copy(const Copy &copy) { running->copies.push_back(copy); }

void run(const Launch &launch) {
    grid_dim = launch.grid, block_dim = launch.block;
    uint32_t threads = launch.block.x, blocks = launch.grid.x * launch.grid.y * launch.grid.z;
    if (launch.block.y != 1 || launch.block.z != 1 || threads > 1024) wrong("thread blocks of one dimension, up to 1,024 threads");
    if (launch.grid.x % launch.cluster) wrong("a grid that is not whole clusters");
    if (pool.size() < threads * launch.cluster) pool.resize(threads * launch.cluster);
    std::vector<uint32_t> order(blocks / launch.cluster);
    for (uint32_t i = 0; i < order.size(); i++) order[i] = i * launch.cluster;
    shuffle(order);
    Cluster cluster;
    cluster.launch = &launch;
    cluster.blocks.resize(launch.cluster);
    for (uint32_t first : order) {
        cluster.unstarted.clear();
        cluster.meeting = Meeting();
        cluster.live = threads * launch.cluster;
        for (uint32_t rank = 0; rank < launch.cluster; rank++) {
            Block &block = cluster.blocks[rank];
            uint32_t at = first + rank;
            block.index = {at % launch.grid.x, at / launch.grid.x % launch.grid.y, at / launch.grid.x / launch.grid.y};
            block.rank = rank, block.live = threads, block.cluster = &cluster;
            block.shared = shared_pages_of(rank, launch.shared_bytes), block.shared_bytes = launch.shared_bytes;
            memset(block.shared, POISON, launch.shared_bytes);
            block.all = Meeting();
            for (Meeting &meeting : block.some) meeting = Meeting();
            block.warps.resize((threads + 31) / 32);
            for (Warp &warp : block.warps) warp.meeting = Meeting(), warp.lanes = 0;
            for (uint32_t t = 0; t < threads; t++) {
                Thread &thread = pool[rank * threads + t];
                thread.done = false;
                thread.copies.clear();
                if (!thread.groups.empty()) thread.groups.clear();
                thread.index = {t, 0, 0}, thread.lane = t % 32, thread.block = &block, thread.warp = &block.warps[t / 32];
                thread.warp->lanes++, thread.warp->live = thread.warp->lanes;
                cluster.unstarted.push_back(&thread);
            }
        }
        run_cluster(cluster, first == order[0]);
    }
}

}  // namespace emulator
