// How often symbols occur, and how long they will be when coded.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "holdfast/entropy.h"
#include "scratch.h"

namespace holdfast {
namespace {

constexpr double kRandomBits = 7.8;           // so many random bytes seem to have 7.955 bits each
constexpr std::size_t kPairsCount = 1 << 17;  // symbols from which on pairs are counted

struct CountMemory;
struct PairMemory;

double bits_of(const std::uint32_t* counts) {
  double bits = 0, total = 0;
  for (int i = 0; i < 256; ++i) {
    if (counts[i] == 0) continue;
    total += counts[i];
    bits -= counts[i] * std::log2(static_cast<double>(counts[i]));
  }
  return total > 0 ? bits + total * std::log2(total) : 0;
}

// Counts as many pairs as are symbols' halves: half as many steps, and neighbours that are alike do
// not wait for each other.
void count_pairs(const std::uint8_t* symbols, std::size_t count, std::uint32_t* counts) {
  auto* pairs = scratch<std::uint32_t, PairMemory>(1 << 16);
  std::memset(pairs, 0, sizeof *pairs << 16);
  std::size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    std::uint64_t word;
    std::memcpy(&word, symbols + i, 8);
    ++pairs[word & 0xFFFF];
    ++pairs[word >> 16 & 0xFFFF];
    ++pairs[word >> 32 & 0xFFFF];
    ++pairs[word >> 48];
  }
  for (; i < count; ++i) ++counts[symbols[i]];
  for (std::size_t second = 0; second < 256; ++second) {
    const std::uint32_t* of_first = pairs + (second << 8);
    std::uint32_t sum = 0;
    for (std::size_t first = 0; first < 256; ++first) {
      counts[first] += of_first[first];
      sum += of_first[first];
    }
    counts[second] += sum;
  }
}

// In several tables by turns: equal neighbours do not wait for each other.
void count_by_context(const Symbols& symbols, Histogram& histogram) {
  constexpr std::size_t kBlock = 256;
  const std::size_t size = symbols.context_count << 8;
  auto* tables = scratch<std::uint32_t, CountMemory>(4 * size);
  std::memset(tables, 0, 4 * size * sizeof *tables);
  std::uint16_t places[kBlock];
  for (std::size_t at = 0; at < symbols.count; at += kBlock) {
    const std::size_t count = std::min(kBlock, symbols.count - at);
    for (std::size_t i = 0; i < count; ++i) places[i] = symbols.data[at + i];
    if (symbols.contexts != nullptr) {
      for (std::size_t i = 0; i < count; ++i) {
        places[i] = static_cast<std::uint16_t>(places[i] | symbols.contexts[at + i] << 8);
      }
    }
    std::size_t i = 0;
    for (; i + 4 <= count; i += 4) {
      for (std::size_t t = 0; t < 4; ++t) ++tables[t * size + places[i + t]];
    }
    for (; i < count; ++i) ++tables[places[i]];
  }
  std::uint32_t* counts = histogram.counts[0];
  for (std::size_t i = 0; i < size; ++i) {
    counts[i] = tables[i] + tables[size + i] + tables[2 * size + i] + tables[3 * size + i];
  }
}

}  // namespace

bool looks_random(const std::uint8_t* sample) {
  std::uint32_t counts[256] = {};
  for (std::size_t i = 0; i < kSampledBytes; ++i) ++counts[sample[i]];
  return bits_of(counts) > kRandomBits * kSampledBytes;
}

void count_symbols(const Symbols& symbols, Histogram& histogram) {
  std::memset(histogram.counts, 0, symbols.context_count * sizeof histogram.counts[0]);
  if (symbols.contexts == nullptr && symbols.count >= kPairsCount) {
    count_pairs(symbols.data, symbols.count, histogram.counts[0]);
  } else {
    count_by_context(symbols, histogram);
  }
}

void join_contexts(Histogram& histogram, std::size_t context_count) {
  for (std::size_t context = 1; context < context_count; ++context) {
    for (int s = 0; s < 256; ++s) histogram.counts[0][s] += histogram.counts[context][s];
  }
}

double estimate_bytes(const Histogram& histogram, std::size_t context_count) {
  double bits = 0;
  for (std::size_t context = 0; context < context_count; ++context) {
    const std::uint32_t* counts = histogram.counts[context];
    bits += bits_of(counts) + 16 +
            10.0 * static_cast<double>(256 - std::count(counts, counts + 256, 0u));
  }
  const double bytes = bits / 8;
  return bytes + (bytes < kSomeLanesBytes ? 8 : bytes < kManyLanesBytes ? 50 : 390);
}

}  // namespace holdfast
