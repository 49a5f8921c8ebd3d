#include "holdfast/lossless.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "check.h"
#include "codec/codec_kernel.h"

namespace holdfast {
namespace {

using Bytes = std::vector<std::uint8_t>;

struct Made {
  Mode mode;
  Bytes payload;
};

Made encoded(const Elements& elements, const void* data, const Relatives& relatives,
             const CodecKernel& kernel) {
  Bytes out(lossless_bytes_max(elements), 0xEE);
  const Encoded made = encode_lossless(elements, data, relatives, out.data(), kernel);
  out.resize(made.mode == Mode::kRaw ? 0 : made.size_bytes);
  return {made.mode, out};
}

// Codes with every kernel, which must give the same bytes; decodes with every kernel.
Made round_trip(const Elements& elements, const void* data, const Relatives& relatives = {}) {
  const Made first = encoded(elements, data, relatives, codec_kernels().back());
  for (const CodecKernel& kernel : codec_kernels()) {
    const Made made = encoded(elements, data, relatives, kernel);
    CHECK(made.mode == first.mode);
    CHECK(made.payload == first.payload);
    if (made.mode == Mode::kRaw) continue;
    std::vector<std::uint64_t> target(elements.size_bytes() / 8 + 1, 0x5555555555555555);
    CHECK(decode_lossless(made.mode, made.payload, elements, relatives, target.data(), kernel));
    CHECK(std::memcmp(target.data(), data, elements.size_bytes()) == 0);
    auto* behind = reinterpret_cast<std::uint8_t*>(target.data()) + elements.size_bytes();
    CHECK_EQ(int{*behind}, 0x55);
  }
  return first;
}

std::vector<std::uint32_t> weights(std::size_t count, unsigned seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> next(0, 0.02f);
  std::vector<std::uint32_t> result(count);
  for (std::uint32_t& word : result) word = std::bit_cast<std::uint32_t>(next(random));
  return result;
}

// A second moment that is the product of a row's and a column's scale, about; and its first moment.
struct Moments {
  std::vector<std::uint32_t> first, second;
};

Moments moments(std::size_t rows, std::size_t columns, unsigned seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<double> next;
  std::vector<double> row(rows), column(columns);
  for (double& scale : row) scale = std::exp2(2 * next(random));
  for (double& scale : column) scale = std::exp2(2 * next(random));
  Moments made;
  for (std::size_t i = 0; i < rows * columns; ++i) {
    const double square = 1e-9 * row[i / columns] * column[i % columns] * std::exp2(next(random));
    made.second.push_back(std::bit_cast<std::uint32_t>(static_cast<float>(square)));
    const auto moment = static_cast<float>(0.3 * std::sqrt(square) * next(random));
    made.first.push_back(std::bit_cast<std::uint32_t>(moment));
  }
  return made;
}

double share(const Made& made, const Elements& elements) {
  return static_cast<double>(made.payload.size()) / static_cast<double>(elements.size_bytes());
}

TEST(weights_are_coded_by_planes) {
  const std::vector<std::uint32_t> data = weights(300000, 1);
  const Elements elements = {data.size(), 4, Kind::kFloat, 1000, 0};
  const Made made = round_trip(elements, data.data());
  CHECK(made.mode == Mode::kPlanes);
  CHECK(share(made, elements) < 0.84);
}

TEST(moments_are_coded_by_rows_and_columns) {
  const Moments made = moments(300, 1000, 2);
  const Elements elements = {300000, 4, Kind::kFloat, 1000, 0};
  const Made second = round_trip(elements, made.second.data());
  CHECK(second.mode == Mode::kGrid);
  CHECK(share(second, elements) < 0.82);
  const Made alone = round_trip(elements, made.first.data());
  const Made known = round_trip(elements, made.first.data(), {nullptr, made.second.data()});
  CHECK(known.mode == Mode::kGridOfMoment);
  CHECK(known.payload.size() < alone.payload.size());
}

TEST(a_sign_that_the_sample_misses_escapes) {
  Moments made = moments(300, 1000, 2);
  const Elements elements = {300000, 4, Kind::kFloat, 1000, 0};
  for (const std::size_t at : {300, 5000, 123456, 299000}) made.second[at] |= 0x80000000;
  const Made second = round_trip(elements, made.second.data());
  CHECK(second.mode == Mode::kGrid);
  CHECK_EQ(int{second.payload[0]}, 0);
}

TEST(runs_that_begin_and_end_within_a_row) {
  const Moments made = moments(64, 999, 3);
  for (const std::size_t first : {0, 1, 500, 998, 999}) {
    for (const std::size_t count : {20000, 40007}) {
      const Elements elements = {count, 4, Kind::kFloat, 999, first % 999};
      CHECK(round_trip(elements, made.second.data() + first).mode == Mode::kGrid);
      round_trip(elements, made.first.data() + first, {nullptr, made.second.data() + first});
    }
  }
}

TEST(every_bit_pattern_survives) {
  std::mt19937_64 random(4);
  const std::uint32_t odd[] = {0,          0x80000000, 1,          0x80000001,
                               0x7F800000, 0xFF800000, 0x7F800001, 0xFFFFFFFF,
                               0x7FC00000, 0x00400000, 0x3F800000};
  Moments made = moments(200, 300, 5);
  for (int trial = 0; trial < 20; ++trial) {
    for (int i = 0; i < 100; ++i) {
      made.second[random() % made.second.size()] = odd[random() % (trial % 2 ? 1 : 11)];
      made.first[random() % made.first.size()] = odd[random() % 11];
    }
    const Elements elements = {60000, 4, Kind::kFloat, 300, 0};
    round_trip(elements, made.second.data());
    round_trip(elements, made.first.data(), {nullptr, made.second.data()});
  }
}

TEST(every_item_size_and_every_count) {
  std::mt19937_64 random(6);
  for (const std::size_t item : {1, 2, 4, 8}) {
    for (const Kind kind : {Kind::kInteger, Kind::kFloat}) {
      for (const std::size_t count : {1, 2, 3, 63, 64, 65, 1000, 70001}) {
        std::vector<std::uint64_t> data(count);
        for (std::uint64_t& word : data) word = random() & random() & random() & 0xFF0F07030103070F;
        round_trip({count, item, kind, 1, 0}, data.data());
        std::fill(data.begin(), data.end(), data[0]);
        for (std::size_t i = 1; i < 8 / item; ++i) {
          std::memcpy(reinterpret_cast<char*>(data.data()) + i * item, data.data(), item);
        }
        std::fill(data.begin(), data.end(), data[0]);
        const Made made = round_trip({count, item, kind, 1, 0}, data.data());
        CHECK(count == 1 || made.mode == Mode::kConstant);
      }
    }
  }
}

TEST(roundings_of_masters_take_nothing) {
  std::vector<std::uint32_t> masters = weights(50000, 8);
  masters[0] = 0x7F800001;  // NaN
  masters[1] = 0x7F7FFFFF;  // rounds to infinity
  masters[2] = 0x3F808000;  // ties
  masters[3] = 0x3F818000;
  std::vector<std::uint16_t> data(masters.size());
  best_codec_kernel().to_bf16(masters.data(), data.data(), data.size());
  CHECK_EQ(data[0], std::uint16_t{0x7FC0});
  CHECK_EQ(data[1], std::uint16_t{0x7F80});
  CHECK_EQ(data[2], std::uint16_t{0x3F80});
  CHECK_EQ(data[3], std::uint16_t{0x3F82});
  const Elements elements = {data.size(), 2, Kind::kBf16, 100, 0};
  const Made made = round_trip(elements, data.data(), {masters.data(), nullptr});
  CHECK(made.mode == Mode::kRounded);
  CHECK(made.payload.empty());
  data[40000] ^= 1;
  CHECK(round_trip(elements, data.data(), {masters.data(), nullptr}).mode == Mode::kPlanes);
}

// 28 and 29 bits behind 7 others: a word of 64 is full, and must be empty after it.
TEST(differences_that_fill_a_word_of_bits_come_back) {
  std::mt19937_64 random(12);
  std::vector<std::uint32_t> base = weights(200000, 11), data;
  for (std::uint32_t& word : base) word = random() % 2 ? word : 0;
  for (const std::uint32_t word : base) data.push_back(word);
  for (std::size_t at = 0; at + 2 <= data.size(); at += 2 + random() % 50) {
    for (std::size_t i = at; i < at + 2; ++i) {
      data[i] = base[i] == 0 ? base[(i + 2) % base.size()] : base[i] ^ 0x80000000;
    }
  }
  const Elements elements = {data.size(), 4, Kind::kFloat, 1000, 0};
  const Made made = round_trip(elements, data.data(), {nullptr, nullptr, base.data()});
  CHECK(made.mode == Mode::kDifference);
}

TEST(damage_is_refused_or_decodes_to_something_and_nothing_else_is_touched) {
  std::mt19937_64 random(9);
  const Moments made = moments(64, 500, 10);
  const Elements elements = {32000, 4, Kind::kFloat, 500, 0};
  const Relatives relatives = {nullptr, made.second.data()};
  for (const auto* data : {&made.first, &made.second}) {
    const Made whole = encoded(elements, data->data(), relatives, best_codec_kernel());
    for (int trial = 0; trial < 500; ++trial) {
      Bytes damaged = whole.payload;
      const std::size_t end = trial % 2 ? damaged.size() : 2000;
      damaged[random() % end] ^= static_cast<std::uint8_t>(1 << random() % 8);
      if (trial % 5 == 0) damaged.resize(random() % damaged.size());
      for (const CodecKernel& kernel : codec_kernels()) {
        std::vector<std::uint32_t> target(elements.count);
        decode_lossless(whole.mode, damaged, elements, relatives, target.data(), kernel);
      }
    }
  }
  CHECK(!decode_lossless(Mode::kGridOfMoment, {}, elements, {}, nullptr));
  CHECK(!decode_lossless(Mode::kRounded, {}, elements, relatives, nullptr));
}

}  // namespace
}  // namespace holdfast
