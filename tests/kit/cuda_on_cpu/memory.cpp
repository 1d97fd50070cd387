// Shared memory: filled with a pattern before each block, between guards, and followed by the byte.
//
// Sources that are compiled with -fsanitize=thread call a function at each of their accesses. Those below answer, not
// the sanitizer's own: of all memory only the block's is of interest, and its threads are no threads of the system.
#include "memory.h"

#include "cuda_on_cpu.h"

#include <algorithm>
#include <cstring>
#include <vector>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#define FASTGEN_POISON(ADDRESS, BYTES) ASAN_POISON_MEMORY_REGION(ADDRESS, BYTES)
#define FASTGEN_UNPOISON(ADDRESS, BYTES) ASAN_UNPOISON_MEMORY_REGION(ADDRESS, BYTES)
#else
#define FASTGEN_POISON(ADDRESS, BYTES)
#define FASTGEN_UNPOISON(ADDRESS, BYTES)
#endif

namespace cuda_on_cpu {
namespace memory {

std::uint32_t epoch = 1;
std::uint32_t warp_epochs[32];
std::size_t dynamic_bytes = 0;
bool checks = true;

namespace {

constexpr std::size_t kRoom = 2 * kLimit;
constexpr std::size_t kGuard = 64;
constexpr unsigned char kGuarded = 0xa5, kUnwritten = 0xcb;
constexpr int kDynamic = -1; // in place of a line
constexpr int kNobody = -1, kSeveral = -2;
#ifdef FASTGEN_FOLLOW
constexpr bool kFollows = true;
#else
constexpr bool kFollows = false; // atomic operations alone would be known
#endif

struct Variable {
  const char* name;
  int line;
  std::size_t first, size;
};

// Who used one byte last, and when.
struct Use {
  std::uint32_t epoch = 0, warp_epoch = 0;
  int thread = kNobody, warp = kNobody;
  bool is_atomic = false;
};

struct Byte {
  Use write, read;
};

alignas(128) unsigned char room[kRoom];
Byte bytes[kRoom];
std::int8_t owners[kRoom]; // the number of the variable that a byte belongs to, or -1
std::vector<Variable> variables; // of the running block
std::size_t used = 0, taken = 0;
std::uint32_t first_epoch = 0; // of the running block

// Whether the use and one by `thread` now have no barrier between them.
bool is_concurrent(const Use& use, int thread) {
  const int warp = thread / 32;
  return use.epoch == epoch && use.thread != thread &&
      !(use.warp == warp && use.warp_epoch != warp_epochs[warp]);
}

void note(Use& use, int thread, bool is_atomic) {
  const bool is_same = use.epoch == epoch;
  const int warp = thread / 32;
  use.thread = is_same && use.thread != thread ? kSeveral : thread;
  use.warp = is_same && use.warp != warp ? kSeveral : warp;
  use.epoch = epoch;
  use.warp_epoch = warp_epochs[warp];
  use.is_atomic = is_atomic;
}

// Follows an access of the running thread to these bytes, if they are the block's.
void follow(const void* address, std::size_t size, bool reads, bool writes, bool is_atomic) {
  const auto* const begin = static_cast<const unsigned char*>(address);
  if (!kFollows || !checks || begin < room || begin >= room + kRoom) {
    return;
  }
  const auto first = static_cast<std::size_t>(begin - room);
  const int thread = static_cast<int>(running_thread());
  for (std::size_t place = first; place < first + size; ++place) {
    Byte& byte = bytes[place];
    const char* wrong = nullptr;
    if (owners[place] < 0) {
      wrong = "it uses shared memory beyond the end of a variable";
    } else if (reads && byte.write.epoch < first_epoch) {
      wrong = "it reads shared memory that nobody has written";
    } else if (is_concurrent(byte.write, thread) && !(is_atomic && byte.write.is_atomic)) {
      wrong = writes ? "a race: it writes what another thread writes" : "a race: it reads what another thread writes";
    } else if (writes && is_concurrent(byte.read, thread) && !(is_atomic && byte.read.is_atomic)) {
      wrong = "a race: it writes what another thread reads";
    }
    if (wrong != nullptr) {
      const char* const name = owners[place] < 0 ? "of no variable" : variables[owners[place]].name;
      fail((std::string(wrong) + " (" + name + ")").c_str());
    }
    if (reads) {
      note(byte.read, thread, is_atomic);
    }
    if (writes) {
      note(byte.write, thread, is_atomic);
    }
  }
}

} // namespace

void begin_block() {
  FASTGEN_UNPOISON(room, kRoom);
  std::memset(room, kGuarded, kRoom);
  std::memset(owners, -1, kRoom);
  FASTGEN_POISON(room, kRoom);
  variables.clear();
  used = kGuard;
  taken = 0;
  first_epoch = ++epoch;
}

std::string find_overrun() {
  FASTGEN_UNPOISON(room, kRoom);
  std::size_t place = 0;
  for (std::size_t i = 0; !variables.empty() && i <= variables.size(); ++i) {
    const bool is_last = i == variables.size(); // `used` ends with the guard of the last variable
    for (const std::size_t end = is_last ? used : variables[i].first; place < end; ++place) {
      if (room[place] != kGuarded) {
        const bool is_behind = i > 0 && place < variables[i - 1].first + variables[i - 1].size + kGuard;
        return std::string("a thread wrote beside the shared variable ") + variables[is_behind ? i - 1 : i].name;
      }
    }
    place = is_last ? place : variables[i].first + variables[i].size;
  }
  return "";
}

} // namespace memory

void* shared(const char* name, int line, std::size_t size, std::size_t alignment) {
  using namespace memory;
  for (const Variable& variable : variables) {
    if (variable.line == line && std::strcmp(variable.name, name) == 0) {
      return room + variable.first;
    }
  }
  taken += size;
  if (taken > kLimit) {
    fail("the block has more than 48 KiB of shared memory");
  }
  alignment = std::max<std::size_t>(alignment, 16);
  const std::size_t first = (used + alignment - 1) / alignment * alignment;
  used = first + size + kGuard;
  std::memset(owners + first, static_cast<int>(variables.size()), size);
  variables.push_back({name, line, first, size});
  FASTGEN_UNPOISON(room + first, size);
  std::memset(room + first, kUnwritten, size);
  return room + first;
}

unsigned char* dynamic_shared() {
  return static_cast<unsigned char*>(shared("dynamic", memory::kDynamic, memory::dynamic_bytes, 16));
}

void uses_atomically(const void* address, std::size_t size) {
  memory::follow(address, size, true, true, true);
}

} // namespace cuda_on_cpu

#ifdef FASTGEN_FOLLOW

using cuda_on_cpu::memory::follow;

extern "C" {

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
void __tsan_read_range(void* address, unsigned long size) { follow(address, size, true, false, false); }
void __tsan_write_range(void* address, unsigned long size) { follow(address, size, false, true, false); }

#define FASTGEN_ACCESS(SIZE)                                                                    \
  void __tsan_read##SIZE(void* address) { follow(address, SIZE, true, false, false); }          \
  void __tsan_write##SIZE(void* address) { follow(address, SIZE, false, true, false); }         \
  void __tsan_volatile_read##SIZE(void* address) { follow(address, SIZE, true, false, false); } \
  void __tsan_volatile_write##SIZE(void* address) { follow(address, SIZE, false, true, false); } \
  void __tsan_unaligned_read##SIZE(void* address) { follow(address, SIZE, true, false, false); } \
  void __tsan_unaligned_write##SIZE(void* address) { follow(address, SIZE, false, true, false); }
FASTGEN_ACCESS(1)
FASTGEN_ACCESS(2)
FASTGEN_ACCESS(4)
FASTGEN_ACCESS(8)
FASTGEN_ACCESS(16)

// Atomic operations of the host half: torch's counts of references.
#define FASTGEN_ATOMIC(BITS, TYPE)                                                                                    \
  TYPE __tsan_atomic##BITS##_load(const volatile TYPE* at, int) { return __atomic_load_n(at, __ATOMIC_SEQ_CST); }      \
  void __tsan_atomic##BITS##_store(volatile TYPE* at, TYPE x, int) { __atomic_store_n(at, x, __ATOMIC_SEQ_CST); }      \
  TYPE __tsan_atomic##BITS##_exchange(volatile TYPE* at, TYPE x, int) {                                                \
    return __atomic_exchange_n(at, x, __ATOMIC_SEQ_CST);                                                               \
  }                                                                                                                    \
  TYPE __tsan_atomic##BITS##_fetch_add(volatile TYPE* at, TYPE x, int) {                                               \
    return __atomic_fetch_add(at, x, __ATOMIC_SEQ_CST);                                                                \
  }                                                                                                                    \
  TYPE __tsan_atomic##BITS##_fetch_sub(volatile TYPE* at, TYPE x, int) {                                               \
    return __atomic_fetch_sub(at, x, __ATOMIC_SEQ_CST);                                                                \
  }                                                                                                                    \
  int __tsan_atomic##BITS##_compare_exchange_strong(volatile TYPE* at, TYPE* expected, TYPE x, int, int) {             \
    return __atomic_compare_exchange_n(at, expected, x, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);                    \
  }                                                                                                                    \
  int __tsan_atomic##BITS##_compare_exchange_weak(volatile TYPE* at, TYPE* expected, TYPE x, int, int) {               \
    return __atomic_compare_exchange_n(at, expected, x, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);                    \
  }
FASTGEN_ATOMIC(8, unsigned char)
FASTGEN_ATOMIC(32, unsigned)
FASTGEN_ATOMIC(64, unsigned long)
void __tsan_atomic_thread_fence(int) {}

} // extern "C"

#endif
