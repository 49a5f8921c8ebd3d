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

// Copies from memory that its owner may take away meanwhile: false when the kernel says that a page
// of `source` is not there (any more). What is copied then is of no use. A handler for SIGSEGV and
// SIGBUS stands while this runs, and passes on what happens elsewhere.
bool copy_if_there(std::byte* target, const std::byte* source, std::size_t size);

}  // namespace holdfast
