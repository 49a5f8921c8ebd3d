#include "holdfast/vfs.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>

#include "io/beneath.h"
#include "io/descriptor.h"
#include "io/fresh.h"

namespace holdfast {
namespace {

constexpr std::size_t kTransferBytesMax = 1 << 30;  // Linux moves at most 2 GiB - 4 KiB per call
constexpr mode_t kFileMode = 0666;                  // the umask decides
constexpr mode_t kDirectoryMode = 0777;
constexpr int kStaleAttempts = 3;  // one is enough, unless it is removed again meanwhile

std::int64_t or_error(std::int64_t result) {
  return result < 0 ? -errno : result;
}

bool interrupted(std::int64_t result) {
  return result == -EINTR || result == -EAGAIN;
}

// Asks the Vfs, makes the call, tells the Vfs; again while a signal interrupts it.
template <class Body>
std::int64_t perform(Vfs& vfs, const Call& call, Body body) {
  std::int64_t result = 0;
  for (int attempt = 0; attempt <= kRetriesMax; ++attempt) {
    const Admission admission = vfs.admit(call);
    result = admission.skipped ? admission.result : body(admission);
    result = vfs.settle(call, admission, result);
    if (!interrupted(result)) break;
  }
  return result;
}

std::string path_of(int fd) {
  char path[4096];
  char link[64];
  std::snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  const ssize_t size = ::readlink(link, path, sizeof path);
  if (size < 0) return "descriptor " + std::to_string(fd);
  return std::string(path, static_cast<std::size_t>(size));
}

Status outcome(const Call& call, std::int64_t result) {
  if (result >= 0) return {};
  std::string what(name_of(call.operation));
  what += ' ';
  what += call.fd >= 0 ? path_of(call.fd) : std::string(call.path);
  if (!call.second.empty()) what.append(" to ").append(call.second);
  if (call.size > 0) what += " (" + std::to_string(call.size) + " bytes)";
  if (call.fd >= 0 && call.operation != Operation::kSync && call.operation != Operation::kClose) {
    what += call.size > 0 ? " at offset " : " size ";
    what += std::to_string(call.number);
  }
  return Status::system(static_cast<int>(-result), what);
}

// A NUL would silently name another file.
bool has_nul(const std::string& path) {
  return path.find('\0') != std::string::npos;
}

std::string joined(const std::string& root, const std::string& name) {
  return name.empty() ? root : root + '/' + name;
}

template <class Body>
Status on_path(Vfs& vfs, Operation operation, const std::string& path, Body body) {
  const Call call{.operation = operation, .path = path};
  if (has_nul(path)) return outcome(call, -EINVAL);
  return outcome(call, perform(vfs, call, [&](const Admission&) { return or_error(body()); }));
}

template <class Body>
Status on_two_paths(Vfs& vfs, Operation operation, const std::string& source,
                    const std::string& target, Body body) {
  const Call call{.operation = operation, .path = source, .second = target};
  if (has_nul(source) || has_nul(target)) return outcome(call, -EINVAL);
  return outcome(call, perform(vfs, call, [&](const Admission&) { return or_error(body()); }));
}

template <class Body>
Status on_descriptor(Vfs& vfs, Operation operation, int fd, std::uint64_t number, Body body) {
  const Call call{.operation = operation, .fd = fd, .number = number};
  return outcome(call, perform(vfs, call, [&](const Admission&) { return or_error(body()); }));
}

template <class Body>
Result<int> make_descriptor(Vfs& vfs, Operation operation, const std::string& path, Body body) {
  const Call call{.operation = operation, .path = path};
  if (has_nul(path)) return outcome(call, -EINVAL);
  const std::int64_t fd = perform(vfs, call, [&](const Admission&) { return body(); });
  if (fd < 0) return outcome(call, fd);
  return static_cast<int>(fd);
}

// Looks for something by its name, as the server of a network file system has it. What another
// machine has removed is stale where this one had it open, and then it is looked for by name again.
template <class Look>
std::int64_t look_by_name(const std::string& root, const std::string& name, Look look) {
  std::int64_t result = -ESTALE;
  for (int attempt = 0; attempt < kStaleAttempts && result == -ESTALE; ++attempt) {
    look_anew_beneath(root, name);
    result = look();
  }
  return result;
}

// link(2); where a client of NFS asked again, since the first reply was lost, it is told EEXIST.
int link_once(const std::string& source, const std::string& target) {
  if (::link(source.c_str(), target.c_str()) == 0) return 0;
  const int error = errno;
  if (error == EEXIST && id_of(source).is_that_of(id_of(target))) return 0;
  errno = error;
  return -1;
}

// rename(2); the same, with ENOENT.
int rename_once(const std::string& source, const std::string& target) {
  const FileId moved = id_of(source);
  if (::rename(source.c_str(), target.c_str()) == 0) return 0;
  const int error = errno;
  if (error == ENOENT && moved.is_that_of(id_of(target))) return 0;
  errno = error;
  return -1;
}

// Opens a file by a function of flags: a descriptor, or -errno.
template <class Open>
std::int64_t open_regular(bool direct, Open open) {
  // O_NONBLOCK: opening a FIFO would wait for its writer.
  const int flags = O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC | (direct ? O_DIRECT : 0);
  const int found = out_of_standard_places(open(flags));
  if (found < 0) return found == -ENXIO || found == -ENODEV ? -EINVAL : found;
  Descriptor file(found);
  struct stat info{};
  if (::fstat(file.get(), &info) != 0) return -errno;
  if (!S_ISREG(info.st_mode)) return -EINVAL;
  // A ring would answer EAGAIN where a read has to wait, were O_NONBLOCK left on.
  if (::fcntl(file.get(), F_SETFL, flags & ~(O_NONBLOCK | O_NOFOLLOW)) != 0) return -errno;
  return file.release();
}

std::int64_t list_entries(const std::string& root, const std::string& name,
                          std::vector<DirectoryEntry>& entries) {
  const int found = open_beneath(root, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (found < 0) return found;
  Descriptor place(found);
  DIR* directory = ::fdopendir(place.get());
  if (directory == nullptr) return -errno;
  place.release();  // closedir closes it
  entries.clear();
  errno = 0;
  while (const dirent* entry = ::readdir(directory)) {
    const std::string name = entry->d_name;
    struct stat info{};
    if (name == "." || name == "..") continue;
    if (::fstatat(::dirfd(directory), entry->d_name, &info, AT_SYMLINK_NOFOLLOW) != 0) {
      if (errno != ENOENT) break;  // removed meanwhile: it is not there
      errno = 0;
      continue;
    }
    const char* kind = S_ISREG(info.st_mode)   ? "file"
                       : S_ISDIR(info.st_mode) ? "directory"
                                               : "other";
    entries.push_back({name, kind, static_cast<std::uint64_t>(info.st_size)});
    errno = 0;
  }
  const int error = errno;
  ::closedir(directory);
  std::sort(entries.begin(), entries.end(),
            [](const auto& left, const auto& right) { return left.name < right.name; });
  return -error;
}

// Made as the core is loaded: a child that was forked while it is made would wait for ever.
const std::shared_ptr<Vfs> posix_vfs = std::make_shared<Vfs>();

}  // namespace

std::string_view name_of(Operation operation) {
  return kOperationNames[static_cast<std::size_t>(operation)];
}

std::uint64_t bytes_after(int fd, std::uint64_t offset) {
  struct stat info{};
  if (::fstat(fd, &info) != 0) return 0;
  const auto size = static_cast<std::uint64_t>(info.st_size);
  return offset < size ? size - offset : 0;
}

std::shared_ptr<Vfs> Vfs::posix() {
  return posix_vfs;
}

Admission Vfs::admit(const Call& call) {
  return {.size = call.size, .size_seen = call.size};
}

std::int64_t Vfs::settle(const Call&, const Admission&, std::int64_t result) {
  return result;
}

Result<int> Vfs::create(const std::string& path, bool direct) {
  const int flags = O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC | (direct ? O_DIRECT : 0);
  return make_descriptor(*this, Operation::kCreate, path, [&] {
    const StandardPlaces taken;  // or another thread writes to a closed stderr, and into this file
    return out_of_standard_places(int(or_error(::open(path.c_str(), flags, kFileMode))));
  });
}

Result<int> Vfs::open(const std::string& path, bool direct) {
  const auto open = [&](int flags) { return int(or_error(::open(path.c_str(), flags))); };
  return make_descriptor(*this, Operation::kOpen, path, [&] { return open_regular(direct, open); });
}

Result<int> Vfs::open_beneath(const std::string& root, const std::string& name, bool direct) {
  const auto open = [&](int flags) { return holdfast::open_beneath(root, name, flags); };
  const std::string path = joined(root, name);
  return make_descriptor(*this, Operation::kOpen, path, [&] {
    return look_by_name(root, name, [&] { return open_regular(direct, open); });
  });
}

Status Vfs::close(int fd) {
  const Call call{.operation = Operation::kClose, .fd = fd};
  const Admission admission = admit(call);
  // Linux frees the descriptor even when close() fails, EINTR included: never call it again. The
  // copy is for its name, which takes longer to find than to close a file; it takes no place of
  // stdin, stdout or stderr.
  const Descriptor copy(::fcntl(fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1));
  const std::int64_t closed = or_error(::close(fd));
  const std::int64_t result =
      settle(call, admission, admission.skipped ? admission.result : closed);
  if (result >= 0) return {};
  return Status::system(static_cast<int>(-result), "close " + path_of(copy.get()));
}

std::int64_t Vfs::transfer(const Call& call) {
  const Admission admission = admit(call);
  std::int64_t result = admission.result;
  if (!admission.skipped) {
    const auto offset = static_cast<off_t>(call.number);
    result = or_error(call.operation == Operation::kWrite
                          ? ::pwrite(call.fd, call.data, admission.size, offset)
                          : ::pread(call.fd, call.data, admission.size, offset));
  }
  return settle(call, admission, result);
}

Status Vfs::write(int fd, const void* data, std::size_t size, std::uint64_t offset) {
  auto* bytes = static_cast<std::byte*>(const_cast<void*>(data));
  int retries = 0;
  for (std::size_t done = 0; done < size;) {
    const Call call{.operation = Operation::kWrite,
                    .fd = fd,
                    .number = offset + done,
                    .data = bytes + done,
                    .size = std::min(size - done, kTransferBytesMax)};
    const std::int64_t result = transfer(call);
    if (result > 0) {
      done += static_cast<std::size_t>(result);
      retries = 0;
    } else if (result == 0 || !interrupted(result) || ++retries > kRetriesMax) {
      return outcome(call, result == 0 ? -EIO : result);
    }
  }
  start_sync(fd, offset, size);
  return {};
}

Result<std::size_t> Vfs::read(int fd, void* data, std::size_t size, std::uint64_t offset) {
  std::size_t done = 0;
  int retries = 0;
  while (done < size) {
    const Call call{.operation = Operation::kRead,
                    .fd = fd,
                    .number = offset + done,
                    .data = static_cast<std::byte*>(data) + done,
                    .size = std::min(size - done, kTransferBytesMax)};
    const std::int64_t result = transfer(call);
    if (result == 0) break;
    if (result > 0) {
      done += static_cast<std::size_t>(result);
      retries = 0;
    } else if (!interrupted(result) || ++retries > kRetriesMax) {
      return outcome(call, result);
    }
  }
  return done;
}

Result<std::uint64_t> Vfs::size(int fd) {
  struct stat info{};
  Status status = on_descriptor(*this, Operation::kSize, fd, 0, [&] { return ::fstat(fd, &info); });
  if (!status.ok()) return status;
  return static_cast<std::uint64_t>(info.st_size);
}

Status Vfs::allocate(int fd, std::uint64_t size) {
  if (size == 0) return {};  // fallocate refuses it
  return on_descriptor(*this, Operation::kAllocate, fd, size, [&] {
    const int result = ::fallocate(fd, 0, 0, static_cast<off_t>(size));
    // It only helps: a file system may not have it, and a sandbox may refuse it.
    const bool is_refused = errno == EOPNOTSUPP || errno == ENOSYS || errno == EPERM;
    return result < 0 && is_refused ? 0 : result;
  });
}

Status Vfs::truncate(int fd, std::uint64_t size) {
  return on_descriptor(*this, Operation::kTruncate, fd, size,
                       [&] { return ::ftruncate(fd, static_cast<off_t>(size)); });
}

Status Vfs::sync(int fd) {
  return on_descriptor(*this, Operation::kSync, fd, 0, [&] { return ::fsync(fd); });
}

Status Vfs::sync_directory(const std::string& path) {
  return on_path(*this, Operation::kSyncDirectory, path, [&] {
    const int fd = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return fd;
    const int result = ::fsync(fd);
    const int error = errno;
    ::close(fd);
    errno = error;
    return result;
  });
}

Status Vfs::link(const std::string& source, const std::string& target) {
  return on_two_paths(*this, Operation::kLink, source, target,
                      [&] { return link_once(source, target); });
}

Status Vfs::rename(const std::string& source, const std::string& target) {
  return on_two_paths(*this, Operation::kRename, source, target,
                      [&] { return rename_once(source, target); });
}

Status Vfs::unlink(const std::string& path) {
  return on_path(*this, Operation::kUnlink, path, [&] { return ::unlink(path.c_str()); });
}

Result<bool> Vfs::make_directory(const std::string& path) {
  bool made = true;
  Status status = on_path(*this, Operation::kMakeDirectory, path, [&] {
    if (::mkdir(path.c_str(), kDirectoryMode) == 0) return 0;
    struct stat info{};
    if (errno != EEXIST) return -1;
    if (::stat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode)) {
      made = false;
      return 0;
    }
    errno = EEXIST;
    return -1;
  });
  if (!status.ok()) return status;
  return made;
}

Status Vfs::remove_directory(const std::string& path) {
  return on_path(*this, Operation::kRemoveDirectory, path, [&] { return ::rmdir(path.c_str()); });
}

Result<std::vector<DirectoryEntry>> Vfs::list_directory(const std::string& path) {
  return list_beneath(path, "");
}

Result<std::vector<DirectoryEntry>> Vfs::list_beneath(const std::string& root,
                                                      const std::string& name) {
  std::vector<DirectoryEntry> entries;
  const std::string path = joined(root, name);
  const Call call{.operation = Operation::kListDirectory, .path = path};
  if (has_nul(path)) return outcome(call, -EINVAL);
  const auto list = [&](const Admission&) {
    return look_by_name(root, name, [&] { return list_entries(root, name, entries); });
  };
  Status status = outcome(call, perform(*this, call, list));
  if (!status.ok()) return status;
  return entries;
}

}  // namespace holdfast
