// memcpy of many pieces by several threads: one core cannot fill the memory's bandwidth.
// The caller owns all memory; pieces do not overlap. Fewer threads than asked for take longer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "holdfast/checksum.h"
#include "holdfast/status.h"

namespace holdfast {

struct Piece {
  std::byte* target;
  const std::byte* source;
  std::size_t size;
};

// Returns when everything is copied. `threads` counts the calling one.
void copy_pieces(std::span<const Piece> pieces, std::size_t threads);

// The same from memory that its owner may take away meanwhile. Returns the index of a piece of
// whose source the kernel says that it is not there (any more), and then what is copied is of no
// use; else the number of pieces. Holds no lock, installs no signal handler. Errors: system, where
// process_vm_writev is forbidden and no pipe can be had either.
Result<std::size_t> copy_if_there(std::span<const Piece> pieces, std::size_t threads);

// The hashes of each piece: one seeded, one not; and whether there are any.
struct PieceHashes {
  std::span<const std::uint64_t> seeds;
  std::span<std::uint64_t> checksums;
  std::span<Hash128> digests;
  std::span<std::uint8_t> known;
};

// The same, and hashes every piece at once: to read it again later, from memory, takes longer. From
// when another thread makes `hurry` other than 0, no more is hashed. One thread copies all of a
// piece. `room` is memory for all of them to copy through, which makes it faster: 4 MiB for each.
Result<std::size_t> copy_and_hash_if_there(std::span<const Piece> pieces, std::size_t threads,
                                           const PieceHashes& hashes, std::span<std::byte> room,
                                           const std::uint8_t& hurry);

}  // namespace holdfast
