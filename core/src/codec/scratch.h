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

// Memory that begins on a line of the cache.
struct Room {
  static constexpr std::align_val_t kAlign{64};
  struct Free {
    void operator()(void* memory) const { ::operator delete(memory, kAlign); }
  };

  static Room of(std::size_t bytes) {
    return {std::unique_ptr<void, Free>(::operator new(bytes, kAlign)), bytes};
  }

  std::unique_ptr<void, Free> memory;
  std::size_t bytes = 0;
};

// What threads left behind. It outlives every thread, and is there before any. Nobody waits for the
// mutex: a child that was forked while it was locked would for ever. That child shares nothing
// between its threads.
struct Shelf {
  std::mutex mutex;
  std::vector<Room>* left = nullptr;

  // Returns no room where nothing was left, or another thread is here.
  Room take() {
    const std::unique_lock lock(mutex, std::try_to_lock);
    if (!lock || left == nullptr || left->empty()) return {};
    Room room = std::move(left->back());
    left->pop_back();
    return room;
  }

  void put(Room room) {
    const std::unique_lock lock(mutex, std::try_to_lock);
    if (!lock || room.bytes == 0) return;
    if (left == nullptr) left = new std::vector<Room>;
    left->push_back(std::move(room));
  }
};

static_assert(std::is_trivially_destructible_v<Shelf>);  // else it would be gone before threads are

// What one thread has of a shelf.
class Scratch {
 public:
  explicit Scratch(Shelf& shelf) : shelf_(shelf), room_(shelf.take()) {}
  ~Scratch() { shelf_.put(std::move(room_)); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  void* take(std::size_t bytes) {
#ifdef HOLDFAST_SANITIZE
    room_.bytes = 0;  // only so a sanitizer sees where what is in use ends
#endif
    if (room_.bytes < bytes) room_ = Room::of(bytes);
    return room_.memory.get();
  }

 private:
  Shelf& shelf_;
  Room room_;
};

// Returns room for `count` of T, the same for each Tag as long as it suffices; undefined contents.
template <class T, class Tag>
T* scratch(std::size_t count) {
  static_assert(std::is_trivially_default_constructible_v<T>);
  constinit static Shelf shelf;
  thread_local Scratch memory(shelf);
  return static_cast<T*>(memory.take(count * sizeof(T)));
}

}  // namespace holdfast
