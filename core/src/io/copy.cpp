#include "holdfast/copy.h"

#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>

#include "holdfast/checksum.h"
#include "io/descriptor.h"
#include "io/io_thread.h"

namespace holdfast {
namespace {

constexpr std::size_t kUnitBytes = 4 << 20;    // of work: threads that start late still get a share
constexpr std::size_t kThreadBytes = 8 << 20;  // below, starting a thread costs more than it saves

struct Unit {
  Piece piece;  // the whole of one, or a part
  std::size_t index;
};

std::vector<Unit> cut(std::span<const Piece> pieces, std::size_t unit_bytes) {
  std::vector<Unit> units;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    const auto& [target, source, size] = pieces[i];
    std::size_t at = 0;
    do {  // of an empty piece too
      const std::size_t taken = std::min(unit_bytes, size - at);
      units.push_back({{target + at, source + at, taken}, i});
      at += taken;
    } while (at < size);
  }
  return units;
}

// Calls copy(unit, thread) for every unit, in several threads. The calling one is number 0, and
// `threads` counts it.
template <class Copy>
void spread(const std::vector<Unit>& units, std::size_t threads, Copy copy) {
  std::size_t total = 0;
  for (const Unit& unit : units) total += unit.piece.size;
  std::atomic<std::size_t> next = 0;
  const auto work = [&units, &next, &copy](std::size_t thread) {
    for (std::size_t i = next++; i < units.size(); i = next++) copy(units[i], thread);
  };
  std::vector<std::thread> others;
  try {
    for (std::size_t i = 1; i < std::min(threads, total / kThreadBytes); ++i) {
      others.push_back(start_io_thread([&work, i] { work(i); }));
    }
  } catch (const std::system_error&) {  // no more threads: those there are do it all
  }
  work(0);
  for (std::thread& thread : others) thread.join();
}

// A pipe of our own: the kernel reads what is written to it, and says EFAULT of what is not there.
class Pipe {
 public:
  Pipe() {
    int ends[2] = {-1, -1};
    const StandardPlaces taken;
    if (::pipe2(ends, O_CLOEXEC | O_NONBLOCK) != 0) error_ = errno;
    read_end_ = Descriptor(ends[0]);
    write_end_ = Descriptor(ends[1]);
  }

  // 0 or an errno. Never waits: a write to the empty pipe takes what there is room for.
  int copy(std::byte* target, const std::byte* source, std::size_t size) {
    if (error_ != 0) return error_;
    while (size > 0) {
      const ssize_t taken = ::write(write_end_.get(), source, size);
      if (taken < 0 && errno == EINTR) continue;
      if (taken <= 0) return taken < 0 ? errno : EIO;
      const auto count = static_cast<std::size_t>(taken);
      if (const int error = drain(target, count)) return error;
      target += count;
      source += count;
      size -= count;
    }
    return 0;
  }

 private:
  int drain(std::byte* target, std::size_t size) {
    while (size > 0) {
      const ssize_t given = ::read(read_end_.get(), target, size);
      if (given < 0 && errno == EINTR) continue;
      if (given <= 0) return given < 0 ? errno : EIO;
      target += given;
      size -= static_cast<std::size_t>(given);
    }
    return 0;
  }

  Descriptor read_end_;
  Descriptor write_end_;
  int error_ = 0;
};

// 0 or an errno; EFAULT when a page of `source` is not there. The kernel finds the pages of
// `target`, ours, by itself, and reads `source` as it reads what is given to any system call:
// so it takes every mapping that can be read, of a device too, which process_vm_readv does not.
int copy_by_kernel(std::byte* target, const std::byte* source, std::size_t size) {
  while (size > 0) {
    const iovec from{const_cast<std::byte*>(source), size};
    const iovec to{target, size};
    const ssize_t done = ::process_vm_writev(::getpid(), &from, 1, &to, 1, 0);
    if (done < 0 && errno == EFAULT) return EFAULT;
    if (done <= 0) return Pipe().copy(target, source, size);  // it is forbidden here, or unknown
    target += done;
    source += done;
    size -= static_cast<std::size_t>(done);
  }
  return 0;
}

// As `copy_if_there` says, in units of so many bytes: take(unit, thread) returns 0 or an errno.
template <class Take>
Result<std::size_t> take_units(std::span<const Piece> pieces, std::size_t unit_bytes,
                               std::size_t threads, Take take) {
  std::atomic<std::size_t> missing = pieces.size();
  std::atomic<int> failed = 0;
  spread(cut(pieces, unit_bytes), threads, [&](const Unit& unit, std::size_t thread) {
    if (missing < pieces.size() || failed != 0) return;
    const int error = take(unit, thread);
    if (error == EFAULT) {
      missing = unit.index;
    } else if (error != 0) {
      failed = error;
    }
  });
  if (missing == pieces.size() && failed != 0) {
    return Status::system(failed, "copy memory through a pipe");
  }
  return missing.load();
}

}  // namespace

void copy_pieces(std::span<const Piece> pieces, std::size_t threads) {
  spread(cut(pieces, kUnitBytes), threads, [](const Unit& unit, std::size_t) {
    copy_chunk(unit.piece.target, unit.piece.source, unit.piece.size);
  });
}

Result<std::size_t> copy_if_there(std::span<const Piece> pieces, std::size_t threads) {
  return take_units(pieces, kUnitBytes, threads, [](const Unit& unit, std::size_t) {
    return copy_by_kernel(unit.piece.target, unit.piece.source, unit.piece.size);
  });
}

Result<std::size_t> copy_and_hash_if_there(std::span<const Piece> pieces, std::size_t threads,
                                           const PieceHashes& hashes, std::span<std::byte> room,
                                           const std::uint8_t& hurry) {
  std::fill(hashes.known.begin(), hashes.known.end(), std::uint8_t{0});
  return take_units(pieces, SIZE_MAX, threads, [&](const Unit& unit, std::size_t thread) {
    const auto& [target, source, size] = unit.piece;
    const bool hurries = __atomic_load_n(&hurry, __ATOMIC_RELAXED) != 0;
    // The kernel reads the lines that it overwrites. Here they are in the cache, and the rest of
    // the way goes past it.
    const bool has_room = kStreamBytesMin <= size && size <= kUnitBytes &&
                          (thread + 1) * kUnitBytes <= room.size() && !hurries;
    std::byte* const first = has_room ? room.data() + thread * kUnitBytes : target;
    const int error = copy_by_kernel(first, source, size);
    if (error != 0 || hurries) return error;
    const std::size_t i = unit.index;
    const Digest found = has_room ? copy_and_hash_chunk(target, first, size, hashes.seeds[i])
                                  : hash_chunk(target, size, hashes.seeds[i]);
    hashes.checksums[i] = found.xxh3_64;
    hashes.digests[i] = found.xxh3_128;
    hashes.known[i] = 1;
    return 0;
  });
}

}  // namespace holdfast
