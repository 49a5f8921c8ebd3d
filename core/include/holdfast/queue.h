// Reads and writes in flight on the files of one Vfs.
// One caller at a time. The caller keeps descriptor and memory alive until wait() has handed the
// request back. That is never before the kernel has done with them, even when its ring breaks. The
// Queue keeps the Vfs and the Pool alive. Requests on one file complete in any order. Errors of
// create(): argument, or system when a ring cannot be made. Errors of a request come with its
// Completion, as do injected ones. After a fork() the child must not use the Queue; destroying it
// there leaks, and harms nothing.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "holdfast/pool.h"
#include "holdfast/status.h"
#include "holdfast/vfs.h"

namespace holdfast {

struct Request {
  Operation operation;  // kRead or kWrite
  int fd;
  std::byte* data;
  std::size_t size;
  std::uint64_t offset;
  std::uint64_t tag;
};

struct Completion {
  std::uint64_t tag;
  std::size_t bytes;  // from the request's beginning without a gap
  int error;          // of the first block that failed, in file order; 0 when none did
};

struct QueueOptions {
  std::string backend = "buffered";  // io_uring, direct, buffered
  std::size_t depth = 16;
  std::size_t block_bytes = 2 << 20;
};

class Backend;
class Blocks;

class Queue {
 public:
  static Result<std::unique_ptr<Queue>> create(std::shared_ptr<Vfs> vfs, std::shared_ptr<Pool> pool,
                                               const QueueOptions& options);
  // Requests not yet begun are dropped, those begun are waited for.
  ~Queue();
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;

  const std::string& backend() const { return options_.backend; }
  bool direct() const { return options_.backend != "buffered"; }
  // Requests submitted and not yet handed back.
  std::size_t pending() const;

  // `cached`: the file goes through the page cache, whatever the backend. A request of one block is
  // then carried out here, in the caller's thread, where nothing else is pending; the next wait()
  // hands it back. Others have threads of their own, where the system gives any. Errors: argument,
  // when the queue is closed, or when it is direct, the file is not cached, and the memory, the
  // size or the offset is no multiple of kBlockAlignBytes.
  Status submit(const Request& request, bool cached = false);
  // Blocks until a request is whole; empty only when none is pending.
  std::vector<Completion> wait();
  // Finishes everything submitted and ends the threads; wait() still hands results back.
  void close();

 private:
  Queue(std::shared_ptr<Vfs> vfs, std::shared_ptr<Pool> pool, QueueOptions options);

  std::shared_ptr<Vfs> vfs_;
  std::shared_ptr<Pool> pool_;
  QueueOptions options_;
  pid_t owner_;
  std::unique_ptr<Blocks> blocks_;
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Backend> cached_;  // of cached files, where `backend_` is direct; made late
};

// The fastest backend that works in `directory`: io_uring, direct, buffered. Writes and reads back
// 4 KiB of an unnamed file through each; the answer is remembered by device (with the posix Vfs).
// HOLDFAST_IO in the environment names one and skips the probe. Errors: argument, when it names
// none there is; system, when not even a buffered write works.
Result<std::string> probe(const std::string& directory, std::shared_ptr<Vfs> vfs);

}  // namespace holdfast
