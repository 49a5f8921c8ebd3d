#include "holdfast/segment.h"

#include <bit>
#include <cstring>
#include <random>
#include <vector>

#include "check.h"

namespace holdfast {
namespace {

using Words = std::vector<std::uint32_t>;

struct Made {
  Segment segment;
  std::vector<std::uint8_t> bytes;
  std::vector<SegmentPayload> payloads;

  std::span<const std::uint8_t> payload(std::size_t i) const {
    return {bytes.data() + payloads[i].offset, payloads[i].size_bytes};
  }
};

Made encoded(std::span<const SegmentItem> items) {
  std::size_t room = 0;
  for (const SegmentItem& item : items) room += segment_bytes_max(item.elements);
  Made made = {{}, std::vector<std::uint8_t>(room, 0xEE), {}};
  made.payloads.resize(items.size());
  made.segment = encode_segment(items, made.bytes.data(), made.payloads);
  made.bytes.resize(made.segment.size_bytes);
  return made;
}

Words normal(std::size_t count, unsigned seed, float scale = 0.02F) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> next(0, scale);
  Words words(count);
  for (std::uint32_t& word : words) word = std::bit_cast<std::uint32_t>(next(random));
  return words;
}

Words noise(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  Words words(count);
  for (std::uint32_t& word : words) word = static_cast<std::uint32_t>(random());
  return words;
}

SegmentItem floats(const Words& words, std::size_t row = 1) {
  return {words.data(), {words.size(), 4, Kind::kFloat, row, 0}, 0, false, kNone, kNone};
}

// Every payload where it may start, zeros between them, checksums and digests right, and decoded to
// what was given, in the relatives that its item names.
void check_all(std::span<const SegmentItem> items, const Made& made) {
  std::vector<bool> covered(made.bytes.size());
  for (std::size_t i = 0; i < items.size(); ++i) {
    const SegmentItem& item = items[i];
    const SegmentPayload& payload = made.payloads[i];
    const std::size_t size = item.elements.size_bytes();
    const bool is_large = payload.mode == Mode::kRaw && size >= kLargePayloadBytes;
    CHECK_EQ(payload.offset % (is_large ? kLargeAlignBytes : kSmallAlignBytes), 0U);
    CHECK_EQ(payload.checksum,
             xxh3_64(made.payload(i).data(), payload.size_bytes, item.seed));
    CHECK(payload.digest == xxh3_128(item.data, size));
    for (std::size_t at = 0; at < payload.size_bytes; ++at) {
      CHECK(!covered[payload.offset + at]);
      covered[payload.offset + at] = true;
    }
    if (payload.mode == Mode::kRaw) {
      CHECK_EQ(payload.size_bytes, size);
      CHECK(size == 0 || std::memcmp(made.payload(i).data(), item.data, size) == 0);
      continue;
    }
    const auto data_of = [&items](int other) {
      return other == kNone ? nullptr : items[static_cast<std::size_t>(other)].data;
    };
    const Relatives relatives = {data_of(item.master), data_of(item.second_moment), nullptr};
    std::vector<std::uint8_t> target(size);
    CHECK(decode_lossless(payload.mode, made.payload(i), item.elements, relatives, target.data()));
    CHECK(std::memcmp(target.data(), item.data, size) == 0);
  }
  for (std::size_t at = 0; at < covered.size(); ++at) {
    if (!covered[at]) CHECK_EQ(int{made.bytes[at]}, 0);
  }
}

std::vector<std::uint16_t> rounded(const Words& words) {
  std::vector<std::uint16_t> halves;
  for (const std::uint32_t word : words) {
    halves.push_back(static_cast<std::uint16_t>((word + 0x7FFF + (word >> 16 & 1)) >> 16));
  }
  return halves;
}

// Two parameters with all that belongs to them, as a save hands them over.
struct Parameters {
  Words squares[2], moments[2], masters[2];
  std::vector<std::uint16_t> weights[2];
  std::vector<SegmentItem> items;

  explicit Parameters(std::size_t count) {
    for (unsigned n = 0; n < 2; ++n) {
      moments[n] = normal(count, 10 + n, 1e-3F);
      for (const std::uint32_t word : moments[n]) {
        const float square = std::bit_cast<float>(word) * std::bit_cast<float>(word);
        squares[n].push_back(std::bit_cast<std::uint32_t>(2 * square));
      }
      masters[n] = normal(count, 20 + n);
      weights[n] = rounded(masters[n]);
      const int first = static_cast<int>(items.size());
      const std::size_t row = count / 50;
      items.push_back(floats(squares[n], row));
      items.push_back(floats(moments[n], row));
      items.back().second_moment = first;
      items.push_back(floats(masters[n], row));
      items.push_back({weights[n].data(), {count, 2, Kind::kBf16, row, 0}});
      items.back().master = first + 2;
    }
    for (std::size_t i = 0; i < items.size(); ++i) items[i].seed = 1000 + i;
  }
};

}  // namespace

TEST(parameters_lie_behind_each_other_and_are_coded_by_what_belongs_to_them) {
  for (const std::size_t count : {50U, 5000U, 400000U}) {
    const Parameters given(count);
    const Made made = encoded(given.items);
    check_all(given.items, made);
    CHECK(made.payloads[3].mode == Mode::kRounded);
    CHECK(made.payloads[7].mode == Mode::kRounded);
    if (count == 400000U) CHECK(made.payloads[5].mode == Mode::kGridOfMoment);
  }
}

TEST(what_is_staged_gives_the_same_bytes) {
  Parameters given(30000);
  const Made copied = encoded(given.items);
  for (SegmentItem& item : given.items) item.is_staged = true;
  CHECK(encoded(given.items).bytes == copied.bytes);
}

TEST(what_does_not_shrink_is_copied_to_where_it_may_start) {
  const Words few = noise(100, 1), more = noise(20000, 2), none;
  const Words ones(5000, 0x3F800000);
  const SegmentItem items[] = {floats(few), floats(more), floats(none), floats(ones),
                               floats(few), floats(more)};
  const Made made = encoded(items);
  check_all(items, made);
  CHECK(made.payloads[1].mode == Mode::kRaw);
  CHECK(made.payloads[3].mode == Mode::kConstant);
  CHECK_EQ(made.payloads[2].size_bytes, 0U);
  CHECK_EQ(made.payloads[2].offset, 0U);
  CHECK_EQ(made.payloads[5].offset % kLargeAlignBytes, 0U);
}

// Its payload is the digest, and it becomes the next base all the same.
TEST(what_is_equal_to_its_base_is_its_digest) {
  const Words words = normal(5000, 3), others = normal(5000, 4), few = normal(4, 5);
  const Hash128 same = xxh3_128(words.data(), 4 * words.size());
  const Hash128 same_of_few = xxh3_128(few.data(), 4 * few.size());
  for (const bool is_staged : {false, true}) {
    SegmentItem items[] = {floats(words), floats(others), floats(few)};
    std::vector<std::vector<std::uint8_t>> bases;
    const Hash128* digests[] = {&same, &same, &same_of_few};
    for (std::size_t i = 0; i < 3; ++i) {
      items[i].is_staged = is_staged;
      items[i].seed = i;
      items[i].base_digest = digests[i];
      bases.emplace_back(items[i].elements.size_bytes());
      items[i].next_base = bases.back().data();
    }
    const Made made = encoded(items);
    CHECK(made.payloads[0].mode == Mode::kUnchanged);
    CHECK_EQ(made.payloads[0].size_bytes, same.size());
    CHECK(std::memcmp(made.payload(0).data(), same.data(), same.size()) == 0);
    CHECK_EQ(made.payloads[0].checksum, xxh3_64(same.data(), same.size(), 0));
    CHECK(made.payloads[1].mode != Mode::kUnchanged);
    CHECK(made.payloads[2].mode != Mode::kUnchanged);  // it is no longer than a digest
    for (std::size_t i = 0; i < 3; ++i) {
      CHECK(std::memcmp(bases[i].data(), items[i].data, bases[i].size()) == 0);
    }
  }
}

TEST(a_relative_that_is_gone_is_done_without) {
  Parameters given(4000);
  // The second weight by the first master: the second one has taken its memory.
  given.items[7].master = 2;
  given.weights[1] = given.weights[0];
  given.items[7].data = given.weights[1].data();
  given.items.push_back(given.items[3]);  // so that the second master is referred to
  given.items.back().master = 6;
  const Made made = encoded(given.items);
  CHECK(made.payloads[7].mode == Mode::kPlanes);
  check_all(given.items, made);
}

TEST(nothing_is_a_segment_of_no_bytes) {
  CHECK_EQ(encoded({}).segment.size_bytes, 0U);
}

}  // namespace holdfast
