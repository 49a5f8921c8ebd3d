// What is asked of the page cache, and hints to it.
#include <fcntl.h>
#include <sys/uio.h>

#include <cstddef>

#include "holdfast/vfs.h"

namespace holdfast {
namespace {

constexpr std::size_t kFlushBytes = 1 << 20;  // of a large write
constexpr std::uint64_t kPlaces = 16;         // of a file, that are looked at

}  // namespace

void Vfs::start_sync(int fd, std::uint64_t offset, std::size_t size) {
  if (size >= kFlushBytes) ::sync_file_range(fd, off_t(offset), off_t(size), SYNC_FILE_RANGE_WRITE);
}

bool Vfs::is_cached(int fd, std::uint64_t size) {
  // Of what is not there the kernel begins to read a page, and without the advice very many.
  ::posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM);
  bool cached = size > 0;
  for (std::uint64_t place = 0; cached && place <= kPlaces; ++place) {
    std::byte byte;
    const iovec one{&byte, 1};
    const auto offset = off_t((size - 1) / kPlaces * place);
    // Fails where the disk would have to be waited for, and where the file system cannot say.
    cached = ::preadv2(fd, &one, 1, offset, RWF_NOWAIT) == 1;
  }
  ::posix_fadvise(fd, 0, 0, POSIX_FADV_NORMAL);
  return cached;
}

}  // namespace holdfast
