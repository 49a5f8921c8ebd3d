// Modes moment, steps and steps in classes: quantised differences from a base, or from 0.
#include <algorithm>
#include <bit>
#include <cmath>

#include "codec/contexts.h"
#include "codec/quantise.h"

namespace holdfast {
namespace {

constexpr int kWeightRadius = 8;  // classes on both sides of the mean: one octave of step
constexpr int kMomentRadius = 100;
constexpr double kStepMin = 0x1p-90, kStepMax = 0x1p90;
constexpr float kCentreMin = 0x1p-100f, kCentreMax = 0x1p100f;
constexpr std::size_t kEscapeShare = 16;  // more escapes than one in so many do not pay
constexpr int kTries = 8;                 // of steps, until a bound is met

struct ResidualMemory;

Classes classes_of(const StepTask& task, std::uint32_t width, const CodecKernel& kernel) {
  if (task.mode == Mode::kSteps) return {};
  const bool moment = task.mode == Mode::kMoment;
  Classes classes = {nullptr, moment ? kMomentRadius : kWeightRadius, moment ? 2 : -1};
  classes.view = viewed(task.elements, width);
  classes.of = find_classes(classes.view, task.second_moment, classes.radius, kernel);
  return classes;
}

// Decodes what was quantised, and measures what is lost.
void decode_again(const StepTask& task, const Classes& classes, const Quantised& made,
                  float* decoded, Loss& loss, const CodecKernel& kernel) {
  std::size_t stride = 0;
  const float* table = make_steps(made.levels, classes, stride);
  loss.squared_error = loss.largest_error = 0;
  for_blocks(task.elements.count, [&](std::size_t at, std::size_t count) {
    const float* base = task.base != nullptr ? task.base + at : nullptr;
    const std::uint8_t* of = classes.of != nullptr ? classes.of + at : nullptr;
    kernel.add_steps(base, of, made.symbols + at, count, table, stride, decoded + at);
    if (made.escapes > 0) put_back_escapes(made.symbols + at, task.data + at, count, decoded + at);
    std::uint32_t largest = 0;
    loss.squared_error += kernel.sum_errors(task.data + at, decoded + at, count, &largest);
    const auto error = static_cast<double>(std::bit_cast<float>(largest));
    loss.largest_error = std::max(loss.largest_error, error);
  });
}

std::size_t write(const StepTask& task, std::uint32_t width, const Classes& classes,
                  const Quantised& made, double step, std::uint8_t* out,
                  const CodecKernel& kernel) {
  std::uint8_t* const begin = out;
  if (task.mode != Mode::kSteps) out = put(out, width);
  out = put(out, made.levels.form);
  out = put(out, static_cast<std::uint8_t>(made.levels.levels));
  if (made.levels.form == kUniform) out = put(out, static_cast<float>(step));
  for (int level = 1; made.levels.form != kUniform && level <= made.levels.levels; ++level) {
    out = put(out, made.levels.centres[level]);
  }
  out = put_symbols(classes, made.symbols, task.elements.count, out, kernel);
  for (std::size_t i = 0; made.escapes > 0 && i < task.elements.count; ++i) {
    if (made.symbols[i] == kEscapeSymbol) out = put(out, task.data[i]);
  }
  return static_cast<std::size_t>(out - begin);
}

bool is_centre(float centre) {
  return centre >= kCentreMin && centre <= kCentreMax;
}

bool get_levels(std::span<const std::uint8_t>& payload, Levels& levels) {
  std::uint8_t count = 0;
  if (!take(payload, levels.form) || levels.form > kUniform) return false;
  if (!take(payload, count) || count > kLevelsMax) return false;
  levels.levels = count;
  float step = 0;
  if (levels.form == kUniform && (!take(payload, step) || !is_centre(step))) return false;
  for (int level = 1; level <= count; ++level) {
    float& centre = levels.centres[level];
    centre = static_cast<float>(level) * step;
    if (levels.form != kUniform && !take(payload, centre)) return false;
    if (!is_centre(centre)) return false;
  }
  return true;
}

bool get_escapes(std::span<const std::uint8_t>& payload, std::span<const std::uint8_t> symbols,
                 float* target) {
  for (std::size_t i = 0; i < symbols.size(); ++i) {
    if (symbols[i] == kEscapeSymbol && !take(payload, target[i])) return false;
  }
  return true;
}

// Differences from the base, the mean of their squares, scaled, and the sum of these as they are: a
// float that is not finite makes both so.
Residuals find_residuals(const StepTask& task, const Classes& classes, double& mean_square,
                         double& energy, const CodecKernel& kernel) {
  Residuals all = {task.data, classes.of, task.elements.count};
  float* differences = nullptr;
  if (task.base != nullptr) all.data = differences = scratch<float, ResidualMemory>(all.count);
  const std::vector<float> scales = scales_of(classes, 1);
  mean_square = energy = 0;
  for_blocks(all.count, [&](std::size_t at, std::size_t count) {
    if (differences != nullptr) {
      kernel.subtract(task.data + at, task.base + at, count, differences + at);
    }
    const Residuals block = all.part(at, count);
    double more[2];
    kernel.sum_squares(block.data, block.classes, count, scales.data(), scales.size(), more);
    mean_square += more[0] / static_cast<double>(all.count);
    energy += more[1];
  });
  return all;
}

}  // namespace

bool is_met(const Steps& steps, const Loss& loss) {
  if (steps.bound == Bound::kShare) return loss.squared_error <= steps.limit * loss.energy;
  return steps.bound != Bound::kLargest || loss.largest_error <= steps.limit;
}

std::size_t put_steps(const StepTask& task, const Steps& steps, std::uint8_t* out, float* decoded,
                      Loss& loss, const CodecKernel& kernel) {
  const std::size_t count = task.elements.count;
  const std::uint32_t width = width_of(task.elements);
  const Classes classes = classes_of(task, width, kernel);
  const bool fine = width == 0 && count < kFineCount;
  double mean_square;
  const Residuals all = find_residuals(task, classes, mean_square, loss.energy, kernel);
  if (!std::isfinite(mean_square) || !std::isfinite(loss.energy)) {
    loss.energy = 0;
    return 0;
  }
  const double rms = std::sqrt(mean_square);
  double step = rms > 0 ? first_step(all, classes, rms, fine, steps, kernel) : 1;
  for (int i = 0; i < kTries; ++i, step *= 0.9) {
    if (!(step >= kStepMin && step <= kStepMax)) return 0;
    const Quantised made = quantise(all, classes, step, fine, kernel);
    const Levels& levels = made.levels;
    if (!std::all_of(levels.centres + 1, levels.centres + 1 + levels.levels, is_centre)) return 0;
    if (made.escapes > count / kEscapeShare) return 0;
    decode_again(task, classes, made, decoded, loss, kernel);
    if (is_met(steps, loss)) return write(task, width, classes, made, step, out, kernel);
  }
  return 0;
}

bool get_steps(std::span<const std::uint8_t> payload, const StepTask& task, float* target,
               const CodecKernel& kernel) {
  const std::size_t count = task.elements.count;
  std::uint32_t width = 0;
  if (task.mode != Mode::kSteps && (!take(payload, width) || width > count)) return false;
  Levels levels;
  if (!get_levels(payload, levels)) return false;
  const Classes classes = classes_of(task, width, kernel);
  auto* symbols = symbol_memory(count);
  if (!get_symbols(payload, classes, {symbols, count}, kernel)) return false;
  std::uint8_t most = 0;
  for (std::size_t i = 0; i < count; ++i) most = std::max(most, symbols[i]);
  if (most > 2 * levels.levels && (levels.levels != kLevelsMax || most != kEscapeSymbol)) {
    return false;
  }
  std::size_t stride = 0;
  const float* table = make_steps(levels, classes, stride);
  kernel.add_steps(task.base, classes.of, symbols, count, table, stride, target);
  if (most == kEscapeSymbol && !get_escapes(payload, {symbols, count}, target)) return false;
  return payload.empty();
}

}  // namespace holdfast
