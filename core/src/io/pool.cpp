#include "holdfast/pool.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

namespace holdfast {
namespace {

constexpr std::size_t kHugePageBytes = 2 << 20;
constexpr std::size_t kTouchThreadBytes = 256 << 20;  // below, starting a thread costs more
constexpr std::size_t kTouchThreadsMax = 8;
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14; older ones answer EINVAL
#endif

std::size_t round_up(std::size_t size, std::size_t unit) {
  return (size + unit - 1) / unit * unit;
}

void touch(std::byte* begin, std::size_t size) {
  if (::madvise(begin, size, MADV_POPULATE_WRITE) == 0) return;
  for (std::size_t at = 0; at < size; at += kBlockAlignBytes) {
    *const_cast<volatile std::byte*>(begin + at) = std::byte{0};
  }
}

// The kernel zeroes each page on first touch: slow everywhere, 0.3 GB/s on some virtual machines.
void touch_in_parallel(std::byte* memory, std::size_t size) {
  const std::size_t cores = std::max(1u, std::thread::hardware_concurrency());
  const std::size_t count =
      std::min({cores, kTouchThreadsMax, std::max<std::size_t>(1, size / kTouchThreadBytes)});
  const std::size_t part = round_up(size / count + 1, kHugePageBytes);
  std::vector<std::jthread> threads;
  std::size_t begin = part;
  try {
    for (; begin < size; begin += part) {
      threads.emplace_back(touch, memory + begin, std::min(part, size - begin));
    }
  } catch (const std::system_error&) {  // no more threads: what is left is touched here
    touch(memory + begin, size - begin);
  }
  touch(memory, std::min(part, size));
}

}  // namespace

Result<std::shared_ptr<Pool>> Pool::create(std::size_t slot_bytes, std::size_t slots) {
  if (slot_bytes == 0 || slots == 0) {
    return Status::argument("a pool needs at least one slot of at least one byte; asked for " +
                            std::to_string(slots) + " of " + std::to_string(slot_bytes));
  }
  const std::string what =
      "pool of " + std::to_string(slots) + " slots of " + std::to_string(slot_bytes) + " bytes";
  std::size_t size = 0;
  std::size_t mapped = 0;
  if (slot_bytes > SIZE_MAX - kBlockAlignBytes ||
      __builtin_mul_overflow(round_up(slot_bytes, kBlockAlignBytes), slots, &size) ||
      __builtin_add_overflow(size, kHugePageBytes, &mapped)) {
    return Status::memory(ENOMEM, what);
  }
  void* base = ::mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) return Status::memory(errno, what);
  // Huge pages begin at multiples of their size: give back what lies before and after.
  auto* first = static_cast<std::byte*>(base);
  const std::size_t head =
      (kHugePageBytes - reinterpret_cast<std::uintptr_t>(first) % kHugePageBytes) % kHugePageBytes;
  if (head > 0) ::munmap(first, head);
  std::byte* memory = first + head;
  ::munmap(memory + size, kHugePageBytes - head);
  ::madvise(memory, size, MADV_HUGEPAGE);
  ::madvise(memory, size, MADV_DONTFORK);
  touch_in_parallel(memory, size);
  return std::shared_ptr<Pool>(new Pool(memory, round_up(slot_bytes, kBlockAlignBytes), slots));
}

Pool::Pool(std::byte* memory, std::size_t slot_bytes, std::size_t slots)
    : memory_(memory), slot_bytes_(slot_bytes), slots_(slots), owner_(::getpid()) {}

Pool::~Pool() {
  // A forked child has no such mapping, but may have made another in its place.
  if (::getpid() == owner_) ::munmap(memory_, size());
}

}  // namespace holdfast
