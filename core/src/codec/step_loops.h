// The inner loops of the codec compact for one instruction set: plain loops, which the compiler
// turns into vectors. Sums of floats go into a fixed number of lanes, which are added up in order:
// the same bits from every set. Includes nothing that could emit an inline function.
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "codec/codec_kernel.h"
#include "codec/float_bits.h"
#include "codec/gather.h"

namespace holdfast {
namespace {

inline float magnitude(float value) {
  return float_of(bits_of(value) & 0x7FFFFFFF);
}

// Lanes of a sum, and what is added to them; they may take several registers, or none.
#if defined(__AVX512BW__)
constexpr std::size_t kGroup = 8;
#else
constexpr std::size_t kGroup = 4;
#endif
typedef float Floats __attribute__((vector_size(kGroup * sizeof(float))));
typedef double Doubles __attribute__((vector_size(kGroup * sizeof(double))));

// GCC 12 widens vectors by halves, where there is an instruction for it.
inline void widen(const float* floats, Doubles& values) {
#if defined(__AVX512BW__)
  values = _mm512_cvtps_pd(_mm256_loadu_ps(floats));
#elif defined(__AVX2__)
  values = _mm256_cvtps_pd(_mm_loadu_ps(floats));
#else
  Floats narrow;
  memcpy(&narrow, floats, sizeof narrow);
  values = __builtin_convertvector(narrow, Doubles);
#endif
}

// Adds values, or their squares, to lanes: that of index i to lane i mod 16.
template <bool squared>
inline void add_to_lanes(const float* data, std::size_t count, double* lanes) {
  Doubles sums[kSumLanes / kGroup];
  memcpy(sums, lanes, sizeof sums);
  std::size_t i = 0;
  for (; i + kSumLanes <= count; i += kSumLanes) {
#pragma GCC unroll 4
    for (std::size_t group = 0; group < kSumLanes / kGroup; ++group) {
      Doubles values;
      widen(data + i + group * kGroup, values);
      sums[group] += squared ? values * values : values;
    }
  }
  memcpy(lanes, sums, sizeof sums);
  for (std::size_t lane = 0; i + lane < count; ++lane) {
    const double value = (double)data[i + lane];
    lanes[lane] += squared ? value * value : value;
  }
}

constexpr std::size_t kPiece = 512;  // elements, a multiple of the lanes

#if defined(__AVX512BW__) && defined(__AVX512VL__)
inline __m512i widen_places(const std::uint8_t* places) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(places)));
}

inline __m512 gather_floats(__m512i index, const float* table) {
  return _mm512_castsi512_ps(gather_words(index, table));
}
#endif

// table[places[i]], of a table of so many floats.
inline void look_up(const float* table, [[maybe_unused]] std::size_t size,
                    const std::uint8_t* places, std::size_t count, float* found) {
  std::size_t i = 0;
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  if (size <= 32) {  // in two registers
    const std::uint32_t held = (std::uint32_t)((std::uint64_t{1} << size) - 1);
    const __m512 low = _mm512_maskz_loadu_ps((__mmask16)held, table);
    const __m512 high = _mm512_maskz_loadu_ps((__mmask16)(held >> 16), table + 16);
    for (; i + 16 <= count; i += 16) {
      const __m512 values = _mm512_permutex2var_ps(low, widen_places(places + i), high);
      _mm512_storeu_ps(found + i, values);
    }
  }
  for (; i + 16 <= count; i += 16) {
    _mm512_storeu_ps(found + i, gather_floats(widen_places(places + i), table));
  }
#endif
  for (; i < count; ++i) found[i] = table[places[i]];
}

// table[classes[i] * stride + symbols[i]]
inline void look_up_steps(const float* table, std::size_t stride, const std::uint8_t* classes,
                          const std::uint8_t* symbols, std::size_t count, float* found) {
  std::size_t i = 0;
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  const __m512i width = _mm512_set1_epi32((int)stride);
  for (; i + 16 <= count; i += 16) {
    const __m512i row = _mm512_mullo_epi32(widen_places(classes + i), width);
    const __m512i index = _mm512_add_epi32(row, widen_places(symbols + i));
    _mm512_storeu_ps(found + i, gather_floats(index, table));
  }
#endif
  for (; i < count; ++i) found[i] = table[classes[i] * stride + symbols[i]];
}

inline double total(const double* lanes) {
  double sum = 0;
  for (std::size_t lane = 0; lane < kSumLanes; ++lane) sum += lanes[lane];
  return sum;
}

// The largest of the masked words.
std::uint32_t largest_word(const std::uint32_t* __restrict data, std::size_t count,
                           std::uint32_t mask) {
  std::uint32_t most = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t word = data[i] & mask;
    most = word > most ? word : most;
  }
  return most;
}

// Adds a row's values to its columns; returns their sum.
double sum_values(const float* __restrict data, std::size_t count, double* __restrict columns) {
  double lanes[kSumLanes] = {};
  add_to_lanes<false>(data, count, lanes);
  for (std::size_t i = 0; i < count; ++i) columns[i] += (double)data[i];
  return total(lanes);
}

// The logarithm of an element in eighths of octaves, as the means of its row and column give it.
inline int log_of(int column, int row, const LogShape& shape) {
  return (int)((unsigned)(column + row) << shape.unit);
}

inline int limited(int log, const LogShape& shape) {
  log = log < shape.floor ? shape.floor : log;
  return log > kLogMax ? kLogMax : log;
}

// Two to the power of (log / 8 - 127), as bits: between two octaves a parabola.
inline std::uint32_t power_bits(int log) {
  const int part = log & 7;
  return (std::uint32_t)((log << kLogShift) - kParabola * part * (8 - part));
}

void make_squares(std::uint32_t* __restrict target, std::size_t count,
                  const std::int16_t* __restrict columns, int row, const LogShape& shape,
                  const std::uint8_t* __restrict symbols) {
  if (symbols == nullptr) {
    for (std::size_t i = 0; i < count; ++i) {
      target[i] = power_bits(limited(log_of(columns[i], row, shape), shape));
    }
    return;
  }
  for (std::size_t i = 0; i < count; ++i) {
    const int rest = (int)((unsigned)(symbols[i] - 128) << shape.rest);
    target[i] = power_bits(limited(log_of(columns[i], row, shape) + rest, shape));
  }
}

// How far elements, which have no sign, are from their means: as symbols around 128.
void find_rests(const std::uint32_t* __restrict data, std::size_t count,
                const std::int16_t* __restrict columns, int row, const LogShape& shape,
                std::uint8_t* __restrict symbols) {
  const unsigned shift = kLogShift + shape.rest;
  const int half = 1 << (shift - 1);
  const int low = shape.floor << kLogShift;
  for (std::size_t i = 0; i < count; ++i) {
    const int word = (int)data[i] < low ? low : (int)data[i];
    const int from = (int)power_bits(limited(log_of(columns[i], row, shape), shape));
    int rest = ((word - from) + half) >> shift;
    rest = rest < -127 ? -127 : rest > 127 ? 127 : rest;
    symbols[i] = (std::uint8_t)(rest + 128);
  }
}

// The class of each element by the means of its row and column, which are in 64ths of an octave.
void find_scales(const std::int16_t* __restrict columns, std::size_t count, int row, int radius,
                 std::uint8_t* __restrict classes) {
  for (std::size_t i = 0; i < count; ++i) {
    int place = (columns[i] + row) >> kClassShift;
    place = place < -radius ? -radius : place > radius ? radius : place;
    classes[i] = (std::uint8_t)(place + radius);
  }
}

// How many of the limits each class reaches, counted from `first` on.
void find_contexts(const std::uint8_t* __restrict classes, std::size_t count,
                   const std::uint8_t* limits, std::size_t limit_count, std::uint8_t first,
                   std::uint8_t* __restrict contexts) {
  memset(contexts, first, count);
  for (std::size_t n = 0; n < limit_count; ++n) {
    const std::uint8_t limit = limits[n];
    for (std::size_t i = 0; i < count; ++i) {
      contexts[i] = (std::uint8_t)(contexts[i] + (classes[i] >= limit ? 1 : 0));
    }
  }
}

// Sums of the squares of the residuals: scaled, and as they are.
void sum_squares(const float* residuals, const std::uint8_t* classes, std::size_t count,
                 const float* scales, std::size_t scale_count, double* sums) {
  double lanes[kSumLanes] = {};
  add_to_lanes<true>(residuals, count, lanes);
  sums[0] = sums[1] = total(lanes);
  if (classes == nullptr) return;
  double scaled_lanes[kSumLanes] = {};
  for (std::size_t at = 0; at < count; at += kPiece) {
    const std::size_t length = count - at < kPiece ? count - at : kPiece;
    alignas(64) float scaled[kPiece];
    look_up(scales, scale_count, classes + at, length, scaled);
    for (std::size_t i = 0; i < length; ++i) scaled[i] *= residuals[at + i];
    add_to_lanes<true>(scaled, length, scaled_lanes);
  }
  sums[0] = total(scaled_lanes);
}

void subtract(const float* __restrict data, const float* __restrict base, std::size_t count,
              float* __restrict residuals) {
  for (std::size_t i = 0; i < count; ++i) residuals[i] = data[i] - base[i];
}

inline std::uint8_t quantise_piece(const float* __restrict residuals,
                                   const float* __restrict factors, std::size_t count,
                                   float rounding, std::uint8_t* __restrict symbols) {
  int most = 0;  // of bytes, and with a branch, Clang makes no vectors
  for (std::size_t i = 0; i < count; ++i) {
    const float x = residuals[i] * factors[i];
    float place = magnitude(x) + rounding;
    place = place < (float)kEscapeLevel ? place : (float)kEscapeLevel;
    const int level = (int)place;
    const int positive = (int)(~bits_of(x) >> 31);
    int symbol = 2 * level - (positive & (level > 0));
    symbol = symbol < kEscapeSymbol ? symbol : kEscapeSymbol;
    symbols[i] = (std::uint8_t)symbol;
    most = symbol > most ? symbol : most;
  }
  return (std::uint8_t)most;
}

// Levels of the scaled residuals as symbols; returns the largest. `scales` are divided by the step.
std::uint8_t quantise(const float* residuals, const std::uint8_t* classes, std::size_t count,
                      const float* scales, std::size_t scale_count, float rounding,
                      std::uint8_t* symbols) {
  std::uint8_t most = 0;
  alignas(64) float factors[kPiece];
  for (std::size_t i = 0; i < kPiece; ++i) factors[i] = scales[0];
  for (std::size_t at = 0; at < count; at += kPiece) {
    const std::size_t length = count - at < kPiece ? count - at : kPiece;
    if (classes != nullptr) look_up(scales, scale_count, classes + at, length, factors);
    const std::uint8_t largest =
        quantise_piece(residuals + at, factors, length, rounding, symbols + at);
    most = largest > most ? largest : most;
  }
  return most;
}

// target = base + steps[class][symbol], where a class has `stride` steps. No base: 0.
void add_steps(const float* base, const std::uint8_t* __restrict classes,
               const std::uint8_t* __restrict symbols, std::size_t count,
               const float* __restrict steps, std::size_t stride, float* __restrict target) {
  for (std::size_t at = 0; at < count; at += kPiece) {
    const std::size_t length = count - at < kPiece ? count - at : kPiece;
    alignas(64) float found[kPiece];
    if (classes != nullptr) {
      look_up_steps(steps, stride, classes + at, symbols + at, length, found);
    } else {
      look_up(steps, stride, symbols + at, length, found);
    }
    float* __restrict made = target + at;
    if (base == nullptr) {
      memcpy(made, found, length * sizeof *found);
    } else {
      for (std::size_t i = 0; i < length; ++i) made[i] = base[at + i] + found[i];
    }
  }
}

// The sum of the squares of the differences; `largest` gets the bits of the largest.
double sum_errors(const float* __restrict data, const float* __restrict decoded, std::size_t count,
                  std::uint32_t* largest) {
  double lanes[kSumLanes] = {};
  std::uint32_t most = 0;
  for (std::size_t at = 0; at < count; at += kPiece) {
    const std::size_t length = count - at < kPiece ? count - at : kPiece;
    alignas(64) float errors[kPiece];
    for (std::size_t i = 0; i < length; ++i) {
      errors[i] = magnitude(data[at + i] - decoded[at + i]);
      const std::uint32_t bits = bits_of(errors[i]);
      most = bits > most ? bits : most;
    }
    add_to_lanes<true>(errors, length, lanes);
  }
  *largest = most;
  return total(lanes);
}

}  // namespace
}  // namespace holdfast
