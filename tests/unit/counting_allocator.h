// Counts what tensors take of the host's memory, for tests.
#pragma once

#include <c10/core/CPUAllocator.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>

namespace parvl {

// Bytes that were allocated while it is installed and are not freed yet, of all threads and of those that a thread
// allocated, and the largest tensor. Outlives all of them.
class CountingAllocator : public c10::Allocator {
 public:
  at::DataPtr allocate(size_t bytes) override {
    const auto size = static_cast<int64_t>(bytes);
    // Its size and owner stand before it; kernels want it aligned.
    auto* head = static_cast<Head*>(std::aligned_alloc(kAlign, (bytes + 2 * kAlign - 1) / kAlign * kAlign));
    *head = {this, size, t_mine};
    const int64_t now = live_ += size;
    for (int64_t peak = peak_; now > peak && !peak_.compare_exchange_weak(peak, now);) {
    }
    if (t_mine != nullptr) *t_mine += size;
    int64_t largest = largest_;
    while (largest < size && !largest_.compare_exchange_weak(largest, size)) {
    }
    void* const data = reinterpret_cast<char*>(head) + kAlign;
    return {data, data, &CountingAllocator::release, c10::DeviceType::CPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &CountingAllocator::release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
  int64_t live() const { return live_; }
  // The most bytes that were live during `work`, beyond those that were before.
  template <typename Work>
  int64_t peak_of(Work work) {
    const int64_t before = live_;
    peak_ = before;
    work();
    return peak_ - before;
  }
  // What this thread allocates is counted in `mine` too, whoever frees it; null: no longer. It outlives the tensors.
  static void count_mine(std::atomic<int64_t>* mine) { t_mine = mine; }
  int64_t take_largest() { return largest_.exchange(0); }

 private:
  static constexpr size_t kAlign = 64;
  struct Head {
    CountingAllocator* owner;
    int64_t bytes;
    std::atomic<int64_t>* of_thread;
  };
  static void release(void* data) {
    if (data == nullptr) return;
    auto* const head = reinterpret_cast<Head*>(static_cast<char*>(data) - kAlign);
    head->owner->live_ -= head->bytes;
    if (head->of_thread != nullptr) *head->of_thread -= head->bytes;
    std::free(head);
  }
  static inline thread_local std::atomic<int64_t>* t_mine = nullptr;
  std::atomic<int64_t> live_ = 0, peak_ = 0, largest_ = 0;
};

}  // namespace parvl
