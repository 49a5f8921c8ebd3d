#include "holdfast/queue.h"

#include <unistd.h>

#include <utility>

#include "io/backend.h"

namespace holdfast {
namespace {

constexpr std::size_t kDepthMax = 1024;
constexpr std::size_t kCachedThreads = 2;  // that copy from and to the page cache
constexpr std::size_t kBlockBytesMax = 1 << 30;  // Linux moves at most 2 GiB - 4 KiB per call

Status check(const QueueOptions& options) {
  const auto& [backend, depth, block_bytes] = options;
  if (backend != "io_uring" && backend != "direct" && backend != "buffered") {
    return Status::argument("backend \"" + backend +
                            "\": there are \"io_uring\", \"direct\" and \"buffered\"");
  }
  if (depth < 1 || depth > kDepthMax) {
    return Status::argument("queue depth " + std::to_string(depth) + ": must be 1 to " +
                            std::to_string(kDepthMax));
  }
  if (block_bytes < kBlockAlignBytes || block_bytes > kBlockBytesMax ||
      block_bytes % kBlockAlignBytes != 0) {
    return Status::argument("block of " + std::to_string(block_bytes) +
                            " bytes: must be a multiple of 4096, at most 1 GiB");
  }
  return {};
}

bool aligned(const Request& request) {
  const auto address = reinterpret_cast<std::uintptr_t>(request.data);
  return (address | request.size | request.offset) % kBlockAlignBytes == 0;
}

}  // namespace

Queue::Queue(std::shared_ptr<Vfs> vfs, std::shared_ptr<Pool> pool, QueueOptions options)
    : vfs_(std::move(vfs)),
      pool_(std::move(pool)),
      options_(std::move(options)),
      owner_(::getpid()),
      blocks_(std::make_unique<Blocks>(options_.block_bytes)) {}

Result<std::unique_ptr<Queue>> Queue::create(std::shared_ptr<Vfs> vfs, std::shared_ptr<Pool> pool,
                                             const QueueOptions& options) {
  if (Status status = check(options); !status.ok()) return status;
  std::unique_ptr<Queue> queue(new Queue(std::move(vfs), std::move(pool), options));
  auto backend =
      options.backend == "io_uring"
          ? make_uring_backend(*queue->blocks_, *queue->vfs_, *queue->pool_, options.depth)
          : make_thread_backend(*queue->blocks_, Lane::kMain, *queue->vfs_, queue->direct(),
                                options.depth);
  if (!backend.ok()) return backend.status();
  queue->backend_ = std::move(backend.value());
  return queue;
}

Queue::~Queue() {
  if (::getpid() != owner_) {
    // The threads did not come along through fork(): joining them would hang.
    static_cast<void>(backend_.release());
    static_cast<void>(cached_.release());
    static_cast<void>(blocks_.release());
    return;
  }
  blocks_->cancel();
  close();
}

std::size_t Queue::pending() const {
  return blocks_->pending();
}

Status Queue::submit(const Request& request, bool cached) {
  if (backend_ == nullptr) return Status::argument("submit to a closed queue");
  if (direct() && !cached && !aligned(request)) {
    return Status::argument("a " + options_.backend +
                            " queue needs address, size and offset to be multiples of 4096; got " +
                            std::to_string(reinterpret_cast<std::uintptr_t>(request.data)) + ", " +
                            std::to_string(request.size) + " and " +
                            std::to_string(request.offset));
  }
  if (cached && request.size <= options_.block_bytes && pending() == 0) {
    blocks_->add_whole(carry_out(request, *vfs_));
    return {};
  }
  if (cached && direct()) {
    if (cached_ == nullptr) {
      auto made = make_thread_backend(*blocks_, Lane::kCached, *vfs_, false, kCachedThreads);
      if (made.ok()) cached_ = std::move(made.value());
    }
    if (cached_ == nullptr) {  // the system gives no thread: it is done here, and takes longer
      blocks_->add_whole(carry_out(request, *vfs_));
    } else {
      blocks_->add(request, Lane::kCached);
    }
    return {};
  }
  blocks_->add(request, Lane::kMain);
  backend_->wake();
  return {};
}

std::vector<Completion> Queue::wait() {
  return blocks_->wait();
}

void Queue::close() {
  if (backend_ == nullptr || ::getpid() != owner_) return;
  blocks_->stop();
  backend_->wake();
  backend_.reset();
  cached_.reset();
}

}  // namespace holdfast
