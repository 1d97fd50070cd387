// Runs the threads of a kernel on the CPU; cuda_on_cpu.h says what it is for.
#include "cuda_on_cpu.h"

#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "memory.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#endif

dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace cuda_on_cpu {

int fault = 0;

namespace {

enum class Order { forward, reversed, random };
enum class State { ready, at_block_barrier, at_warp_barrier, done };

constexpr std::size_t kStack = 256 * 1024;
constexpr unsigned kWarp = 32;

struct Settings {
  Order order = Order::forward;
  std::uint64_t seed = 1;
  std::uint64_t step = 1; // runs one block in so many, and the last
};

struct Counts {
  std::uint64_t launches = 0, blocks = 0, barriers = 0;
};

// One thread of a block, on a stack of its own. The builtins save less than swapcontext, and ask no kernel.
struct Thread {
  void* resumes_at[5];
  void* stack = nullptr; // below it a page that nobody may touch
  State state = State::done;
  int line = 0; // of the barrier at which it waits
  unsigned mask = 0;
};

Settings settings;
Counts counts;
std::mutex one_launch; // the threads' coordinates are global
std::vector<Thread> threads; // kept for the next block
unsigned size = 0; // threads of the block
unsigned current = 0;
void* scheduler[5];
void (*body)(void*);
void* body_state;
const char* kernel_name;
std::string failure; // of the running block; what throws is the scheduler, not a thread
std::uint64_t slots[1024 / kWarp][kWarp];

#ifdef __SANITIZE_ADDRESS__
const void* scheduler_stack = nullptr;
std::size_t scheduler_bytes = 0;
#endif

std::string block_name() {
  return std::string("kernel ") + kernel_name + ", block (" + std::to_string(blockIdx.x) + ", " +
      std::to_string(blockIdx.y) + ", " + std::to_string(blockIdx.z) + "): ";
}

__attribute__((noinline, no_sanitize("address"))) void jump(void** to) {
  __builtin_longjmp(to, 1);
}

// Goes on at `to`, and returns when somebody jumps to `from`.
__attribute__((noinline, no_sanitize("address"))) void switch_to(void** from, void** to) {
  if (__builtin_setjmp(from) == 0) {
    jump(to);
  }
}

void to_scheduler() {
#ifdef __SANITIZE_ADDRESS__
  void* frames = nullptr;
  __sanitizer_start_switch_fiber(&frames, scheduler_stack, scheduler_bytes);
#endif
  switch_to(threads[current].resumes_at, scheduler);
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(frames, &scheduler_stack, &scheduler_bytes);
#endif
}

void live() { // a thread's stack begins here, and serves one block after the other
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_bytes);
#endif
  for (;;) {
    to_scheduler();
    body(body_state);
    threads[current].state = State::done;
  }
}

void resume(unsigned thread) {
  current = thread;
  threadIdx = dim3(thread % blockDim.x, thread / blockDim.x % blockDim.y, thread / blockDim.x / blockDim.y);
#ifdef __SANITIZE_ADDRESS__
  void* frames = nullptr;
  __sanitizer_start_switch_fiber(&frames, threads[thread].stack, kStack);
#endif
  switch_to(scheduler, threads[thread].resumes_at);
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(frames, nullptr, nullptr);
#endif
}

// Begins the thread's stack; it comes back at once, and waits for a block.
void begin(unsigned number) {
  Thread& thread = threads[number];
  if (thread.stack == nullptr) {
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    void* const memory = mmap(nullptr, page + kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory, page, PROT_NONE) != 0) {
      throw std::runtime_error("there is no memory for the stacks of a block");
    }
    thread.stack = static_cast<char*>(memory) + page;
  }
  current = number;
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = thread.stack;
  context.uc_stack.ss_size = kStack;
  context.uc_link = nullptr;
  makecontext(&context, &live, 0);
#ifdef __SANITIZE_ADDRESS__
  void* frames = nullptr;
  __sanitizer_start_switch_fiber(&frames, thread.stack, kStack);
#endif
  if (__builtin_setjmp(scheduler) == 0) {
    setcontext(&context);
  }
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(frames, nullptr, nullptr);
#endif
}

std::uint64_t draw(std::uint64_t below) {
  settings.seed ^= settings.seed << 13; // xorshift (Marsaglia 2003)
  settings.seed ^= settings.seed >> 7;
  settings.seed ^= settings.seed << 17;
  return settings.seed % below;
}

template <typename Number>
void put_in_order(std::vector<Number>& numbers) {
  std::iota(numbers.begin(), numbers.end(), Number{0});
  if (settings.order == Order::reversed) {
    std::reverse(numbers.begin(), numbers.end());
  } else if (settings.order == Order::random) {
    for (std::size_t i = numbers.size(); i > 1; --i) {
      std::swap(numbers[i - 1], numbers[draw(i)]);
    }
  }
}

// Lets the warps go on whose lanes have all come; whether there was one.
bool release_warps() {
  bool any = false;
  for (unsigned first = 0; first < size; first += kWarp) {
    const unsigned lanes = std::min(kWarp, size - first);
    for (unsigned i = 0; i < lanes; ++i) {
      if (threads[first + i].state != State::at_warp_barrier) {
        continue;
      }
      const unsigned mask = threads[first + i].mask;
      bool all = (mask >> i & 1) != 0;
      for (unsigned j = 0; j < lanes; ++j) {
        const Thread& other = threads[first + j];
        all = all && ((mask >> j & 1) == 0 || (other.state == State::at_warp_barrier && other.mask == mask));
      }
      for (unsigned j = 0; all && j < lanes; ++j) {
        if (mask >> j & 1) {
          threads[first + j].state = State::ready;
          any = true;
        }
      }
      if (all) {
        ++memory::warp_epochs[first / kWarp];
      }
    }
  }
  return any;
}

// What keeps the block from going on, "" if nothing does: then all its threads are done, or at the same barrier.
std::string find_stuck() {
  for (unsigned i = 0; i < size; ++i) {
    const Thread& waits = threads[i];
    if (waits.state == State::at_warp_barrier) {
      return "thread " + std::to_string(i) + " waits for lanes of its warp that never come";
    }
    for (unsigned j = 0; waits.state == State::at_block_barrier && j < size; ++j) {
      const bool comes = threads[j].state == State::at_block_barrier;
      if (!comes || threads[j].line != waits.line) {
        return "thread " + std::to_string(j) + " never comes to the __syncthreads() of line " +
            std::to_string(waits.line) + ", where thread " + std::to_string(i) + " waits" +
            (comes ? ": it waits at line " + std::to_string(threads[j].line) : "");
      }
    }
    if (waits.state == State::at_block_barrier) {
      return "";
    }
  }
  return "";
}

void check(const std::string& what) {
  if (what.empty()) {
    return;
  }
  const std::string message = block_name() + what; // before `failure`, which may be it, is cleared
  failure.clear();
  for (unsigned i = 0; i < size; ++i) {
    if (threads[i].state != State::done) {
      begin(i); // leaves the kernel where it is
    }
  }
  throw std::runtime_error(message);
}

void run_block() {
  memory::begin_block();
  for (unsigned i = 0; i < size; ++i) {
    threads[i].state = State::ready;
  }
  std::vector<unsigned> order(size);
  for (;;) {
    put_in_order(order);
    for (const unsigned thread : order) {
      if (threads[thread].state == State::ready) {
        resume(thread);
        check(failure);
      }
    }
    if (release_warps()) {
      continue;
    }
    check(find_stuck());
    if (threads[0].state == State::done) {
      break;
    }
    for (unsigned i = 0; i < size; ++i) {
      threads[i].state = State::ready;
    }
    ++memory::epoch;
    ++counts.barriers;
  }
  check(memory::find_overrun());
  ++counts.blocks;
}

void check_limits(dim3 grid, dim3 block, std::size_t dynamic_bytes) {
  const char* wrong = nullptr;
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || block.x == 0 || block.y == 0 || block.z == 0) {
    wrong = "a grid or a block of nothing";
  } else if (grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535) {
    wrong = "a grid beyond 2147483647 x 65535 x 65535";
  } else if (block.x > 1024 || block.y > 1024 || block.z > 64 || block.x * block.y * block.z > 1024) {
    wrong = "a block of more than 1024 threads";
  } else if (dynamic_bytes > memory::kLimit) {
    wrong = "more than 48 KiB of shared memory";
  }
  if (wrong != nullptr) {
    throw std::runtime_error(std::string("kernel ") + kernel_name + ": invalid configuration: " + wrong);
  }
}

} // namespace

void run(const char* kernel, dim3 grid, dim3 block, std::size_t dynamic_bytes, void (*call)(void*), void* state) {
  const std::lock_guard<std::mutex> guard(one_launch);
  kernel_name = kernel;
  check_limits(grid, block, dynamic_bytes);
  ++counts.launches;
  body = call;
  body_state = state;
  gridDim = grid;
  blockDim = block;
  size = block.x * block.y * block.z;
  memory::dynamic_bytes = dynamic_bytes;
  if (threads.empty()) {
    threads.resize(1024);
  }
  for (unsigned i = 0; i < size; ++i) {
    if (threads[i].stack == nullptr) {
      begin(i);
    }
  }
  const std::uint64_t blocks = std::uint64_t{grid.x} * grid.y * grid.z;
  std::vector<std::uint64_t> order(blocks);
  put_in_order(order);
  for (const std::uint64_t number : order) {
    if (number % settings.step != 0 && number != blocks - 1) {
      continue;
    }
    const std::uint64_t rest = number / grid.x;
    blockIdx = dim3(
        static_cast<unsigned>(number % grid.x), static_cast<unsigned>(rest % grid.y),
        static_cast<unsigned>(rest / grid.y));
    run_block();
  }
}

void block_barrier(int line) {
  threads[current].line = line;
  threads[current].state = State::at_block_barrier;
  to_scheduler();
}

void warp_barrier(unsigned mask) {
  threads[current].mask = mask;
  threads[current].state = State::at_warp_barrier;
  to_scheduler();
}

unsigned lane() {
  return current % kWarp;
}

std::uint64_t& slot(unsigned lane) {
  return slots[current / kWarp][lane];
}

void fail(const char* what) {
  failure = "thread " + std::to_string(current) + ": " + what;
  to_scheduler();
  __builtin_unreachable();
}

unsigned running_thread() {
  return current;
}

} // namespace cuda_on_cpu

#define FASTGEN_EXPORTED extern "C" __attribute__((visibility("default")))

// For Python, by ctypes. `order`: 0 forward, 1 reversed, 2 random by the seed. `step`: runs one block in so many.
FASTGEN_EXPORTED void cuda_on_cpu_set(int order, std::uint64_t seed, std::uint64_t step, int fault, int checks) {
  using namespace cuda_on_cpu;
  settings = {static_cast<Order>(order), seed * 2 + 1, step};
  cuda_on_cpu::fault = fault;
  memory::checks = checks != 0;
}

// Launches, blocks and barriers so far.
FASTGEN_EXPORTED void cuda_on_cpu_counts(std::uint64_t* into) {
  using cuda_on_cpu::counts;
  into[0] = counts.launches;
  into[1] = counts.blocks;
  into[2] = counts.barriers;
}

#ifdef FASTGEN_COVERAGE
extern "C" void __gcov_reset();
extern "C" void __gcov_dump();
FASTGEN_EXPORTED void cuda_on_cpu_dump_coverage() {
  __gcov_dump();
  __gcov_reset();
}
#endif
