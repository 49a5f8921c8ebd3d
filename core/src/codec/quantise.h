// Residuals to levels and back: what the modes moment, steps and steps in classes have in common.
#pragma once

#include <algorithm>
#include <vector>

#include "codec/compact_parts.h"

namespace holdfast {

inline constexpr float kRounding = 0.33f;  // below 1/2: a value goes to the level nearer to 0
inline constexpr int kLevelsMax = 126;
inline constexpr std::uint8_t kUniform = 1;  // form of levels: multiples of one step

// What symbols stand for: levels 1 … levels on both sides of 0.
struct Levels {
  std::uint8_t form = 0;
  int levels = 0;
  float centres[kLevelsMax + 1] = {};
};

constexpr std::size_t kBlock = 8192;  // elements, which stay in the cache between two passes

// Calls body(first, count) for each block.
template <class Body>
void for_blocks(std::size_t count, Body body) {
  for (std::size_t at = 0; at < count; at += kBlock) body(at, std::min(kBlock, count - at));
}

// Whether statistics take in the block at an element: all of few, one in four of many, one in eight
// of a whole chunk.
inline bool is_sampled(std::size_t at, std::size_t count) {
  const std::size_t blocks = count / kBlock, step = blocks < 16 ? 1 : blocks < 64 ? 4 : 8;
  return at / kBlock % step == 0;
}

// Elements whose residuals are quantised: all, or a sample.
struct Residuals {
  const float* data;
  const std::uint8_t* classes;
  std::size_t count;

  Residuals part(std::size_t at, std::size_t length) const {
    return {data + at, classes != nullptr ? classes + at : nullptr, length};
  }
};

// Symbols of residuals, the same memory for every chunk that a thread codes.
struct Quantised {
  Levels levels;
  std::uint8_t* symbols;
  std::size_t escapes = 0;
};

// Room for the symbols of so many elements.
std::uint8_t* symbol_memory(std::size_t count);

// What residuals are multiplied by before they are quantised, for each class.
std::vector<float> scales_of(const Classes& classes, float factor);

// Quantises with a step in units of the scaled residual; finely: in uniform levels.
Quantised quantise(const Residuals& residuals, const Classes& classes, double step, bool fine,
                   const CodecKernel& kernel);

// What is added for each class and symbol; behind a class's symbols one for the escape.
const float* make_steps(const Levels& levels, const Classes& classes, std::size_t& stride);

// Elements that escaped become what they were.
void put_back_escapes(const std::uint8_t* symbols, const float* data, std::size_t count,
                      float* decoded);

// The step to begin with: a bound is met by it on a sample.
double first_step(const Residuals& all, const Classes& classes, double rms, bool fine,
                  const Steps& steps, const CodecKernel& kernel);

}  // namespace holdfast
