// The kernels that there are.

#pragma once

#include <cstddef>
#include <cstdint>

namespace emulator {

struct Kernel {
    const char *name;
    void (*call)(const void *arguments);
    size_t argument_bytes;
    uint32_t cluster;  // thread blocks of a cluster
};

extern const Kernel KERNELS[];
extern const size_t KERNEL_COUNT;

}  // namespace emulator
