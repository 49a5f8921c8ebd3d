#include "codec/difference.h"

#include <algorithm>
#include <cstring>

#include "codec/entropy.h"
#include "codec/scratch.h"

namespace holdfast {
namespace {

constexpr std::size_t kRareShare = 1000;    // of the exponents one in so many is above the top
constexpr std::size_t kTopSamples = 65536;  // by which the top is found
constexpr std::size_t kRun = 256;           // elements that are looked at together in an estimate
constexpr std::size_t kRuns = 64;
constexpr unsigned kTogether = 57;      // bits that are looked at at once: 64 but 7 before them
constexpr unsigned kPutTogether = 56;   // that are put down: a shift by 64, all held, is undefined
constexpr std::size_t kSlackBytes = 8;  // that bits touch behind their end
constexpr std::size_t kBlock = 4096;    // elements whose bits are put down together

struct SymbolMemory;
struct ContextMemory;
struct LengthMemory;
struct TailMemory;
struct SampleMemory;

// The eight bits behind the sign: of bf16 and f32 the exponent.
template <class Word>
int exponent_of(Word bits) {
  return static_cast<int>(bits >> (8 * sizeof(Word) - 9)) & 0xFF;
}

// How many bits of a magnitude the class of a symbol does not tell.
struct Classes {
  constexpr Classes() {
    for (unsigned symbol = 0; symbol < 256; ++symbol) {
      const unsigned number = (symbol + 1) / 2;
      rest[symbol] = static_cast<std::uint8_t>(number < 4 ? 0 : number / 2 - 1);
    }
  }
  std::uint8_t rest[256] = {};
};
constexpr Classes kClasses;

// The exponent that few are above; contexts are counted down from it.
template <class Word>
std::uint8_t top_exponent(const Word* base, std::size_t count) {
  std::uint32_t counts[256] = {};
  const std::size_t step = std::max<std::size_t>(1, count / kTopSamples);
  std::size_t seen = 0, above = 0;
  for (std::size_t i = 0; i < count; i += step, ++seen) ++counts[exponent_of(base[i])];
  int top = 255;
  while (top > 0 && (above += counts[top]) <= seen / kRareShare) --top;
  return static_cast<std::uint8_t>(top);
}

std::uint8_t top_of(const Elements& elements, const void* base) {
  return elements.item_bytes == 2
             ? top_exponent(static_cast<const std::uint16_t*>(base), elements.count)
             : top_exponent(static_cast<const std::uint32_t*>(base), elements.count);
}

// What a stream of bits ends in: less than a byte that is not put down yet.
struct Bits {
  std::uint8_t* out;
  std::uint64_t held = 0;
  unsigned length = 0;

  // At most kPutTogether bits.
  void put(std::uint64_t bits, unsigned count) {
    held |= bits << length;
    length += count;
    std::memcpy(out, &held, sizeof held);
    out += length / 8;
    held >>= length / 8 * 8;
    length %= 8;
  }
};

// Two together wherever they are short enough, as nearly all are. Returns the end.
std::uint8_t* put_tails(const std::uint32_t* tails, const std::uint8_t* lengths, std::size_t count,
                        std::uint8_t* out) {
  Bits bits = {out};
  std::size_t i = 0;
  for (; i + 2 <= count; i += 2) {
    const unsigned first = lengths[i], both = first + lengths[i + 1];
    if (both <= kPutTogether) {
      bits.put(tails[i] | std::uint64_t{tails[i + 1]} << first, both);
    } else {
      bits.put(tails[i], first);
      bits.put(tails[i + 1], lengths[i + 1]);
    }
  }
  if (i < count) bits.put(tails[i], lengths[i]);
  return bits.out + (bits.length > 0 ? 1 : 0);
}

const std::uint8_t* bytes_at(const void* data, std::size_t offset) {
  return static_cast<const std::uint8_t*>(data) + offset;
}

// Bits of the payload from `at` on: kTogether at least, or all that are left.
std::uint64_t bits_from(std::span<const std::uint8_t> payload, std::size_t at) {
  std::uint64_t held = 0;
  const std::size_t left = payload.size() - at / 8;
  if (left >= sizeof held) {
    std::memcpy(&held, payload.data() + at / 8, sizeof held);
  } else {
    std::memcpy(&held, payload.data() + at / 8, left);
  }
  return held >> at % 8;
}

// Returns where the next ones begin.
std::size_t get_tails(std::span<const std::uint8_t> payload, std::size_t at,
                      const std::uint8_t* symbols, std::size_t count, std::uint32_t* tails) {
  const auto take = [](std::uint64_t held, unsigned length) {
    return static_cast<std::uint32_t>(held & ((std::uint64_t{1} << length) - 1));
  };
  std::size_t i = 0;
  for (; i + 2 <= count; i += 2) {
    const unsigned first = kClasses.rest[symbols[i]], second = kClasses.rest[symbols[i + 1]];
    const std::uint64_t held = bits_from(payload, at);
    tails[i] = take(held, first);
    const bool together = first + second <= kTogether;
    tails[i + 1] = take(together ? held >> first : bits_from(payload, at + first), second);
    at += first + second;
  }
  if (i < count) {
    const unsigned length = kClasses.rest[symbols[i]];
    tails[i] = take(bits_from(payload, at), length);
    at += length;
  }
  return at;
}

}  // namespace

bool has_difference(const Elements& elements) {
  return elements.kind != Kind::kInteger && (elements.item_bytes == 2 || elements.item_bytes == 4);
}

std::size_t difference_bytes_max(const Elements& elements) {
  return 1 + coded_bytes_max(elements.count) + elements.size_bytes() + kSlackBytes;
}

std::size_t encode_difference(const Elements& elements, const void* data, const void* base,
                              std::uint8_t* out, const CodecKernel& kernel) {
  const std::size_t count = elements.count, item = elements.item_bytes;
  auto* symbols = scratch<std::uint8_t, SymbolMemory>(count);
  auto* contexts = scratch<std::uint8_t, ContextMemory>(count);
  auto* lengths = scratch<std::uint8_t, LengthMemory>(count);
  auto* tails = scratch<std::uint32_t, TailMemory>(count);
  std::uint8_t* const begin = out;
  *out++ = top_of(elements, base);
  kernel.find_differences(data, base, count, item, *begin, symbols, contexts, lengths, tails);
  out += encode_symbols({symbols, count, contexts, kExponentContexts}, out, kernel);
  return static_cast<std::size_t>(put_tails(tails, lengths, count, out) - begin);
}

bool decode_difference(std::span<const std::uint8_t> payload, const Elements& elements,
                       const void* base, void* target, const CodecKernel& kernel) {
  const std::size_t count = elements.count, item = elements.item_bytes;
  const std::size_t symbol_max = 2 * (2 * 8 * item - 2);
  if (payload.empty()) return false;
  auto* symbols = scratch<std::uint8_t, SymbolMemory>(count);
  auto* contexts = scratch<std::uint8_t, ContextMemory>(count);
  kernel.find_exponents(base, count, item, payload[0], contexts);
  payload = payload.subspan(1);
  if (!decode_symbols(payload, {symbols, count}, contexts, kExponentContexts, kernel)) return false;
  std::size_t bits = 0;
  std::uint8_t most = 0;
  for (std::size_t i = 0; i < count; ++i) {
    bits += kClasses.rest[symbols[i]];
    most = std::max(most, symbols[i]);
  }
  if (most > symbol_max || payload.size() != (bits + 7) / 8) return false;
  std::uint32_t tails[kBlock];
  std::size_t at = 0;
  for (std::size_t first = 0; first < count; first += kBlock) {
    const std::size_t size = std::min(kBlock, count - first);
    at = get_tails(payload, at, symbols + first, size, tails);
    auto* here = static_cast<std::uint8_t*>(target) + first * item;
    kernel.add_differences(bytes_at(base, first * item), size, item, symbols + first, tails, here);
  }
  return true;
}

double estimate_difference(const Elements& elements, const void* data, const void* base,
                           const CodecKernel& kernel) {
  const std::size_t count = elements.count, item = elements.item_bytes;
  const std::size_t runs = count <= kRun * kRuns ? 1 : kRuns;
  const std::size_t run = runs == 1 ? count : kRun;
  Elements sample = elements;
  sample.count = runs * run;
  auto* news = scratch<std::uint32_t, SampleMemory>(2 * sample.count);
  auto* olds = news + sample.count;
  for (std::size_t r = 0; r < runs; ++r) {
    const std::size_t from = runs == 1 ? 0 : r * (count - run) / (runs - 1);
    auto* place = reinterpret_cast<std::uint8_t*>(news) + r * run * item;
    std::memcpy(place, bytes_at(data, from * item), run * item);
    std::memcpy(place + sample.count * sizeof *news, bytes_at(base, from * item), run * item);
  }
  auto* symbols = scratch<std::uint8_t, SymbolMemory>(sample.count);
  auto* contexts = scratch<std::uint8_t, ContextMemory>(sample.count);
  auto* lengths = scratch<std::uint8_t, LengthMemory>(sample.count);
  auto* tails = scratch<std::uint32_t, TailMemory>(sample.count);
  const int top = top_of(sample, olds);
  kernel.find_differences(news, olds, sample.count, item, top, symbols, contexts, lengths, tails);
  std::size_t bits = 0;
  for (std::size_t i = 0; i < sample.count; ++i) bits += lengths[i];
  Histogram histogram;
  count_symbols({symbols, sample.count, contexts, kExponentContexts}, histogram);
  const double bytes = estimate_bytes(histogram, kExponentContexts) + static_cast<double>(bits) / 8;
  return bytes * static_cast<double>(count) / static_cast<double>(sample.count);
}

}  // namespace holdfast
