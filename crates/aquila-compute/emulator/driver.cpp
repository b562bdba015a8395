// The functions of CUDA's driver that the backend calls, over memory of the host.
//
// What is enqueued runs when the host waits for it and no sooner, so that a host which does not wait
// for what it needs gets something else. Kernels run one after the other, but a thread block of one that
// may begin early may have gone up to its wait for inputs before. Memory is where the host put it, ends
// at a page that no kernel may touch, and is full of a pattern until it is written.

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <sys/mman.h>
#include <vector>

#include "kernels.h"
#include "threads.h"

#define API extern "C" __attribute__((visibility("default"))) int

namespace {

constexpr int INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_DEVICE = 101, INVALID_IMAGE = 200, NOT_FOUND = 500,
              CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901;
constexpr size_t PAGE = 4096, MULTIPROCESSORS = 6, SHARED_BYTES_UNASKED = 48 << 10;
// Shared memory of a Hopper, or the least that a GPU before it has; what a kernel declares for itself is
// not known here, so there it is taken to be more than any of ours declares.
constexpr size_t SHARED_BYTES = (__CUDA_ARCH__ >= 900 ? 227 : 99) << 10, DECLARED_BYTES = __CUDA_ARCH__ >= 900 ? 0 : 4096,
                 RESERVED_BYTES = 1024;
// Kernels that a thread block may be ahead of.
constexpr size_t MOST_AHEAD = 3;

// A kernel, or something else.
struct Work {
    std::shared_ptr<const emulator::Launch> kernel;
    bool early = false;  // whether the kernel may begin before kernels in front of it are over
    std::function<void()> other;
};
typedef std::chrono::steady_clock Clock;

struct Graph {
    std::vector<Work> works;
};
struct Stream {
    std::vector<Work> queue;
    Graph *capture = nullptr;
};
struct Event {
    Stream *stream = nullptr;  // on which it is still to be reached
    Clock::time_point at;
    bool recorded = false;
};
struct Function {
    const emulator::Kernel *kernel;
    size_t most_shared = SHARED_BYTES_UNASKED;
};

// Never destroyed: a process may end while one of its threads still frees memory.
std::recursive_mutex &mutex = *new std::recursive_mutex;
std::map<uintptr_t, size_t> &allocations = *new std::map<uintptr_t, size_t>, &pinned = *new std::map<uintptr_t, size_t>;
size_t allocated = 0;
Stream &default_stream = *new Stream;

struct Lock {
    std::lock_guard<std::recursive_mutex> guard{mutex};
};

Stream &stream_of(void *stream) { return stream ? *static_cast<Stream *>(stream) : default_stream; }

size_t total_memory() {
    const char *gib = getenv("AQUILA_EMULATOR_GIB");
    return (gib ? strtoull(gib, nullptr, 10) : 4) << 30;
}

void catch_up(Stream &stream) {
    std::vector<Work> queue;
    std::swap(queue, stream.queue);
    // Of each kernel the cluster that has begun.
    std::vector<emulator::Cluster *> begun(queue.size());
    for (size_t i = 0; i < queue.size(); i++) {
        if (!queue[i].kernel) {
            queue[i].other();
            continue;
        }
        // Kernels behind this one, up to the first that may not begin early or is no kernel.
        for (size_t next = i + 1; next < queue.size() && next <= i + MOST_AHEAD && queue[next].early; next++) {
            if (!begun[next] && emulator::random_bits() % 3 == 0) begun[next] = emulator::begin_early(*queue[next].kernel);
        }
        emulator::run(*queue[i].kernel, begun[i]);
    }
}

int enqueue(void *handle, Work work) {
    Stream &stream = stream_of(handle);
    (stream.capture ? stream.capture->works : stream.queue).push_back(std::move(work));
    return 0;
}
int enqueue(void *handle, std::function<void()> other) { return enqueue(handle, Work{nullptr, false, std::move(other)}); }

bool is_pinned(const void *pointer) {
    auto after = pinned.upper_bound(reinterpret_cast<uintptr_t>(pointer));
    if (after == pinned.begin()) return false;
    --after;
    return reinterpret_cast<uintptr_t>(pointer) < after->first + after->second;
}

// Ends the process where a copy or a fill is not within one allocation.
void check(uintptr_t address, size_t bytes, const char *what) {
    auto after = allocations.upper_bound(address);
    bool within = after != allocations.begin();
    if (within) {
        --after;
        within = address + bytes <= after->first + after->second;
    }
    if (within) return;
    fprintf(stderr, "emulated driver: %s of %zu bytes at %#zx is not within an allocation\n", what, bytes, (size_t)address);
    abort();
}

int allocate(uint64_t *address, size_t bytes) {
    if (bytes == 0) return INVALID_VALUE;
    if (allocated + bytes > total_memory()) return OUT_OF_MEMORY;
    // As close to the page behind it as an alignment of 16 allows.
    size_t room = (bytes + 15) / 16 * 16, pages = (room + PAGE - 1) / PAGE * PAGE;
    void *start = mmap(nullptr, pages + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) return OUT_OF_MEMORY;
    mprotect(static_cast<uint8_t *>(start) + pages, PAGE, PROT_NONE);
    uint8_t *memory = static_cast<uint8_t *>(start) + pages - room;
    memset(memory, 0xfb, room);
    *address = reinterpret_cast<uintptr_t>(memory);
    allocations[*address] = bytes;
    allocated += bytes;
    return 0;
}

int release(uint64_t address) {
    auto found = allocations.find(address);
    if (found == allocations.end()) return INVALID_VALUE;
    size_t bytes = found->second, room = (bytes + 15) / 16 * 16, pages = (room + PAGE - 1) / PAGE * PAGE;
    munmap(reinterpret_cast<void *>(address + room - pages), pages + PAGE);
    allocated -= bytes;
    allocations.erase(found);
    return 0;
}

}  // namespace

// The device.

API cuInit(unsigned) { return 0; }
API cuDriverGetVersion(int *version) {
    const char *cuda = getenv("AQUILA_EMULATOR_CUDA");  // as the driver numbers versions: 12080 is 12.8
    return *version = cuda ? atoi(cuda) : 13000, 0;
}
API cuDeviceGetCount(int *count) { return *count = 1, 0; }
API cuDeviceGet(int *device, int ordinal) { return ordinal == 0 ? *device = 0, 0 : INVALID_DEVICE; }
API cuDeviceGetName(char *name, int bytes, int) { return snprintf(name, bytes, "emulated on the CPU"), 0; }
API cuDeviceTotalMem_v2(size_t *bytes, int) { return *bytes = total_memory(), 0; }
API cuDevicePrimaryCtxRetain(void **context, int) { return *context = &default_stream, 0; }
API cuDevicePrimaryCtxRelease_v2(int) { return 0; }
API cuCtxSetCurrent(void *) { return 0; }
API cuCtxGetCurrent(void **context) { return *context = &default_stream, 0; }
API cuDeviceGetAttribute(int *value, int attribute, int) {
    switch (attribute) {
    case 16: *value = MULTIPROCESSORS; break;
    case 75: *value = __CUDA_ARCH__ / 100; break;
    case 76: *value = __CUDA_ARCH__ / 10 % 10; break;
    case 81: *value = SHARED_BYTES + RESERVED_BYTES; break;
    case 97: *value = SHARED_BYTES; break;
    case 111: *value = RESERVED_BYTES; break;
    case 115: *value = 1; break;  // pools of memory
    default: fprintf(stderr, "emulated driver: attribute %d is not known\n", attribute); return INVALID_VALUE;
    }
    return 0;
}
API cuMemGetInfo_v2(size_t *free, size_t *total) {
    Lock lock;
    *total = total_memory(), *free = *total - allocated;
    return 0;
}
API cuGetErrorName(int error, const char **name) {
    static thread_local std::string text;
    text = "error " + std::to_string(error) + " of the emulated driver";
    return *name = text.c_str(), 0;
}
API cuGetErrorString(int error, const char **text) { return cuGetErrorName(error, text); }

// Memory.

API cuMemAlloc_v2(uint64_t *address, size_t bytes) {
    Lock lock;
    return allocate(address, bytes);
}
API cuMemFree_v2(uint64_t address) {
    Lock lock;
    return release(address);
}
API cuMemAllocAsync(uint64_t *address, size_t bytes, void *stream) {
    Lock lock;
    if (stream_of(stream).capture) return CAPTURE_UNSUPPORTED;
    // Memory that was freed in the stream's order is there again.
    catch_up(stream_of(stream));
    return allocate(address, bytes);
}
API cuMemFreeAsync(uint64_t address, void *stream) {
    Lock lock;
    if (stream_of(stream).capture) return CAPTURE_UNSUPPORTED;
    return enqueue(stream, [=] {
        if (release(address)) abort();
    });
}
API cuMemHostAlloc(void **memory, size_t bytes, unsigned) {
    Lock lock;
    *memory = malloc(bytes);
    memset(*memory, 0xfb, bytes);
    pinned[reinterpret_cast<uintptr_t>(*memory)] = bytes;
    return 0;
}
API cuMemFreeHost(void *memory) {
    Lock lock;
    pinned.erase(reinterpret_cast<uintptr_t>(memory));
    free(memory);
    return 0;
}
API cuMemsetD8Async(uint64_t address, unsigned char value, size_t bytes, void *stream) {
    Lock lock;
    return enqueue(stream, [=] {
        check(address, bytes, "a fill");
        memset(reinterpret_cast<void *>(address), value, bytes);
    });
}
API cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t bytes, void *stream) {
    Lock lock;
    if (is_pinned(from)) {
        return enqueue(stream, [=] {
            check(to, bytes, "a copy");
            memcpy(reinterpret_cast<void *>(to), from, bytes);
        });
    }
    // Of pageable memory the driver makes a copy before it returns.
    std::vector<uint8_t> copy(static_cast<const uint8_t *>(from), static_cast<const uint8_t *>(from) + bytes);
    return enqueue(stream, [=] {
        check(to, bytes, "a copy");
        memcpy(reinterpret_cast<void *>(to), copy.data(), bytes);
    });
}
API cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t bytes, void *stream) {
    Lock lock;
    if (stream_of(stream).capture) return CAPTURE_UNSUPPORTED;
    enqueue(stream, [=] {
        check(from, bytes, "a copy");
        memcpy(to, reinterpret_cast<void *>(from), bytes);
    });
    // To pageable memory the driver copies before it returns.
    if (!is_pinned(to)) catch_up(stream_of(stream));
    return 0;
}
API cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, void *stream) {
    Lock lock;
    return enqueue(stream, [=] {
        check(from, bytes, "a copy");
        check(to, bytes, "a copy");
        memmove(reinterpret_cast<void *>(to), reinterpret_cast<void *>(from), bytes);
    });
}

// Streams and events.

API cuStreamCreate(void **stream, unsigned) { return *stream = new Stream, 0; }
API cuStreamDestroy_v2(void *stream) {
    Lock lock;
    catch_up(stream_of(stream));
    delete static_cast<Stream *>(stream);
    return 0;
}
API cuStreamSynchronize(void *stream) {
    Lock lock;
    if (stream_of(stream).capture) return CAPTURE_UNSUPPORTED;
    catch_up(stream_of(stream));
    return 0;
}
API cuCtxSynchronize() { return 0; }
API cuEventCreate(void **event, unsigned) { return *event = new Event, 0; }
API cuEventDestroy_v2(void *event) {
    Lock lock;
    Event *destroyed = static_cast<Event *>(event);
    if (destroyed->stream) catch_up(*destroyed->stream);
    delete destroyed;
    return 0;
}
API cuEventRecord(void *handle, void *stream) {
    Lock lock;
    if (stream_of(stream).capture) return CAPTURE_UNSUPPORTED;
    Event *event = static_cast<Event *>(handle);
    if (event->stream) catch_up(*event->stream);
    event->stream = &stream_of(stream);
    return enqueue(stream, [=] { event->stream = nullptr, event->recorded = true, event->at = Clock::now(); });
}
API cuEventSynchronize(void *handle) {
    Lock lock;
    Event *event = static_cast<Event *>(handle);
    if (event->stream) catch_up(*event->stream);
    return 0;
}
API cuEventElapsedTime_v2(float *milliseconds, void *from, void *to) {
    Lock lock;
    cuEventSynchronize(from), cuEventSynchronize(to);
    Event *first = static_cast<Event *>(from), *last = static_cast<Event *>(to);
    if (!first->recorded || !last->recorded) return INVALID_VALUE;
    *milliseconds = std::chrono::duration<float, std::milli>(last->at - first->at).count();
    return 0;
}
API cuEventElapsedTime(float *milliseconds, void *from, void *to) { return cuEventElapsedTime_v2(milliseconds, from, to); }
API cuStreamWaitEvent(void *, void *event, unsigned) { return cuEventSynchronize(event); }

// Kernels.

API cuModuleLoadData(void **module, const void *image) {
    const char *bytes = static_cast<const char *>(image);
    bool code = memcmp(bytes, "\x7f" "ELF", 4) == 0;
    // The kernels of this library stand for those of the image, which must be of the same kind.
    if (code != (__CUDA_ARCH__ == 900)) return INVALID_IMAGE;
    return *module = &default_stream, 0;
}
API cuModuleUnload(void *) { return 0; }
API cuModuleGetFunction(void **function, void *, const char *name) {
    Lock lock;
    static auto &functions = *new std::map<std::string, Function>;
    for (size_t i = 0; i < emulator::KERNEL_COUNT; i++) {
        if (strcmp(emulator::KERNELS[i].name, name) != 0) continue;
        return *function = &functions.try_emplace(name, Function{&emulator::KERNELS[i]}).first->second, 0;
    }
    return NOT_FOUND;
}
API cuFuncGetAttribute(int *value, int attribute, void *) { return attribute == 1 ? *value = DECLARED_BYTES, 0 : INVALID_VALUE; }
API cuFuncSetAttribute(void *function, int attribute, int value) {
    if (attribute != 8 || value < 0 || (size_t)value + DECLARED_BYTES > SHARED_BYTES) return INVALID_VALUE;
    return static_cast<Function *>(function)->most_shared = value, 0;
}

// CUDA's structures.
struct LaunchAttribute {
    int id;
    alignas(8) int value;
    uint8_t rest[60];
};
struct LaunchConfig {
    unsigned grid[3], block[3], shared_bytes;
    void *stream;
    const LaunchAttribute *attributes;
    unsigned attribute_count;
};
API cuOccupancyMaxActiveClusters(int *count, void *, const LaunchConfig *) { return *count = 3, 0; }
API cuLaunchKernelEx(const LaunchConfig *config, void *handle, void **parameters, void **) {
    Lock lock;
    Function &function = *static_cast<Function *>(handle);
    if (config->shared_bytes > function.most_shared) return INVALID_VALUE;
    for (int i = 0; i < 3; i++) {
        if (config->grid[i] == 0 || config->block[i] == 0) return INVALID_VALUE;
    }
    if (config->grid[1] > 65535 || config->grid[2] > 65535) return INVALID_VALUE;
    const emulator::Kernel *kernel = function.kernel;
    const uint8_t *from = static_cast<const uint8_t *>(parameters[0]);
    // As aligned as the strictest of their fields may be.
    std::shared_ptr<void> arguments(aligned_alloc(128, (kernel->argument_bytes + 127) / 128 * 128), free);
    memcpy(arguments.get(), from, kernel->argument_bytes);
    const LaunchConfig &c = *config;
    emulator::Launch launch = {kernel->name, kernel->call, arguments, {c.grid[0], c.grid[1], c.grid[2]},
                               {c.block[0], c.block[1], c.block[2]}, kernel->cluster, c.shared_bytes};
    bool early = false;
    for (unsigned i = 0; i < c.attribute_count; i++) {
        constexpr int PROGRAMMATIC_STREAM_SERIALIZATION = 6;
        if (c.attributes[i].id != PROGRAMMATIC_STREAM_SERIALIZATION) return INVALID_VALUE;
        early = c.attributes[i].value != 0;
    }
    return enqueue(c.stream, Work{std::make_shared<emulator::Launch>(launch), early, nullptr});
}

// Rows of 2-byte values in boxes that are swizzled by 128 bytes, and 4-byte values of four dimensions in
// boxes that are not, which is all that the backend asks for: where they begin, the sizes, bytes from one
// to the next of each but the first, and the box.
API cuTensorMapEncodeTiled(void *map, int kind, unsigned rank, void *from, const uint64_t *sizes, const uint64_t *strides,
                           const unsigned *box, const unsigned *steps, int interleave, int swizzle, int, int fill) {
    constexpr int UINT32 = 2, BFLOAT16 = 9, BY_128 = 3;
    bool rows = kind == BFLOAT16 && rank == 2 && swizzle == BY_128 && box[0] * 2 <= 128;
    bool weights = kind == UINT32 && rank == 4 && !swizzle;
    if ((!rows && !weights) || interleave || fill || (uintptr_t)map % 64 || (uintptr_t)from % 16) return INVALID_VALUE;
    uint64_t words[16] = {(uint64_t)from}, *to = words + 1;
    for (unsigned i = 0; i < rank; i++) {
        if (steps[i] != 1 || box[i] == 0 || box[i] > 256 || sizes[i] == 0 || sizes[i] > 1ull << 32) return INVALID_VALUE;
        *to++ = sizes[i];
    }
    for (unsigned i = 0; i + 1 < rank; i++) {
        if (strides[i] % 16 || strides[i] >= 1ull << 40) return INVALID_VALUE;
        *to++ = strides[i];
    }
    for (unsigned i = 0; i < rank; i++) *to++ = box[i];
    return memcpy(map, words, sizeof(words)), 0;
}

// Graphs.

API cuStreamBeginCapture_v2(void *stream, int) {
    Lock lock;
    if (stream_of(stream).capture) return CAPTURE_INVALIDATED;
    stream_of(stream).capture = new Graph;
    return 0;
}
API cuStreamEndCapture(void *stream, void **graph) {
    Lock lock;
    *graph = stream_of(stream).capture;
    stream_of(stream).capture = nullptr;
    return *graph ? 0 : CAPTURE_INVALIDATED;
}
API cuStreamIsCapturing(void *stream, int *status) {
    Lock lock;
    return *status = stream_of(stream).capture ? 1 : 0, 0;
}
API cuGraphInstantiateWithFlags(void **executable, void *graph, unsigned long long) {
    return *executable = new Graph(*static_cast<Graph *>(graph)), 0;
}
API cuGraphUpload(void *, void *) { return 0; }
API cuGraphLaunch(void *graph, void *stream) {
    Lock lock;
    // A graph begins when all before it is over, and what comes behind it begins when it is over.
    enqueue(stream, [] {});
    for (const Work &work : static_cast<Graph *>(graph)->works) enqueue(stream, work);
    return enqueue(stream, [] {});
}
API cuGraphExecDestroy(void *graph) { return delete static_cast<Graph *>(graph), 0; }
API cuGraphDestroy(void *graph) { return delete static_cast<Graph *>(graph), 0; }
