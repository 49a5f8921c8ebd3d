// Blocking pread and pwrite, one thread per operation in flight.
#include <system_error>
#include <thread>

#include "io/backend.h"
#include "io/io_thread.h"

namespace holdfast {
namespace {

class ThreadBackend final : public Backend {
 public:
  ThreadBackend(Blocks& blocks, Lane lane, Vfs& vfs, bool direct)
      : blocks_(blocks), lane_(lane), vfs_(vfs), direct_(direct) {}

  ~ThreadBackend() override {
    for (std::thread& thread : threads_) thread.join();
  }

  // As many threads as the system gives; an error when it gives none.
  Status start(std::size_t depth) {
    try {
      for (std::size_t index = 0; index < depth; ++index) {
        threads_.push_back(start_io_thread([this] { run(); }));
      }
    } catch (const std::system_error& error) {
      if (threads_.empty()) return Status::system(error.code().value(), "start a thread");
    }
    return {};
  }

  void wake() override {}  // the threads wait in Blocks::pop

 private:
  void run() {
    while (auto block = blocks_.pop(lane_)) {
      for (bool over = false; !over;) {
        const Call call = block->next(direct_);
        over = block->take(call, vfs_.transfer(call));
      }
      // The disk writes while the next block is copied. It leaves the file's last one alone: to cut
      // off its padding would have to wait for the disk.
      const Request& request = block->open->request;
      if (!direct_ && request.operation == Operation::kWrite && blocks_.is_full(*block)) {
        vfs_.start_sync(request.fd, request.offset + block->begin, block->size);
      }
      blocks_.finish(*block);
    }
  }

  Blocks& blocks_;
  const Lane lane_;
  Vfs& vfs_;
  const bool direct_;
  std::vector<std::thread> threads_;
};

}  // namespace

Result<std::unique_ptr<Backend>> make_thread_backend(Blocks& blocks, Lane lane, Vfs& vfs,
                                                     bool direct, std::size_t depth) {
  auto backend = std::make_unique<ThreadBackend>(blocks, lane, vfs, direct);
  Status status = backend->start(depth);
  if (!status.ok()) return status;
  return std::unique_ptr<Backend>(std::move(backend));
}

}  // namespace holdfast
