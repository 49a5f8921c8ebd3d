// How often symbols occur, and how long they will be when coded.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "codec/entropy.h"
#include "codec/scratch.h"

namespace holdfast {
namespace {

constexpr double kRandomBits = 7.8;  // so many random bytes seem to have 7.955 bits each

// Of many symbols an eighth is counted: a run of each block, now its first, now its last, by no
// rule that rows of elements may have too.
constexpr std::size_t kManyCount = 1 << 17;
constexpr std::size_t kBlock = 256;
constexpr std::size_t kRun = 32;
constexpr std::uint32_t kHash = 2654435761;  // D. Knuth, The Art of Computer Programming, 6.4

// That says too little where symbols take less than a bit, or where more than a few were not met
// that may occur: each costs 2^-12 of all there is to give.
constexpr double kBitsMin = 1;
constexpr int kUnmetMax = 8;

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
  std::memset(counts, 0, 256 * sizeof *counts);
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

// Counts a part as if it were all; what was not met, but lies between symbols that occur, as one.
// Returns false where all have to be counted.
bool count_part(const std::uint8_t* symbols, std::size_t count, std::uint32_t* counts) {
  constexpr std::size_t kTables = 8;  // by turns: equal neighbours do not wait for each other
  std::uint32_t tables[kTables][256] = {};
  const std::size_t blocks = count / kBlock;
  for (std::uint32_t block = 0; block < blocks; ++block) {
    const std::uint8_t* run = symbols + block * kBlock + (block * kHash >> 29) * kRun;
    for (std::size_t i = 0; i < kRun; i += kTables) {
      for (std::size_t t = 0; t < kTables; ++t) ++tables[t][run[i + t]];
    }
  }
  for (int i = 0; i < 256; ++i) {
    counts[i] = 0;
    for (const auto& table : tables) counts[i] += table[i];
  }
  if (bits_of(counts) < kBitsMin * static_cast<double>(blocks * kRun)) return false;
  std::uint8_t least = 255, largest = 0;
  for (std::size_t i = 0; i < count; ++i) {
    least = std::min(least, symbols[i]);
    largest = std::max(largest, symbols[i]);
  }
  if (std::count(counts + least, counts + largest + 1, 0u) > kUnmetMax) return false;
  for (int i = least; i <= largest; ++i) {
    counts[i] = std::max<std::uint32_t>(counts[i] * (kBlock / kRun), 1);
  }
  return true;
}

// In several tables by turns: equal neighbours do not wait for each other.
void count_by_context(const Symbols& symbols, Histogram& histogram) {
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
  std::uint32_t* counts = histogram.counts[0];
  if (symbols.contexts != nullptr || symbols.count < kManyCount) {
    count_by_context(symbols, histogram);
  } else if (!count_part(symbols.data, symbols.count, counts)) {
    count_pairs(symbols.data, symbols.count, counts);
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
