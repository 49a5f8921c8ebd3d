// Columns of chunks against the same done one by one.
#include "holdfast/chunks.h"

#include <cstring>
#include <random>
#include <vector>

#include "check.h"
#include "holdfast/segment.h"

namespace holdfast {
namespace {

constexpr SeedHead kHead = {1, 2, 3, 4, 5, 6, 7, 8, 9};

// The rule of docs/format.md §4, word for word.
std::uint64_t next_start(std::uint64_t position, std::uint64_t size) {
  const std::uint64_t align = size >= kLargePayloadBytes ? kLargeAlignBytes : kSmallAlignBytes;
  while (position % align != 0) ++position;
  return position;
}

}  // namespace

TEST(chunks_follow_each_other_in_a_file) {
  const std::vector<std::uint64_t> sizes = {4, 64, 65, 1 << 16, 3, (1 << 16) - 1, 1 << 16};
  const std::vector<std::uint64_t> counts = {3, 4}, rows = {100, 100};
  const Places places = place_chunks({sizes, counts, rows}, {64, 1 << 30, 1 << 16, 0});
  std::uint64_t position = 64;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    CHECK(places.offset[i] == next_start(position, sizes[i]));
    CHECK(places.turns[i] == 0);
    position = places.offset[i] + sizes[i];
  }
  CHECK(places.end == std::vector<std::uint64_t>{position});
  CHECK((places.file == std::vector<std::uint32_t>{0, 0}));
}

TEST(a_window_turns_at_a_whole_page) {
  std::mt19937 random(1);
  constexpr std::uint64_t kWindow = 64 << 10;
  std::vector<std::uint64_t> sizes;
  for (int i = 0; i < 500; ++i) sizes.push_back(1 + random() % (30 << 10));
  const std::vector<std::uint64_t> counts(sizes.size(), 1), rows(sizes.size(), 40);
  const Places places = place_chunks({sizes, counts, rows}, {64, 1 << 30, 1 << 16, kWindow});
  std::uint64_t start = 0, position = 64, turns = 0;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (places.turns[i] != 0) {
      ++turns;
      start = (position + kLargeAlignBytes - 1) / kLargeAlignBytes * kLargeAlignBytes;
      CHECK(places.offset[i] == start);
    } else {
      CHECK(places.offset[i] == next_start(position, sizes[i]));
    }
    CHECK(places.offset[i] + sizes[i] <= start + kWindow);
    position = places.offset[i] + sizes[i];
  }
  CHECK(turns > 50);
}

TEST(a_full_file_is_followed_by_another) {
  const std::vector<std::uint64_t> sizes(10, 1 << 20), counts(5, 2), rows(5, 1000);
  const std::size_t limit = 64 + (1 << 16) + 2 * (2 << 20) + 2 * (2 * kLargeAlignBytes + 1000);
  const Places places = place_chunks({sizes, counts, rows}, {64, limit, 1 << 16, 0});
  CHECK((places.file == std::vector<std::uint32_t>{0, 0, 1, 1, 2}));
  CHECK(places.end.size() == 3);
  CHECK(places.offset[4] == places.offset[0]);
}

TEST(chunks_are_copied_and_hashed) {
  std::mt19937 random(2);
  std::vector<std::uint64_t> sizes = {0, 1, 300, 70000, 5, 4096};
  std::vector<std::byte> source(80000), memory(200000, std::byte{7});
  for (std::byte& byte : source) byte = static_cast<std::byte>(random());
  std::vector<std::byte*> targets;
  std::vector<const std::byte*> sources;
  std::uint64_t at = 0;
  for (const std::uint64_t size : sizes) {
    at = next_start(at, size);
    targets.push_back(memory.data() + at);
    sources.push_back(source.data());
    at += size;
  }
  std::memcpy(targets[3], source.data(), sizes[3]);
  sources[3] = targets[3];  // it stands there already
  std::vector<std::uint64_t> checksums(sizes.size());
  std::vector<Hash128> digests(sizes.size());
  stage_chunks(targets, sources, sizes, kHead, 10, {checksums, digests});
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    CHECK(std::memcmp(targets[i], source.data(), sizes[i]) == 0);
    const Digest one = hash_chunk(source.data(), sizes[i], chunk_seed(kHead, 10 + i));
    CHECK(checksums[i] == one.xxh3_64 && digests[i] == one.xxh3_128);
    if (i > 0) {
      for (std::byte* gap = targets[i - 1] + sizes[i - 1]; gap < targets[i]; ++gap) {
        CHECK(*gap == std::byte{0});
      }
    }
  }
  checksums[3] = 7;  // what has its hashes keeps them
  sources[3] = nullptr;
  stage_chunks(targets, sources, sizes, kHead, 20, {checksums, digests});
  CHECK(checksums[3] == 7);
  CHECK(checksums[4] == hash_chunk(source.data(), sizes[4], chunk_seed(kHead, 24)).xxh3_64);
  const std::vector<std::uint64_t> counts = {2, 1, 3};
  std::vector<Hash128> shards(3);
  digest_shards(digests, counts, shards);
  CHECK(shards[0] == xxh3_128(digests.data(), 32) && shards[1] == xxh3_128(&digests[2], 16));
  CHECK(shards[2] == xxh3_128(&digests[3], 48));
}

TEST(the_first_damaged_chunk_is_found) {
  std::vector<std::byte> memory(1 << 20);
  std::vector<StoredChunk> chunks;
  for (std::uint64_t i = 0; i < 20; ++i) {
    const std::byte* payload = memory.data() + i * 50000 + 100;
    const std::uint64_t size = i * 1000;
    chunks.push_back({payload, size, 100, i, xxh3_64(payload, size, chunk_seed(kHead, i))});
  }
  CHECK(first_damaged(chunks, kHead) == chunks.size());
  for (std::size_t i = 1; i < chunks.size(); ++i) {
    std::byte& last = memory[i * 50000 + 100 + i * 1000 - 1];
    last ^= std::byte{1};
    CHECK(first_damaged(chunks, kHead) == i);
    last ^= std::byte{1};
    std::byte& gap = memory[i * 50000];
    gap = std::byte{1};
    CHECK(first_damaged(chunks, kHead) == i);
    gap = std::byte{0};
    chunks[i].row += 1;  // as if another chunk stood in its place
    CHECK(first_damaged(chunks, kHead) == i);
    chunks[i].row -= 1;
  }
}

}  // namespace holdfast
