// Memory that threads keep: what a codec needs for a chunk is not allocated for each, and what one
// thread leaves behind the next one takes: memory that was touched before is ten times as fast.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <new>
#include <type_traits>
#include <utility>
#include <vector>

namespace holdfast {

// What one thread has for a Tag.
template <class T, class Tag>
class Scratch {
 public:
  Scratch() {
    if (const std::unique_lock lock(mutex_, std::try_to_lock); lock && left_ && !left_->empty()) {
      std::swap(held_, left_->back());
      left_->pop_back();
    }
  }
  ~Scratch() {
    if (const std::unique_lock lock(mutex_, std::try_to_lock); lock && held_.count > 0) {
      if (left_ == nullptr) left_ = new std::vector<Held>;
      left_->push_back(std::move(held_));
    }
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  T* take(std::size_t count) {
#ifdef HOLDFAST_SANITIZE
    held_.count = 0;  // only so a sanitizer sees where what is in use ends
#endif
    if (held_.count < count) held_ = {Memory(allocate(count)), count};
    return held_.memory.get();
  }

 private:
  static_assert(std::is_trivially_default_constructible_v<T>);
  static constexpr std::align_val_t kAlign{64};  // a line of the cache

  struct Free {
    void operator()(T* memory) const { ::operator delete(memory, kAlign); }
  };
  using Memory = std::unique_ptr<T[], Free>;

  struct Held {
    Memory memory;
    std::size_t count = 0;
  };

  static T* allocate(std::size_t count) {
    return static_cast<T*>(::operator new(count * sizeof(T), kAlign));
  }

  // Both outlive every thread, and are there before any. Nobody waits for the mutex: a child that
  // was forked while it was locked would for ever. That child shares nothing between its threads.
  static inline constinit std::mutex mutex_;
  static inline constinit std::vector<Held>* left_ = nullptr;

  Held held_;
};

// Returns room for `count` of T, the same for each Tag as long as it suffices; undefined contents.
template <class T, class Tag>
T* scratch(std::size_t count) {
  thread_local Scratch<T, Tag> memory;
  return memory.take(count);
}

}  // namespace holdfast
