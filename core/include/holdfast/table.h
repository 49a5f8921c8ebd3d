// The columns of a table (docs/format.md §6, §7) whose payloads are their elements, checked against
// each other in one pass, and what its readers derive from them. A pure function, safe from any
// thread; all memory is the caller's. It knows no error texts: what it does not accept is looked at
// again by the caller, who says what is wrong with it, or that it is unusual and right.
#pragma once

#include <cstdint>
#include <span>

namespace holdfast {

// As docs/format.md §6 names them.
struct TableColumns {
  std::span<const std::uint64_t> file_bytes;
  std::span<const std::uint32_t> file_rank, file_number, file_chunks;
  std::span<const std::uint32_t> shard_tensor, shard_file, shard_first_chunk, shard_chunks;
  std::span<const std::int64_t> shard_box;
  std::span<const std::uint32_t> chunk_size_mode, chunk_offset;
};

// What the header says of every tensor.
struct TensorColumns {
  std::span<const std::int64_t> item_bytes, chunk_elements, ndim;
  std::span<const std::int64_t> shape;  // of all, one behind the other
};

// As `Manifest` of format/manifest.py has them. Sizes: files + 1, files, shards, shards + 1,
// shards, tensors + 1, then chunks three times; and tensors.
struct DerivedColumns {
  std::span<std::int64_t> file_first_chunk, payload_end;
  std::span<std::int64_t> shard_first_row, box_start, tensor_order, tensor_first;
  std::span<std::int64_t> chunk_start, chunk_bytes, chunk_gap_start;
  std::span<std::uint8_t> is_cut;
};

// True when every rule holds, and nothing is unusual: no payload is encoded or empty, and those of
// a file follow each other in its chunks' order. Then `out` is filled in, else it holds anything.
// Columns of one count have one length; `world_size` is the header's.
bool derive_plain(const TableColumns& table, const TensorColumns& tensors, std::uint64_t world_size,
                  const DerivedColumns& out);

}  // namespace holdfast
