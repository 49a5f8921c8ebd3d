// Chunks whose payloads are their elements: where they stand in data files (docs/format.md §4), how
// they get there, and how they are checked when they come back. Many by one call: the call of a
// small one takes longer than its work. Pure functions, safe from any thread; all memory is the
// caller's.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "holdfast/checksum.h"

namespace holdfast {

// What the checksum of every chunk of a file is bound to: save_id, rank, number of the file.
using SeedHead = std::array<unsigned char, 24>;

// The seed of the checksum of a file's chunk.
std::uint64_t chunk_seed(const SeedHead& head, std::uint64_t row);

// The shards of one rank, in order.
struct ShardColumns {
  std::span<const std::uint64_t> sizes;      // bytes of every chunk
  std::span<const std::uint64_t> counts;     // chunks of each shard, added up as many as there are
  std::span<const std::uint64_t> row_bytes;  // what each shard takes of a footer, at most
};

struct FileLimits {
  std::size_t header_bytes;  // what a file begins with
  std::size_t file_bytes;    // a file does not grow past this by a further shard
  std::size_t footer_bytes;  // of these, kept free for what every footer has
  std::size_t window_bytes;  // of the memory that a file passes through; 0: it stands in one piece
};

struct Places {
  std::vector<std::uint64_t> offset;  // of each chunk in its file
  // Whether each chunk is the first behind a turn to the beginning of the window: the page before
  // is filled up.
  std::vector<std::uint8_t> turns;
  std::vector<std::uint32_t> file;  // of each shard, from 0
  std::vector<std::uint64_t> end;   // of the payloads of each file
};

// Places shards one behind the other, and in the next file where the last is full. A chunk is never
// longer than the window.
Places place_chunks(const ShardColumns& shards, const FileLimits& limits);

struct ChunkHashes {
  std::span<std::uint64_t> checksums;  // seeded with the place of the chunk in its file
  std::span<Hash128> digests;
};

// Copies chunks to `targets`, and hashes the bytes as they lie there; zeroes what lies between one
// and the next. A source that is the target itself is hashed where it stands. A null source: the
// chunk stands there, and `out` has its hashes. `first_row` is the row of the first chunk in its
// file.
void stage_chunks(std::span<std::byte* const> targets, std::span<const std::byte* const> sources,
                  std::span<const std::uint64_t> sizes, const SeedHead& head,
                  std::uint64_t first_row, const ChunkHashes& out);

// The digest of each shard: XXH3-128 of those of its chunks. `counts` are as in `ShardColumns`.
void digest_shards(std::span<const Hash128> digests, std::span<const std::uint64_t> counts,
                   std::span<Hash128> out);

struct StoredChunk {
  const std::byte* payload;
  std::size_t size;
  std::size_t gap;  // zero bytes before the payload
  std::uint64_t row;
  std::uint64_t checksum;
};

// The index of the first chunk whose bytes, or the gap before it, are not what was written; the
// number of chunks when all are.
std::size_t first_damaged(std::span<const StoredChunk> chunks, const SeedHead& head);

}  // namespace holdfast
