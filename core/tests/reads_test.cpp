// What a load reads: which chunks, in which order, in which runs, and to which targets.
#include "holdfast/reads.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "check.h"
#include "holdfast/checksum.h"

namespace holdfast {
namespace {

using Numbers = std::vector<std::int64_t>;
using Flags = std::vector<std::uint8_t>;

// Two files. The first has chunks 0, 1 and 2 of 4 MiB each, the second chunk 3 of 100 bytes.
constexpr std::int64_t kBig = 4 << 20;
struct Chunks {
  Numbers first{0, 3, 4}, start{4096, 4096 + kBig, 4096 + 2 * kBig, 64};
  Numbers bytes{kBig, kBig, kBig, 100}, gap_start{64, 4096 + kBig, 4096 + 2 * kBig, 64};
  ChunkColumns all() const { return {first, start, bytes, gap_start}; }
};

bool same(const Run& run, const Run& expected) {
  return run.file == expected.file && run.offset == expected.offset &&
         run.bytes == expected.bytes && run.begin == expected.begin && run.end == expected.end;
}

}  // namespace

TEST(whole_tensors_are_all_chunks_of_their_shards) {
  const Numbers order{1, 0, 2}, first{0, 1, 2, 3}, first_row{0, 2, 3};
  const std::vector<std::uint32_t> chunks{2, 1, 1};
  const Wanted wanted = rows_of_whole(order, first, first_row, chunks, Numbers{1, 0});
  CHECK(wanted.number == (Numbers{0, 0, 1}));
  CHECK(wanted.row == (Numbers{0, 1, 2}));
}

TEST(reads_are_ordered_by_file_and_place_and_each_chunk_is_one) {
  Chunks chunks;
  std::swap(chunks.start[0], chunks.start[2]);  // as of a file whose payloads refer to each other
  const ReadColumns reads = reads_in_order(chunks.first, chunks.start, Numbers{0, 1, 2, 3, 4},
                                           Numbers{3, 0, 2, 0, 1}, Flags{1, 0, 1, 1, 0});
  CHECK(reads.row == (Numbers{2, 1, 0, 3}));
  CHECK(reads.first == (Numbers{3, 2, 0, 4}));
  CHECK(reads.count == (Numbers{1, 1, 2, 1}));
  CHECK(reads.wants == (Numbers{1, 3, 4, 2, 0}));
  CHECK(reads.exact == (Flags{0, 1, 0, 1, 1}));
}

TEST(neighbours_are_one_run_until_it_is_long_enough_or_would_be_too_long) {
  const Chunks chunks;
  const Numbers rows{0, 1, 2, 3}, begins{0, 1, 2, 3};
  const auto two = join_runs(chunks.all(), rows, begins, {64 << 20, 6 << 20});
  CHECK_EQ(two.size(), 3u);
  CHECK(same(two[0], {0, 0, 4096 + 2 * kBig, 0, 2}));
  CHECK(same(two[1], {0, 4096 + 2 * kBig, kBig, 2, 3}));
  CHECK(same(two[2], {1, 0, 4096, 3, 4}));  // of another file
  const auto short_ones = join_runs(chunks.all(), rows, begins, {6 << 20, 6 << 20});
  CHECK_EQ(short_ones.size(), 4u);
  const auto units = join_runs(chunks.all(), rows, Numbers{0, 3}, {64 << 20, 4 << 20});
  CHECK_EQ(units.size(), 2u);  // what is decoded together is read together
  CHECK(same(units[0], {0, 0, 4096 + 3 * kBig, 0, 3}));
}

TEST(a_gap_is_read_over_only_where_it_is_a_small_part) {
  Chunks chunks;
  const Numbers rows{0, 1}, begins{0, 1};
  const RunLimits limits{64 << 20, 32 << 20};
  const auto runs_after = [&](std::int64_t gap) {
    chunks.start[1] = chunks.gap_start[1] = 4096 + kBig + gap;
    return join_runs(chunks.all(), rows, begins, limits).size();
  };
  CHECK_EQ(runs_after(60 << 10), 1u);
  CHECK_EQ(runs_after(64 << 10), 1u);
  CHECK_EQ(runs_after(68 << 10), 2u);
  chunks.bytes[0] = 1 << 20;
  CHECK_EQ(join_runs(chunks.all(), rows, begins, limits).size(), 2u);
}

TEST(a_damaged_byte_or_gap_of_a_run_is_found) {
  alignas(64) std::array<std::byte, 256> file{};
  const Numbers first{0, 2}, start{64, 128}, bytes{60, 100}, gap_start{64, 124};
  const ChunkColumns chunks{first, start, bytes, gap_start};
  const SeedHead head{1, 2, 3};
  std::vector<std::uint64_t> checksums;
  for (std::uint64_t row = 0; row < 2; ++row) {
    checksums.push_back(xxh3_64(file.data() + start[row], static_cast<std::size_t>(bytes[row]),
                                chunk_seed(head, row)));
  }
  const auto damaged = [&] {
    return first_damaged_read(chunks, checksums, Numbers{0, 1}, 0, file.data(), head);
  };
  CHECK_EQ(damaged(), 2u);
  file[70] = std::byte{1};
  CHECK_EQ(damaged(), 0u);
  file[70] = std::byte{0};
  file[125] = std::byte{1};  // between the two
  CHECK_EQ(damaged(), 1u);
}

TEST(chunks_are_placed_where_their_targets_lie_as_stored_and_the_others_are_named) {
  std::array<std::byte, 128> file;
  for (std::size_t i = 0; i < file.size(); ++i) file[i] = static_cast<std::byte>(i);
  // One tensor of 12 two-byte elements, in chunks of 8 and of 4; and one of 5 bytes.
  const Numbers first{0, 3}, start{0, 64, 80}, bytes{16, 8, 5}, gap_start{0, 16, 72};
  const std::vector<std::uint32_t> tensor{0, 1};
  const Numbers first_row{0, 2}, chunk_elements{8, 8}, item_bytes{2, 1};
  std::array<std::byte, 24> target{};
  std::array<std::byte, 24> twin{};
  const std::vector<std::uint64_t> address{reinterpret_cast<std::uint64_t>(target.data()), 0,
                                           reinterpret_cast<std::uint64_t>(twin.data())};
  const Numbers rows{0, 1, 2}, firsts{0, 2, 4}, counts{2, 2, 1}, wants{0, 2, 0, 2, 1};
  const Flags exact{1, 1, 1, 0, 1};
  const Elsewhere others =
      place_reads({first, start, bytes, gap_start}, {first_row, tensor, chunk_elements, item_bytes},
                  {rows, firsts, counts, wants, exact, address}, file.data());
  CHECK(std::memcmp(target.data(), file.data(), 16) == 0);
  CHECK(std::memcmp(target.data() + 16, file.data() + 64, 8) == 0);
  CHECK(std::memcmp(twin.data(), file.data(), 16) == 0);
  CHECK(twin[16] == std::byte{0});
  CHECK(others.read == (Numbers{1, 2}));
  CHECK(others.pair == (Numbers{3, 4}));
}

TEST(stretches_that_share_a_byte_are_found) {
  using Places = std::vector<std::size_t>;
  CHECK(overlapping(Numbers{100, 0, 50}, Numbers{10, 50, 50}).empty());
  CHECK(overlapping(Numbers{99, 0, 50}, Numbers{10, 50, 50}) == (Places{0, 2}));
  CHECK(overlapping(Numbers{0, 10, 90}, Numbers{100, 5, 5}) == (Places{0, 1, 2}));
  CHECK(overlapping(Numbers{7, 7}, Numbers{1, 1}) == (Places{0, 1}));
  CHECK(overlapping(Numbers{0, 5}, Numbers{10, 0}).empty());  // an empty one shares none
}

}  // namespace holdfast
