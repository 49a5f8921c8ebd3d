#include "holdfast/compact.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "codec/compact_parts.h"
#include "codec/float_mode.h"

namespace holdfast {
namespace {

constexpr std::size_t kGridRowMin = 16;
constexpr std::size_t kGridRowsMin = 4;
constexpr std::size_t kGridCountMin = 4096;

struct WideMemory;
struct WideBaseMemory;
struct WideDecodedMemory;

bool is_half(const Elements& elements) {
  return elements.kind == Kind::kBf16 || elements.kind == Kind::kF16;
}

bool is_f32(const Elements& elements) {
  return elements.kind == Kind::kFloat && elements.item_bytes == 4;
}

float widened_f16(std::uint16_t half) {
  const std::uint32_t sign = (half & 0x8000u) << 16, rest = half & 0x7FFFu;
  if (rest < 0x400) {
    const float small = static_cast<float>(rest) * 0x1p-24f;
    return std::bit_cast<float>(std::bit_cast<std::uint32_t>(small) | sign);
  }
  const std::uint32_t bits = rest >= 0x7C00 ? 0x7F800000 | rest << 13 : (rest << 13) + 0x38000000;
  return std::bit_cast<float>(bits | sign);
}

// To the nearest, ties to even; what is too large becomes infinite, a NaN 0x7E00.
std::uint16_t narrowed_f16(float value) {
  const std::uint32_t word = std::bit_cast<std::uint32_t>(value);
  const auto sign = static_cast<std::uint16_t>(word >> 16 & 0x8000);
  const std::uint32_t bits = word & 0x7FFFFFFF;
  if (bits > kInfinity) return 0x7E00;
  if (bits >= 0x477FF000) return sign | 0x7C00;
  if (bits >= 0x38800000) {
    return static_cast<std::uint16_t>(sign | (bits - 0x38000000 + 0xFFF + (bits >> 13 & 1)) >> 13);
  }
  if (bits < 0x33000000) return sign;
  // A denormal: the fraction with its leading one, shifted to units of 2^-24.
  const unsigned shift = 126 - (bits >> 23);
  const std::uint32_t fraction = (bits & 0x7FFFFF) | 0x800000;
  const std::uint32_t kept = fraction >> shift, left = fraction & ((1u << shift) - 1);
  const std::uint32_t half = 1u << (shift - 1);
  const bool up = left > half || (left == half && (kept & 1) != 0);
  return static_cast<std::uint16_t>(sign | (kept + (up ? 1 : 0)));
}

template <class Memory>
const float* widened(const Elements& elements, const void* data) {
  if (!is_half(elements)) return static_cast<const float*>(data);
  auto* halves = static_cast<const std::uint16_t*>(data);
  auto* wide = scratch<float, Memory>(elements.count);
  const bool bf16 = elements.kind == Kind::kBf16;
  for (std::size_t i = 0; i < elements.count; ++i) {
    const std::uint32_t word = static_cast<std::uint32_t>(halves[i]) << 16;
    wide[i] = bf16 ? std::bit_cast<float>(word) : widened_f16(halves[i]);
  }
  return wide;
}

void narrow(const Elements& elements, const float* wide, void* target, const CodecKernel& kernel) {
  auto* halves = static_cast<std::uint16_t*>(target);
  if (elements.kind == Kind::kBf16) {
    kernel.to_bf16(reinterpret_cast<const std::uint32_t*>(wide), halves, elements.count);
    return;
  }
  for (std::size_t i = 0; i < elements.count; ++i) halves[i] = narrowed_f16(wide[i]);
}

// Where decoding puts floats: at the target itself where those are its elements.
float* wide_target(const Elements& elements, void* target) {
  return is_half(elements) ? scratch<float, WideDecodedMemory>(elements.count)
                           : static_cast<float*>(target);
}

double energy_of(const float* data, std::size_t count, const CodecKernel& kernel) {
  double sums[2];
  kernel.sum_squares(data, nullptr, count, nullptr, 0, sums);
  return std::isfinite(sums[0]) ? sums[0] : 0;
}

Lossy without_loss(const Elements& elements, const void* data, const Relatives& relatives,
                   double energy, std::uint8_t* out, void* decoded, const CodecKernel& kernel) {
  const Encoded made = encode_lossless(elements, data, relatives, out, kernel);
  if (elements.count > 0) std::memcpy(decoded, data, elements.size_bytes());
  return {made.mode, made.size_bytes, {0, 0, energy}};
}

void measure(const float* data, const float* decoded, std::size_t count, Loss& loss,
             const CodecKernel& kernel) {
  std::uint32_t largest = 0;
  loss.squared_error = kernel.sum_errors(data, decoded, count, &largest);
  loss.largest_error = static_cast<double>(std::bit_cast<float>(largest));
}

// All 0, whatever they were.
Lossy dropped(const Elements& elements, const float* data, double largest, std::uint8_t* out,
              void* decoded, const CodecKernel& kernel) {
  std::memset(out, 0, elements.item_bytes);
  std::memset(decoded, 0, elements.size_bytes());
  const double energy = energy_of(data, elements.count, kernel);
  return {Mode::kConstant, elements.item_bytes, {energy, largest, energy}};
}

// A half-precision weight that was the rounding of its master becomes that of the decoded one.
bool is_rounding(const Elements& elements, const void* data, const Reference& reference,
                 const CodecKernel& kernel) {
  return elements.kind == Kind::kBf16 && reference.master != nullptr &&
         reference.exact_master != nullptr && elements.count > 0 &&
         kernel.is_bf16(static_cast<const std::uint16_t*>(data),
                        static_cast<const std::uint32_t*>(reference.exact_master), elements.count);
}

// The same rounding to bf16 of each element; without loss where one is not finite.
Lossy keep_rounding(const Elements& elements, const void* data, const Reference& reference,
                    std::uint8_t* out, void* decoded, const CodecKernel& kernel) {
  const Relatives relatives = {reference.master, nullptr, reference.base};
  auto* words = static_cast<const std::uint32_t*>(data);
  if (is_f32(elements) && kernel.largest_word(words, elements.count, 0x7FFFFFFF) < kInfinity) {
    auto* floats = static_cast<const float*>(data);
    auto* base = static_cast<const float*>(reference.base);
    auto* target = static_cast<float*>(decoded);
    Lossy made = {Mode::kRounding, 0, {}};
    made.size_bytes = put_rounding(floats, base, elements.count, out, target, kernel);
    made.loss = measure_loss(floats, target, base, elements.count, kernel);
    if (made.size_bytes < elements.size_bytes()) return made;
  }
  return without_loss(elements, data, relatives, 0, out, decoded, kernel);
}

}  // namespace

Loss measure_loss(const float* data, const float* decoded, const float* base, std::size_t count,
                  const CodecKernel& kernel) {
  const DefaultFloats floats;
  Loss loss;
  measure(data, decoded, count, loss, kernel);
  std::uint32_t largest = 0;
  loss.energy = base == nullptr ? energy_of(data, count, kernel)
                                : kernel.sum_errors(data, base, count, &largest);
  return loss;
}

Elements viewed(const Elements& elements, std::uint32_t width) {
  Elements view = {elements.count, 4, Kind::kFloat, width, 0};
  if (width == 0) view.row = elements.count;
  if (width != 0) view.column = elements.column % width;
  return view;
}

std::uint32_t width_of(const Elements& elements) {
  const bool grid = elements.row >= kGridRowMin && Rows(elements).size() >= kGridRowsMin &&
                    elements.count >= kGridCountMin && elements.row <= elements.count;
  return grid ? static_cast<std::uint32_t>(elements.row) : 0;
}

std::size_t compact_bytes_max(const Elements& elements) {
  // Beside what is lossless: of an f32 at most 3 bytes (a column mean and a rest), of a weight one
  // symbol and, of one in 16, an escape; and centres, and forms of streams.
  constexpr std::size_t kHeadBytes = 4096;
  return lossless_bytes_max(elements) + kHeadBytes;
}

Lossy encode_means(const Elements& elements, const void* data, bool rests, std::uint8_t* out,
                   void* decoded, const CodecKernel& kernel) {
  const DefaultFloats floats;
  if (elements.count > 1 && is_f32(elements)) {
    auto* squares = static_cast<const float*>(data);
    auto* target = static_cast<float*>(decoded);
    const double energy = energy_of(squares, elements.count, kernel);
    const std::size_t size =
        energy > 0 ? put_squares(elements, squares, rests, out, target, kernel) : 0;
    if (size > 0 && size < elements.size_bytes()) {
      Lossy made = {Mode::kMeans, size, {0, 0, energy}};
      measure(squares, target, elements.count, made.loss, kernel);
      return made;
    }
  }
  return without_loss(elements, data, {}, 0, out, decoded, kernel);
}

Lossy encode_moment(const Elements& elements, const void* data, const Steps& steps,
                    const Reference& reference, std::uint8_t* out, void* decoded,
                    const CodecKernel& kernel) {
  const DefaultFloats floats;
  auto* moments = static_cast<const float*>(data);
  auto* target = static_cast<float*>(decoded);
  if (elements.count > 1 && is_f32(elements) && steps.step == 0) {
    const std::uint32_t largest =
        kernel.largest_word(static_cast<const std::uint32_t*>(data), elements.count, 0x7FFFFFFF);
    if (largest < kInfinity) {
      const auto most = static_cast<double>(std::bit_cast<float>(largest));
      return dropped(elements, moments, most, out, decoded, kernel);
    }
  } else if (elements.count > 1 && is_f32(elements) && reference.second_moment != nullptr) {
    const StepTask task = {Mode::kMoment, elements, moments, nullptr, reference.second_moment};
    Lossy made = {Mode::kMoment, 0, {}};
    made.size_bytes = put_steps(task, steps, out, target, made.loss, kernel);
    if (made.size_bytes > 0 && made.size_bytes < elements.size_bytes()) return made;
  }
  return without_loss(elements, data, {nullptr, reference.second_moment}, 0, out, decoded, kernel);
}

Lossy encode_steps(const Elements& elements, const void* data, const Steps& steps,
                   const Reference& reference, std::uint8_t* out, void* decoded,
                   const CodecKernel& kernel) {
  const DefaultFloats floats;
  const Relatives relatives = {reference.master, nullptr};
  if (is_rounding(elements, data, reference, kernel)) {
    Lossy made = {Mode::kRounded, 0, {}};
    kernel.to_bf16(static_cast<const std::uint32_t*>(reference.master),
                   static_cast<std::uint16_t*>(decoded), elements.count);
    return made;
  }
  if (elements.count < 2 || !(is_f32(elements) || is_half(elements)) || reference.base == nullptr) {
    return without_loss(elements, data, relatives, 0, out, decoded, kernel);
  }
  if (steps.bound == Bound::kBf16) {
    return keep_rounding(elements, data, reference, out, decoded, kernel);
  }
  const bool classes = reference.second_moment != nullptr && steps.bound != Bound::kLargest;
  const Mode mode = classes ? Mode::kStepsInClasses : Mode::kSteps;
  const float* wide = widened<WideMemory>(elements, data);
  const float* base = widened<WideBaseMemory>(elements, reference.base);
  float* target = wide_target(elements, decoded);
  const StepTask task = {mode, elements, wide, base, classes ? reference.second_moment : nullptr};
  Lossy made = {mode, 0, {}};
  made.size_bytes = put_steps(task, steps, out, target, made.loss, kernel);
  if (made.size_bytes == 0 || made.size_bytes >= elements.size_bytes()) {
    return without_loss(elements, data, relatives, made.loss.energy, out, decoded, kernel);
  }
  if (is_half(elements)) {
    narrow(elements, target, decoded, kernel);
    // The loss is that of the rounded elements.
    const float* back = widened<WideMemory>(elements, decoded);
    std::memcpy(target, back, elements.count * sizeof(float));
    measure(widened<WideMemory>(elements, data), target, elements.count, made.loss, kernel);
    if (!is_met(steps, made.loss)) {
      return without_loss(elements, data, relatives, made.loss.energy, out, decoded, kernel);
    }
  }
  return made;
}

bool decode_compact(Mode mode, std::span<const std::uint8_t> payload, const Elements& elements,
                    const Reference& reference, void* target, const CodecKernel& kernel) {
  const DefaultFloats floats;
  if (elements.count == 0) return false;
  const bool moments = mode == Mode::kMeans || mode == Mode::kMoment;
  const bool classes = mode == Mode::kMoment || mode == Mode::kStepsInClasses;
  const bool steps = mode == Mode::kSteps || mode == Mode::kStepsInClasses;
  if (mode == Mode::kRounding) {
    return is_f32(elements) && reference.base != nullptr &&
           get_rounding(payload, static_cast<const float*>(reference.base), elements.count,
                        static_cast<float*>(target), kernel);
  }
  if (!moments && !steps) {
    return decode_lossless(mode, payload, elements,
                           {reference.master, reference.second_moment, reference.base}, target,
                           kernel);
  }
  if (!is_f32(elements) && (moments || !is_half(elements))) return false;
  if (mode == Mode::kMeans) {
    return get_squares(payload, elements, static_cast<float*>(target), kernel);
  }
  if (steps && reference.base == nullptr) return false;
  if (classes && reference.second_moment == nullptr) return false;
  const float* base = steps ? widened<WideBaseMemory>(elements, reference.base) : nullptr;
  const StepTask task = {mode, elements, nullptr, base,
                         classes ? reference.second_moment : nullptr};
  float* wide = wide_target(elements, target);
  if (!get_steps(payload, task, wide, kernel)) return false;
  if (is_half(elements)) narrow(elements, wide, target, kernel);
  return true;
}

}  // namespace holdfast
