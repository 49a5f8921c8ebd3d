#include "holdfast/samples.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "check.h"

namespace holdfast {
namespace {

std::vector<std::byte> random_bytes(std::size_t size) {
  std::mt19937_64 random(size);
  std::vector<std::byte> bytes(size);
  for (auto& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

std::uint64_t hash_of(const std::vector<std::byte>& bytes, std::uint64_t seed) {
  const Bytes all{bytes.data(), bytes.size()};
  return hash_spread({&all, 1}, seed);
}

}  // namespace

TEST(it_makes_no_difference_where_parts_are_cut) {
  std::mt19937_64 random(1);
  for (const std::size_t size : {0, 1, 127, 4096, 4097, 100003, 3000017, 40 << 20}) {
    const std::vector<std::byte> bytes = random_bytes(size);
    std::vector<std::vector<std::byte>> kept;
    for (std::size_t at = 0; at < size;) {
      const std::size_t end = at + std::min<std::size_t>(random() % (size / 3 + 2), size - at);
      kept.emplace_back(bytes.begin() + static_cast<std::ptrdiff_t>(at),
                        bytes.begin() + static_cast<std::ptrdiff_t>(end));
      at = end;
      at = end;
    }
    std::vector<Bytes> parts;
    for (const auto& part : kept) parts.push_back({part.data(), part.size()});
    CHECK_EQ(hash_spread(parts, 5), hash_of(bytes, 5));
  }
}

TEST(elements_in_any_strides_are_read_in_their_order) {
  constexpr std::int64_t kRows = 70;
  constexpr std::int64_t kColumns = 301;
  for (const std::size_t width : {1, 2, 4, 8, 16}) {
    const std::vector<std::byte> source = random_bytes(kRows * kColumns * width);
    std::vector<std::byte> turned;  // the columns, one behind the other
    for (std::int64_t column = 0; column < kColumns; ++column) {
      for (std::int64_t row = 0; row < kRows; ++row) {
        const auto* at = source.data() + std::size_t(row * kColumns + column) * width;
        turned.insert(turned.end(), at, at + width);
      }
    }
    const std::vector<std::int64_t> shape = {kColumns, 1, kRows};
    const std::vector<std::int64_t> strides = {1, 12345, kColumns};
    CHECK_EQ(hash_spread(Strided{source.data(), width, shape, strides}, 9), hash_of(turned, 9));
  }
}

TEST(few_elements_in_any_strides_are_all_read) {
  const std::vector<std::byte> source = random_bytes(64);
  const std::vector<std::byte> turned = {source[0], source[32], source[1], source[33]};
  const std::vector<std::int64_t> shape = {2, 2}, strides = {1, 32};
  const Strided elements{source.data(), 1, shape, strides};
  CHECK_EQ(hash_spread(elements, 1), hash_of(turned, 1));
  CHECK_EQ(hash_spread(elements, 1), hash_spread(elements, 2));  // no samples: no seed
}

TEST(of_few_bytes_each_counts) {
  std::vector<std::byte> bytes = random_bytes(4096);
  const std::uint64_t before = hash_of(bytes, 3);
  for (std::byte& byte : bytes) {
    byte ^= std::byte{1};
    CHECK(hash_of(bytes, 3) != before);
    byte ^= std::byte{1};
  }
  CHECK_EQ(hash_of(bytes, 3), before);
}

TEST(a_run_longer_than_two_stretches_is_always_seen) {
  std::vector<std::byte> bytes = random_bytes(4 << 20);
  const std::size_t run = 2 * (bytes.size() / (3 + 4) + 128);
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    const std::uint64_t before = hash_of(bytes, seed);
    const std::size_t at = seed * (bytes.size() - run) / 49;
    for (std::size_t i = at; i < at + run; ++i) bytes[i] ^= std::byte{1};
    CHECK(hash_of(bytes, seed) != before);
    for (std::size_t i = at; i < at + run; ++i) bytes[i] ^= std::byte{1};
  }
}

// Of places changed at random, and of columns, a share of 1 / 4: seen as often as is promised.
TEST(what_is_spread_is_seen_as_often_as_is_promised) {
  constexpr int kTrials = 400;
  for (const bool columns : {false, true}) {
    const std::vector<std::byte> bytes = random_bytes(96 << 10);
    int seen = 0;
    for (std::uint64_t trial = 0; trial < kTrials; ++trial) {
      std::vector<std::byte> changed = bytes;
      std::mt19937_64 random(trial);
      for (std::size_t place = 0; place < changed.size() / 128; ++place) {
        const bool hit = columns ? place % 4 == trial % 4 : random() % 4 == 0;
        if (hit) changed[place * 128 + random() % 128] ^= std::byte{1};
      }
      seen += hash_of(changed, trial) != hash_of(bytes, trial);
    }
    // 1 - (1 - 1/4)^3 = 0.578; 6 standard deviations of 400 trials are 0.148
    CHECK(seen > kTrials * 43 / 100);
    CHECK(seen < kTrials * 73 / 100);
  }
}

}  // namespace holdfast
