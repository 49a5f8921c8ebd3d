// Pruning and centres of the codec "excp", for one instruction set: plain loops, which the compiler
// turns into vectors. Includes nothing that could emit an inline function. Every sum has one order,
// and nothing is contracted: the same bits on every machine.
#pragma once

#include <stdint.h>
#include <string.h>

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

std::uint32_t add_centres(const float* base, const std::uint8_t* symbols, std::size_t count,
                          const float* centres, float* target) {
  std::uint32_t most = 0;
HOLDFAST_NO_DEPENDENCE  // the base may be the target: each element is read before it is written
  for (std::size_t i = 0; i < count; ++i) {
    const float value = base[i] + centres[symbols[i]];
    const std::uint32_t bits = bits_of(value) & 0x7FFFFFFF;
    most = bits > most ? bits : most;
    target[i] = value;
  }
  return most;
}

void place_centres(const std::uint8_t* __restrict symbols, std::size_t count, const float* centres,
                   float* __restrict target) {
  for (std::size_t i = 0; i < count; ++i) target[i] = centres[symbols[i]];
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
