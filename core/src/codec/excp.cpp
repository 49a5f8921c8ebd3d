#include "holdfast/excp.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "codec/centres.h"
#include "codec/entropy.h"
#include "codec/float_mode.h"
#include "codec/scratch.h"

namespace holdfast {
namespace {

constexpr std::size_t kStep = 2048;  // elements at a time, which stay in the nearest cache
constexpr std::uint32_t kAll = 0xFFFFFFFF, kNoSign = 0x7FFFFFFF, kInfinity = 0x7F800000;
constexpr std::size_t kTable = 16;  // a centre for each symbol
constexpr std::size_t kRoles = 3;

// Calls body(first element, elements) for one step of a chunk after the other.
template <class Body>
void for_steps(std::size_t count, Body body) {
  for (std::size_t at = 0; at < count; at += kStep) body(at, std::min(kStep, count - at));
}

// The value of a rank among many, found by the upper half of the bits, then by the lower.
class RankFinder {
 public:
  RankFinder() : counts_(1 << 16) {}

  void add_upper(const std::uint32_t* bits, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) ++counts_[bits[i] >> 16];
  }

  // Ranks count from 0.
  void choose_upper(std::uint64_t rank) {
    upper_ = find(rank);
    left_ = rank;
    for (std::uint32_t i = 0; i < upper_; ++i) left_ -= counts_[i];
    std::fill(counts_.begin(), counts_.end(), 0);
  }

  void add_lower(const std::uint32_t* bits, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) {
      if (bits[i] >> 16 == upper_) ++counts_[bits[i] & 0xFFFF];
    }
  }

  float value() const { return std::bit_cast<float>(upper_ << 16 | find(left_)); }

 private:
  std::uint32_t find(std::uint64_t rank) const {
    std::uint32_t place = 0;
    for (; rank >= counts_[place]; ++place) rank -= counts_[place];
    return place;
  }

  std::vector<std::uint64_t> counts_;
  std::uint32_t upper_ = 0;
  std::uint64_t left_ = 0;
};

// A sum of many f32 in one order, and the largest of their bits.
struct Sum {
  double lanes[kSumLanes] = {};
  std::uint32_t most = 0;

  void add(const float* data, std::size_t count, std::uint32_t mask, const CodecKernel& kernel) {
    most = std::max(most, kernel.sum_up(data, count, mask, lanes));
  }

  float mean(std::uint64_t count) const {
    double sum = 0;
    for (const double lane : lanes) sum += lane;
    return static_cast<float>(sum / static_cast<double>(count));
  }
};

// What the first look at a unit finds.
struct FirstLook {
  std::uint64_t count = 0;
  Sum moments, squares;
  std::uint32_t farthest = 0;
  bool rounded = true;
  RankFinder distances;
};

void look(const ExcpPart& part, FirstLook& found, const CodecKernel& kernel) {
  std::uint32_t distances[kStep];
  for_steps(part.count, [&](std::size_t at, std::size_t count) {
    found.moments.add(part.exp_avg + at, count, kNoSign, kernel);
    found.squares.add(part.exp_avg_sq + at, count, kAll, kernel);
    const std::uint32_t farthest =
        kernel.find_distances(part.weight + at, part.base + at, count, distances);
    found.farthest = std::max(found.farthest, farthest);
    found.distances.add_upper(distances, count);
  });
  found.count += part.count;
  auto* masters = reinterpret_cast<const std::uint32_t*>(part.weight);
  found.rounded =
      found.rounded && part.half != nullptr && kernel.is_bf16(part.half, masters, part.count);
}

float median_of(std::span<const ExcpPart> parts, FirstLook& first, const CodecKernel& kernel) {
  first.distances.choose_upper((first.count - 1) / 2);
  std::uint32_t distances[kStep];
  for (const ExcpPart& part : parts) {
    for_steps(part.count, [&](std::size_t at, std::size_t count) {
      kernel.find_distances(part.weight + at, part.base + at, count, distances);
      first.distances.add_lower(distances, count);
    });
  }
  return first.distances.value();
}

float threshold_of(const ExcpRule& rule, float mean, float median) {
  const float factor = rule.alpha / std::sqrt(mean);
  return (factor < rule.cap ? factor : rule.cap) * median;
}

// What is left of a step of each tensor, up to that of a role.
struct Kept {
  float values[kRoles][kStep];
};

void keep(const ExcpSurvey& survey, ExcpRole role, const ExcpPart& part, std::size_t at,
          std::size_t count, Kept& kept, const CodecKernel& kernel) {
  const float* const weight = part.weight + at;
  if (survey.rule.per_element) {
    const ElementRule rule = {survey.rule.alpha, survey.rule.cap, survey.median};
    kernel.keep_residuals_by(weight, part.base + at, part.exp_avg_sq + at, count, &rule,
                             kept.values[0]);
  } else {
    kernel.keep_residuals(weight, part.base + at, count, survey.threshold, kept.values[0]);
  }
  if (role == ExcpRole::kWeight) return;
  kernel.keep_moments(part.exp_avg + at, kept.values[0], count, survey.moment_threshold,
                      kept.values[1]);
  if (role == ExcpRole::kExpAvg) return;
  kernel.keep_where(part.exp_avg_sq + at, kept.values[1], count, kept.values[2]);
}

void find_all_centres(std::span<const ExcpPart> parts, ExcpSurvey& survey,
                      const CodecKernel& kernel) {
  const bool all = survey.rule.optimal;
  Remains remains[kRoles] = {Remains(all), Remains(all), Remains(all)};
  Kept kept;
  float found[kStep + 1];
  for (const ExcpPart& part : parts) {
    for_steps(part.count, [&](std::size_t at, std::size_t count) {
      keep(survey, ExcpRole::kExpAvgSq, part, at, count, kept, kernel);
      for (std::size_t role = 0; role < kRoles; ++role) {
        remains[role].add(found, kernel.gather(kept.values[role], count, found));
      }
    });
  }
  for (std::size_t role = 0; role < kRoles; ++role) {
    survey.centres[role] = remains[role].centres(survey.rule.half_centres);
  }
}

struct SymbolMemory;
struct LikelyMemory;
struct OtherMemory;
struct PartMemory;
struct RestMemory;

// Whether each element of a moment is likely to be there: its weight changed, its first moment is
// there. Null for a weight.
const std::uint8_t* find_likely(ExcpRole role, std::size_t count, const ExcpRelatives& relatives,
                                const CodecKernel& kernel) {
  if (role == ExcpRole::kWeight) return nullptr;
  auto* likely = scratch<std::uint8_t, LikelyMemory>(count);
  if (role == ExcpRole::kExpAvg) {
    kernel.find_changed(static_cast<const std::uint32_t*>(relatives.weight),
                        static_cast<const std::uint32_t*>(relatives.base), count, likely);
  } else {
    kernel.find_nonzero(static_cast<const std::uint32_t*>(relatives.exp_avg), count, likely);
  }
  return likely;
}

// Whether there is a symbol that is not 0 among those that are not likely.
bool any_unlikely(const std::uint8_t* symbols, const std::uint8_t* likely, std::size_t count) {
  unsigned any = 0;
  for (std::size_t i = 0; i < count; ++i) any |= symbols[i] & (likely[i] - 1u);
  return any != 0;
}

// Loops in place of algorithms of the library, of which Clang's makes no vectors.
std::uint8_t largest_of(const std::uint8_t* symbols, std::size_t count) {
  std::uint8_t most = 0;
  for (std::size_t i = 0; i < count; ++i) most = std::max(most, symbols[i]);
  return most;
}

// Where `likely` is 0 and where it is 1, changed places.
const std::uint8_t* others_of(const std::uint8_t* likely, std::size_t count) {
  auto* others = scratch<std::uint8_t, OtherMemory>(count);
  for (std::size_t i = 0; i < count; ++i) others[i] = likely[i] ^ 1;
  return others;
}

// Codes the symbols of a chunk; those of a moment in two streams.
std::uint8_t* put_symbols(const std::uint8_t* symbols, const std::uint8_t* likely,
                          std::size_t count, std::uint8_t* out, const CodecKernel& kernel) {
  if (likely == nullptr) {
    return out + encode_symbols({.data = symbols, .count = count}, out, kernel);
  }
  auto* part = scratch<std::uint8_t, PartMemory>(count + 1);
  const std::size_t found = kernel.gather_where(symbols, likely, count, part);
  out += encode_symbols({.data = part, .count = found}, out, kernel);
  if (found < count && !any_unlikely(symbols, likely, count)) return put_repeated(out, 0);
  kernel.gather_where(symbols, others_of(likely, count), count, part);
  return out + encode_symbols({.data = part, .count = count - found}, out, kernel);
}

bool get_symbols(std::span<const std::uint8_t>& payload, const std::uint8_t* likely,
                 std::size_t count, std::uint8_t* symbols, const CodecKernel& kernel) {
  if (likely == nullptr) return decode_symbols(payload, {symbols, count}, nullptr, 1, kernel);
  auto* part = scratch<std::uint8_t, PartMemory>(count + 1);
  auto* rest = scratch<std::uint8_t, RestMemory>(count + 1);
  std::size_t found = 0;
  for (std::size_t i = 0; i < count; ++i) found += likely[i];
  if (!decode_symbols(payload, {part, found}, nullptr, 1, kernel)) return false;
  if (!decode_symbols(payload, {rest, count - found}, nullptr, 1, kernel)) return false;
  std::memset(symbols, 0, count);
  kernel.scatter_where(part, likely, count, symbols);
  if (largest_of(rest, count - found) != 0) {
    kernel.scatter_where(rest, others_of(likely, count), count, symbols);
  }
  return true;
}

bool has_relatives(ExcpRole role, const ExcpRelatives& relatives) {
  if (role == ExcpRole::kExpAvgSq) return relatives.exp_avg != nullptr;
  return relatives.base != nullptr && (role == ExcpRole::kWeight || relatives.weight != nullptr);
}

// Elements of symbols. Returns whether the base and what is added make numbers.
bool place(ExcpRole role, const std::uint8_t* symbols, std::size_t count, const Centres& centres,
           const void* base, float* target, const CodecKernel& kernel) {
  float table[kTable] = {};
  std::copy_n(centres.values, centres.count, table + 1);
  if (role != ExcpRole::kWeight) {
    kernel.place_centres(symbols, count, table, target);
    return true;
  }
  table[0] = -0.0f;  // x + -0 is x, -0 too
  return kernel.add_centres(static_cast<const float*>(base), symbols, count, table, target) <
         kInfinity;
}

bool all_finite(const Centres& centres) {
  return std::all_of(centres.values, centres.values + centres.count,
                     [](float centre) { return std::isfinite(centre); });
}

}  // namespace

ExcpSurvey survey_excp(std::span<const ExcpPart> parts, const ExcpRule& rule,
                       const CodecKernel& kernel) {
  const DefaultFloats floats;
  ExcpSurvey survey;
  survey.rule = rule;
  FirstLook first;
  for (const ExcpPart& part : parts) look(part, first, kernel);
  const std::uint32_t most = std::max({first.farthest, first.moments.most, first.squares.most});
  if (first.count == 0 || most >= kInfinity) return survey;
  survey.usable = true;
  survey.rounded = first.rounded;
  survey.median = median_of(parts, first, kernel);
  survey.threshold = threshold_of(rule, first.squares.mean(first.count), survey.median);
  survey.moment_threshold = rule.beta * first.moments.mean(first.count);
  find_all_centres(parts, survey, kernel);
  return survey;
}

std::size_t encode_excp(const ExcpSurvey& survey, ExcpRole role, const ExcpPart& part,
                        const ExcpRelatives& relatives, std::uint8_t* out, float* decoded,
                        const CodecKernel& kernel) {
  const DefaultFloats floats;
  const Centres& centres = survey.centres[static_cast<std::size_t>(role)];
  if (!survey.usable || !has_relatives(role, relatives) || !all_finite(centres)) return 0;
  float limits[kCentresMax - 1];
  std::fill_n(limits, kCentresMax - 1, INFINITY);
  for (std::size_t j = 0; j + 1 < centres.count; ++j) {
    limits[j] = limit_between(centres.values[j], centres.values[j + 1]);
  }
  auto* symbols = scratch<std::uint8_t, SymbolMemory>(part.count);
  Kept kept;
  for_steps(part.count, [&](std::size_t at, std::size_t count) {
    keep(survey, role, part, at, count, kept, kernel);
    kernel.find_centres(kept.values[static_cast<std::size_t>(role)], count, limits, symbols + at);
  });
  const std::uint8_t* likely = find_likely(role, part.count, relatives, kernel);
  if (!place(role, symbols, part.count, centres, relatives.base, decoded, kernel)) return 0;
  std::uint8_t* const begin = out;
  *out++ = static_cast<std::uint8_t>(centres.count);
  std::memcpy(out, centres.values, 4 * centres.count);
  out += 4 * centres.count;
  out = put_symbols(symbols, likely, part.count, out, kernel);
  const auto size = static_cast<std::size_t>(out - begin);
  return size < 4 * part.count ? size : 0;
}

bool decode_excp(ExcpRole role, std::span<const std::uint8_t> payload, std::size_t count,
                 const ExcpRelatives& relatives, float* target, const CodecKernel& kernel) {
  const DefaultFloats floats;
  if (count == 0 || payload.empty() || !has_relatives(role, relatives)) return false;
  Centres centres = {.count = payload[0]};
  if (centres.count > kCentresMax || payload.size() < 1 + 4 * centres.count) return false;
  std::memcpy(centres.values, payload.data() + 1, 4 * centres.count);
  if (!all_finite(centres)) return false;
  payload = payload.subspan(1 + 4 * centres.count);
  auto* symbols = scratch<std::uint8_t, SymbolMemory>(count);
  const std::uint8_t* likely = find_likely(role, count, relatives, kernel);
  if (!get_symbols(payload, likely, count, symbols, kernel) || !payload.empty() ||
      largest_of(symbols, count) > centres.count) {
    return false;
  }
  place(role, symbols, count, centres, relatives.base, target, kernel);
  return true;
}

}  // namespace holdfast
