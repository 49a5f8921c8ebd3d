#include "holdfast/replay.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "codec/entropy.h"
#include "codec/float_bits.h"
#include "codec/float_mode.h"
#include "codec/float_order.h"
#include "codec/least_squares.h"
#include "codec/scratch.h"

namespace holdfast {
namespace {

constexpr std::size_t kConstants = 3;
constexpr std::size_t kSamples = 4096;  // elements by which constants are found
constexpr std::size_t kCountMin = 256;  // what is shorter is not worth it
constexpr std::size_t kRowsMin = 32;    // of a fit; fewer say too little
constexpr std::size_t kBlock = 1024;    // elements that are predicted at once
constexpr std::uint32_t kEscape = 255;
constexpr double kGoodBits = 10;      // of what is missed, for each element, at most
constexpr double kBeta2Digits = 1e6;  // of what people choose
constexpr double kBeta1Digits = 1e5;
constexpr double kOutlier = 1e4;  // times what it is compared with: no step of Adam led here
constexpr int kFitRounds = 5;
constexpr double kFarOff = 2;     // times the mean square
constexpr int kEpsilonSteps = 8;  // at most, until it moves less than this share of itself:
constexpr double kEpsilonPrecision = 1e-6;

struct SymbolMemory;
struct SampleMemory;

// Of a second moment: beta2, 1 - beta2, 1 - beta1. Of a weight: what it is multiplied by, what the
// first moment is multiplied by, epsilon.
struct Constants {
  float values[kConstants];
};

// Some elements and their relatives.
struct Part {
  const float* data;
  const float* base;
  const float* exp_avg;
  const float* other;  // exp_avg_base, or exp_avg_sq
};

Part part_of(Mode mode, const void* data, const ReplayRelatives& relatives) {
  const void* other = mode == Mode::kReplayMoment ? relatives.exp_avg_base : relatives.exp_avg_sq;
  return {static_cast<const float*>(data), static_cast<const float*>(relatives.base),
          static_cast<const float*>(relatives.exp_avg), static_cast<const float*>(other)};
}

bool is_whole(const Part& part) {
  return part.base != nullptr && part.exp_avg != nullptr && part.other != nullptr;
}

// What the step makes of elements `from` and on; no NaN, whose bits differ from machine to machine.
void predict(Mode mode, const Constants& constants, const Part& part, std::size_t from,
             std::size_t count, float* __restrict result) {
  const float first = constants.values[0], second = constants.values[1],
              third = constants.values[2];
  const float *base = part.base + from, *moment = part.exp_avg + from, *other = part.other + from;
  if (mode == Mode::kReplayMoment) {
    const double share = third;
    for (std::size_t i = 0; i < count; ++i) {
      const double before = other[i];
      const auto gradient = static_cast<float>(before + (moment[i] - before) / share);
      result[i] = first * base[i] + second * gradient * gradient;
    }
  } else {
    for (std::size_t i = 0; i < count; ++i) {
      result[i] = first * base[i] + second * moment[i] / (std::sqrt(other[i]) + third);
    }
  }
  for (std::size_t i = 0; i < count; ++i) result[i] = result[i] == result[i] ? result[i] : 0.0f;
}

// How far an element is from what was predicted: 0, -1, 1, -2, 2, … are 0, 1, 2, 3, 4, …
std::uint32_t missed_by(float value, float predicted) {
  const std::uint32_t step = place_of<32>(bits_of(value)) - place_of<32>(bits_of(predicted));
  return step << 1 ^ static_cast<std::uint32_t>(static_cast<std::int32_t>(step) >> 31);
}

std::uint32_t moved_by(float predicted, std::uint32_t missed) {
  const std::uint32_t step = missed >> 1 ^ (0u - (missed & 1));
  return bits_at<32>(place_of<32>(bits_of(predicted)) + step);
}

// The first escape among symbols; `end` where there is none. Loops that make vectors leave escapes
// to this: they are rare.
const std::uint8_t* next_escape(const std::uint8_t* at, const std::uint8_t* end) {
  const void* found = std::memchr(at, kEscape, static_cast<std::size_t>(end - at));
  return found != nullptr ? static_cast<const std::uint8_t*>(found) : end;
}

// Elements that are evenly spread, next to each other in memory.
Part sample_of(const Part& part, std::size_t count, std::size_t taken) {
  auto* memory = scratch<float, SampleMemory>(4 * taken);
  const float* const sources[] = {part.data, part.base, part.exp_avg, part.other};
  for (std::size_t i = 0; i < taken; ++i) {
    for (std::size_t s = 0; s < 4; ++s) memory[s * taken + i] = sources[s][i * count / taken];
  }
  return {memory, memory + taken, memory + 2 * taken, memory + 3 * taken};
}

// Bits that are missed, for each element of a sample.
double score(Mode mode, const Constants& constants, const Part& sample, std::size_t count) {
  float predicted[kBlock];
  std::size_t bits = 0;
  for (std::size_t from = 0; from < count; from += kBlock) {
    const std::size_t size = std::min(kBlock, count - from);
    predict(mode, constants, sample, from, size, predicted);
    for (std::size_t i = 0; i < size; ++i) {
      const unsigned width = std::bit_width(missed_by(sample.data[from + i], predicted[i]));
      bits += width;
    }
  }
  return static_cast<double>(bits) / static_cast<double>(count);
}

double rounded(double value, double digits) {
  return std::nearbyint(value * digits) / digits;
}

Constants moment_constants(double keep, double add, double share) {
  return {{static_cast<float>(keep), static_cast<float>(add), static_cast<float>(share)}};
}

// Finds the unknowns of rows that `row_of(i, row, value)` fills in, where it returns true. Some are
// of elements that no step of Adam led to: what is far off is left out, and the rest fitted again.
template <std::size_t Unknowns, class RowOf>
bool fit(std::size_t count, RowOf row_of, double (&found)[Unknowns]) {
  double limit = std::numeric_limits<double>::infinity();
  for (int round = 0; round < kFitRounds; ++round) {
    LeastSquares<Unknowns> squares;
    double total = 0;
    for (std::size_t i = 0; i < count; ++i) {
      double row[Unknowns], value;
      if (!row_of(i, row, value)) continue;
      double rest = value;
      for (std::size_t j = 0; j < Unknowns; ++j) rest -= row[j] * found[j];
      if (!(rest * rest <= limit)) continue;
      squares.add(row, value);
      total += rest * rest;
    }
    if (squares.rows() < kRowsMin || !squares.solve(found)) return false;
    if (round > 0) limit = kFarOff * total / static_cast<double>(squares.rows());
  }
  return true;
}

// With g = m0 + (m1 - m0) / w the step is linear in beta2 and in three products of it and w.
double fit_moment(const Part& sample, std::size_t count, Constants& best) {
  double found[4] = {};
  const auto row_of = [&](std::size_t i, double* row, double& result) {
    const double value = sample.data[i], base = sample.base[i], before = sample.other[i];
    const double moved = sample.exp_avg[i] - before;
    row[0] = base / value;
    row[1] = before * before / value;
    row[2] = before * moved / value;
    row[3] = moved * moved / value;
    result = 1;
    return value > 0 && base > 0 && row[0] + row[1] + row[3] < kOutlier;
  };
  if (!fit(count, row_of, found)) return kGoodBits;
  const double keep = found[0], share = std::sqrt((1 - keep) / found[3]);
  if (!(keep > 0) || !(keep < 1) || !(share > 0) || !(share <= 1)) return kGoodBits;
  // People choose betas of few digits: those, where they are no worse.
  const double chosen = rounded(keep, kBeta2Digits);
  const double chosen_share = 1 - rounded(1 - share, kBeta1Digits);
  const Constants all[] = {moment_constants(chosen, 1 - chosen, chosen_share),
                           moment_constants(keep, 1 - keep, share)};
  double least = kGoodBits;
  for (const Constants& each : all) {
    const double bits = score(Mode::kReplayMoment, each, sample, count);
    if (bits < least) {
      least = bits;
      best = each;
    }
  }
  return least;
}

// Given epsilon, the step is linear in the rest, and about so in a share more of epsilon: `more`.
bool fit_rest(const Part& sample, std::size_t count, double epsilon, Constants& constants,
              double* more) {
  double found[3] = {};
  const auto row_of = [&](std::size_t i, auto& row, double& result) {
    const double value = sample.data[i], base = sample.base[i];
    const double root = std::sqrt(sample.other[i]) + epsilon, unit = sample.exp_avg[i] / root;
    const double scale = 1 / (std::fabs(value) + std::fabs(base));
    row[0] = base * scale;
    row[1] = unit * scale;
    if constexpr (sizeof row == sizeof found) {
      row[2] = -unit / root * epsilon * scale;
    }
    result = value * scale;
    return std::fabs(base) < kOutlier * std::fabs(value) && std::fabs(unit) < kOutlier;
  };
  double two[2] = {};
  if (more != nullptr ? !fit(count, row_of, found) : !fit(count, row_of, two)) return false;
  const double* all = more != nullptr ? found : two;
  constants = {
      {static_cast<float>(all[0]), static_cast<float>(all[1]), static_cast<float>(epsilon)}};
  if (more != nullptr) *more = found[1] != 0 ? found[2] / found[1] : 0;
  return true;
}

double fit_weight(const Part& sample, std::size_t count, Constants& best) {
  double least = kGoodBits, epsilon = 1e-8;
  const auto consider = [&](double each, double* more) {
    Constants constants;
    if (!fit_rest(sample, count, each, constants, more)) return;
    const double bits = score(Mode::kReplayWeight, constants, sample, count);
    if (bits < least) {
      least = bits;
      best = constants;
    }
  };
  double more = 1;
  for (int step = 0; step < kEpsilonSteps && std::fabs(more) > kEpsilonPrecision; ++step) {
    more = 0;
    consider(epsilon, &more);
    epsilon *= std::clamp(1 + more, 0.125, 8.0);  // Gauss-Newton, three octaves at most
  }
  const double power = std::pow(10.0, std::floor(std::log10(epsilon)));
  consider(std::nearbyint(epsilon / power) * power, nullptr);  // people choose one digit
  return least;
}

// Finds the constants of a step by a sample; false where no step led here.
bool find_constants(Mode mode, const Part& part, std::size_t count, Constants& constants) {
  if (!is_whole(part) || count < kCountMin) return false;
  const std::size_t taken = std::min(count, kSamples);
  const Part sample = sample_of(part, count, taken);
  const double bits = mode == Mode::kReplayMoment ? fit_moment(sample, taken, constants)
                                                  : fit_weight(sample, taken, constants);
  return bits < kGoodBits;
}

}  // namespace

bool fits_replay(Mode mode, const void* data, std::size_t count, const ReplayRelatives& relatives) {
  const DefaultFloats floats;
  Constants constants;
  return find_constants(mode, part_of(mode, data, relatives), count, constants);
}

std::size_t encode_replay(Mode mode, const void* data, std::size_t count,
                          const ReplayRelatives& relatives, std::uint8_t* out,
                          const CodecKernel& kernel) {
  const DefaultFloats floats;
  const Part part = part_of(mode, data, relatives);
  Constants constants;
  if (!find_constants(mode, part, count, constants)) return 0;
  auto* symbols = scratch<std::uint8_t, SymbolMemory>(count);
  std::uint8_t* const begin = out;
  std::uint8_t* const escapes = out + sizeof constants + coded_bytes_max(count);
  std::size_t escaped = 0;
  float predicted[kBlock];
  std::uint32_t missed[kBlock];
  for (std::size_t from = 0; from < count; from += kBlock) {
    const std::size_t size = std::min(kBlock, count - from);
    predict(mode, constants, part, from, size, predicted);
    std::uint8_t* const here = symbols + from;
    for (std::size_t i = 0; i < size; ++i) {
      missed[i] = missed_by(part.data[from + i], predicted[i]);
      here[i] = static_cast<std::uint8_t>(std::min(missed[i], kEscape));
    }
    for (const auto* at = next_escape(here, here + size); at != here + size;
         at = next_escape(at + 1, here + size)) {
      if (4 * escaped + 4 > count) return 0;
      std::memcpy(escapes + 4 * escaped++, missed + (at - here), 4);
    }
  }
  std::memcpy(out, &constants, sizeof constants);
  out += sizeof constants;
  out += encode_symbols({.data = symbols, .count = count}, out, kernel);
  std::memmove(out, escapes, 4 * escaped);
  return static_cast<std::size_t>(out - begin) + 4 * escaped;
}

bool decode_replay(Mode mode, std::span<const std::uint8_t> payload, std::size_t count,
                   const ReplayRelatives& relatives, void* target, const CodecKernel& kernel) {
  const DefaultFloats floats;
  const Part part = part_of(mode, nullptr, relatives);
  Constants constants;
  if (!is_whole(part) || payload.size() < sizeof constants) return false;
  std::memcpy(&constants, payload.data(), sizeof constants);
  payload = payload.subspan(sizeof constants);
  auto* symbols = scratch<std::uint8_t, SymbolMemory>(count);
  if (!decode_symbols(payload, {symbols, count}, nullptr, 1, kernel)) return false;
  auto* words = static_cast<std::uint32_t*>(target);
  float predicted[kBlock];
  std::uint32_t missed[kBlock];
  for (std::size_t from = 0; from < count; from += kBlock) {
    const std::size_t size = std::min(kBlock, count - from);
    predict(mode, constants, part, from, size, predicted);
    const std::uint8_t* const here = symbols + from;
    std::copy_n(here, size, missed);
    for (const auto* at = next_escape(here, here + size); at != here + size;
         at = next_escape(at + 1, here + size)) {
      std::uint32_t& escape = missed[at - here];
      if (payload.size() < sizeof escape) return false;
      std::memcpy(&escape, payload.data(), sizeof escape);
      if (escape < kEscape) return false;
      payload = payload.subspan(sizeof escape);
    }
    for (std::size_t i = 0; i < size; ++i) words[from + i] = moved_by(predicted[i], missed[i]);
  }
  return payload.empty();
}

}  // namespace holdfast
