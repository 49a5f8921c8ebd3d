// memcpy of many pieces by several threads: one core cannot fill the memory's bandwidth.
// The caller owns all memory; pieces do not overlap. No errors: with fewer threads it takes longer.
#pragma once

#include <cstddef>
#include <span>

namespace holdfast {

struct Piece {
  std::byte* target;
  const std::byte* source;
  std::size_t size;
};

// Returns when everything is copied. `threads` counts the calling one.
void copy_pieces(std::span<const Piece> pieces, std::size_t threads);

}  // namespace holdfast
