// What carries blocks to the kernel. Internal to the core.
#pragma once

#include <memory>

#include "io/block.h"

namespace holdfast {

class Backend {
 public:
  // Blocks must have been stopped: waits for the threads to empty it and ends them.
  virtual ~Backend() = default;
  // Blocks were added or stopped. From the caller's thread.
  virtual void wake() = 0;
};

// `blocks`, `vfs` and `pool` must outlive the backend.
// The threads take the blocks of one lane.
Result<std::unique_ptr<Backend>> make_thread_backend(Blocks& blocks, Lane lane, Vfs& vfs,
                                                     bool direct, std::size_t depth);
Result<std::unique_ptr<Backend>> make_uring_backend(Blocks& blocks, Vfs& vfs, const Pool& pool,
                                                    std::size_t depth);

}  // namespace holdfast
