// The loops of rANS for one instruction set: the compiler flags of the including file decide which.
// Includes nothing that could emit an inline function which the linker might then pick for a
// machine without these instructions.
//
// Symbol i belongs to lane i % kLanes. Decoding goes forward and reads one 16-bit word for each
// lane whose state has become too small, lanes in order; encoding goes backward through the same
// steps.
#pragma once

#include <stdint.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "codec/codec_kernel.h"
#include "codec/gather.h"

namespace holdfast {
namespace {

constexpr std::size_t kStepBytesMax = 2 * kLanes;  // of words

#if defined(__AVX512BW__) && defined(__AVX512VL__)

constexpr std::size_t kWidth = 16;
using Vector = __m512i;

inline Vector load_states(const std::uint32_t* states) {
  return _mm512_loadu_si512(states);
}
inline void store_states(std::uint32_t* states, Vector values) {
  _mm512_storeu_si512(states, values);
}
inline Vector widen(const std::uint8_t* bytes) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
}
inline Vector shift_left(Vector a, int n) {
  return _mm512_slli_epi32(a, static_cast<unsigned>(n));
}
inline Vector add(Vector a, Vector b) {
  return _mm512_add_epi32(a, b);
}
inline Vector low_bits(Vector a) {
  return _mm512_and_si512(a, _mm512_set1_epi32(kScale - 1));
}
inline Vector gather(Vector index, const std::uint32_t* table) {
  return gather_words(index, table);
}

// What encoding needs of a symbol: an EncodeTable's word, and 1 / frequency.
struct Found {
  Vector packed;
  __m512 reciprocal;
};

inline Vector frequency_of(Vector packed) {
  return _mm512_sub_epi32(_mm512_set1_epi32(kScale), low_bits(packed));
}

// 14 bits, made twice as exact by a step of Newton's: another gather would take longer.
inline __m512 reciprocal_of(Vector packed) {
  const __m512 divisor = _mm512_cvtepi32_ps(frequency_of(packed));
  const __m512 rough = _mm512_rcp14_ps(divisor);
  const __m512 missing = _mm512_fnmadd_ps(divisor, rough, _mm512_set1_ps(1));
  return _mm512_fmadd_ps(rough, missing, rough);
}

inline Found look_up(Vector index, const EncodeTable& table) {
  const Vector packed = gather(index, table.packed);
  return {packed, reciprocal_of(packed)};
}

// Puts down the low halves of too large states in front of `end`.
//
// The quotient is below 2^19, and floats give it within 1/4: a quarter less, cut off, is it or one
// less. Of frequency 1 it is to be one less, as the bias expects.
inline Vector encode_lanes(Vector state, const Found& found, std::uint16_t*& end) {
  const Vector frequency = frequency_of(found.packed);
  const __mmask16 full = _mm512_cmpge_epu32_mask(state, _mm512_slli_epi32(frequency, 19));
  const int count = __builtin_popcount(full);
  end -= count;
  const __m256i words = _mm512_cvtepi32_epi16(_mm512_maskz_compress_epi32(full, state));
  _mm256_mask_storeu_epi16(end, static_cast<__mmask16>((1u << count) - 1), words);
  state = _mm512_mask_srli_epi32(state, full, state, 16);
  const Vector quotient = _mm512_cvttps_epi32(
      _mm512_fmsub_ps(_mm512_cvtepi32_ps(state), found.reciprocal, _mm512_set1_ps(0.25F)));
  const Vector rest = _mm512_sub_epi32(state, _mm512_mullo_epi32(quotient, frequency));
  const __mmask16 less =
      _mm512_cmpge_epi32_mask(rest, _mm512_max_epi32(frequency, _mm512_set1_epi32(2)));
  const Vector bias =
      _mm512_and_si512(_mm512_srli_epi32(found.packed, 12), _mm512_set1_epi32(0x1FFF));
  state = add(add(shift_left(quotient, kScaleBits), rest), bias);
  return _mm512_mask_add_epi32(state, less, state, low_bits(found.packed));
}

// A table whose symbols lie near each other, as exponents do, held in pairs of registers: finding a
// word takes permutations, not a load for each lane.
template <int pairs>
struct NearSymbols {
  static constexpr int kWords = static_cast<int>(kWidth);
  static constexpr int kNear = 2 * pairs * kWords;
  const std::uint8_t* symbols;
  Vector first;
  Vector packed[2 * pairs];
  Vector reciprocal[2 * pairs];

  NearSymbols(const std::uint8_t* of, const EncodeTable& table, int low) : symbols(of) {
    if (low > 256 - kNear) low = 256 - kNear;
    first = _mm512_set1_epi32(low);
    for (int i = 0; i < 2 * pairs; ++i) {
      packed[i] = load_states(table.packed + low + i * kWords);
      reciprocal[i] = _mm512_castps_si512(reciprocal_of(packed[i]));
    }
  }

  Found find(std::size_t at) const {
    const Vector index = _mm512_sub_epi32(widen(symbols + at), first);
    return {word_at(index, packed), _mm512_castsi512_ps(word_at(index, reciprocal))};
  }

  static Vector word_at(Vector index, const Vector* words) {
    Vector found = _mm512_permutex2var_epi32(words[0], index, words[1]);
#pragma GCC unroll 4
    for (int i = 1; i < pairs; ++i) {
      const __mmask16 behind = _mm512_cmpge_epi32_mask(index, _mm512_set1_epi32(2 * i * kWords));
      found = _mm512_mask_mov_epi32(
          found, behind, _mm512_permutex2var_epi32(words[2 * i], index, words[2 * i + 1]));
    }
    return found;
  }
};

// Reads a word into each state that has become too small.
inline Vector decode_lanes(Vector state, Vector slot, std::uint8_t* symbols,
                           const std::uint8_t*& words) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(symbols), _mm512_cvtepi32_epi8(slot));
  const Vector frequency =
      _mm512_add_epi32(low_bits(_mm512_srli_epi32(slot, 8)), _mm512_set1_epi32(1));
  state = _mm512_add_epi32(_mm512_mullo_epi32(frequency, _mm512_srli_epi32(state, kScaleBits)),
                           _mm512_srli_epi32(slot, 20));
  const __mmask16 small = _mm512_cmplt_epu32_mask(state, _mm512_set1_epi32(kStateMin));
  const Vector next =
      _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(words)));
  words += 2 * __builtin_popcount(small);
  const Vector refilled =
      _mm512_or_si512(_mm512_slli_epi32(state, 16), _mm512_maskz_expand_epi32(small, next));
  return _mm512_mask_mov_epi32(state, small, refilled);
}

#elif defined(__AVX2__)

constexpr std::size_t kWidth = 8;
using Vector = __m256i;

// For each mask of lanes: `to_back` moves those in it, in order, up to the last place, and
// `from_front` moves as many from the first places to them.
struct Permutations {
  std::uint32_t to_back[256][8];
  std::uint32_t from_front[256][8];
};

constexpr Permutations make_permutations() {
  Permutations made{};
  for (unsigned mask = 0; mask < 256; ++mask) {
    unsigned count = 0;
    for (unsigned lane = 0; lane < 8; ++lane) {
      made.from_front[mask][lane] = count;
      count += mask >> lane & 1;
    }
    unsigned place = 8 - count;
    for (unsigned lane = 0; lane < 8; ++lane) {
      if (mask >> lane & 1) made.to_back[mask][place++] = lane;
    }
  }
  return made;
}

constexpr Permutations kPermutations = make_permutations();

inline Vector load_states(const std::uint32_t* states) {
  return _mm256_loadu_si256(reinterpret_cast<const Vector*>(states));
}
inline void store_states(std::uint32_t* states, Vector values) {
  _mm256_storeu_si256(reinterpret_cast<Vector*>(states), values);
}
inline Vector widen(const std::uint8_t* bytes) {
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes)));
}
inline Vector shift_left(Vector a, int n) {
  return _mm256_slli_epi32(a, n);
}
inline Vector add(Vector a, Vector b) {
  return _mm256_add_epi32(a, b);
}
inline Vector low_bits(Vector a) {
  return _mm256_and_si256(a, _mm256_set1_epi32(kScale - 1));
}
inline Vector gather(Vector index, const std::uint32_t* table) {
  return _mm256_i32gather_epi32(reinterpret_cast<const int*>(table), index, 4);
}
inline unsigned mask_of(Vector lanes) {
  return static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(lanes)));
}
// The low halves of eight words of 32 bits.
inline __m128i narrow(Vector values) {
  const Vector low = _mm256_and_si256(values, _mm256_set1_epi32(0xFFFF));
  return _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
}

// What encoding needs of a symbol: an EncodeTable's words.
struct Found {
  Vector packed, reciprocal;
};

inline Found look_up(Vector index, const EncodeTable& table) {
  return {gather(index, table.packed), gather(index, table.reciprocal)};
}

inline Vector encode_lanes(Vector state, const Found& found, std::uint16_t*& end) {
  const auto [packed, reciprocal] = found;
  const Vector complement = low_bits(packed);
  const Vector limit = _mm256_sub_epi32(
      _mm256_slli_epi32(_mm256_sub_epi32(_mm256_set1_epi32(kScale), complement), 19),
      _mm256_set1_epi32(1));
  const Vector full = _mm256_cmpgt_epi32(state, limit);
  const unsigned mask = mask_of(full);
  const Vector order =
      _mm256_loadu_si256(reinterpret_cast<const Vector*>(kPermutations.to_back[mask]));
  // Eight words, the last of which are meant; those before are overwritten by the next ones.
  _mm_storeu_si128(reinterpret_cast<__m128i*>(end - 8),
                   narrow(_mm256_permutevar8x32_epi32(state, order)));
  end -= __builtin_popcount(mask);
  state = _mm256_blendv_epi8(state, _mm256_srli_epi32(state, 16), full);
  const Vector even = _mm256_srli_epi64(_mm256_mul_epu32(state, reciprocal), 32);
  const Vector odd =
      _mm256_mul_epu32(_mm256_srli_epi64(state, 32), _mm256_srli_epi64(reciprocal, 32));
  const Vector high = _mm256_blend_epi32(even, odd, 0xAA);
  const Vector quotient = _mm256_srlv_epi32(high, _mm256_srli_epi32(packed, 25));
  const Vector bias = _mm256_and_si256(_mm256_srli_epi32(packed, 12), _mm256_set1_epi32(0x1FFF));
  return _mm256_add_epi32(_mm256_add_epi32(state, bias), _mm256_mullo_epi32(quotient, complement));
}

inline Vector decode_lanes(Vector state, Vector slot, std::uint8_t* symbols,
                           const std::uint8_t*& words) {
  const __m128i bytes = narrow(_mm256_and_si256(slot, _mm256_set1_epi32(0xFF)));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(symbols), _mm_packus_epi16(bytes, bytes));
  const Vector frequency =
      _mm256_add_epi32(low_bits(_mm256_srli_epi32(slot, 8)), _mm256_set1_epi32(1));
  state = _mm256_add_epi32(_mm256_mullo_epi32(frequency, _mm256_srli_epi32(state, kScaleBits)),
                           _mm256_srli_epi32(slot, 20));
  const Vector small = _mm256_cmpgt_epi32(_mm256_set1_epi32(kStateMin), state);
  const unsigned mask = mask_of(small);
  const Vector next =
      _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(words)));
  words += 2 * __builtin_popcount(mask);
  const Vector order =
      _mm256_loadu_si256(reinterpret_cast<const Vector*>(kPermutations.from_front[mask]));
  const Vector refilled =
      _mm256_or_si256(_mm256_slli_epi32(state, 16), _mm256_permutevar8x32_epi32(next, order));
  return _mm256_blendv_epi8(state, refilled, small);
}

#endif

#if defined(__AVX2__)

constexpr std::size_t kVectors = kLanes / kWidth;

// What a table has of each symbol; NearSymbols and TablesByContext find it alike.
struct OneTable {
  const std::uint8_t* symbols;
  const EncodeTable* table;

  Found find(std::size_t at) const { return look_up(widen(symbols + at), *table); }
};

struct TablesByContext {
  const std::uint8_t* symbols;
  const std::uint8_t* contexts;
  const EncodeTable* tables;

  Found find(std::size_t at) const {
    constexpr int kTableShift = 9;  // words of 32 bits from one context's table to the next
    static_assert(sizeof(EncodeTable) == 4 << kTableShift);
    const Vector of_context = shift_left(widen(contexts + at), kTableShift);
    return look_up(add(widen(symbols + at), of_context), *tables);
  }
};

template <class Lookup>
inline std::uint16_t* encode_steps(const Lookup& lookup, std::size_t count, std::uint32_t* states,
                                   std::uint16_t* end) {
  Vector lanes[kVectors];
  for (std::size_t v = 0; v < kVectors; ++v) lanes[v] = load_states(states + v * kWidth);
#pragma GCC unroll 1
  for (std::size_t step = count; step > 0;) {
    step -= kLanes;
#pragma GCC unroll 4
    for (std::size_t n = 1; n <= kVectors; ++n) {
      const std::size_t v = kVectors - n;
      lanes[v] = encode_lanes(lanes[v], lookup.find(step + v * kWidth), end);
    }
  }
  for (std::size_t v = 0; v < kVectors; ++v) store_states(states + v * kWidth, lanes[v]);
  return end;
}

std::uint16_t* encode(const std::uint8_t* symbols, const std::uint8_t* contexts, std::size_t count,
                      const EncodeTable* tables, std::uint32_t* states, std::uint16_t* end) {
  if (contexts != nullptr) {
    return encode_steps(TablesByContext{symbols, contexts, tables}, count, states, end);
  }
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  int low = 0, high = 255;
  while (low < 255 && tables->packed[low] == 0) ++low;
  while (high > low && tables->packed[high] == 0) --high;
  const auto near = [&](auto held) { return encode_steps(held, count, states, end); };
  if (high - low < NearSymbols<1>::kNear) return near(NearSymbols<1>(symbols, *tables, low));
  if (high - low < NearSymbols<2>::kNear) return near(NearSymbols<2>(symbols, *tables, low));
  if (high - low < NearSymbols<4>::kNear) return near(NearSymbols<4>(symbols, *tables, low));
#endif
  return encode_steps(OneTable{symbols, tables}, count, states, end);
}

#else

std::uint16_t* encode(const std::uint8_t* symbols, const std::uint8_t* contexts, std::size_t count,
                      const EncodeTable* tables, std::uint32_t* states, std::uint16_t* end) {
  for (std::size_t i = count; i-- > 0;) {
    const EncodeTable& table = tables[contexts != nullptr ? contexts[i] : 0];
    const std::uint32_t packed = table.packed[symbols[i]],
                        reciprocal = table.reciprocal[symbols[i]];
    const std::uint32_t complement = packed & (kScale - 1);
    std::uint32_t state = states[i % kLanes];
    if (state >= (kScale - complement) << 19) {
      *--end = (std::uint16_t)state;
      state >>= 16;
    }
    const std::uint32_t high = (std::uint32_t)((std::uint64_t)state * reciprocal >> 32);
    states[i % kLanes] = state + (packed >> 12 & 0x1FFF) + (high >> (packed >> 25)) * complement;
  }
  return end;
}

#endif

// One step, looking at the end of the words before each of them.
bool decode_carefully(std::uint8_t* symbols, const std::uint8_t* contexts,
                      const DecodeTable* tables, std::uint32_t* states, const std::uint8_t*& words,
                      const std::uint8_t* end) {
  for (std::size_t lane = 0; lane < kLanes; ++lane) {
    std::uint32_t state = states[lane];
    const std::uint32_t context = contexts != nullptr ? contexts[lane] : 0;
    const std::uint32_t slot = tables[context].slot[state & (kScale - 1)];
    symbols[lane] = (std::uint8_t)slot;
    state = ((slot >> 8 & 0xFFF) + 1) * (state >> kScaleBits) + (slot >> 20);
    if (state < kStateMin) {
      if (end - words < 2) return false;
      std::uint16_t word;
      memcpy(&word, words, 2);
      words += 2;
      state = state << 16 | word;
    }
    states[lane] = state;
  }
  return true;
}

const std::uint8_t* decode(std::uint8_t* symbols, const std::uint8_t* contexts, std::size_t count,
                           const DecodeTable* tables, std::uint32_t* states,
                           const std::uint8_t* words, const std::uint8_t* end) {
  std::size_t step = 0;
#if defined(__AVX2__)
  Vector lanes[kVectors];
  for (std::size_t v = 0; v < kVectors; ++v) lanes[v] = load_states(states + v * kWidth);
  for (; step < count && (std::size_t)(end - words) >= kStepBytesMax; step += kLanes) {
#pragma GCC unroll 4
    for (std::size_t v = 0; v < kVectors; ++v) {
      Vector index = low_bits(lanes[v]);
      if (contexts != nullptr) {
        index = add(index, shift_left(widen(contexts + step + v * kWidth), kScaleBits));
      }
      const Vector slot = gather(index, tables->slot);
      lanes[v] = decode_lanes(lanes[v], slot, symbols + step + v * kWidth, words);
    }
  }
  for (std::size_t v = 0; v < kVectors; ++v) store_states(states + v * kWidth, lanes[v]);
#endif
  for (; step < count; step += kLanes) {
    const std::uint8_t* of_step = contexts != nullptr ? contexts + step : nullptr;
    if (!decode_carefully(symbols + step, of_step, tables, states, words, end)) return nullptr;
  }
  return words;
}

}  // namespace
}  // namespace holdfast
