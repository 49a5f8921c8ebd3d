#include "difference.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "holdfast/entropy.h"
#include "places.h"
#include "scratch.h"

namespace holdfast {
namespace {

constexpr unsigned kContexts = 16;
constexpr std::size_t kRareShare = 1000;    // of the exponents one in so many is above the top
constexpr std::size_t kTopSamples = 65536;  // by which the top is found
constexpr std::size_t kRun = 256;           // elements that are looked at together in an estimate
constexpr std::size_t kRuns = 64;
constexpr std::size_t kSlackBytes = 8;  // that bits touch behind their end

struct SymbolMemory;
struct ContextMemory;
struct WordMemory;

// The eight bits behind the sign: of bf16 and f32 the exponent.
template <class Word>
int exponent_of(Word bits) {
  return static_cast<int>(bits >> (8 * sizeof(Word) - 9)) & 0xFF;
}

// Classes of magnitudes: 0, 1, and each power of two in two halves. Without branches: which way
// they would go is random.
unsigned class_of(std::uint32_t magnitude) {
  const unsigned top = static_cast<unsigned>(std::bit_width(magnitude | 1)) - 1;
  const unsigned number = 2 * top + (std::uint64_t{magnitude} * 2 >> top & 1);
  return magnitude < 2 ? magnitude : number;
}

// Of each class, how many bits of a magnitude it does not tell, and its least magnitude; found by
// a symbol, which is 0 for no difference, and else twice the class, less one for those upwards.
struct Classes {
  constexpr Classes() {
    for (unsigned symbol = 0; symbol < 128; ++symbol) {
      const unsigned number = (symbol + 1) / 2;
      rest[symbol] = static_cast<std::uint8_t>(number < 4 ? 0 : number / 2 - 1);
      least[symbol] = number < 2 ? number : (2 | (number & 1)) << (number / 2 - 1);
    }
  }
  std::uint8_t rest[128] = {};
  std::uint32_t least[128] = {};
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

template <class Word>
void find_contexts(const Word* base, std::size_t count, std::uint8_t top, std::uint8_t* contexts) {
  for (std::size_t i = 0; i < count; ++i) {
    const int below = std::min(top - exponent_of(base[i]), static_cast<int>(kContexts) - 1);
    contexts[i] = static_cast<std::uint8_t>(std::max(below, 0));
  }
}

// Returns the symbol of a difference.
template <class Word>
std::uint8_t step_of(Word bits, Word base, Word& magnitude) {
  const auto up = static_cast<Word>(place_of(bits) - place_of(base));
  const auto down = static_cast<Word>(-up);
  magnitude = std::min(up, down);
  return static_cast<std::uint8_t>(2 * class_of(magnitude) - (up < down ? 1 : 0));
}

template <class Word>
std::size_t encode_words(const Word* data, const Word* base, std::size_t count, std::uint8_t* out,
                         const CodecKernel& kernel) {
  auto* symbols = scratch<std::uint8_t, SymbolMemory>(count);
  auto* contexts = scratch<std::uint8_t, ContextMemory>(count);
  std::uint8_t* const begin = out;
  *out++ = top_exponent(base, count);
  find_contexts(base, count, *begin, contexts);
  auto* magnitudes = scratch<Word, WordMemory>(count);
  for (std::size_t i = 0; i < count; ++i) symbols[i] = step_of(data[i], base[i], magnitudes[i]);
  out += encode_symbols({symbols, count, contexts, kContexts}, out, kernel);
  std::uint64_t held = 0;
  unsigned length = 0;
  for (std::size_t i = 0; i < count; ++i) {
    held |= std::uint64_t{magnitudes[i] - kClasses.least[symbols[i]]} << length;
    length += kClasses.rest[symbols[i]];
    std::memcpy(out, &held, sizeof held);
    out += length / 8;
    held >>= length / 8 * 8;
    length %= 8;
  }
  return static_cast<std::size_t>(out - begin) + (length > 0 ? 1 : 0);
}

template <class Word>
bool decode_words(std::span<const std::uint8_t> payload, const Word* base, std::size_t count,
                  Word* target, const CodecKernel& kernel) {
  constexpr unsigned kSymbolMax = 2 * (2 * 8 * sizeof(Word) - 2);
  if (payload.empty()) return false;
  auto* symbols = scratch<std::uint8_t, SymbolMemory>(count);
  auto* contexts = scratch<std::uint8_t, ContextMemory>(count);
  find_contexts(base, count, payload[0], contexts);
  payload = payload.subspan(1);
  if (!decode_symbols(payload, {symbols, count}, contexts, kContexts, kernel)) return false;
  std::size_t bits = 0;
  for (std::size_t i = 0; i < count; ++i) {
    if (symbols[i] > kSymbolMax) return false;
    bits += kClasses.rest[symbols[i]];
  }
  if (payload.size() != (bits + 7) / 8) return false;
  for (std::size_t i = 0, at = 0; i < count; ++i) {
    const unsigned symbol = symbols[i], length = kClasses.rest[symbol];
    std::uint64_t held = 0;
    const std::size_t left = payload.size() - at / 8;
    if (left >= sizeof held) {
      std::memcpy(&held, payload.data() + at / 8, sizeof held);
    } else {
      std::memcpy(&held, payload.data() + at / 8, left);
    }
    held = held >> at % 8 & ((std::uint64_t{1} << length) - 1);
    const auto magnitude = static_cast<Word>(kClasses.least[symbol] + held);
    const auto down = static_cast<Word>((symbol & 1) - 1u);  // all bits, or none
    target[i] = bits_at(static_cast<Word>(place_of(base[i]) + (magnitude ^ down) - down));
    at += length;
  }
  return true;
}

template <class Word>
double estimate_words(const Word* data, const Word* base, std::size_t count) {
  const std::size_t runs = count <= kRun * kRuns ? 1 : kRuns;
  const std::size_t run = runs == 1 ? count : kRun;
  auto* memory = scratch<Word, WordMemory>(2 * runs * run);
  Word* const olds = memory + runs * run;
  for (std::size_t r = 0; r < runs; ++r) {
    const std::size_t from = runs == 1 ? 0 : r * (count - run) / (runs - 1);
    std::memcpy(memory + r * run, data + from, run * sizeof(Word));
    std::memcpy(olds + r * run, base + from, run * sizeof(Word));
  }
  const std::size_t taken = runs * run;
  auto* symbols = scratch<std::uint8_t, SymbolMemory>(taken);
  auto* contexts = scratch<std::uint8_t, ContextMemory>(taken);
  find_contexts(olds, taken, top_exponent(olds, taken), contexts);
  double bits = 0;
  for (std::size_t i = 0; i < taken; ++i) {
    Word magnitude;
    symbols[i] = step_of(memory[i], olds[i], magnitude);
    bits += kClasses.rest[symbols[i]];
  }
  Histogram histogram;
  count_symbols({symbols, taken, contexts, kContexts}, histogram);
  const double bytes = estimate_bytes(histogram, kContexts) + bits / 8;
  return bytes * static_cast<double>(count) / static_cast<double>(taken);
}

template <class Body>
auto with_words(const Elements& elements, Body body) {
  return elements.item_bytes == 2 ? body(std::uint16_t{}) : body(std::uint32_t{});
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
  return with_words(elements, [&](auto word) {
    using Words = const decltype(word)*;
    return encode_words(static_cast<Words>(data), static_cast<Words>(base), elements.count, out,
                        kernel);
  });
}

bool decode_difference(std::span<const std::uint8_t> payload, const Elements& elements,
                       const void* base, void* target, const CodecKernel& kernel) {
  return with_words(elements, [&](auto word) {
    using Word = decltype(word);
    return decode_words(payload, static_cast<const Word*>(base), elements.count,
                        static_cast<Word*>(target), kernel);
  });
}

double estimate_difference(const Elements& elements, const void* data, const void* base) {
  return with_words(elements, [&](auto word) {
    using Words = const decltype(word)*;
    return estimate_words(static_cast<Words>(data), static_cast<Words>(base), elements.count);
  });
}

}  // namespace holdfast
