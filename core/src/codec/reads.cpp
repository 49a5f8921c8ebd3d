#include "holdfast/reads.h"

#include <algorithm>
#include <numeric>
#include <tuple>
#include <utility>

#include "holdfast/segment.h"

namespace holdfast {
namespace {

constexpr std::int64_t kGapBytesMax = 64 << 10;  // to read over so many costs less than a request
constexpr std::int64_t kGapShareMax = 64;        // but of a run no more than one part in so many
constexpr std::int64_t kPage = kLargeAlignBytes;

std::size_t at(std::int64_t row) { return static_cast<std::size_t>(row); }

// The last of `firsts` that is not above `row`: which file, or which shard, a row is of.
std::size_t owner_of(Column firsts, std::int64_t row) {
  return at(std::ranges::upper_bound(firsts, row) - firsts.begin()) - 1;
}

// Whole pages of a file around a unit.
struct Unit {
  std::int64_t first, last;
  std::size_t file;
};

// What wants a chunk.
struct Pair {
  std::int64_t row, number;
  std::size_t index;

  auto order() const { return std::tie(row, number); }
};

// By row, and what wants it by number; empty where they are given so.
std::vector<Pair> sorted_pairs(Column number, Column row) {
  const auto key = [&](std::size_t i) { return std::tie(row[i], number[i]); };
  std::vector<Pair> pairs;
  std::size_t ordered = 1;
  while (ordered < row.size() && key(ordered - 1) <= key(ordered)) ++ordered;
  if (ordered >= row.size()) return pairs;
  pairs.resize(row.size());
  for (std::size_t i = 0; i < pairs.size(); ++i) pairs[i] = {row[i], number[i], i};
  std::ranges::stable_sort(pairs, {}, &Pair::order);
  return pairs;
}

// Reads by row → by file and place. Rows count on from file to file.
void order_by_place(Column file_first_chunk, Column chunk_start, ReadColumns& reads) {
  std::vector<std::pair<std::size_t, std::int64_t>> places(reads.row.size());
  std::size_t file = 0;
  for (std::size_t i = 0; i < places.size(); ++i) {
    const std::int64_t row = reads.row[i];
    if (row >= file_first_chunk[file + 1]) file = owner_of(file_first_chunk, row);
    places[i] = {file, chunk_start[at(row)]};
  }
  std::vector<std::size_t> order(places.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::stable_sort(order, {}, [&](std::size_t i) { return places[i]; });
  for (auto* column : {&reads.row, &reads.first, &reads.count}) {
    std::vector<std::int64_t> moved(order.size());
    std::ranges::transform(order, moved.begin(), [&](std::size_t i) { return (*column)[i]; });
    *column = std::move(moved);
  }
}

std::vector<Unit> units_of(const ChunkColumns& chunks, Column rows, Column begins) {
  std::vector<Unit> units(begins.size());
  for (std::size_t i = 0; i < begins.size(); ++i) {
    const std::size_t begin = at(begins[i]);
    const std::size_t end = i + 1 < begins.size() ? at(begins[i + 1]) : rows.size();
    std::int64_t first = chunks.gap_start[at(rows[begin])], last = 0;
    for (const std::int64_t row : rows.subspan(begin, end - begin)) {
      first = std::min(first, chunks.gap_start[at(row)]);
      last = std::max(last, chunks.start[at(row)] + chunks.bytes[at(row)]);
    }
    units[i] = {first / kPage * kPage, (last + kPage - 1) / kPage * kPage,
                owner_of(chunks.file_first_chunk, rows[begin])};
  }
  return units;
}

}  // namespace

Wanted rows_of_whole(Column tensor_order, Column tensor_first, Column shard_first_row,
                     std::span<const std::uint32_t> shard_chunks, Column tensors) {
  Wanted wanted;
  for (std::size_t number = 0; number < tensors.size(); ++number) {
    const std::size_t shard = at(tensor_order[at(tensor_first[at(tensors[number])])]);
    const std::int64_t first = shard_first_row[shard];
    for (std::int64_t row = first; row < first + shard_chunks[shard]; ++row) {
      wanted.number.push_back(static_cast<std::int64_t>(number));
      wanted.row.push_back(row);
    }
  }
  return wanted;
}

ReadColumns reads_in_order(Column file_first_chunk, Column chunk_start, Column number, Column row,
                           std::span<const std::uint8_t> exact) {
  const std::vector<Pair> pairs = sorted_pairs(number, row);
  ReadColumns reads;
  for (auto* column : {&reads.row, &reads.first, &reads.count, &reads.wants}) {
    column->reserve(row.size());
  }
  reads.exact.reserve(row.size());
  bool is_ordered = true;
  std::size_t file = 0;
  for (std::size_t i = 0; i < row.size(); ++i) {
    const Pair pair = pairs.empty() ? Pair{row[i], number[i], i} : pairs[i];
    if (reads.row.empty() || reads.row.back() != pair.row) {
      const bool is_next = pair.row >= file_first_chunk[file + 1];
      if (is_next) file = owner_of(file_first_chunk, pair.row);
      is_ordered = is_ordered && (is_next || reads.row.empty() ||
                                  chunk_start[at(reads.row.back())] <= chunk_start[at(pair.row)]);
      reads.row.push_back(pair.row);
      reads.first.push_back(static_cast<std::int64_t>(i));
      reads.count.push_back(0);
    }
    ++reads.count.back();
    reads.wants.push_back(pair.number);
    reads.exact.push_back(exact[pair.index]);
  }
  if (!is_ordered) order_by_place(file_first_chunk, chunk_start, reads);
  return reads;
}

std::vector<Run> join_runs(const ChunkColumns& chunks, Column rows, Column begins,
                           const RunLimits& limits) {
  const std::vector<Unit> units = units_of(chunks, rows, begins);
  std::vector<Run> runs;
  for (std::size_t begin = 0; begin < units.size();) {
    const auto [start, first_last, file] = units[begin];
    std::int64_t highest = first_last;
    std::size_t end = begin + 1;
    while (end < units.size() && highest - start < limits.bytes_min) {
      const std::int64_t before = units[end - 1].last;
      const std::int64_t gap_max = std::min(kGapBytesMax, (before - start) / kGapShareMax);
      if (units[end].file != file || units[end].first - before > gap_max) break;
      if (units[end].last - start > limits.bytes_max) break;
      highest = std::max(highest, units[end].last);
      ++end;
    }
    const std::size_t rows_end = end < units.size() ? at(begins[end]) : rows.size();
    runs.push_back({file, start, highest - start, at(begins[begin]), rows_end});
    begin = end;
  }
  return runs;
}

std::size_t first_damaged_read(const ChunkColumns& chunks, std::span<const std::uint64_t> checksum,
                               Column rows, std::size_t file, std::byte* base,
                               const SeedHead& head) {
  std::vector<StoredChunk> stored(rows.size());
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const std::size_t row = at(rows[i]);
    const std::int64_t start = chunks.start[row];
    const auto gap = static_cast<std::size_t>(start - chunks.gap_start[row]);
    const auto number = static_cast<std::uint64_t>(rows[i] - chunks.file_first_chunk[file]);
    stored[i] = {base + start, static_cast<std::size_t>(chunks.bytes[row]), gap, number,
                 checksum[row]};
  }
  return first_damaged(stored, head);
}

Elsewhere place_reads(const ChunkColumns& chunks, const ShardRows& shards, const Placing& reads,
                      const std::byte* base) {
  Elsewhere others;
  for (std::size_t which = 0; which < reads.row.size(); ++which) {
    const std::int64_t row = reads.row[which];
    const std::size_t shard = owner_of(shards.first_row, row), tensor = shards.tensor[shard];
    const std::int64_t before = (row - shards.first_row[shard]) * shards.chunk_elements[tensor];
    const std::byte* const source = base + chunks.start[at(row)];
    for (std::int64_t i = 0; i < reads.count[which]; ++i) {
      const std::int64_t pair = reads.first[which] + i;
      const std::uint64_t address = reads.address[at(reads.wants[at(pair)])];
      if (reads.exact[at(pair)] == 0 || address == 0) {
        others.read.push_back(static_cast<std::int64_t>(which));
        others.pair.push_back(pair);
        continue;
      }
      auto* const target = reinterpret_cast<std::byte*>(address);
      copy_chunk(target + before * shards.item_bytes[tensor], source,
                 static_cast<std::size_t>(chunks.bytes[at(row)]));
    }
  }
  return others;
}

std::vector<std::size_t> overlapping(Column begin, Column bytes) {
  std::vector<std::size_t> order;
  for (std::size_t i = 0; i < begin.size(); ++i) {
    if (bytes[i] != 0) order.push_back(i);
  }
  std::ranges::stable_sort(order, {}, [&](std::size_t i) { return begin[i]; });
  std::vector<std::size_t> found;
  std::int64_t highest = 0;  // end of all before
  for (std::size_t i = 0; i < order.size(); ++i) {
    const std::int64_t first = begin[order[i]], end = first + bytes[order[i]];
    const bool holds_next = i + 1 < order.size() && begin[order[i + 1]] < end;
    if (holds_next || (i > 0 && first < highest)) found.push_back(order[i]);
    highest = i > 0 ? std::max(highest, end) : end;
  }
  std::ranges::sort(found);
  return found;
}

}  // namespace holdfast
