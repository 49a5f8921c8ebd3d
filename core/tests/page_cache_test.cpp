// What is asked of the page cache, and hints to it.
#include <fcntl.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "check.h"
#include "child.h"
#include "files.h"
#include "holdfast/queue.h"
#include "holdfast/vfs.h"

namespace holdfast {
namespace {

// Else the data stays in memory, and a copy waits for its last sync.
TEST(large_writes_go_to_the_disk_at_once) {
  constexpr unsigned kCachestat = 451;  // of Linux 6.5, newer than the headers that may be here
  struct {
    std::uint64_t offset = 0, size = 0;
  } range;
  struct {
    std::uint64_t cached, dirty, in_writeback, evicted, recently_evicted;
  } pages{};
  const TemporaryDirectory directory;
  const auto vfs = Vfs::posix();
  const int fd = vfs->create(directory / "file", false).value();
  const std::string bytes(8 << 20, 'x');
  CHECK(vfs->write(fd, bytes.data(), bytes.size(), 0).ok());
  if (::syscall(kCachestat, fd, &range, &pages, 0) != 0) return check::skip("no cachestat");
  CHECK_EQ(pages.dirty, 0u);
  in_child([&] {
    forbid(SYS_sync_file_range, EPERM);
    CHECK(vfs->write(fd, bytes.data(), bytes.size(), 0).ok());
  });
  CHECK(vfs->close(fd).ok());
}

TEST(a_file_is_cached_where_all_of_it_is_in_the_page_cache) {
  const TemporaryDirectory directory;
  const auto vfs = Vfs::posix();
  constexpr std::size_t kBytes = (8 << 20) + 1;
  const int fd = vfs->create(directory / "file", false).value();
  CHECK(!Vfs::is_cached(fd, 0));
  // In small pieces: the kernel drops them alone.
  const std::string bytes(64 << 10, 'x');
  const auto fill = [&] {
    for (std::size_t at = 0; at < kBytes; at += bytes.size()) {
      CHECK(vfs->write(fd, bytes.data(), std::min(bytes.size(), kBytes - at), at).ok());
    }
    CHECK(vfs->sync(fd).ok());
  };
  fill();
  char byte = 0;
  const iovec one{&byte, 1};
  if (::preadv2(fd, &one, 1, 0, RWF_NOWAIT) != 1) return check::skip("no RWF_NOWAIT");
  CHECK(Vfs::is_cached(fd, kBytes));
  CHECK(!Vfs::is_cached(fd, 2 * kBytes));  // it would have to be longer
  for (const off_t gone : {0, 4 << 20, 7 << 20}) {
    CHECK_EQ(::posix_fadvise(fd, gone, 2 << 20, POSIX_FADV_DONTNEED), 0);
    CHECK(!Vfs::is_cached(fd, kBytes));
    CHECK_EQ(::posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED), 0);
    fill();
    CHECK(Vfs::is_cached(fd, kBytes));
  }
  CHECK(vfs->close(fd).ok());
}

TEST(a_cached_file_is_written_and_read_where_no_further_thread_can_be_had) {
  const TemporaryDirectory directory;
  in_child([&] {
    const auto pool = Pool::create(1 << 20, 2).value();
    fill_random(pool->address(0), 1 << 20, 1);
    auto made = Queue::create(Vfs::posix(), pool, {"direct", 2, 64 << 10});
    const auto queue = std::move(made.value());
    forbid_threads();
    const int fd = Vfs::posix()->create(directory / "file", false).value();
    CHECK(queue->submit({Operation::kWrite, fd, pool->address(0), 1 << 20, 0, 1}, true).ok());
    CHECK_EQ(queue->wait().at(0).bytes, 1u << 20);
    CHECK(queue->submit({Operation::kRead, fd, pool->address(1), 1 << 20, 0, 2}, true).ok());
    CHECK_EQ(queue->wait().at(0).bytes, 1u << 20);
    CHECK(std::memcmp(pool->address(0), pool->address(1), 1 << 20) == 0);
    CHECK(Vfs::posix()->close(fd).ok());
  });
}

}  // namespace
}  // namespace holdfast
