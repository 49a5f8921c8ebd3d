#include "holdfast/copy.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "check.h"

namespace holdfast {
namespace {

std::vector<std::byte> random_bytes(std::size_t size, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::byte> bytes(size);
  for (auto& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

void copies_every_piece_and_nothing_else(std::size_t threads) {
  const std::vector<std::size_t> sizes = {0, 1, 63, 4096, (4 << 20) + 1, 9 << 20, 17, 12 << 20};
  std::size_t total = 0;
  for (const std::size_t size : sizes) total += size + 1;  // one byte between the pieces
  const std::vector<std::byte> source = random_bytes(total, 7);
  std::vector<std::byte> target(total, std::byte{0xAA});
  std::vector<Piece> pieces;
  std::size_t at = 0;
  for (const std::size_t size : sizes) {
    pieces.push_back({target.data() + at, source.data() + at, size});
    at += size + 1;
  }
  copy_pieces(pieces, threads);
  at = 0;
  for (const std::size_t size : sizes) {
    const auto begin = static_cast<std::ptrdiff_t>(at);
    const auto end = begin + static_cast<std::ptrdiff_t>(size);
    CHECK(std::equal(source.begin() + begin, source.begin() + end, target.begin() + begin));
    CHECK(target[at + size] == std::byte{0xAA});
    at += size + 1;
  }
}

}  // namespace

TEST(every_piece_is_copied_and_nothing_else) {
  for (const std::size_t threads : {0, 1, 2, 5}) copies_every_piece_and_nothing_else(threads);
}

TEST(no_pieces_are_copied_at_once) {
  copy_pieces({}, 4);
}

}  // namespace holdfast
