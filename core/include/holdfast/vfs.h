// The one seam to the operating system: every system call that touches a file is an Operation,
// asked about before it is made and told about after. Thread-safe; descriptors belong to the
// caller. Errors: a system Status with the errno, its text naming operation, path and offset.
//
// The base class does as asked. Subclasses (recording(), faulty()) override admit() and settle(),
// and so see every call whoever makes it: this file's methods, the threads or the ring of a Queue.
#pragma once

#include <fcntl.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "holdfast/status.h"

namespace holdfast {

enum class Operation : std::uint8_t {
  kCreate,
  kOpen,
  kClose,
  kWrite,
  kRead,
  kSize,
  kAllocate,
  kTruncate,
  kSync,
  kSyncDirectory,
  kLink,
  kRename,
  kUnlink,
  kMakeDirectory,
  kRemoveDirectory,
  kListDirectory,
};
inline constexpr std::array<std::string_view, 16> kOperationNames = {
    "create",        "open",     "close",    "write",          "read",
    "size",          "allocate", "truncate", "sync",           "sync_directory",
    "link",          "rename",   "unlink",   "make_directory", "remove_directory",
    "list_directory"};
static_assert(kOperationNames.size() == std::size_t(Operation::kListDirectory) + 1);
std::string_view name_of(Operation operation);

// One system call about to be made.
struct Call {
  Operation operation;
  std::string_view path{};  // empty when the call is on a descriptor
  std::string_view second{};
  int fd = -1;
  std::uint64_t number = 0;   // a transfer's offset; the length of allocate and truncate
  std::byte* data = nullptr;  // a transfer's memory; never written to by a write
  std::size_t size = 0;       // a transfer's bytes
};

// What a Vfs lets a call do.
struct Admission {
  bool skipped = false;  // do not make the call; `result` is its result
  std::int64_t result = 0;
  std::size_t size = 0;       // bytes a transfer may ask the kernel for
  std::size_t size_seen = 0;  // bytes the caller is told of at most
  int error_after = 0;        // the call is made, then said to have failed
  bool kill_after = false;
};

struct DirectoryEntry {
  std::string name;
  const char* kind;    // "file", "directory", "other"
  std::uint64_t size;  // bytes
};

struct TraceEntry {
  Operation operation;
  std::string path;
  std::string second;
  std::uint64_t number;
  std::vector<std::byte> data;
};

struct FaultRule {
  std::string operation;  // a name of kOperationNames, or "*"
  std::uint64_t nth;      // from 1; 0 never fires
  bool persistent;
  std::string action;
  std::uint64_t argument;
};

class Vfs {
 public:
  static std::shared_ptr<Vfs> posix();
  // Logs what changes the disk, in order of completion. Keeps all bytes written in memory.
  static std::shared_ptr<Vfs> recording();
  // `base` may be null: posix. Errors: argument, when a rule cannot be. See faulty.cpp.
  static Result<std::shared_ptr<Vfs>> faulty(const std::vector<FaultRule>& rules,
                                             std::shared_ptr<Vfs> base);
  virtual ~Vfs() = default;

  Result<int> create(const std::string& path, bool direct);
  // Regular files only, and no link: ELOOP or EINVAL otherwise.
  Result<int> open(const std::string& path, bool direct);
  // The same below `root`: no part of `name` may be a link or lead out, whatever is swapped
  // meanwhile. ELOOP, ENOTDIR, EXDEV or EINVAL otherwise. `root` may be reached through links.
  Result<int> open_beneath(const std::string& root, const std::string& name, bool direct);
  // The descriptor is gone whatever the result.
  Status close(int fd);
  // The kernel starts to write large data to the disk at once, so a later sync() waits less. That
  // hint is no Operation.
  Status write(int fd, const void* data, std::size_t size, std::uint64_t offset);
  // The same hint for all that was written, however little.
  void start_sync(int fd) { ::sync_file_range(fd, 0, 0, SYNC_FILE_RANGE_WRITE); }
  // The same hint for a part of it, if that is large: at least 1 MiB.
  void start_sync(int fd, std::uint64_t offset, std::size_t size);
  // Whether a file of so many bytes seems to be in the page cache: some places all over it are. No
  // Operation.
  static bool is_cached(int fd, std::uint64_t size);
  // The kernel starts to read the file from the disk, as far as it keeps what it reads. That hint
  // is no Operation either.
  void start_read(int fd) { ::posix_fadvise(fd, 0, 0, POSIX_FADV_WILLNEED); }
  // Bytes read: fewer than `size` only at the end of the file.
  Result<std::size_t> read(int fd, void* data, std::size_t size, std::uint64_t offset);
  Result<std::uint64_t> size(int fd);
  Status allocate(int fd, std::uint64_t size);
  Status truncate(int fd, std::uint64_t size);
  Status sync(int fd);
  Status sync_directory(const std::string& path);
  Status link(const std::string& source, const std::string& target);
  Status rename(const std::string& source, const std::string& target);
  Status unlink(const std::string& path);
  Result<bool> make_directory(const std::string& path);
  Status remove_directory(const std::string& path);
  Result<std::vector<DirectoryEntry>> list_directory(const std::string& path);
  Result<std::vector<DirectoryEntry>> list_beneath(const std::string& root,
                                                   const std::string& name);

  // One pread or pwrite: bytes done, or -errno. `call` is a kRead or kWrite.
  std::int64_t transfer(const Call& call);

  // The hooks around every call. settle() gets the kernel's result (or the skipped one's) and
  // returns what the caller is to see. Both may be called from any thread.
  virtual Admission admit(const Call& call);
  virtual std::int64_t settle(const Call& call, const Admission& admission, std::int64_t result);

  virtual std::map<std::string, std::uint64_t> calls() const { return {}; }
  virtual std::vector<TraceEntry> trace() const { return {}; }
};

// Bytes of `fd` from `offset` to its end, without an Operation: bounds a buffer before a read.
std::uint64_t bytes_after(int fd, std::uint64_t offset);

// Opens the directory that `path` is in, and closes it: a client of NFS then asks its server what
// that directory holds ("close-to-open"). Else it answers from its caches for up to a minute, also
// that a name is not there. Changes nothing, and says nothing of errors.
void look_anew(const std::string& path);

// The nearest directory above `path` with a file `name` that begins so; empty: there is none, or
// none that can be read. Without an Operation. Errors: ENOTDIR.
Result<std::string> above_with(const std::string& path, const std::string& name,
                               std::string_view beginning);

// Interrupted calls (EINTR, EAGAIN) are made again, this often in a row without progress.
inline constexpr int kRetriesMax = 100;

}  // namespace holdfast
