// Pruning and centres of the codec "excp", for one instruction set: plain loops, which the compiler
// turns into vectors. Includes nothing that could emit an inline function. Every sum has one order,
// and nothing is contracted: the same bits on every machine.
#pragma once

#include <stdint.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "codec/codec_kernel.h"
#include "codec/float_bits.h"
#include "codec/loop_hints.h"

namespace holdfast {
namespace {

std::uint32_t sum_up(const float* data, std::size_t count, std::uint32_t mask,
                     double* __restrict lanes) {
  std::uint32_t most = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t bits = bits_of(data[i]) & mask;
    most = bits > most ? bits : most;
  }
  std::size_t i = 0;
  for (; i + kSumLanes <= count; i += kSumLanes) {
    for (std::size_t lane = 0; lane < kSumLanes; ++lane) {
      lanes[lane] += (double)float_of(bits_of(data[i + lane]) & mask);
    }
  }
  for (std::size_t lane = 0; i < count; ++i, ++lane) {
    lanes[lane] += (double)float_of(bits_of(data[i]) & mask);
  }
  return most;
}

std::uint32_t find_distances(const float* data, const float* base, std::size_t count,
                             std::uint32_t* __restrict distances) {
  std::uint32_t most = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t bits = bits_of(data[i] - base[i]) & 0x7FFFFFFF;
    distances[i] = bits;
    most = bits > most ? bits : most;
  }
  return most;
}

void keep_residuals(const float* data, const float* base, std::size_t count, float threshold,
                    float* __restrict kept) {
  for (std::size_t i = 0; i < count; ++i) {
    const float residual = data[i] - base[i];
    kept[i] = __builtin_fabsf(residual) > threshold ? residual : 0.0f;
  }
}

void keep_residuals_by(const float* data, const float* base, const float* squares,
                       std::size_t count, const ElementRule* rule, float* __restrict kept) {
  const float alpha = rule->alpha, cap = rule->cap, median = rule->median;
  for (std::size_t i = 0; i < count; ++i) {
    const float residual = data[i] - base[i];
    const float factor = alpha / __builtin_sqrtf(squares[i]);
    const float threshold = (factor < cap ? factor : cap) * median;
    kept[i] = __builtin_fabsf(residual) > threshold ? residual : 0.0f;
  }
}

void keep_moments(const float* data, const float* residuals, std::size_t count, float threshold,
                  float* __restrict kept) {
  for (std::size_t i = 0; i < count; ++i) {
    const bool large = __builtin_fabsf(data[i]) > threshold;
    kept[i] = (large & (residuals[i] != 0.0f)) ? data[i] : 0.0f;
  }
}

void keep_where(const float* data, const float* others, std::size_t count, float* __restrict kept) {
  for (std::size_t i = 0; i < count; ++i) kept[i] = others[i] != 0.0f ? data[i] : 0.0f;
}

// Whether 16 elements, or symbols, are all 0: most are.
inline bool all_zero(const float* values) {
  std::uint32_t any = 0;
  for (std::size_t i = 0; i < 16; ++i) any |= bits_of(values[i]);
  return any == 0;
}

inline bool all_zero(const std::uint8_t* values) {
  std::uint64_t words[2];
  memcpy(words, values, 16);
  return (words[0] | words[1]) == 0;
}

std::size_t gather(const float* kept, std::size_t count, float* __restrict found) {
  std::size_t place = 0;
  for (std::size_t at = 0; at < count; at += 16) {
    const std::size_t end = count - at < 16 ? count : at + 16;
    if (end == at + 16 && all_zero(kept + at)) continue;
    for (std::size_t i = at; i < end; ++i) {
      found[place] = kept[i];
      place += kept[i] != 0.0f;
    }
  }
  return place;
}

std::size_t gather_where(const std::uint8_t* symbols, const std::uint8_t* likely, std::size_t count,
                         std::uint8_t* __restrict found) {
  std::size_t place = 0;
  for (std::size_t at = 0; at < count; at += 16) {
    const std::size_t end = count - at < 16 ? count : at + 16;
    if (end == at + 16 && all_zero(likely + at)) continue;
    for (std::size_t i = at; i < end; ++i) {
      found[place] = symbols[i];
      place += likely[i];
    }
  }
  return place;
}

void scatter_where(const std::uint8_t* found, const std::uint8_t* likely, std::size_t count,
                   std::uint8_t* __restrict symbols) {
  for (std::size_t at = 0; at < count; at += 16) {
    const std::size_t end = count - at < 16 ? count : at + 16;
    if (end == at + 16 && all_zero(likely + at)) continue;
    for (std::size_t i = at; i < end; ++i) {
      symbols[i] = likely[i] != 0 ? *found : symbols[i];
      found += likely[i];
    }
  }
}

void find_centres(const float* __restrict kept, std::size_t count, const float* limits,
                  std::uint8_t* __restrict symbols) {
  const float a = limits[0], b = limits[1], c = limits[2], d = limits[3], e = limits[4];
  const float f = limits[5], g = limits[6], h = limits[7], k = limits[8], l = limits[9];
  const float m = limits[10], n = limits[11], o = limits[12], p = limits[13];
  for (std::size_t i = 0; i < count; ++i) {
    const float x = kept[i];
    // Written out: GCC 12 makes no vectors of a loop over the limits.
    const int above = (x > a) + (x > b) + (x > c) + (x > d) + (x > e) + (x > f) + (x > g) +
                      (x > h) + (x > k) + (x > l) + (x > m) + (x > n) + (x > o) + (x > p);
    symbols[i] = (std::uint8_t)((above + 1) & -(x != 0.0f));
  }
}

// All 16 centres lie in registers where there are any: Clang would gather, which takes longer.
void place_centres(const std::uint8_t* __restrict symbols, std::size_t count, const float* centres,
                   float* __restrict target) {
  std::size_t i = 0;
#if defined(__AVX512BW__)
  const __m512 all = _mm512_loadu_ps(centres);
  for (; i + 16 <= count; i += 16) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(symbols + i));
    _mm512_storeu_ps(target + i, _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(bytes), all));
  }
#elif defined(__AVX2__)
  const __m256 low = _mm256_loadu_ps(centres), high = _mm256_loadu_ps(centres + 8);
  for (; i + 8 <= count; i += 8) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(symbols + i));
    const __m256i places = _mm256_cvtepu8_epi32(bytes);
    const __m256 is_high = _mm256_castsi256_ps(_mm256_slli_epi32(places, 28));
    const __m256 of_low = _mm256_permutevar8x32_ps(low, places);
    const __m256 of_high = _mm256_permutevar8x32_ps(high, places);
    _mm256_storeu_ps(target + i, _mm256_blendv_ps(of_low, of_high, is_high));
  }
#endif
  for (; i < count; ++i) target[i] = centres[symbols[i]];
}

// Adds the centre of each element; returns the largest bits of the absolute values.
template <class CentreOf>
inline std::uint32_t add_each(const float* base, std::size_t count, CentreOf centre_of,
                              float* target) {
  std::uint32_t most = 0;
HOLDFAST_NO_DEPENDENCE  // the base may be the target: each element is read before it is written
  for (std::size_t i = 0; i < count; ++i) {
    const float value = base[i] + centre_of(i);
    const std::uint32_t bits = bits_of(value) & 0x7FFFFFFF;
    most = bits > most ? bits : most;
    target[i] = value;
  }
  return most;
}

std::uint32_t add_centres(const float* base, const std::uint8_t* symbols, std::size_t count,
                          const float* centres, float* target) {
#if defined(__AVX2__)
  constexpr std::size_t kTogether = 512;  // elements, whose centres stay in the nearest cache
  std::uint32_t most = 0;
  for (std::size_t at = 0; at < count; at += kTogether) {
    const std::size_t length = count - at < kTogether ? count - at : kTogether;
    alignas(64) float found[kTogether];
    place_centres(symbols + at, length, centres, found);
    const auto centre_of = [&](std::size_t i) { return found[i]; };
    const std::uint32_t largest = add_each(base + at, length, centre_of, target + at);
    most = largest > most ? largest : most;
  }
  return most;
#else
  return add_each(base, count, [=](std::size_t i) { return centres[symbols[i]]; }, target);
#endif
}

void find_changed(const std::uint32_t* data, const std::uint32_t* base, std::size_t count,
                  std::uint8_t* __restrict changed) {
  for (std::size_t i = 0; i < count; ++i) changed[i] = data[i] != base[i];
}

void find_nonzero(const std::uint32_t* data, std::size_t count, std::uint8_t* __restrict nonzero) {
  for (std::size_t i = 0; i < count; ++i) nonzero[i] = (data[i] & 0x7FFFFFFF) != 0;
}

}  // namespace
}  // namespace holdfast
