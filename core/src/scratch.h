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
    if (const std::unique_lock lock(mutex(), std::try_to_lock); lock && !left().empty()) {
      std::swap(held_, left().back());
      left().pop_back();
    }
  }
  ~Scratch() {
    if (const std::unique_lock lock(mutex(), std::try_to_lock); lock && held_.count > 0) {
      left().push_back(std::move(held_));
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

  // Both outlive every thread. Nobody waits for the mutex: a child that was forked while it was
  // locked would for ever.
  static std::vector<Held>& left() {
    static auto& held = *new std::vector<Held>;
    return held;
  }
  static std::mutex& mutex() {
    static auto& made = *new std::mutex;
    return made;
  }

  Held held_;
};

// Returns room for `count` of T, the same for each Tag as long as it suffices; undefined contents.
template <class T, class Tag>
T* scratch(std::size_t count) {
  thread_local Scratch<T, Tag> memory;
  return memory.take(count);
}

}  // namespace holdfast
