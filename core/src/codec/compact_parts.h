// The two halves of the codec compact: means (of second moments) and steps (of all else).
#pragma once

#include <cstring>
#include <optional>

#include "codec/entropy.h"
#include "codec/grid.h"
#include "codec/planes.h"
#include "codec/scratch.h"
#include "holdfast/compact.h"

namespace holdfast {

inline constexpr std::uint32_t kInfinity = 0x7F800000;
// Elements without a grid below which all is fine.
inline constexpr std::size_t kFineCount = 1 << 16;

// The elements as a grid: in rows as long as the payload says, or, where it says 0, in one row.
Elements viewed(const Elements& elements, std::uint32_t width);

// The width of the view that encoding takes.
std::uint32_t width_of(const Elements& elements);

// Reads a little-endian number or a byte off the front of a payload.
template <class T>
bool take(std::span<const std::uint8_t>& payload, T& value) {
  if (payload.size() < sizeof value) return false;
  std::memcpy(&value, payload.data(), sizeof value);
  payload = payload.subspan(sizeof value);
  return true;
}

template <class T>
std::uint8_t* put(std::uint8_t* out, T value) {
  std::memcpy(out, &value, sizeof value);
  return out + sizeof value;
}

// Returns the bytes of the payload, or 0 where the elements are no second moments.
std::size_t put_squares(const Elements& elements, const float* data, bool rests, std::uint8_t* out,
                        float* decoded, const CodecKernel& kernel);
bool get_squares(std::span<const std::uint8_t> payload, const Elements& elements, float* target,
                 const CodecKernel& kernel);

// Classes of the steps of elements.
struct Classes {
  const std::uint8_t* of = nullptr;  // of each element; null: all are of one
  int radius = 0;
  int step = 0;  // eighths of octaves from one class to the next, in what is decoded
  Elements view = {};

  int count() const { return 2 * radius + 1; }
  int eighths(int index) const { return (index - radius) * step; }
};

// The class of each element of a view, from 0 to 2 · radius, by the means of the logarithms of its
// row and column: radius where they are as large as all are.
const std::uint8_t* find_classes(const Elements& view, const float* second_moment, int radius,
                                 const CodecKernel& kernel);

// What a residual is quantised from, and in which classes.
struct StepTask {
  Mode mode;  // kMoment, kSteps or kStepsInClasses
  Elements elements;
  const float* data;
  const float* base;           // null: 0
  const float* second_moment;  // null in kSteps
};

// Whether a loss keeps its bound.
bool is_met(const Steps& steps, const Loss& loss);

// Returns the bytes of the payload, or 0 where the bound cannot be met or a float is not finite.
std::size_t put_steps(const StepTask& task, const Steps& steps, std::uint8_t* out, float* decoded,
                      Loss& loss, const CodecKernel& kernel);
bool get_steps(std::span<const std::uint8_t> payload, const StepTask& task, float* target,
               const CodecKernel& kernel);

// An f32 weight that keeps its rounding to bf16. Returns the bytes of the payload.
std::size_t put_rounding(const float* data, const float* base, std::size_t count, std::uint8_t* out,
                         float* decoded, const CodecKernel& kernel);
bool get_rounding(std::span<const std::uint8_t> payload, const float* base, std::size_t count,
                  float* target, const CodecKernel& kernel);

}  // namespace holdfast
