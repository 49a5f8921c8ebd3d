#include "codec/quantise.h"

#include <bit>
#include <cmath>

#include "codec/contexts.h"

namespace holdfast {
namespace {

constexpr float kFineRounding = 0.5f;
constexpr double kFineStep = 0.25;

struct SymbolMemory;
struct StepMemory;
struct SampleMemory;
struct SampleClassMemory;
struct TrialMemory;

// fl32(2^(i/8)).
constexpr float kPowers[8] = {0x1p+0f,        0x1.172b84p+0f, 0x1.306fep+0f,  0x1.4bfdaep+0f,
                              0x1.6a09e6p+0f, 0x1.8ace54p+0f, 0x1.ae89fap+0f, 0x1.d5818ep+0f};

// value · 2^(eighths/8), of which the first factor is rounded.
float scaled(float value, int eighths) {
  const float part = value * kPowers[eighths & 7];
  if (part == 0) return 0;
  const auto shift = static_cast<std::uint32_t>(eighths >> 3) << 23;
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(part) + shift);
}

// Sums of what fell into each symbol; the centre of a level is their mean.
struct CentreSums {
  static constexpr std::size_t kParts = 4;  // equal neighbours do not wait for each other
  double sums[kParts][256] = {};
  std::uint32_t counts[kParts][256] = {};

  void add(const Residuals& residuals, const std::uint8_t* symbols, const float* scales) {
    if (residuals.classes != nullptr) {
      add_each(residuals, symbols, [&](std::size_t i) { return scales[residuals.classes[i]]; });
    } else {
      add_each(residuals, symbols, [&](std::size_t) { return scales[0]; });
    }
  }

  double mean(int level) const {
    double sum = 0;
    std::uint32_t count = 0;
    for (std::size_t part = 0; part < kParts; ++part) {
      for (int symbol = 2 * level - 1; symbol <= 2 * level; ++symbol) {
        sum += sums[part][symbol];
        count += counts[part][symbol];
      }
    }
    return count > 0 ? sum / count : level;
  }

 private:
  template <class Scale>
  void add_each(const Residuals& residuals, const std::uint8_t* symbols, Scale scale) {
    for (std::size_t i = 0; i < residuals.count; ++i) {
      const float size = std::fabs(residuals.data[i] * scale(i));
      sums[i % kParts][symbols[i]] += static_cast<double>(size);
      ++counts[i % kParts][symbols[i]];
    }
  }
};

}  // namespace

std::uint8_t* symbol_memory(std::size_t count) {
  return scratch<std::uint8_t, SymbolMemory>(count);
}

std::vector<float> scales_of(const Classes& classes, float factor) {
  std::vector<float> scales(static_cast<std::size_t>(classes.count()));
  for (int c = 0; c < classes.count(); ++c) {
    scales[static_cast<std::size_t>(c)] = scaled(factor, -classes.eighths(c));
  }
  return scales;
}

Quantised quantise(const Residuals& residuals, const Classes& classes, double step, bool fine,
                   const CodecKernel& kernel) {
  Quantised made = {{}, symbol_memory(residuals.count)};
  const std::vector<float> scales = scales_of(classes, static_cast<float>(1 / step));
  const float rounding = fine ? kFineRounding : kRounding;
  CentreSums sums;
  std::uint8_t most = 0;
  for_blocks(residuals.count, [&](std::size_t at, std::size_t count) {
    const Residuals block = residuals.part(at, count);
    std::uint8_t* symbols = made.symbols + at;
    const std::uint8_t largest = kernel.quantise(block.data, block.classes, count, scales.data(),
                                                 scales.size(), rounding, symbols);
    most = std::max(most, largest);
    if (!fine && is_sampled(at, residuals.count)) sums.add(block, symbols, scales.data());
  });
  for (std::size_t i = 0; most == kEscapeSymbol && i < residuals.count; ++i) {
    if (made.symbols[i] == kEscapeSymbol) ++made.escapes;
  }
  made.levels.levels = std::min((most + 1) / 2, kLevelsMax);
  made.levels.form = fine ? kUniform : 0;
  for (int level = 1; level <= made.levels.levels; ++level) {
    made.levels.centres[level] = fine ? static_cast<float>(level) * static_cast<float>(step)
                                      : static_cast<float>(sums.mean(level) * step);
  }
  return made;
}

const float* make_steps(const Levels& levels, const Classes& classes, std::size_t& stride) {
  stride = static_cast<std::size_t>(levels.levels == kLevelsMax ? kEscapeSymbol + 1
                                                                : 2 * levels.levels + 1);
  auto* steps = scratch<float, StepMemory>(static_cast<std::size_t>(classes.count()) * stride);
  for (int c = 0; c < classes.count(); ++c) {
    float* row = steps + static_cast<std::size_t>(c) * stride;
    row[0] = 0;
    row[stride - 1] = 0;
    for (int level = 1; level <= levels.levels; ++level) {
      const float step = scaled(levels.centres[level], classes.eighths(c));
      row[2 * level - 1] = step;
      row[2 * level] = -step;
    }
  }
  return steps;
}

void put_back_escapes(const std::uint8_t* symbols, const float* data, std::size_t count,
                      float* decoded) {
  for (std::size_t i = 0; i < count; ++i) {
    if (symbols[i] == kEscapeSymbol) decoded[i] = data[i];
  }
}

namespace {

Residuals sample_of(const Residuals& all) {
  constexpr std::size_t kRuns = 64, kRun = 256;
  if (all.count <= kRuns * kRun) return all;
  auto* data = scratch<float, SampleMemory>(kRuns * kRun);
  auto* classes = scratch<std::uint8_t, SampleClassMemory>(kRuns * kRun);
  for (std::size_t run = 0; run < kRuns; ++run) {
    const std::size_t at = run * (all.count - kRun) / (kRuns - 1);
    std::memcpy(data + run * kRun, all.data + at, kRun * sizeof *data);
    if (all.classes != nullptr) std::memcpy(classes + run * kRun, all.classes + at, kRun);
  }
  return {data, all.classes != nullptr ? classes : nullptr, kRuns * kRun};
}

// Bits of a symbol, in the contexts of their classes; tables are not counted.
double bits_of(const Classes& classes, const std::uint8_t* symbols, std::size_t count,
               const CodecKernel& kernel) {
  const Parts parts = find_parts(classes, symbols, count);
  const Symbols coded = in_contexts(classes, parts, symbols, count, kernel);
  Histogram histogram;
  count_symbols(coded, histogram);
  double bits = 0;
  for (std::size_t context = 0; context < coded.context_count; ++context) {
    double total = 0;
    for (const std::uint32_t each : histogram.counts[context]) total += each;
    for (const std::uint32_t each : histogram.counts[context]) {
      if (each > 0) bits -= each * std::log2(each / total);
    }
  }
  return bits / static_cast<double>(count);
}

// How much of the bound a step takes on a sample: above 1 it is broken.
double share_of_bound(const Residuals& sample, Classes classes, double step, bool fine,
                      const Steps& steps, const CodecKernel& kernel) {
  classes.of = sample.classes;
  classes.view = {};
  const Quantised made = quantise(sample, classes, step, fine, kernel);
  if (steps.bound == Bound::kBits) {
    return bits_of(classes, made.symbols, sample.count, kernel) / steps.limit;
  }
  std::size_t stride = 0;
  const float* table = make_steps(made.levels, classes, stride);
  auto* decoded = scratch<float, TrialMemory>(sample.count);
  const std::vector<float> zeros(sample.count);
  kernel.add_steps(zeros.data(), classes.of, made.symbols, sample.count, table, stride, decoded);
  if (made.escapes > 0) put_back_escapes(made.symbols, sample.data, sample.count, decoded);
  std::uint32_t largest = 0;
  double sums[2];
  kernel.sum_squares(sample.data, nullptr, sample.count, nullptr, 0, sums);
  const double error = kernel.sum_errors(sample.data, decoded, sample.count, &largest);
  return sums[0] > 0 ? error / (sums[0] * steps.limit) : 0;
}

}  // namespace

double first_step(const Residuals& all, const Classes& classes, double rms, bool fine,
                  const Steps& steps, const CodecKernel& kernel) {
  constexpr int kHalvings = 16;
  if (steps.bound == Bound::kNone) {
    return rms * (fine ? std::min(steps.step, kFineStep) : steps.step);
  }
  if (steps.bound == Bound::kLargest) return steps.limit * 2 * (1 - static_cast<double>(kRounding));
  const Residuals sample = sample_of(all);
  double low = rms * 0x1p-12, high = rms * 8;
  for (int i = 0; i < kHalvings; ++i) {
    const double middle = std::sqrt(low * high);
    const bool broken = share_of_bound(sample, classes, middle, fine, steps, kernel) > 1;
    // A coarser step has a larger error, and fewer bits.
    (broken == (steps.bound == Bound::kBits) ? low : high) = middle;
  }
  return steps.bound == Bound::kBits ? high : low;
}

}  // namespace holdfast
