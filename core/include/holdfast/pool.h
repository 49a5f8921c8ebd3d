// Host memory for bytes on their way to or from the disk: equal slots, allocated once, never moved.
// Every slot begins at a multiple of 4 KiB, so O_DIRECT takes it. Huge pages are asked for, every
// page is touched before create() returns. The memory is not inherited by fork(): a child that
// touches it dies, and in return a fork during a write cannot move pages under the device.
// Immutable after creation; safe from any thread. Whoever uses a slot owns it: nothing is locked.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <memory>

#include "holdfast/status.h"

namespace holdfast {

inline constexpr std::size_t kBlockAlignBytes = 4096;  // O_DIRECT on 4 KiB-sector disks

class Pool {
 public:
  // `slot_bytes` is rounded up to 4 KiB. Errors: argument when either is 0, memory.
  static Result<std::shared_ptr<Pool>> create(std::size_t slot_bytes, std::size_t slots);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  std::size_t slot_bytes() const { return slot_bytes_; }
  std::size_t slots() const { return slots_; }
  std::byte* address(std::size_t slot) const { return memory_ + slot * slot_bytes_; }
  std::byte* memory() const { return memory_; }
  std::size_t size() const { return slot_bytes_ * slots_; }

 private:
  Pool(std::byte* memory, std::size_t slot_bytes, std::size_t slots);

  std::byte* memory_;
  std::size_t slot_bytes_;
  std::size_t slots_;
  pid_t owner_;
};

}  // namespace holdfast
