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
std::vector<Cluster *> &free_clusters = *new std::vector<Cluster *>;
std::vector<uint8_t *> &free_stacks = *new std::vector<uint8_t *>;
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
    if (!thread.multiplications.empty() || !thread.committed.empty()) wrong("multiplications that were not waited for");
    if (thread.warp->meeting.arrived > 0) wrong("a lane left while others of its warp wait for it");
    // Its kernel could then be over before those in front of it, and who waits for it sees nothing of them.
    if (block.live == 0 && !block.waited) wrong("a thread block that ends without having waited for its inputs");
}

// What runs on a stack: one thread after the other, for as long as none of them waits.
void run_threads() {
    while (true) {
        while (!running->unstarted.empty()) {
            current = running->unstarted.back();
            running->unstarted.pop_back();
            running->launch->call(running->launch->arguments.get());
            leave(*current);
        }
        void *stack = nullptr;
        emulator_switch(&stack, scheduler_stack);
    }
}

// A stack on which nothing runs yet.
void *new_stack() {
    if (free_stacks.empty()) {
        void *stack = mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (stack == MAP_FAILED) wrong("no memory for its threads");
        mprotect(stack, 4096, PROT_NONE);
        free_stacks.push_back(static_cast<uint8_t *>(stack));
    }
    uint8_t *stack = free_stacks.back();
    free_stacks.pop_back();
    running->stacks.push_back(stack);
    // A return address, though nothing returns, leaves the stack aligned as a call would.
    void **top = reinterpret_cast<void **>(stack + STACK) - 1;
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

// Runs the threads of a cluster to their end, or, of one that is early, until all of them wait.
void run_cluster(Cluster &cluster) {
    running = &cluster, grid_dim = cluster.launch->grid, block_dim = cluster.launch->block;
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
            if (cluster.early) {
                cluster.fixed.assign(__start_emulated_shared, __stop_emulated_shared);
                running = nullptr;
                return;
            }
            current = cluster.waiting.back();
            wrong("its threads wait for each other for ever");
        }
    }
    if (!cluster.copies.empty()) wrong("a bulk copy was never waited for");
    if (!cluster.untouched.empty() && memcmp(cluster.untouched.data(), __start_emulated_shared, cluster.untouched.size()) != 0)
        wrong("thread blocks of a cluster may not have shared memory of a fixed size");
    free_stacks.insert(free_stacks.end(), cluster.stacks.begin(), cluster.stacks.end());
    cluster.stacks.clear();
    running = nullptr;
}

// Shared memory that ends at a page that no thread may touch.
uint8_t *shared_pages_of(Cluster &cluster, size_t rank, size_t bytes) {
    constexpr size_t MOST = 256 << 10;
    std::vector<uint8_t *> &shared_pages = cluster.shared_pages;
    if (bytes > MOST) wrong("more shared memory than there is");
    while (shared_pages.size() <= rank) {
        void *pages = mmap(nullptr, MOST + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (pages == MAP_FAILED) wrong("no shared memory");
        mprotect(static_cast<uint8_t *>(pages) + MOST, 4096, PROT_NONE);
        shared_pages.push_back(static_cast<uint8_t *>(pages));
    }
    return shared_pages[rank] + MOST - (bytes + 127) / 128 * 128;
}

uint32_t blocks_of(const Launch &launch) { return launch.grid.x * launch.grid.y * launch.grid.z; }

// A cluster with room for those of a launch.
Cluster &take_cluster(const Launch &launch) {
    if (launch.block.y != 1 || launch.block.z != 1 || launch.block.x > 1024) wrong("thread blocks of one dimension, up to 1,024 threads");
    if (launch.grid.x % launch.cluster) wrong("a grid that is not whole clusters");
    if (free_clusters.empty()) free_clusters.push_back(new Cluster);
    Cluster &cluster = *free_clusters.back();
    free_clusters.pop_back();
    size_t threads = launch.block.x * launch.cluster;
    if (cluster.threads.size() < threads) cluster.threads.resize(threads);
    cluster.launch = &launch;
    cluster.blocks.resize(launch.cluster);
    return cluster;
}

// Begins the cluster of a launch whose first thread block this is; `anew` where it is the first to run.
void begin_cluster(Cluster &cluster, uint32_t first, bool anew) {
    const Launch &launch = *cluster.launch;
    uint32_t threads = launch.block.x;
    cluster.first = first;
    cluster.unstarted.clear();
    cluster.meeting = Meeting();
    cluster.live = threads * launch.cluster;
    for (uint32_t rank = 0; rank < launch.cluster; rank++) {
        Block &block = cluster.blocks[rank];
        uint32_t at = first + rank;
        block.index = {at % launch.grid.x, at / launch.grid.x % launch.grid.y, at / launch.grid.x / launch.grid.y};
        block.rank = rank, block.live = threads, block.cluster = &cluster, block.waited = false;
        block.shared = shared_pages_of(cluster, rank, launch.shared_bytes), block.shared_bytes = launch.shared_bytes;
        memset(block.shared, POISON, launch.shared_bytes);
        block.all = Meeting();
        for (Meeting &meeting : block.some) meeting = Meeting();
        block.warps.resize((threads + 31) / 32);
        for (Warp &warp : block.warps) warp.meeting = Meeting(), warp.lanes = 0;
        for (uint32_t t = 0; t < threads; t++) {
            Thread &thread = cluster.threads[rank * threads + t];
            thread.done = false;
            thread.copies.clear();
            if (!thread.groups.empty()) thread.groups.clear();
            thread.index = {t, 0, 0}, thread.lane = t % 32, thread.block = &block, thread.warp = &block.warps[t / 32];
            thread.warp->lanes++, thread.warp->live = thread.warp->lanes;
            cluster.unstarted.push_back(&thread);
        }
    }
    size_t fixed = __stop_emulated_shared - __start_emulated_shared;
    if (fixed > 0 && (anew || random_bits() % 8 == 0)) memset(__start_emulated_shared, POISON, fixed);
    cluster.untouched.clear();
    if (launch.cluster > 1) cluster.untouched.assign(__start_emulated_shared, __stop_emulated_shared);
    if (random_bits() % 4 == 0) shuffle(cluster.unstarted);
    run_cluster(cluster);
}

// Has a cluster that began early go on.
void resume_cluster(Cluster &cluster) {
    cluster.early = false;
    if (!cluster.fixed.empty()) memcpy(__start_emulated_shared, cluster.fixed.data(), cluster.fixed.size());
    run_cluster(cluster);
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

void wait_for_inputs() {
    current->block->waited = true;
    if (!running->early) return;
    // Copies that were started before may be over.
    auto complete = [](std::vector<Copy> &copies) {
        for (const Copy &copy : copies) memcpy(copy.to, copy.from, copy.bytes);
        copies.clear();
    };
    complete(current->copies);
    for (std::vector<Copy> &group : current->groups) complete(group);
    wait_until([] { return !running->early; });
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

Cluster *begin_early(const Launch &launch) {
    Cluster &cluster = take_cluster(launch);
    cluster.early = true;
    begin_cluster(cluster, random_bits() % (blocks_of(launch) / launch.cluster) * launch.cluster, true);
    return &cluster;
}

void run(const Launch &launch, Cluster *begun) {
    std::vector<uint32_t> order(blocks_of(launch) / launch.cluster);
    for (uint32_t i = 0; i < order.size(); i++) order[i] = i * launch.cluster;
    shuffle(order);
    Cluster &cluster = take_cluster(launch);
    for (uint32_t first : order) {
        if (begun && begun->first == first) {
            resume_cluster(*begun);
        } else {
            begin_cluster(cluster, first, first == order[0]);
        }
    }
    free_clusters.push_back(&cluster);
    if (begun) free_clusters.push_back(begun);
}

}  // namespace emulator
