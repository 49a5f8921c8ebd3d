#include "holdfast/copy.h"

#include <algorithm>
#include <atomic>
#include <system_error>
#include <thread>
#include <vector>

#include "holdfast/checksum.h"
#include "io_thread.h"

namespace holdfast {
namespace {

constexpr std::size_t kUnitBytes = 4 << 20;    // of work: threads that start late still get a share
constexpr std::size_t kThreadBytes = 8 << 20;  // below, starting a thread costs more than it saves

std::vector<Piece> cut(std::span<const Piece> pieces) {
  std::vector<Piece> units;
  for (const Piece& piece : pieces) {
    for (std::size_t at = 0; at < piece.size; at += kUnitBytes) {
      units.push_back(
          {piece.target + at, piece.source + at, std::min(kUnitBytes, piece.size - at)});
    }
  }
  return units;
}

}  // namespace

void copy_pieces(std::span<const Piece> pieces, std::size_t threads) {
  const std::vector<Piece> units = cut(pieces);
  std::size_t total = 0;
  for (const Piece& unit : units) total += unit.size;
  std::atomic<std::size_t> next = 0;
  const auto work = [&units, &next] {
    for (std::size_t i = next++; i < units.size(); i = next++) {
      copy_chunk(units[i].target, units[i].source, units[i].size);
    }
  };
  std::vector<std::thread> others;
  try {
    for (std::size_t i = 1; i < std::min(threads, total / kThreadBytes); ++i) {
      others.push_back(start_io_thread(work));
    }
  } catch (const std::system_error&) {  // no more threads: those there are do it all
  }
  work();
  for (std::thread& thread : others) thread.join();
}

}  // namespace holdfast
