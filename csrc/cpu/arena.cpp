// Arenas: memory that a model's steps use again and again, in front of torch's allocator for the CPU.
//
// The C library gives blocks of some MB back to the system once they are free, and takes them anew: a page fault for
// every 4 KiB, at every step. Inside an arena this thread's larger blocks are kept instead.
#include "../arguments.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <torch/library.h>

#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace fastgen {
namespace {

constexpr size_t kSmallest = 1 << 17; // bytes: what is smaller, the C library keeps by itself

struct Arena {
  std::multimap<size_t, void*> idle; // by size
  bool is_open = true;
};

struct Block {
  std::shared_ptr<Arena> arena;
  size_t size;
};

struct State {
  std::mutex mutex; // of all below, the arenas included
  std::unordered_map<void*, Block> blocks;
  std::unordered_map<int64_t, std::shared_ptr<Arena>> arenas;
  int64_t last_arena = 0;
  c10::Allocator* torchs = nullptr; // that was there before ours
};

State& state() { // never destroyed: tensors may die later than whatever is
  static State* const only = new State;
  return *only;
}

thread_local std::vector<std::shared_ptr<Arena>> entered;

// A few sizes for all, so that a block fits the next request although the rows have become fewer.
size_t rounded(size_t size) {
  size_t step = kSmallest / 8;
  while (step * 16 <= size) {
    step *= 2;
  }
  return (size + step - 1) / step * step;
}

void give_back(void* data) {
  State& all = state();
  {
    const std::lock_guard<std::mutex> lock(all.mutex);
    const auto found = all.blocks.find(data);
    if (found != all.blocks.end() && found->second.arena->is_open) {
      found->second.arena->idle.emplace(found->second.size, data);
      return;
    }
    if (found != all.blocks.end()) {
      all.blocks.erase(found);
    }
  }
  all.torchs->raw_deallocate(data);
}

class Allocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t size) override {
    State& all = state();
    if (entered.empty() || size < kSmallest) {
      return all.torchs->allocate(size);
    }
    const std::shared_ptr<Arena>& arena = entered.back();
    size = rounded(size);
    {
      const std::lock_guard<std::mutex> lock(all.mutex);
      const auto found = arena->idle.lower_bound(size);
      if (found != arena->idle.end() && found->first <= 2 * size) {
        void* const data = found->second;
        arena->idle.erase(found);
        return pointer(data);
      }
    }
    void* const data = all.torchs->raw_allocate(size);
    const std::lock_guard<std::mutex> lock(all.mutex);
    all.blocks[data] = {arena, size};
    return pointer(data);
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &give_back;
  }

  void copy_data(void* to, const void* from, size_t count) const override {
    state().torchs->copy_data(to, from, count);
  }

 private:
  static c10::DataPtr pointer(void* data) {
    return {data, data, &give_back, c10::Device(c10::DeviceType::CPU)};
  }
};

int64_t arena_open() {
  State& all = state();
  const std::lock_guard<std::mutex> lock(all.mutex);
  if (all.torchs == nullptr) { // from now on, and for good: blocks may outlive every arena
    c10::Allocator* const torchs = c10::GetCPUAllocator();
    TORCH_CHECK(torchs->raw_deleter() != nullptr, "fastgen: torch's allocator for the CPU deals in no plain pointers");
    all.torchs = torchs;
    c10::SetCPUAllocator(new Allocator);
  }
  all.arenas[++all.last_arena] = std::make_shared<Arena>();
  return all.last_arena;
}

void arena_enter(int64_t arena) {
  State& all = state();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto found = all.arenas.find(arena);
  TORCH_CHECK(found != all.arenas.end(), "fastgen: there is no arena ", arena);
  entered.push_back(found->second);
}

void arena_leave() {
  TORCH_CHECK(!entered.empty(), "fastgen: this thread is in no arena");
  entered.pop_back();
}

// The bytes of its idle blocks.
int64_t arena_idle(int64_t arena) {
  State& all = state();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto found = all.arenas.find(arena);
  int64_t bytes = 0;
  if (found != all.arenas.end()) {
    for (const auto& [size, data] : found->second->idle) {
      bytes += static_cast<int64_t>(size);
    }
  }
  return bytes;
}

// Frees its idle blocks and, if it `closes`, all others as their tensors die.
void arena_trim(int64_t arena, bool closes) {
  State& all = state();
  std::vector<void*> freed; // once the lock is free: a profiler may listen
  {
    const std::lock_guard<std::mutex> lock(all.mutex);
    const auto found = all.arenas.find(arena);
    if (found == all.arenas.end()) {
      return;
    }
    const std::shared_ptr<Arena> mine = found->second;
    for (const auto& [size, data] : mine->idle) {
      freed.push_back(data);
      all.blocks.erase(data);
    }
    mine->idle.clear();
    if (closes) {
      mine->is_open = false;
      all.arenas.erase(found);
    }
  }
  for (void* const block : freed) {
    all.torchs->raw_deallocate(block);
  }
}

} // namespace

TORCH_LIBRARY_FRAGMENT(fastgen, m) {
  m.def("arena_open() -> int", &arena_open);
  m.def("arena_enter(int arena) -> ()", &arena_enter);
  m.def("arena_leave() -> ()", &arena_leave);
  m.def("arena_idle(int arena) -> int", &arena_idle);
  m.def("arena_trim(int arena, bool closes) -> ()", &arena_trim);
}

} // namespace fastgen
