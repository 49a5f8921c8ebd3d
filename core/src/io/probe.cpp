// The fastest backend that works here.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <map>

#include "holdfast/queue.h"
#include "io/descriptor.h"
#include "io/fork_lock.h"

namespace holdfast {
namespace {

constexpr std::array<const char*, 3> kBackends = {"io_uring", "direct", "buffered"};
constexpr std::size_t kProbeBytes = 4096;

std::map<dev_t, std::string> known;  // under a ForkLock

// An open file without a name, or -1 and errno.
int open_unnamed(const std::string& directory, bool direct) {
  const int flags = O_RDWR | O_CLOEXEC | (direct ? O_DIRECT : 0);
  const int fd = ::open(directory.c_str(), flags | O_TMPFILE, 0600);
  if (fd >= 0 || (errno != EOPNOTSUPP && errno != EISDIR && errno != ENOENT)) return fd;
  // File systems without O_TMPFILE (some NFS, FUSE, overlay): a name for a moment.
  constinit static std::atomic<unsigned> count = 0;
  const std::string path =
      directory + "/.holdfast-probe-" + std::to_string(::getpid()) + "-" + std::to_string(count++);
  const int named = ::open(path.c_str(), flags | O_CREAT | O_EXCL | O_NOFOLLOW, 0600);
  if (named >= 0) ::unlink(path.c_str());
  return named;
}

int run_one(Queue& queue, const Request& request) {
  if (!queue.submit(request).ok()) return EINVAL;
  const Completion completion = queue.wait().front();
  if (completion.error != 0) return completion.error;
  return completion.bytes == request.size ? 0 : EIO;
}

// Writes a page, reads it back, compares; 0 or an errno.
int try_backend(const std::string& directory, const std::shared_ptr<Vfs>& vfs,
                const std::shared_ptr<Pool>& pool, const char* backend) {
  QueueOptions options;
  options.backend = backend;
  options.depth = 1;
  auto queue = Queue::create(vfs, pool, options);
  if (!queue.ok()) return queue.status().error();
  const Descriptor file(open_unnamed(directory, queue.value()->direct()));
  if (file.get() < 0) return errno;
  std::byte* const written = pool->address(0);
  std::byte* const found = pool->address(1);
  std::memset(written, 0xa5, kProbeBytes);
  std::memset(found, 0, kProbeBytes);
  Request request{Operation::kWrite, file.get(), written, kProbeBytes, 0, 0};
  if (const int error = run_one(*queue.value(), request)) return error;
  request.operation = Operation::kRead;
  request.data = found;
  if (const int error = run_one(*queue.value(), request)) return error;
  return std::memcmp(written, found, kProbeBytes) == 0 ? 0 : EIO;
}

Result<std::string> find_backend(const std::string& directory, const std::shared_ptr<Vfs>& vfs) {
  auto pool = Pool::create(kProbeBytes, 2);
  if (!pool.ok()) return pool.status();
  int error = 0;
  for (const char* backend : kBackends) {
    error = try_backend(directory, vfs, pool.value(), backend);
    if (error == 0) return std::string(backend);
  }
  return Status::system(error, "probe " + directory + " with a buffered write of 4096 bytes at 0");
}

}  // namespace

Result<std::string> probe(const std::string& directory, std::shared_ptr<Vfs> vfs) {
  if (const char* named = std::getenv("HOLDFAST_IO"); named != nullptr && *named != '\0') {
    for (const char* backend : kBackends) {
      if (std::strcmp(named, backend) == 0) return std::string(backend);
    }
    return Status::argument("HOLDFAST_IO is \"" + std::string(named) +
                            "\": there are \"io_uring\", \"direct\" and \"buffered\"");
  }
  if (vfs == nullptr) vfs = Vfs::posix();
  struct stat info{};
  if (::stat(directory.c_str(), &info) != 0) return Status::system(errno, "probe " + directory);
  // What a faulty or recording Vfs finds is about itself, not about the device.
  if (vfs != Vfs::posix()) return find_backend(directory, vfs);
  {
    const ForkLock lock;
    if (const auto found = known.find(info.st_dev); found != known.end()) return found->second;
  }
  // Without the lock: a disk may hang. Two threads may find the same.
  Result<std::string> backend = find_backend(directory, vfs);
  const ForkLock lock;
  if (backend.ok()) known[info.st_dev] = backend.value();
  return backend;
}

}  // namespace holdfast
