#include "codec/entropy.h"

#include <algorithm>
#include <cstring>

#include "codec/scratch.h"

namespace holdfast {
namespace {

// The forms of a stream of coded symbols.
enum Form : std::uint8_t { kStored = 0, kRepeated = 1, kRans1 = 2, kRans8 = 3, kRans64 = 4 };

constexpr std::size_t kTableBytesMax = 2 + 2 * 256;

using Frequencies = std::uint16_t[256];

std::size_t lanes_of(Form form) {
  return form == kRans64 ? kLanes : form == kRans8 ? 8 : 1;
}

// Scales counts to frequencies that sum to 2^12, none of a symbol that occurs 0. What rounding
// leaves over is given to, or taken from, the symbols where a step changes the length least.
void normalise(const std::uint32_t* counts, Frequencies& frequencies) {
  std::uint8_t used[256];
  std::size_t size = 0;
  std::uint64_t total = 0;
  for (int i = 0; i < 256; ++i) {
    if (counts[i] != 0) used[size++] = static_cast<std::uint8_t>(i);
    total += counts[i];
  }
  std::memset(frequencies, 0, sizeof frequencies);
  if (total == 0) {
    frequencies[0] = kScale;
    return;
  }
  std::int64_t left = kScale;
  for (std::size_t n = 0; n < size; ++n) {
    const std::size_t i = used[n];
    const std::uint64_t scaled = (std::uint64_t{counts[i]} * kScale + total / 2) / total;
    frequencies[i] = static_cast<std::uint16_t>(std::max<std::uint64_t>(scaled, 1));
    left -= frequencies[i];
  }
  while (left != 0) {
    // The gain of a step, count / frequency, compared without division.
    int best = -1;
    for (std::size_t n = 0; n < size; ++n) {
      const int i = used[n];
      if (left < 0 && frequencies[i] == 1) continue;
      if (best < 0) {
        best = i;
        continue;
      }
      const std::uint64_t mine = std::uint64_t{counts[i]} * frequencies[best];
      const std::uint64_t its = std::uint64_t{counts[best]} * frequencies[i];
      if (left > 0 ? mine > its : mine < its) best = i;
    }
    // Large remainders (many rare symbols were rounded up) go in larger steps.
    std::int64_t step = left > 0 ? 1 : -1;
    if (left < -8) step = -std::min<std::int64_t>(-left / 4, frequencies[best] / 16 + 1);
    if (frequencies[best] + step < 1) step = -1;
    frequencies[best] = static_cast<std::uint16_t>(frequencies[best] + step);
    left -= step;
  }
}

// first symbol, last symbol, then each frequency between them: below 128 in a byte, else in two,
// high one first with its top bit set; 0 is followed by how many more zeros there are.
std::uint8_t* put_table(const Frequencies& frequencies, std::uint8_t* out) {
  int first = 0, last = 255;
  while (frequencies[first] == 0) ++first;
  while (frequencies[last] == 0) --last;
  *out++ = static_cast<std::uint8_t>(first);
  *out++ = static_cast<std::uint8_t>(last);
  for (int i = first; i <= last; ++i) {
    const unsigned frequency = frequencies[i];
    if (frequency >= 128) {
      *out++ = static_cast<std::uint8_t>(128 | frequency >> 8);
      *out++ = static_cast<std::uint8_t>(frequency);
    } else if (frequency > 0) {
      *out++ = static_cast<std::uint8_t>(frequency);
    } else {
      int run = 0;
      while (frequencies[i + 1] == 0) ++i, ++run;
      *out++ = 0;
      *out++ = static_cast<std::uint8_t>(run);
    }
  }
  return out;
}

bool get_table(std::span<const std::uint8_t>& coded, Frequencies& frequencies) {
  std::memset(frequencies, 0, sizeof frequencies);
  if (coded.size() < 2) return false;
  const std::size_t first = coded[0], last = coded[1];
  std::size_t at = 2, sum = 0;
  for (std::size_t i = first; i <= last; ++i) {
    if (at + 2 > coded.size()) return false;  // a state, at least, comes behind the table
    std::size_t frequency = coded[at++];
    if (frequency == 0) {
      i += coded[at++];
      if (i >= last) return false;  // the last one is not 0
      continue;
    }
    if (frequency >= 128) {
      frequency = (frequency & 127) << 8 | coded[at++];
      if (frequency < 128) return false;
    }
    sum += frequency;
    if (sum > kScale) return false;
    frequencies[i] = static_cast<std::uint16_t>(frequency);
  }
  if (sum != kScale || frequencies[first] == 0) return false;
  coded = coded.subspan(at);
  return true;
}

// Division by a frequency as multiplication: R. Alverson, "Integer division using reciprocals",
// 1991; exact for states below 2^31.
void make_encode_table(const Frequencies& frequencies, EncodeTable& table) {
  std::uint32_t start = 0;
  for (int i = 0; i < 256; ++i) {
    const std::uint32_t frequency = frequencies[i];
    if (frequency == 0) {
      table.packed[i] = table.reciprocal[i] = 0;
      continue;
    }
    std::uint32_t shift = 0, bias = start, reciprocal = ~0u;
    if (frequency == 1) {
      bias += kScale - 1;
    } else {
      while (frequency > 1u << shift) ++shift;
      reciprocal = static_cast<std::uint32_t>(((std::uint64_t{1} << (shift + 31)) + frequency - 1) /
                                              frequency);
      --shift;
    }
    table.packed[i] = (kScale - frequency) | bias << 12 | shift << 25;
    table.reciprocal[i] = reciprocal;
    start += frequency;
  }
}

void make_decode_table(const Frequencies& frequencies, DecodeTable& table) {
  std::uint32_t start = 0;
  for (std::uint32_t symbol = 0; symbol < 256; ++symbol) {
    const std::uint32_t frequency = frequencies[symbol];
    for (std::uint32_t i = 0; i < frequency; ++i) {
      table.slot[start + i] = symbol | (frequency - 1) << 8 | i << 20;
    }
    start += frequency;
  }
}

// One symbol of one lane, as rans_loops.h does many. A word is put down in front of `end` where the
// state is full. With most symbols it is not, which a processor foretells.
void encode_one(std::uint32_t& state, std::uint16_t*& end, const EncodeTable& table,
                std::uint8_t symbol) {
  const std::uint32_t packed = table.packed[symbol];
  const std::uint32_t complement = packed & (kScale - 1);
  if (state >= (kScale - complement) << 19) [[unlikely]] {
    *--end = static_cast<std::uint16_t>(state);
    state >>= 16;
  }
  const auto high =
      static_cast<std::uint32_t>(std::uint64_t{state} * table.reciprocal[symbol] >> 32);
  state += (packed >> 12 & 0x1FFF) + (high >> (packed >> 25)) * complement;
}

// The same backward; `words` has one to read. Most symbols read none, which a processor foretells.
void decode_one(std::uint32_t& state, const std::uint8_t*& words, const DecodeTable& table,
                std::uint8_t& symbol) {
  const std::uint32_t slot = table.slot[state & (kScale - 1)];
  symbol = static_cast<std::uint8_t>(slot);
  state = ((slot >> 8 & 0xFFF) + 1) * (state >> kScaleBits) + (slot >> 20);
  if (state < kStateMin) [[unlikely]] {
    std::uint16_t word;
    std::memcpy(&word, words, 2);
    words += 2;
    state = state << 16 | word;
  }
}

// The same, where there may be no word left to read.
bool decode_carefully(std::uint32_t& state, const std::uint8_t*& words, const std::uint8_t* end,
                      const DecodeTable& table, std::uint8_t& symbol) {
  if (words != end) {
    decode_one(state, words, table, symbol);
    return true;
  }
  static constexpr std::uint8_t kNoWord[2] = {};
  const std::uint8_t* none = kNoWord;
  decode_one(state, none, table, symbol);
  return none == kNoWord;
}

// Calls body(a function from the index of a symbol to that of its table). A loop without contexts
// is one of its own: it does not ask for each symbol.
template <class Body>
void with_tables(const std::uint8_t* contexts, Body body) {
  if (contexts != nullptr) {
    body([contexts](std::size_t i) -> std::size_t { return contexts[i]; });
  } else {
    body([](std::size_t) -> std::size_t { return 0; });
  }
}

template <std::size_t lanes>
std::uint16_t* encode_groups(const Symbols& symbols, std::size_t count, const EncodeTable* tables,
                             std::uint32_t* states, std::uint16_t* end) {
  std::uint32_t held[lanes];
  std::copy_n(states, lanes, held);
  const auto encode_all = [&](auto table_of) {
    for (std::size_t at = count; at > 0;) {
      at -= lanes;
#pragma GCC unroll 8
      for (std::size_t n = 1; n <= lanes; ++n) {
        const std::size_t lane = lanes - n;
        encode_one(held[lane], end, tables[table_of(at + lane)], symbols.data[at + lane]);
      }
    }
  };
  with_tables(symbols.contexts, encode_all);
  std::copy_n(held, lanes, states);
  return end;
}

// Stops where words might run out; returns how many symbols were decoded.
template <std::size_t lanes>
std::size_t decode_groups(std::span<std::uint8_t> target, const std::uint8_t* contexts,
                          const DecodeTable* tables, std::uint32_t* states,
                          const std::uint8_t*& words, const std::uint8_t* end) {
  std::uint32_t held[lanes];
  std::copy_n(states, lanes, held);
  std::size_t at = 0;
  const auto decode_all = [&](auto table_of) {
    for (; at + lanes <= target.size() && end - words >= std::ptrdiff_t{2 * lanes}; at += lanes) {
#pragma GCC unroll 8
      for (std::size_t lane = 0; lane < lanes; ++lane) {
        decode_one(held[lane], words, tables[table_of(at + lane)], target[at + lane]);
      }
    }
  };
  with_tables(contexts, decode_all);
  std::copy_n(held, lanes, states);
  return at;
}

struct TableMemory;
struct WordMemory;

std::size_t encode_rans(Form form, const Symbols& symbols, const Histogram& histogram,
                        std::uint8_t* out, const CodecKernel& kernel) {
  const std::size_t lanes = lanes_of(form), contexts = symbols.context_count;
  auto* tables = scratch<EncodeTable, TableMemory>(kContextsMax);
  std::uint8_t head[kContextsMax * kTableBytesMax];
  std::uint8_t* table_end = head;
  for (std::size_t context = 0; context < contexts; ++context) {
    Frequencies frequencies;
    normalise(histogram.counts[context], frequencies);
    table_end = put_table(frequencies, table_end);
    make_encode_table(frequencies, tables[context]);
  }
  std::uint16_t* const end =
      scratch<std::uint16_t, WordMemory>(symbols.count + kLanes) + symbols.count + kLanes;
  std::uint16_t* words = end;
  std::uint32_t states[kLanes];
  std::fill_n(states, lanes, kStateMin);
  const std::size_t whole = symbols.count / lanes * lanes;
  for (std::size_t i = symbols.count; i-- > whole;) {
    const EncodeTable& table = tables[symbols.contexts != nullptr ? symbols.contexts[i] : 0];
    encode_one(states[i % lanes], words, table, symbols.data[i]);
  }
  if (form == kRans64) {
    words = kernel.encode(symbols.data, symbols.contexts, whole, tables, states, words);
  } else {
    words = form == kRans8 ? encode_groups<8>(symbols, whole, tables, states, words)
                           : encode_groups<1>(symbols, whole, tables, states, words);
  }
  const auto table_bytes = static_cast<std::size_t>(table_end - head);
  const auto count = static_cast<std::size_t>(end - words);
  const std::size_t size = 1 + table_bytes + 4 + 4 * lanes + 2 * count;
  if (size > symbols.count) return 0;
  const auto word_count = static_cast<std::uint32_t>(count);
  *out++ = form;
  std::memcpy(out, head, table_bytes);
  std::memcpy(out += table_bytes, &word_count, 4);
  std::memcpy(out += 4, states, 4 * lanes);
  std::memcpy(out += 4 * lanes, words, 2 * count);
  return size;
}

bool decode_rans(Form form, std::span<const std::uint8_t>& coded, std::span<std::uint8_t> target,
                 const std::uint8_t* contexts, std::size_t context_count,
                 const CodecKernel& kernel) {
  auto* tables = scratch<DecodeTable, TableMemory>(context_count);
  for (std::size_t context = 0; context < context_count; ++context) {
    Frequencies frequencies;
    if (!get_table(coded, frequencies)) return false;
    make_decode_table(frequencies, tables[context]);
  }
  const std::size_t lanes = lanes_of(form);
  std::uint32_t states[kLanes], count = 0;
  if (coded.size() < 4 + 4 * lanes) return false;
  std::memcpy(&count, coded.data(), 4);
  std::memcpy(states, coded.data() + 4, 4 * lanes);
  coded = coded.subspan(4 + 4 * lanes);
  if (coded.size() / 2 < count) return false;
  for (std::size_t lane = 0; lane < lanes; ++lane) {
    if (states[lane] < kStateMin || states[lane] >= 1u << 31) return false;
  }
  const std::uint8_t* words = coded.data();
  const std::uint8_t* const end = words + 2 * std::size_t{count};
  std::size_t done = 0;
  if (form == kRans64) {
    done = target.size() / kLanes * kLanes;
    words = kernel.decode(target.data(), contexts, done, tables, states, words, end);
    if (words == nullptr) return false;
  } else {
    done = form == kRans8 ? decode_groups<8>(target, contexts, tables, states, words, end)
                          : decode_groups<1>(target, contexts, tables, states, words, end);
  }
  for (std::size_t i = done; i < target.size(); ++i) {
    const DecodeTable& table = tables[contexts != nullptr ? contexts[i] : 0];
    if (!decode_carefully(states[i % lanes], words, end, table, target[i])) return false;
  }
  coded = coded.subspan(2 * std::size_t{count});
  return words == end && std::all_of(states, states + lanes,
                                     [](std::uint32_t state) { return state == kStateMin; });
}

std::size_t store(const Symbols& symbols, std::uint8_t* out) {
  out[0] = kStored;
  if (symbols.count > 0) std::memcpy(out + 1, symbols.data, symbols.count);
  return 1 + symbols.count;
}

bool looks_random(const Symbols& symbols) {
  if (symbols.count < kSampledCount) return false;
  std::uint8_t sample[kSampledBytes];
  for_sampled_runs(symbols.count, [&](std::size_t run, std::size_t at) {
    std::memcpy(sample + run * kSampledRun, symbols.data + at, kSampledRun);
  });
  return holdfast::looks_random(sample);
}

}  // namespace

std::size_t encode_symbols(const Symbols& symbols, std::uint8_t* out, const CodecKernel& kernel) {
  const std::size_t count = symbols.count, contexts = symbols.context_count;
  if (count == 0 || (symbols.contexts == nullptr && looks_random(symbols))) {
    return store(symbols, out);
  }
  if (std::memcmp(symbols.data, symbols.data + 1, count - 1) == 0) {
    put_repeated(out, symbols.data[0]);
    return 2;
  }
  Histogram histogram;
  count_symbols(symbols, histogram);
  const double expected = estimate_bytes(histogram, contexts);
  if (expected >= 0.995 * static_cast<double>(count)) return store(symbols, out);
  const Form form = expected >= kManyLanesBytes   ? kRans64
                    : expected >= kSomeLanesBytes ? kRans8
                                                  : kRans1;
  const std::size_t size = encode_rans(form, symbols, histogram, out, kernel);
  return size != 0 ? size : store(symbols, out);
}

const std::uint8_t* find_symbols(std::span<const std::uint8_t>& coded, std::span<std::uint8_t> room,
                                 const CodecKernel& kernel) {
  if (!coded.empty() && coded[0] == kStored && coded.size() > room.size()) {
    const std::uint8_t* symbols = coded.data() + 1;
    coded = coded.subspan(1 + room.size());
    return symbols;
  }
  return decode_symbols(coded, room, nullptr, 1, kernel) ? room.data() : nullptr;
}

bool decode_symbols(std::span<const std::uint8_t>& coded, std::span<std::uint8_t> target,
                    const std::uint8_t* contexts, std::size_t context_count,
                    const CodecKernel& kernel) {
  if (coded.empty()) return false;
  const std::uint8_t form = coded[0];
  coded = coded.subspan(1);
  if (form == kStored) {
    if (coded.size() < target.size()) return false;
    std::copy_n(coded.data(), target.size(), target.data());
    coded = coded.subspan(target.size());
    return true;
  }
  if (form == kRepeated) {
    if (coded.empty() || target.empty()) return false;
    std::fill(target.begin(), target.end(), coded[0]);
    coded = coded.subspan(1);
    return true;
  }
  if (form > kRans64) return false;
  return decode_rans(static_cast<Form>(form), coded, target, contexts, context_count, kernel);
}

}  // namespace holdfast
