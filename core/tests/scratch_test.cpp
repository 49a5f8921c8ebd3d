// What a thread leaves, another takes; no two have the same.
#include "codec/scratch.h"

#include <cstdint>
#include <future>
#include <thread>

#include "check.h"

namespace holdfast {
namespace {

struct First;
struct Second;
struct Third;

// What a thread of its own gets, and leaves when it ends.
template <class Tag>
std::uint8_t* of_a_thread(std::size_t count) {
  std::uint8_t* found = nullptr;
  std::thread([&] { found = scratch<std::uint8_t, Tag>(count); }).join();
  return found;
}

}  // namespace

TEST(a_thread_keeps_its_memory_and_the_next_one_takes_it) {
  std::uint8_t *first = nullptr, *less = nullptr;
  std::thread([&] {
    first = scratch<std::uint8_t, First>(1000);
    less = scratch<std::uint8_t, First>(10);
  }).join();
  CHECK_EQ(reinterpret_cast<std::uintptr_t>(first) % 64, 0u);
#ifndef HOLDFAST_SANITIZE  // which gives out new memory each time
  CHECK(less == first);
  CHECK(of_a_thread<First>(1000) == first);
  CHECK(of_a_thread<First>(1) == first);
#endif
}

TEST(memory_that_is_too_small_is_not_kept) {
  std::thread([] {
    scratch<std::uint8_t, Second>(16);
    std::uint8_t* more = scratch<std::uint8_t, Second>(1 << 20);
    more[(1 << 20) - 1] = 1;  // a sanitizer would tell
  }).join();
  of_a_thread<Second>(1 << 20)[0] = 1;  // the one of a mebibyte was left, and nothing else
  std::thread([] {
    const std::uint8_t* const mine = scratch<std::uint8_t, Second>(1);
    CHECK(mine != nullptr && of_a_thread<Second>(1) != mine);
  }).join();
}

TEST(threads_at_once_have_memory_of_their_own) {
  std::uint8_t* const mine = scratch<std::uint8_t, Third>(100);
  std::promise<std::uint8_t*> found;
  std::promise<void> end;
  std::thread other([&] {
    found.set_value(scratch<std::uint8_t, Third>(100));
    end.get_future().wait();
  });
  std::uint8_t* const theirs = found.get_future().get();
  CHECK(theirs != mine);
  std::uint8_t* const third = of_a_thread<Third>(100);
  CHECK(third != mine && third != theirs);
  end.set_value();
  other.join();
}

// As in a child that was forked while another thread had the mutex.
TEST(a_locked_shelf_gives_and_takes_nothing) {
  Shelf shelf;
  shelf.put(Room::of(100));
  CHECK_EQ(shelf.left->size(), 1u);
  {
    const std::lock_guard lock(shelf.mutex);
    std::thread([&] {
      CHECK_EQ(shelf.take().bytes, 0u);
      Scratch scratch(shelf);
      CHECK(scratch.take(10) != nullptr);
    }).join();
    CHECK_EQ(shelf.left->size(), 1u);
  }
  shelf.put({});  // of a thread that never needed any
  CHECK_EQ(shelf.left->size(), 1u);
  CHECK_EQ(shelf.take().bytes, 100u);
  CHECK_EQ(shelf.take().bytes, 0u);
  delete shelf.left;
}

}  // namespace holdfast
