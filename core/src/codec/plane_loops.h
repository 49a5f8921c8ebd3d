// Elements ⇄ byte planes, residuals and packed bits, for one instruction set: plain loops, which
// the compiler turns into vectors. Includes nothing that could emit an inline function.
#pragma once

#include <stdint.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "codec/codec_kernel.h"

namespace holdfast {
namespace {

template <class Word>
inline Word rotate_left(Word word) {
  return (Word)((Word)(word << 1) | (Word)(word >> (8 * sizeof word - 1)));
}

template <class Word>
inline Word rotate_right(Word word) {
  return (Word)((Word)(word >> 1) | (Word)(word << (8 * sizeof word - 1)));
}

inline void split_1(const std::uint8_t* data, std::size_t count, std::uint8_t* const* planes,
                    bool rotate) {
  std::uint8_t* __restrict p0 = planes[0];
  if (!rotate) {
    memcpy(p0, data, count);
    return;
  }
  for (std::size_t i = 0; i < count; ++i) p0[i] = rotate_left(data[i]);
}

template <bool rotate>
inline void split_2(const std::uint16_t* __restrict data, std::size_t count,
                    std::uint8_t* const* planes) {
  std::uint8_t* __restrict p0 = planes[0];
  std::uint8_t* __restrict p1 = planes[1];
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint16_t word = rotate ? rotate_left(data[i]) : data[i];
    p0[i] = (std::uint8_t)word;
    p1[i] = (std::uint8_t)(word >> 8);
  }
}

#if defined(__AVX2__) && !defined(__AVX512BW__)
// Four planes of 32 words: compilers take more steps to narrow words with AVX2.
template <bool rotate>
inline void split_32_words(const std::uint32_t* data, __m256i* planes) {
  const __m256i transposed = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  const __m256i in_order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  __m256i part[4];
#pragma GCC unroll 4
  for (int n = 0; n < 4; ++n) {
    part[n] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data + 8 * n));
    const __m256i sign = _mm256_srli_epi32(part[n], 31);
    if (rotate) part[n] = _mm256_or_si256(_mm256_slli_epi32(part[n], 1), sign);
    part[n] = _mm256_shuffle_epi8(part[n], transposed);
  }
  const __m256i first_low = _mm256_unpacklo_epi32(part[0], part[1]);
  const __m256i first_high = _mm256_unpackhi_epi32(part[0], part[1]);
  const __m256i second_low = _mm256_unpacklo_epi32(part[2], part[3]);
  const __m256i second_high = _mm256_unpackhi_epi32(part[2], part[3]);
  planes[0] = _mm256_unpacklo_epi64(first_low, second_low);
  planes[1] = _mm256_unpackhi_epi64(first_low, second_low);
  planes[2] = _mm256_unpacklo_epi64(first_high, second_high);
  planes[3] = _mm256_unpackhi_epi64(first_high, second_high);
#pragma GCC unroll 4
  for (int n = 0; n < 4; ++n) planes[n] = _mm256_permutevar8x32_epi32(planes[n], in_order);
}
#endif

template <bool rotate>
inline void split_4(const std::uint32_t* __restrict data, std::size_t count,
                    std::uint8_t* const* planes) {
  std::uint8_t* __restrict p0 = planes[0];
  std::uint8_t* __restrict p1 = planes[1];
  std::uint8_t* __restrict p2 = planes[2];
  std::uint8_t* __restrict p3 = planes[3];
  std::size_t i = 0;
#if defined(__AVX2__) && !defined(__AVX512BW__)
  for (; i + 32 <= count; i += 32) {
    __m256i found[4];
    split_32_words<rotate>(data + i, found);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p0 + i), found[0]);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p1 + i), found[1]);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p2 + i), found[2]);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p3 + i), found[3]);
  }
#endif
  for (; i < count; ++i) {
    const std::uint32_t word = rotate ? rotate_left(data[i]) : data[i];
    p0[i] = (std::uint8_t)word;
    p1[i] = (std::uint8_t)(word >> 8);
    p2[i] = (std::uint8_t)(word >> 16);
    p3[i] = (std::uint8_t)(word >> 24);
  }
}

inline void split_8(const std::uint64_t* data, std::size_t count, std::uint8_t* const* planes,
                    bool rotate) {
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint64_t word = rotate ? rotate_left(data[i]) : data[i];
    for (unsigned p = 0; p < 8; ++p) planes[p][i] = (std::uint8_t)(word >> (8 * p));
  }
}

void split(const void* data, std::size_t count, std::size_t item, bool rotate,
           std::uint8_t* const* planes) {
  auto* words = static_cast<const std::uint32_t*>(data);
  auto* halves = static_cast<const std::uint16_t*>(data);
  if (item == 1) {
    split_1(static_cast<const std::uint8_t*>(data), count, planes, rotate);
  } else if (item == 2) {
    rotate ? split_2<true>(halves, count, planes) : split_2<false>(halves, count, planes);
  } else if (item == 4) {
    rotate ? split_4<true>(words, count, planes) : split_4<false>(words, count, planes);
  } else {
    split_8(static_cast<const std::uint64_t*>(data), count, planes, rotate);
  }
}

template <bool rotate>
inline void merge_1(std::uint8_t* __restrict data, std::size_t count,
                    const std::uint8_t* const* planes) {
  const std::uint8_t* __restrict p0 = planes[0];
  for (std::size_t i = 0; i < count; ++i) data[i] = rotate ? rotate_right(p0[i]) : p0[i];
}

template <bool rotate>
inline void merge_2(std::uint16_t* __restrict data, std::size_t count,
                    const std::uint8_t* const* planes) {
  const std::uint8_t* __restrict p0 = planes[0];
  const std::uint8_t* __restrict p1 = planes[1];
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint16_t word = (std::uint16_t)(p0[i] | p1[i] << 8);
    data[i] = rotate ? rotate_right(word) : word;
  }
}

template <bool rotate>
inline void merge_4(std::uint32_t* __restrict data, std::size_t count,
                    const std::uint8_t* const* planes) {
  const std::uint8_t* __restrict p0 = planes[0];
  const std::uint8_t* __restrict p1 = planes[1];
  const std::uint8_t* __restrict p2 = planes[2];
  const std::uint8_t* __restrict p3 = planes[3];
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t word = (std::uint32_t)p0[i] | (std::uint32_t)p1[i] << 8 |
                               (std::uint32_t)p2[i] << 16 | (std::uint32_t)p3[i] << 24;
    data[i] = rotate ? rotate_right(word) : word;
  }
}

inline void merge_8(std::uint64_t* data, std::size_t count, const std::uint8_t* const* planes,
                    bool rotate) {
  for (std::size_t i = 0; i < count; ++i) {
    std::uint64_t word = 0;
    for (unsigned p = 0; p < 8; ++p) word |= (std::uint64_t)planes[p][i] << (8 * p);
    data[i] = rotate ? rotate_right(word) : word;
  }
}

void merge(void* data, std::size_t count, std::size_t item, bool rotate,
           const std::uint8_t* const* planes) {
  auto* bytes = static_cast<std::uint8_t*>(data);
  auto* halves = static_cast<std::uint16_t*>(data);
  auto* words = static_cast<std::uint32_t*>(data);
  if (item == 1) {
    rotate ? merge_1<true>(bytes, count, planes) : merge_1<false>(bytes, count, planes);
  } else if (item == 2) {
    rotate ? merge_2<true>(halves, count, planes) : merge_2<false>(halves, count, planes);
  } else if (item == 4) {
    rotate ? merge_4<true>(words, count, planes) : merge_4<false>(words, count, planes);
  } else {
    merge_8(static_cast<std::uint64_t*>(data), count, planes, rotate);
  }
}

// Adds the heads (what is above the tail) of a row's elements to its columns; returns their sum.
std::uint32_t sum_heads(const std::uint32_t* __restrict data, std::size_t count, unsigned tail_bits,
                        bool with_sign, std::uint32_t* __restrict columns) {
  std::uint32_t sum = 0;
  if (with_sign) {
    for (std::size_t i = 0; i < count; ++i) {
      const std::uint32_t head = rotate_left(data[i]) >> tail_bits;
      columns[i] += head;
      sum += head;
    }
  } else {
    for (std::size_t i = 0; i < count; ++i) {
      const std::uint32_t head = data[i] >> tail_bits;
      columns[i] += head;
      sum += head;
    }
  }
  return sum;
}

template <bool with_sign>
inline std::size_t residuals_of(const std::uint32_t* __restrict data, std::size_t count,
                                unsigned tail_bits, const std::int16_t* __restrict columns, int row,
                                std::uint8_t* __restrict symbols, std::uint8_t* const* tails) {
  std::uint8_t* __restrict t0 = tails[0];
  std::uint8_t* __restrict t1 = tails[1];
  std::uint8_t* __restrict t2 = tails[2];
  const std::uint32_t mask = (1u << (tail_bits - 16)) - 1;
  std::uint32_t escapes = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t word = with_sign ? rotate_left(data[i]) : data[i];
    const int predicted = (columns[i] + row) >> 3;
    const std::uint32_t symbol = (word >> tail_bits) - (std::uint32_t)predicted + 128;
    const bool fits = symbol - 1 < 255;
    symbols[i] = fits ? (std::uint8_t)symbol : (std::uint8_t)0;
    escapes += !fits;
    t0[i] = (std::uint8_t)word;
    t1[i] = (std::uint8_t)(word >> 8);
    t2[i] = (std::uint8_t)(word >> 16 & mask);
  }
  return escapes;
}

std::size_t find_residuals(const std::uint32_t* data, std::size_t count, unsigned tail_bits,
                           bool with_sign, const std::int16_t* columns, int row,
                           std::uint8_t* symbols, std::uint8_t* const* tails) {
  return with_sign ? residuals_of<true>(data, count, tail_bits, columns, row, symbols, tails)
                   : residuals_of<false>(data, count, tail_bits, columns, row, symbols, tails);
}

// The residual of a value without a sign, as one of 8 classes.
void find_classes(const std::uint32_t* __restrict data, std::size_t count, unsigned tail_bits,
                  const std::int16_t* __restrict columns, int row,
                  std::uint8_t* __restrict classes) {
  for (std::size_t i = 0; i < count; ++i) {
    const int predicted = (columns[i] + row) >> 3;
    int place = ((int)(data[i] >> tail_bits) - predicted + 8) >> 1;
    place = place < 0 ? 0 : place;
    classes[i] = (std::uint8_t)(place > 7 ? 7 : place);
  }
}

void add_residuals(std::uint32_t* __restrict data, std::size_t count, unsigned tail_bits,
                   bool with_sign, const std::int16_t* __restrict columns, int row,
                   const std::uint8_t* __restrict symbols, const std::uint8_t* const* tails) {
  const std::uint8_t* __restrict t0 = tails[0];
  const std::uint8_t* __restrict t1 = tails[1];
  const std::uint8_t* __restrict t2 = tails[2];
  if (with_sign) {
    for (std::size_t i = 0; i < count; ++i) {
      const std::uint32_t head = (std::uint32_t)(symbols[i] - 128 + ((columns[i] + row) >> 3));
      data[i] = rotate_right((std::uint32_t)(head << tail_bits | (std::uint32_t)t2[i] << 16 |
                                             (std::uint32_t)t1[i] << 8 | t0[i]));
    }
  } else {
    for (std::size_t i = 0; i < count; ++i) {
      const std::uint32_t head = (std::uint32_t)(symbols[i] - 128 + ((columns[i] + row) >> 3));
      data[i] = head << tail_bits | (std::uint32_t)t2[i] << 16 | (std::uint32_t)t1[i] << 8 | t0[i];
    }
  }
}

// Eight values of `bits` bits, in bytes, become `bits` bytes; what is behind the last whole eight
// is filled up with zeros. `packed` has room for 8 bytes more.
void pack_bits(const std::uint8_t* values, std::size_t count, unsigned bits, std::uint8_t* packed) {
  constexpr std::size_t kWords = 16;  // that are made together, in vectors, and then put down
  for (std::size_t i = 0; i < count; i += 8 * kWords) {
    std::uint64_t words[kWords] = {};
    memcpy(words, values + i, count - i < sizeof words ? count - i : sizeof words);
    for (std::uint64_t& word : words) {
      word = (word & 0x00FF00FF00FF00FF) | (word & 0xFF00FF00FF00FF00) >> (8 - bits);
      word = (word & 0x0000FFFF0000FFFF) | (word & 0xFFFF0000FFFF0000) >> (16 - 2 * bits);
      word = (word & 0x00000000FFFFFFFF) | (word >> 32) << (4 * bits);
    }
    for (std::size_t at = 0; at < kWords && i + 8 * at < count; ++at, packed += bits) {
      memcpy(packed, words + at, 8);
    }
  }
}

// As many words of eight values as a vector holds.
#if defined(__AVX2__)
constexpr std::size_t kWordsTogether = 4;
#else
constexpr std::size_t kWordsTogether = 2;
#endif
typedef std::uint64_t Words __attribute__((vector_size(8 * kWordsTogether)));

// The inverse; `packed` can be read 8 bytes further, `values` has room for 8 bytes more.
void unpack_bits(const std::uint8_t* packed, std::size_t count, unsigned bits,
                 std::uint8_t* values) {
  const std::uint64_t one = (1u << bits) - 1;
  const std::uint64_t two = one | one << bits;
  const std::uint64_t four = two | two << (2 * bits);
  const std::uint64_t twos = two | two << 32;
  const std::uint64_t ones = one | one << 16 | one << 32 | one << 48;
  const auto unpack = [=](auto word) {
    word = (word & four) | (word >> (4 * bits) & four) << 32;
    word = (word & twos) | (word >> (2 * bits) & twos) << 16;
    return (word & ones) | (word >> bits & ones) << 8;
  };
  std::size_t i = 0;
#pragma GCC unroll 4
  for (; i + sizeof(Words) <= count; i += sizeof(Words)) {
    Words words;
#pragma GCC unroll 8
    for (std::size_t at = 0; at < kWordsTogether; ++at, packed += bits) {
      std::uint64_t word;
      memcpy(&word, packed, 8);
      words[at] = word;
    }
    words = unpack(words);
    memcpy(values + i, &words, sizeof words);
  }
  for (; i < count; i += 8, packed += bits) {
    std::uint64_t word;
    memcpy(&word, packed, 8);
    word = unpack(word);
    memcpy(values + i, &word, 8);
  }
}

// To the nearest, ties to even, as torch rounds; a NaN becomes 0x7FC0.
inline std::uint16_t rounded_to_bf16(std::uint32_t word) {
  const std::uint32_t even = (word + 0x7FFF + (word >> 16 & 1)) >> 16;
  return (std::uint16_t)((word & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : even);
}

void to_bf16(const std::uint32_t* __restrict data, std::uint16_t* __restrict target,
             std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) target[i] = rounded_to_bf16(data[i]);
}

bool is_bf16(const std::uint16_t* data, const std::uint32_t* masters, std::size_t count) {
  constexpr std::size_t kStep = 4096;  // elements between two looks
  for (std::size_t at = 0; at < count; at += kStep) {
    const std::size_t end = count - at < kStep ? count : at + kStep;
    std::uint32_t differing = 0;
    for (std::size_t i = at; i < end; ++i) {
      differing |= (std::uint32_t)(data[i] ^ rounded_to_bf16(masters[i]));
    }
    if (differing != 0) return false;
  }
  return true;
}

}  // namespace
}  // namespace holdfast
