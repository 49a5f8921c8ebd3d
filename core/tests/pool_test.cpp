#include "holdfast/pool.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>

#include "check.h"
#include "child.h"

namespace holdfast {

TEST(slots_are_aligned_zeroed_writable_and_apart) {
  for (const std::size_t slot_bytes : {1, 4096, 5000, (2 << 20) + 1}) {
    auto made = Pool::create(slot_bytes, 3);
    if (!CHECK(made.ok())) continue;
    const Pool& pool = *made.value();
    CHECK_EQ(pool.slots(), 3u);
    CHECK(pool.slot_bytes() >= slot_bytes && pool.slot_bytes() < slot_bytes + kBlockAlignBytes);
    for (std::size_t slot = 0; slot < 3; ++slot) {
      CHECK_EQ(reinterpret_cast<std::uintptr_t>(pool.address(slot)) % kBlockAlignBytes, 0u);
      CHECK_EQ(int(*pool.address(slot)), 0);
      std::memset(pool.address(slot), static_cast<int>(slot) + 1, pool.slot_bytes());
    }
    for (std::size_t slot = 0; slot < 3; ++slot) {
      const std::byte* last = pool.address(slot) + pool.slot_bytes() - 1;
      CHECK_EQ(std::size_t(*pool.address(slot)), slot + 1);
      CHECK_EQ(std::size_t(*last), slot + 1);
    }
  }
}

TEST(a_large_pool_is_touched_by_several_threads) {
  auto made = Pool::create((520 << 20) + 4096, 1);
  if (!CHECK(made.ok())) return;
  CHECK_EQ(int(made.value()->address(0)[520 << 20]), 0);
}

TEST(a_pool_that_cannot_be_is_an_error_with_its_kind) {
  CHECK(Pool::create(0, 1).status().kind() == Status::Kind::kArgument);
  CHECK(Pool::create(1, 0).status().kind() == Status::Kind::kArgument);
  CHECK(Pool::create(SIZE_MAX, 1).status().kind() == Status::Kind::kMemory);
  CHECK(Pool::create(SIZE_MAX / 2, 3).status().kind() == Status::Kind::kMemory);
  const Status huge = Pool::create(std::size_t{1} << 60, 1).status();
  CHECK(huge.kind() == Status::Kind::kMemory);
  CHECK_EQ(huge.error(), ENOMEM);
}

// Linux before 5.14, which cannot populate memory, and one at whose limit no thread is started.
TEST(a_pool_is_made_where_the_kernel_helps_with_nothing) {
  in_child([] {
    forbid(SYS_madvise, EINVAL);
    forbid_threads();
    auto made = Pool::create((520 << 20) + 4096, 1);
    if (!CHECK(made.ok())) return;
    for (const std::size_t at : {0, 300 << 20, 520 << 20}) {
      // Pages that were touched are resident.
      unsigned char resident = 0;
      CHECK_EQ(::mincore(made.value()->address(0) + at, 4096, &resident), 0);
      CHECK_EQ(resident & 1, 1);
      CHECK_EQ(int(made.value()->address(0)[at]), 0);
    }
  });
}

TEST(a_child_of_fork_does_not_inherit_the_pool) {
  auto made = Pool::create(4096, 1);
  if (!CHECK(made.ok())) return;
  int ends[2];
  if (!CHECK(::pipe(ends) == 0)) return;
  in_child([&] {
    // The kernel's own access tells without a signal: EFAULT.
    const ssize_t written = ::write(ends[1], made.value()->address(0), 1);
    CHECK(written < 0 && errno == EFAULT);
    // Whatever the child maps there meanwhile must outlive its copy of the pool.
    void* at = made.value()->address(0);
    void* mine =
        ::mmap(at, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    made.value().reset();
    *static_cast<volatile char*>(mine) = 1;
  });
  ::close(ends[0]);
  ::close(ends[1]);
}

}  // namespace holdfast
