// Elements ⇄ byte planes, residuals and packed bits, for one instruction set: plain loops, which
// the compiler turns into vectors. Includes nothing that could emit an inline function.
#pragma once

#include <stdint.h>
#include <string.h>

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

template <bool rotate>
inline void split_4(const std::uint32_t* __restrict data, std::size_t count,
                    std::uint8_t* const* planes) {
  std::uint8_t* __restrict p0 = planes[0];
  std::uint8_t* __restrict p1 = planes[1];
  std::uint8_t* __restrict p2 = planes[2];
  std::uint8_t* __restrict p3 = planes[3];
  for (std::size_t i = 0; i < count; ++i) {
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

// The inverse; `packed` can be read 8 bytes further, `values` has room for 8 bytes more.
void unpack_bits(const std::uint8_t* packed, std::size_t count, unsigned bits,
                 std::uint8_t* values) {
  const std::uint64_t one = (1u << bits) - 1;
  const std::uint64_t two = one | one << bits;
  const std::uint64_t four = two | two << (2 * bits);
  for (std::size_t i = 0; i < count; i += 8, packed += bits) {
    std::uint64_t word;
    memcpy(&word, packed, 8);
    word = (word & four) | (word >> (4 * bits) & four) << 32;
    word = (word & (two | two << 32)) | (word >> (2 * bits) & (two | two << 32)) << 16;
    const std::uint64_t ones = one | one << 16 | one << 32 | one << 48;
    word = (word & ones) | (word >> bits & ones) << 8;
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
