// The shared memory of the block that runs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace cuda_on_cpu {

unsigned running_thread();

namespace memory {

constexpr std::size_t kLimit = 48 * 1024; // of a block, on every device

extern std::uint32_t epoch; // rises at every barrier of the block, and with every block
extern std::uint32_t warp_epochs[32]; // rise at every barrier of a warp
extern std::size_t dynamic_bytes;
extern bool checks; // whether accesses are followed, where the compiler reports them

void begin_block();

// Whether somebody wrote beside the ends of a variable; "" if not.
std::string find_overrun();

} // namespace memory
} // namespace cuda_on_cpu
