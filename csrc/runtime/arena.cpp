// Arenas: memory that a model's steps use again and again, in front of torch's allocator for the CPU.
//
// The C library gives blocks of some MB back to the system once they are free, and takes them anew: a page fault for
// every 4 KiB, at every step. Inside an arena this thread's larger blocks are kept instead.
#include "../arguments.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <torch/custom_class.h>

#include <pthread.h>

#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace fastgen {
namespace {

constexpr size_t kSmallest = 1 << 17; // bytes: what is smaller, the C library keeps by itself

struct Idle {
  std::multimap<size_t, void*> blocks; // by size
  bool is_kept = true; // else blocks are freed with their tensors
};

struct Block {
  std::shared_ptr<Idle> idle; // where it belongs when its tensor has died
  size_t size;
};

struct State {
  std::mutex mutex; // of all below, and of what is idle
  std::unordered_map<void*, Block> blocks;
  c10::Allocator* torchs = nullptr; // that was there before ours
};

State& state() { // never destroyed: tensors may die later than whatever is
  static State* const only = new State;
  return *only;
}

thread_local std::vector<std::shared_ptr<Idle>> entered; // of the arenas that this thread is in; null: of none

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
    if (found != all.blocks.end() && found->second.idle->is_kept) {
      found->second.idle->blocks.emplace(found->second.size, data);
      return;
    }
    if (found != all.blocks.end()) {
      all.blocks.erase(found);
    }
  }
  all.torchs->raw_deallocate(data);
}

// Frees the idle blocks; what dies later is kept, or freed too.
void free_idle(Idle& idle, bool is_kept) {
  State& all = state();
  std::multimap<size_t, void*> freed; // once the lock is free: a profiler may listen
  {
    const std::lock_guard<std::mutex> lock(all.mutex);
    idle.is_kept = is_kept;
    idle.blocks.swap(freed);
    for (const auto& [size, data] : freed) {
      all.blocks.erase(data);
    }
  }
  for (const auto& [size, data] : freed) {
    all.torchs->raw_deallocate(data);
  }
}

class Allocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t size) override {
    State& all = state();
    if (entered.empty() || entered.back() == nullptr || size < kSmallest) {
      return all.torchs->allocate(size);
    }
    const std::shared_ptr<Idle>& idle = entered.back();
    size = rounded(size);
    void* too_small = nullptr;
    {
      const std::lock_guard<std::mutex> lock(all.mutex);
      auto found = idle->blocks.lower_bound(size);
      if (found != idle->blocks.end() && found->first <= 2 * size) {
        void* const data = found->second;
        idle->blocks.erase(found);
        return pointer(data);
      }
      if (found != idle->blocks.begin()) { // so that growing tensors leave no trail of blocks that nobody needs
        too_small = (--found)->second;
        idle->blocks.erase(found);
        all.blocks.erase(too_small);
      }
    }
    if (too_small != nullptr) {
      all.torchs->raw_deallocate(too_small);
    }
    void* data = nullptr;
    try {
      data = all.torchs->raw_allocate(size);
    } catch (const c10::Error&) { // no memory: what lies idle is some
      free_idle(*idle, true);
      data = all.torchs->raw_allocate(size);
    }
    const std::lock_guard<std::mutex> lock(all.mutex);
    all.blocks[data] = {idle, size};
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

void install() { // for good: blocks may outlive every arena
  State& all = state();
  const std::lock_guard<std::mutex> lock(all.mutex);
  if (all.torchs == nullptr) {
    c10::Allocator* const torchs = c10::GetCPUAllocator();
    TORCH_CHECK(torchs->raw_deleter() != nullptr, "fastgen: torch's allocator for the CPU deals in no plain pointers");
    all.torchs = torchs;
    c10::SetCPUAllocator(new Allocator);
    // A forked process has this thread alone: nobody else there would unlock what another held.
    pthread_atfork([] { state().mutex.lock(); }, [] { state().mutex.unlock(); }, [] { state().mutex.unlock(); });
  }
}

// A class, as operators would be seen by whoever watches the operators of a model.
class Arena final : public torch::CustomClassHolder {
 public:
  explicit Arena(bool keeps) : idle_(keeps ? std::make_shared<Idle>() : nullptr) {
    install();
  }

  ~Arena() override {
    if (idle_ != nullptr) {
      free_idle(*idle_, false);
    }
  }

  void enter() {
    entered.push_back(idle_);
  }

  void leave() {
    TORCH_CHECK(!entered.empty(), "fastgen: this thread is in no arena");
    entered.pop_back();
  }

  int64_t nbytes() {
    const std::lock_guard<std::mutex> lock(state().mutex);
    int64_t bytes = 0;
    if (idle_ != nullptr) {
      for (const auto& [size, data] : idle_->blocks) {
        bytes += static_cast<int64_t>(size);
      }
    }
    return bytes;
  }

  void trim() {
    if (idle_ != nullptr) {
      free_idle(*idle_, true);
    }
  }

 private:
  const std::shared_ptr<Idle> idle_; // null: inside, memory is torch's again
};

} // namespace

TORCH_LIBRARY_FRAGMENT(fastgen, m) {
  m.class_<Arena>("Arena")
      .def(torch::init<bool>())
      .def("enter", [](const c10::intrusive_ptr<Arena>& arena) { arena->enter(); })
      .def("leave", [](const c10::intrusive_ptr<Arena>& arena) { arena->leave(); })
      .def("nbytes", [](const c10::intrusive_ptr<Arena>& arena) { return arena->nbytes(); })
      .def("trim", [](const c10::intrusive_ptr<Arena>& arena) { arena->trim(); });
}

} // namespace fastgen
