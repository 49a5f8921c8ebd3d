#include "holdfast/chunks.h"

#include <cstring>

#include "holdfast/segment.h"

namespace holdfast {
namespace {

std::uint64_t align_up(std::uint64_t position, std::uint64_t align) {
  return (position + align - 1) / align * align;
}

std::uint64_t align_payload(std::uint64_t position, std::uint64_t size) {
  return align_up(position, size >= kLargePayloadBytes ? kLargeAlignBytes : kSmallAlignBytes);
}

// Where the next chunk goes, while the chunks of one file are placed.
class Cursor {
 public:
  explicit Cursor(const FileLimits& limits)
      : window_bytes_(limits.window_bytes), position_(limits.header_bytes) {}

  std::uint64_t position() const { return position_; }

  // Returns whether the chunk is behind a turn, and puts its offset in `offset`.
  bool place(std::uint64_t size, std::uint64_t& offset) {
    offset = align_payload(position_, size);
    const bool turns = window_bytes_ != 0 && offset + size > start_ + window_bytes_;
    if (turns) {
      start_ = align_up(position_, kLargeAlignBytes);
      offset = align_payload(start_, size);
    }
    position_ = offset + size;
    return turns;
  }

 private:
  std::uint64_t window_bytes_;
  std::uint64_t position_;   // of the next byte
  std::uint64_t start_ = 0;  // position of what stands at the beginning of the window
};

}  // namespace

std::uint64_t chunk_seed(const SeedHead& head, std::uint64_t row) {
  std::array<unsigned char, sizeof head + sizeof row> bytes;
  std::memcpy(bytes.data(), head.data(), sizeof head);
  std::memcpy(bytes.data() + sizeof head, &row, sizeof row);
  return xxh3_64(bytes.data(), bytes.size(), 0);
}

Places place_chunks(const ShardColumns& shards, const FileLimits& limits) {
  Places places;
  places.offset.resize(shards.sizes.size());
  places.turns.resize(shards.sizes.size());
  places.file.resize(shards.counts.size());
  Cursor cursor(limits);
  std::uint64_t rows_bytes = 0;
  std::size_t chunk = 0;
  for (std::size_t shard = 0; shard < shards.counts.size(); ++shard) {
    const std::uint64_t count = shards.counts[shard];
    std::uint64_t more = count * kLargeAlignBytes + shards.row_bytes[shard];
    for (std::uint64_t i = 0; i < count; ++i) more += shards.sizes[chunk + i];
    const std::uint64_t needed = cursor.position() + rows_bytes + more + limits.footer_bytes;
    if (shard > 0 && needed > limits.file_bytes) {
      places.end.push_back(cursor.position());
      cursor = Cursor(limits);
      rows_bytes = 0;
    }
    rows_bytes += shards.row_bytes[shard];
    places.file[shard] = static_cast<std::uint32_t>(places.end.size());
    for (std::uint64_t i = 0; i < count; ++i, ++chunk) {
      places.turns[chunk] = cursor.place(shards.sizes[chunk], places.offset[chunk]) ? 1 : 0;
    }
  }
  places.end.push_back(cursor.position());
  return places;
}

void stage_chunks(std::span<std::byte* const> targets, std::span<const std::byte* const> sources,
                  std::span<const std::uint64_t> sizes, const SeedHead& head,
                  std::uint64_t first_row, const ChunkHashes& out) {
  for (std::size_t i = 0; i < targets.size(); ++i) {
    if (i > 0) {
      std::byte* const before = targets[i - 1] + sizes[i - 1];
      std::memset(before, 0, static_cast<std::size_t>(targets[i] - before));
    }
    if (sources[i] == nullptr) continue;
    const std::uint64_t seed = chunk_seed(head, first_row + i);
    const Digest found = sources[i] == targets[i]
                             ? hash_chunk(targets[i], sizes[i], seed)
                             : copy_and_hash_chunk(targets[i], sources[i], sizes[i], seed);
    out.checksums[i] = found.xxh3_64;
    out.digests[i] = found.xxh3_128;
  }
}

void digest_shards(std::span<const Hash128> digests, std::span<const std::uint64_t> counts,
                   std::span<Hash128> out) {
  std::size_t first = 0;
  for (std::size_t shard = 0; shard < counts.size(); ++shard) {
    out[shard] = xxh3_128(digests.data() + first, counts[shard] * sizeof(Hash128));
    first += counts[shard];
  }
}

std::size_t first_damaged(std::span<const StoredChunk> chunks, const SeedHead& head) {
  for (std::size_t i = 0; i < chunks.size(); ++i) {
    const StoredChunk& chunk = chunks[i];
    const std::uint64_t seed = chunk_seed(head, chunk.row);
    if (xxh3_64(chunk.payload, chunk.size, seed) != chunk.checksum) return i;
    if (!is_zero(chunk.payload - chunk.gap, chunk.gap)) return i;
  }
  return chunks.size();
}

}  // namespace holdfast
