#include "holdfast/table.h"

#include <algorithm>
#include <cstddef>
#include <vector>

#include "holdfast/segment.h"

namespace holdfast {
namespace {

// As format/spec.py has them.
constexpr std::int64_t kPayloadBytesMax = (1 << 24) - 1;
constexpr std::int64_t kDataHeaderBytes = 64;
constexpr std::int64_t kTrailerBytes = 32;
constexpr std::int64_t kGapBytesLimit = kLargeAlignBytes;
constexpr std::uint64_t kDataFileBytesMax = std::uint64_t{1} << 38;

bool derive_files(const TableColumns& table, std::uint64_t world_size, const DerivedColumns& out) {
  std::int64_t chunks = 0;
  std::uint64_t before = 0;
  out.file_first_chunk[0] = 0;
  for (std::size_t file = 0; file < table.file_bytes.size(); ++file) {
    const std::uint64_t rank = table.file_rank[file];
    const std::uint64_t order = rank << 32 | table.file_number[file];
    if (table.file_bytes[file] > kDataFileBytesMax || rank >= world_size) {
      return false;
    }
    if (file > 0 && order <= before) return false;
    before = order;
    chunks += table.file_chunks[file];
    out.file_first_chunk[file + 1] = chunks;
  }
  return static_cast<std::uint64_t>(chunks) == table.chunk_offset.size();
}

bool derive_payloads(const TableColumns& table, const DerivedColumns& out) {
  for (std::size_t file = 0; file < table.file_bytes.size(); ++file) {
    std::int64_t end = kDataHeaderBytes;
    const auto last = static_cast<std::size_t>(out.file_first_chunk[file + 1]);
    for (auto row = static_cast<std::size_t>(out.file_first_chunk[file]); row < last; ++row) {
      const std::int64_t start = std::int64_t{table.chunk_offset[row]} * kSmallAlignBytes;
      const std::int64_t size = table.chunk_size_mode[row];
      if (size == 0 || size > kPayloadBytesMax) return false;
      if (start < end || start - end >= kGapBytesLimit) return false;
      if (size >= static_cast<std::int64_t>(kLargePayloadBytes) && start % kLargeAlignBytes != 0) {
        return false;
      }
      out.chunk_start[row] = start;
      out.chunk_bytes[row] = size;
      out.chunk_gap_start[row] = end;
      end = start + size;
    }
    out.payload_end[file] = end;
    if (end > static_cast<std::int64_t>(table.file_bytes[file]) - kTrailerBytes) return false;
  }
  return true;
}

// One shard's chunks, from `row` on, have the sizes that its elements take.
bool chunks_fit(const TableColumns& table, std::size_t row, std::uint64_t rows,
                std::int64_t elements, std::int64_t step, std::int64_t item) {
  std::int64_t full = 0;
  if (__builtin_mul_overflow(step, item, &full)) return false;
  if (static_cast<std::uint64_t>(1 + (elements - 1) / step) != rows) return false;
  for (std::uint64_t number = 0; number + 1 < rows; ++number) {
    if (table.chunk_size_mode[row + number] != full) return false;
  }
  const std::int64_t rest = elements - static_cast<std::int64_t>(rows - 1) * step;
  return table.chunk_size_mode[row + rows - 1] == rest * item;
}

bool derive_shards(const TableColumns& table, const TensorColumns& tensors,
                   std::span<const std::int64_t> shape_start, const DerivedColumns& out) {
  std::int64_t row = 0;
  std::size_t box = 0;
  out.box_start[0] = 0;
  for (std::size_t shard = 0; shard < table.shard_tensor.size(); ++shard) {
    const std::size_t tensor = table.shard_tensor[shard], file = table.shard_file[shard];
    if (tensor >= tensors.ndim.size() || file >= table.file_bytes.size()) return false;
    if (out.file_first_chunk[file] + table.shard_first_chunk[shard] != row) return false;
    const std::uint64_t rows = table.shard_chunks[shard];
    const std::int64_t end = row + static_cast<std::int64_t>(rows);
    if (rows == 0 || end > out.file_first_chunk[file + 1]) return false;
    const auto ndim = static_cast<std::size_t>(tensors.ndim[tensor]);
    if (box + 2 * ndim > table.shard_box.size()) return false;
    const std::int64_t* offset = table.shard_box.data() + box;
    const std::int64_t* shape = tensors.shape.data() + shape_start[tensor];
    std::int64_t elements = 1;
    bool whole = true;
    for (std::size_t d = 0; d < ndim; ++d) {
      const std::int64_t at = offset[d], extent = offset[ndim + d];
      if (at < 0 || extent < 1 || at > shape[d] || extent > shape[d] - at) return false;
      if (__builtin_mul_overflow(elements, extent, &elements)) return false;
      whole = whole && extent == shape[d];
    }
    if (!chunks_fit(table, static_cast<std::size_t>(row), rows, elements,
                    tensors.chunk_elements[tensor], tensors.item_bytes[tensor])) {
      return false;
    }
    out.shard_first_row[shard] = row;
    out.box_start[shard + 1] = static_cast<std::int64_t>(box += 2 * ndim);
    out.is_cut[tensor] = out.is_cut[tensor] || !whole;
    ++out.tensor_first[tensor + 1];  // counts, for now
    row = end;
  }
  return static_cast<std::size_t>(row) == table.chunk_offset.size() &&
         box == table.shard_box.size();
}

// Orders shards by tensor, those of one as they stand.
void order_shards(const TableColumns& table, const DerivedColumns& out) {
  for (std::size_t tensor = 0; tensor < out.is_cut.size(); ++tensor) {
    out.is_cut[tensor] = out.is_cut[tensor] || out.tensor_first[tensor + 1] != 1;
    out.tensor_first[tensor + 1] += out.tensor_first[tensor];
  }
  for (std::size_t shard = table.shard_tensor.size(); shard-- > 0;) {
    out.tensor_order[static_cast<std::size_t>(--out.tensor_first[table.shard_tensor[shard] + 1])] =
        static_cast<std::int64_t>(shard);
  }
  // Each was moved down to the beginning of its own: the next one's end is where it begins.
  for (std::size_t tensor = 0; tensor < out.is_cut.size(); ++tensor) {
    out.tensor_first[tensor] = out.tensor_first[tensor + 1];
  }
  out.tensor_first.back() = static_cast<std::int64_t>(table.shard_tensor.size());
}

}  // namespace

bool derive_plain(const TableColumns& table, const TensorColumns& tensors, std::uint64_t world_size,
                  const DerivedColumns& out) {
  std::ranges::fill(out.tensor_first, 0);
  std::ranges::fill(out.is_cut, std::uint8_t{0});
  std::vector<std::int64_t> shape_start(tensors.ndim.size());
  std::int64_t begin = 0;
  for (std::size_t tensor = 0; tensor < shape_start.size(); ++tensor) {
    if (tensors.item_bytes[tensor] < 1 || tensors.chunk_elements[tensor] < 1) return false;
    shape_start[tensor] = begin;
    begin += tensors.ndim[tensor];
  }
  if (begin != static_cast<std::int64_t>(tensors.shape.size())) return false;
  if (!derive_files(table, world_size, out) || !derive_payloads(table, out)) return false;
  if (!derive_shards(table, tensors, shape_start, out)) return false;
  order_shards(table, out);
  return true;
}

}  // namespace holdfast
