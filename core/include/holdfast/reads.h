// What a load reads: which chunks, in which runs of bytes, and how a run gets to its targets. A
// chunk is a row of the manifest's columns. Pure functions but for `place_reads`; safe from any
// thread. All memory is the caller's. The caller has checked that each row is within its column.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "holdfast/chunks.h"

namespace holdfast {

using Column = std::span<const std::int64_t>;

// Pairs: the number of something that is wanted, and the row of a chunk of it.
struct Wanted {
  std::vector<std::int64_t> number, row;
};

// As `Reads` of plan/reads.py has them.
struct ReadColumns {
  std::vector<std::int64_t> row, first, count, wants;
  std::vector<std::uint8_t> exact;
};

// The chunks of whole tensors, each of which is one shard.
Wanted rows_of_whole(Column tensor_order, Column tensor_first, Column shard_first_row,
                     std::span<const std::uint32_t> shard_chunks, Column tensors);

// Every chunk once, by file and place in it (empty ones, which lie nowhere, by row), with what
// wants it in the order of the numbers. There is a file.
ReadColumns reads_in_order(Column file_first_chunk, Column chunk_start, Column number,
                           Column row, std::span<const std::uint8_t> exact);

// Where chunks lie: columns of all, and where those of each file begin.
struct ChunkColumns {
  Column file_first_chunk, start, bytes, gap_start;
};

struct RunLimits {
  std::int64_t bytes_max;  // no longer, unless a single unit is
  std::int64_t bytes_min;  // nothing is added to a run of so many
};

struct Run {
  std::size_t file;
  std::int64_t offset, bytes;
  std::size_t begin, end;  // of its chunks, in `rows`
};

// Joins units, given in file order, into runs. A unit is the chunks from one of `begins` to the
// next.
std::vector<Run> join_runs(const ChunkColumns& chunks, Column rows, Column begins,
                           const RunLimits& limits);

// The chunks of one file's run, checked as `first_damaged` checks them: `base` is the address at
// which byte 0 of the file would be.
std::size_t first_damaged_read(const ChunkColumns& chunks, std::span<const std::uint64_t> checksum,
                               Column rows, std::size_t file, std::byte* base,
                               const SeedHead& head);

// Which elements each row of a chunk is.
struct ShardRows {
  Column first_row;
  std::span<const std::uint32_t> tensor;
  Column chunk_elements, item_bytes;  // of each tensor
};

// The reads of one run, and the address of each target; 0: its elements do not lie as stored.
struct Placing {
  Column row, first, count, wants;
  std::span<const std::uint8_t> exact;
  std::span<const std::uint64_t> address;
};

// What does not lie in its target as it is stored: which of `Placing::row`, and which place in
// `Placing::wants`.
struct Elsewhere {
  std::vector<std::int64_t> read, pair;
};

// Copies chunks to where they lie in their targets as they are stored. Returns the others.
Elsewhere place_reads(const ChunkColumns& chunks, const ShardRows& shards, const Placing& reads,
                      const std::byte* base);

// Which stretches of memory share a byte with another one, ascending. Empty ones share none.
std::vector<std::size_t> overlapping(Column begin, Column bytes);

}  // namespace holdfast
