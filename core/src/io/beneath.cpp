#include "io/beneath.h"

#include <fcntl.h>
#include <linux/openat2.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>

#include "io/descriptor.h"

namespace holdfast {
namespace {

constexpr int kPlace = O_PATH | O_DIRECTORY | O_CLOEXEC;

}  // namespace

int open_beneath(const std::string& root, const std::string& name, int flags) {
  constinit static std::atomic<bool> has_openat2{true};
  if (name.empty() || !has_openat2.load(std::memory_order_relaxed)) {
    return walk_beneath(root, name, flags);
  }
  const Descriptor place(::open(root.c_str(), kPlace));
  if (place.get() < 0) return -errno;
  open_how how{};
  how.flags = static_cast<unsigned>(flags);
  how.resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS;
  const long fd = ::syscall(SYS_openat2, place.get(), name.c_str(), &how, sizeof how);
  if (fd >= 0) return static_cast<int>(fd);
  if (errno != ENOSYS && errno != EPERM) return -errno;
  has_openat2.store(false, std::memory_order_relaxed);
  return walk_beneath(root, name, flags);
}

int walk_beneath(const std::string& root, const std::string& name, int flags) {
  if (name.empty()) {
    const int fd = ::open(root.c_str(), flags);
    return fd < 0 ? -errno : fd;
  }
  Descriptor place(::open(root.c_str(), kPlace));
  if (place.get() < 0) return -errno;
  for (std::size_t start = 0;;) {
    const std::size_t end = name.find('/', start);
    const bool last = end == std::string::npos;
    const std::string part = name.substr(start, last ? end : end - start);
    if (part.empty() || part == "." || part == "..") return -EINVAL;
    const int fd = ::openat(place.get(), part.c_str(), (last ? flags : kPlace) | O_NOFOLLOW);
    if (fd < 0) return -errno;
    if (last) return fd;
    place = Descriptor(fd);
    start = end + 1;
  }
}

}  // namespace holdfast
