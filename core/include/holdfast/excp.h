// ExCP: a weight as what it moved since its base, pruned, in 15 values; and its optimizer's
// moments, pruned further, in 15 values each. W. Li, X. Chen, H. Shu, Y. Tang, Y. Wang, "ExCP:
// Extreme LLM Checkpoint Compression via Weight-Momentum Joint Shrinking", arXiv:2406.11257, as its
// public code has it. Pure functions, safe from any thread; the payloads are described in
// docs/codecs.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

#include "holdfast/kernel.h"

namespace holdfast {

inline constexpr std::size_t kCentresMax = 15;  // symbol 0 is exactly zero

// How much is kept, and how centres are found.
struct ExcpRule {
  float alpha = 5e-5f;
  float beta = 2;
  float cap = 2.5f;          // of alpha / sqrt(v); infinity: none
  bool per_element = false;  // alpha / sqrt(v) of each element, instead of sqrt(mean(v))
  bool half_centres = false;
  bool optimal = false;
};

// A chunk of a unit: the same elements of its tensors, all f32.
struct ExcpPart {
  std::size_t count = 0;
  const float* weight = nullptr;  // or the master
  const float* base = nullptr;    // of the weight
  const float* exp_avg = nullptr;
  const float* exp_avg_sq = nullptr;
  const std::uint16_t* half = nullptr;  // bf16 weight of which `weight` is the master; or null
};

struct Centres {
  std::size_t count = 0;
  float values[kCentresMax] = {};  // ascending
};

enum class ExcpRole : std::uint8_t { kWeight = 0, kExpAvg = 1, kExpAvgSq = 2 };

// What is known of a whole unit before any of its chunks is coded.
struct ExcpSurvey {
  ExcpRule rule;
  bool usable = false;   // all is finite, no v below 0; else nothing else here means anything
  bool rounded = false;  // each bf16 weight is the rounding of its master
  float median = 0;      // lower median of |weight - base|
  float threshold = 0;   // of |weight - base|, unless it is of each element
  float moment_threshold = 0;
  Centres centres[3];  // by ExcpRole
};

ExcpSurvey survey_excp(std::span<const ExcpPart> parts, const ExcpRule& rule,
                       const CodecKernel& kernel = best_codec_kernel());

// What a reader has when it decodes the chunk. For a weight, `base` alone; for a first moment, the
// decoded weight and its base; for a second moment, the decoded first moment.
struct ExcpRelatives {
  const void* base = nullptr;
  const void* weight = nullptr;
  const void* exp_avg = nullptr;
};

// Room that encode_excp needs.
constexpr std::size_t excp_bytes_max(std::size_t count) {
  return 1 + 4 * kCentresMax + count + 4;
}

// Codes one tensor of a chunk; puts down at `decoded` (`part.count` f32, which may be the base)
// what a reader will have. Returns the bytes written to `out`: 0 when they would not be fewer than
// the elements', or something decoded is not finite; then both hold anything.
std::size_t encode_excp(const ExcpSurvey& survey, ExcpRole role, const ExcpPart& part,
                        const ExcpRelatives& relatives, std::uint8_t* out, float* decoded,
                        const CodecKernel& kernel = best_codec_kernel());

// Decodes mode 13 (role kWeight) or 14 to `target`, which may be the base. Returns false when the
// payload is not what encode_excp writes, or a relative is null; `target` then holds anything.
bool decode_excp(ExcpRole role, std::span<const std::uint8_t> payload, std::size_t count,
                 const ExcpRelatives& relatives, float* target,
                 const CodecKernel& kernel = best_codec_kernel());

}  // namespace holdfast
