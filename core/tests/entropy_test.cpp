#include "codec/entropy.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <utility>
#include <vector>

#include "check.h"

namespace holdfast {
namespace {

using Bytes = std::vector<std::uint8_t>;

// Symbols of a geometric distribution: `share` of what is left goes to each next one.
Bytes geometric(std::size_t count, double share, unsigned seed) {
  std::mt19937_64 random(seed);
  std::geometric_distribution<int> next(share);
  Bytes symbols(count);
  for (std::uint8_t& symbol : symbols)
    symbol = static_cast<std::uint8_t>(std::min(next(random), 255));
  return symbols;
}

Bytes contexts_of(std::size_t count, std::size_t contexts, unsigned seed) {
  std::mt19937_64 random(seed);
  Bytes result(count);
  for (std::uint8_t& context : result) context = static_cast<std::uint8_t>(random() % contexts);
  return result;
}

Bytes coded(const Symbols& symbols, const CodecKernel& kernel) {
  Bytes out(coded_bytes_max(symbols.count));
  out.resize(encode_symbols(symbols, out.data(), kernel));
  return out;
}

constexpr std::size_t kCounts[] = {1, 2, 7, 63, 64, 65, 1000, 4097, 65536, 300001};

TEST(what_is_coded_is_decoded_by_every_kernel_from_the_same_bytes) {
  for (const std::size_t count : kCounts) {
    for (const double share : {0.999, 0.9, 0.3, 0.05, 0.001}) {
      const Bytes symbols = geometric(count, share, static_cast<unsigned>(count));
      for (const std::size_t contexts : {std::size_t{1}, std::size_t{3}, kContextsMax}) {
        const Bytes of = contexts_of(count, contexts, 7);
        const std::uint8_t* in = contexts > 1 ? of.data() : nullptr;
        const Symbols all = {symbols.data(), count, in, contexts};
        const Bytes first = coded(all, codec_kernels().back());
        for (const CodecKernel& kernel : codec_kernels()) {
          CHECK(coded(all, kernel) == first);
          std::span<const std::uint8_t> left = first;
          Bytes found(count);
          CHECK(decode_symbols(left, found, in, contexts, kernel));
          CHECK(left.empty());
          CHECK(found == symbols);
        }
      }
    }
  }
}

// A table of symbol 0, of a frequency, and symbol 255, of the rest.
EncodeTable table_of(std::uint32_t frequency) {
  EncodeTable table = {};
  const auto set = [&](int symbol, std::uint32_t of, std::uint32_t start) {
    std::uint32_t shift = 0;
    while (of > 1u << shift) ++shift;
    const std::uint32_t bias = of == 1 ? start + kScale - 1 : start;
    const std::uint64_t reciprocal = ((std::uint64_t{1} << (shift + 31)) + of - 1) / of;
    table.packed[symbol] = (kScale - of) | bias << 12 | (of == 1 ? 0 : shift - 1) << 25;
    table.reciprocal[symbol] = of == 1 ? ~0u : static_cast<std::uint32_t>(reciprocal);
  };
  set(0, frequency, 0);
  set(255, kScale - frequency, frequency);
  return table;
}

TEST(every_kernel_divides_as_integers_do) {
  std::mt19937 random(17);
  for (std::uint32_t frequency = 1; frequency < kScale; ++frequency) {
    const EncodeTable table = table_of(frequency);
    for (const std::uint8_t symbol : Bytes{0, 255}) {
      const std::uint32_t of = symbol == 0 ? frequency : kScale - frequency;
      const std::uint32_t start = symbol == 0 ? 0 : frequency;
      const Bytes symbols(kLanes, symbol), contexts(kLanes, 0);
      std::uint32_t before[kLanes], expected[kLanes];
      std::vector<std::uint16_t> words;
      for (std::size_t lane = 0; lane < kLanes; ++lane) {
        // Just below, at and above a multiple, the largest quotient among them; or any state.
        const auto step = static_cast<std::uint32_t>(lane);
        const std::uint32_t quotient = lane < 3 ? (1u << 19) - 1 : std::uint32_t(random()) >> 13;
        const std::uint32_t near = quotient * of + step % 3 - 1;
        const std::uint32_t any = std::uint32_t(random()) >> 1;
        before[lane] = std::clamp(lane < 48 ? near : any, kStateMin, (1u << 31) - 1);
        const bool full = before[lane] >= of << 19;
        if (full) words.push_back(static_cast<std::uint16_t>(before[lane]));
        const std::uint32_t left = full ? before[lane] >> 16 : before[lane];
        expected[lane] = left / of * kScale + start + left % of;
      }
      for (const CodecKernel& kernel : codec_kernels()) {
        const std::uint8_t* const none = nullptr;
        for (const std::uint8_t* in : {none, contexts.data()}) {
          std::uint32_t states[kLanes];
          std::copy_n(before, kLanes, states);
          std::vector<std::uint16_t> out(2 * kLanes);
          std::uint16_t* const end = out.data() + out.size();
          const std::uint16_t* first =
              kernel.encode(symbols.data(), in, kLanes, &table, states, end);
          CHECK(std::equal(states, states + kLanes, expected));
          CHECK(std::equal(first, static_cast<const std::uint16_t*>(end), words.begin(),
                           words.end()));
        }
      }
    }
  }
}

TEST(of_many_symbols_a_part_says_how_often_all_occur) {
  constexpr std::size_t kMany = 1 << 18;
  Bytes symbols = geometric(kMany, 0.2, 5);
  for (std::uint8_t& symbol : symbols) symbol = std::min<std::uint8_t>(symbol, 20);
  const auto counts_of = [&] {
    Histogram histogram;
    count_symbols({symbols.data(), symbols.size()}, histogram);
    return std::vector<std::uint32_t>(histogram.counts[0], histogram.counts[0] + 256);
  };
  const std::vector<std::uint32_t> about = counts_of();
  for (int i = 0; i < 8; ++i) {
    const auto exact = static_cast<double>(std::count(symbols.begin(), symbols.end(), i));
    CHECK(std::abs(about[i] - exact) < 0.05 * exact);
  }
  // Wherever a symbol occurs once, it has a place in the table: beside the others, and far away.
  for (const std::uint8_t rare : Bytes{21, 255}) {
    for (const std::size_t at : {std::size_t{0}, kMany / 2 + 77, kMany - 1}) {
      const std::uint8_t before = std::exchange(symbols[at], rare);
      CHECK(counts_of()[rare] > 0);
      const Bytes payload = coded({symbols.data(), kMany}, best_codec_kernel());
      std::span<const std::uint8_t> left = payload;
      Bytes found(kMany);
      CHECK(decode_symbols(left, found, nullptr, 1, best_codec_kernel()));
      CHECK(found == symbols);
      symbols[at] = before;
    }
  }
  // Rows as long as a block: columns that differ are all met.
  for (std::size_t i = 0; i < kMany; ++i) {
    symbols[i] = static_cast<std::uint8_t>(i % 256 < 200 ? i % 7 : 100 + i % 11);
  }
  const std::vector<std::uint32_t> rows = counts_of();
  for (int i = 0; i < 111; ++i) {
    const auto exact = static_cast<double>(std::count(symbols.begin(), symbols.end(), i));
    CHECK(std::abs(rows[i] - exact) <= 0.1 * exact);
  }
}

TEST(the_length_is_within_one_percent_of_the_entropy) {
  const std::size_t count = 1 << 20;
  for (const double share : {0.9, 0.5, 0.2, 0.05}) {
    const Bytes symbols = geometric(count, share, 3);
    std::vector<double> counts(256);
    for (const std::uint8_t symbol : symbols) counts[symbol] += 1;
    double bits = 0;
    for (const double n : counts) bits += n > 0 ? -n * std::log2(n / count) : 0;
    const double size =
        static_cast<double>(coded({symbols.data(), count}, best_codec_kernel()).size());
    CHECK(size < 1.01 * bits / 8 + 700);
  }
}

TEST(equal_symbols_take_two_bytes_and_random_ones_two_more_than_they_are) {
  const Bytes zeros(5000);
  CHECK_EQ(coded({zeros.data(), zeros.size()}, best_codec_kernel()).size(), std::size_t{2});
  std::mt19937_64 random(1);
  Bytes noise(100000);
  for (std::uint8_t& byte : noise) byte = static_cast<std::uint8_t>(random());
  CHECK(coded({noise.data(), noise.size()}, best_codec_kernel()).size() <=
        coded_bytes_max(noise.size()));
  CHECK_EQ(coded({nullptr, 0}, best_codec_kernel()).size(), std::size_t{1});
}

TEST(damage_is_refused_or_decodes_to_something_and_nothing_else_is_touched) {
  std::mt19937_64 random(5);
  for (const std::size_t count : {std::size_t{100}, std::size_t{5000}, std::size_t{200000}}) {
    const Bytes symbols = geometric(count, 0.3, 11);
    const Bytes whole = coded({symbols.data(), count}, best_codec_kernel());
    std::size_t refused = 0, wrong = 0;
    for (int trial = 0; trial < 300; ++trial) {
      Bytes damaged = whole;
      damaged[random() % std::min<std::size_t>(damaged.size(), trial % 2 ? 1u << 30 : 60)] ^=
          static_cast<std::uint8_t>(1 << random() % 8);
      if (trial % 5 == 0) damaged.resize(random() % damaged.size());
      for (const CodecKernel& kernel : codec_kernels()) {
        std::span<const std::uint8_t> left = damaged;
        Bytes found(count);
        const bool good = decode_symbols(left, found, nullptr, 1, kernel) && left.empty();
        if (!good)
          ++refused;
        else if (found != symbols)
          ++wrong;
      }
    }
    CHECK(refused > 0);
    CHECK(wrong * 20 < refused);  // the states at the end tell nearly all
  }
}

}  // namespace
}  // namespace holdfast
