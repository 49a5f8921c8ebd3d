#include "holdfast/entropy.h"

#include <cmath>
#include <random>
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
