// Requests cut into blocks, and the blocks' way from the caller to a backend's threads and back.
// Thread-safe throughout. Internal to the core.
#pragma once

#include <array>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "holdfast/queue.h"

namespace holdfast {

// Whose threads carry a request out.
enum class Lane { kMain, kCached };

// Submitted, not yet whole. All but `request` is guarded by the mutex of its Blocks.
struct OpenRequest {
  Request request;
  Lane lane;
  std::size_t bytes_good;        // up to the first block that was not whole
  std::size_t bytes_begun = 0;   // cut into blocks so far, in file order
  std::size_t blocks_begun = 0;  // and not finished
  int error = 0;                 // of the first block, in file order, that failed
};

// A part of a request, owned by one thread at a time.
struct Block {
  std::shared_ptr<OpenRequest> open;
  std::size_t begin = 0;  // within the request
  std::size_t size = 0;
  std::size_t done = 0;
  int error = 0;
  int retries = 0;  // in a row without progress

  // The part to ask for next: what is left, from the last whole 4 KiB on when direct; of a write
  // into the page cache the beginning of it.
  Call next(bool direct) const;
  // Takes the result of `call`; true when the block is over.
  bool take(const Call& call, std::int64_t result);
};

// Carries a request out as one block, through the page cache, in this thread.
Completion carry_out(const Request& request, Vfs& vfs);

class Blocks {
 public:
  explicit Blocks(std::size_t block_bytes) : block_bytes_(block_bytes) {}

  void add(const Request& request, Lane lane);
  // One that is over: for the next wait().
  void add_whole(const Completion& completion);
  // The next block of a lane; waits for one, and returns nothing once stop() was called and none
  // is left.
  std::optional<Block> pop(Lane lane);
  // The next block of the main lane if there is one now. `stopped` says whether no more will ever
  // be added.
  std::optional<Block> try_pop(bool& stopped);
  // Every block popped must come back. What is left of a request that failed or ended is dropped.
  void finish(const Block& block);
  // Whether a block is as large as blocks are.
  bool is_full(const Block& block) const { return block.size == block_bytes_; }
  void stop();
  // Drops what was not begun: ECANCELED.
  void cancel();

  std::size_t pending() const;
  std::vector<Completion> wait();

 private:
  using Requests = std::deque<std::shared_ptr<OpenRequest>>;
  struct Waiting {
    Requests requests;  // only the first is begun, none wholly
    std::condition_variable available;
  };

  Waiting& waiting(Lane lane) { return lanes_[static_cast<std::size_t>(lane)]; }
  std::optional<Block> cut(Requests& requests);
  void complete_if_over(const OpenRequest& open);

  const std::size_t block_bytes_;
  mutable std::mutex mutex_;
  std::condition_variable finished_;
  std::array<Waiting, 2> lanes_;
  std::vector<Completion> completions_;
  std::size_t pending_ = 0;
  bool stopped_ = false;
};

}  // namespace holdfast
