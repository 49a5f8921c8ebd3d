// Lossless coding of a chunk of a tensor: pure functions, safe from any thread. The payloads are
// described in docs/codecs.md, "lossless".
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "holdfast/kernel.h"

namespace holdfast {

// What the bits of an element mean, as far as a codec cares. Complex numbers are pairs of floats.
enum class Kind : std::uint8_t { kInteger, kFloat, kBf16, kF16 };

// A run of elements of a shard, in row-major order.
struct Elements {
  std::size_t count = 0;
  std::size_t item_bytes = 1;  // 1, 2, 4 or 8
  Kind kind = Kind::kInteger;  // kBf16 and kF16 are of 2 bytes
  std::size_t row = 1;         // elements of a row of the shard; at least 1
  std::size_t column = 0;      // of the first element; below `row`

  std::size_t size_bytes() const { return count * item_bytes; }
};

// The same elements of other tensors of the parameter, or null.
struct Relatives {
  const void* master = nullptr;         // f32, of which a bf16 or f16 weight may be the rounding
  const void* second_moment = nullptr;  // f32, for a first moment of f32
  const void* base = nullptr;           // the same elements in an earlier checkpoint
};

enum class Mode : std::uint8_t {
  kRaw = 0,
  kConstant = 1,  // one element, of all
  kPlanes = 2,
  kGrid = 3,          // f32 by the means of row and column
  kGridOfMoment = 4,  // the same, in the contexts of the second moment
  kRounded = 5,       // nothing: the elements are the roundings of their masters
  kDifference = 6,    // how far floats of 2 or 4 bytes are from the base's
  kUnchanged = 7,   // of segment.h: the digest of elements that are the base's
  // Those of compact.h:
  kMeans = 8,
  kReplayMoment = 9,  // of replay.h
  kMoment = 10,
  kSteps = 11,
  kStepsInClasses = 12,
  kReplayWeight = 16,  // of replay.h
  kRounding = 17,      // of compact.h
};

struct Encoded {
  Mode mode;
  std::size_t size_bytes;  // for kRaw: nothing was written, the elements are the payload
};

// Room that encode_lossless needs.
std::size_t lossless_bytes_max(const Elements& elements);

// Codes elements at `data`, aligned to their size, in the mode that a sample favours.
Encoded encode_lossless(const Elements& elements, const void* data, const Relatives& relatives,
                        std::uint8_t* out, const CodecKernel& kernel = best_codec_kernel());

// The same as kDifference, or kRaw where that takes no less.
Encoded encode_as_difference(const Elements& elements, const void* data, const void* base,
                             std::uint8_t* out, const CodecKernel& kernel = best_codec_kernel());

// Decodes a payload of any mode but kRaw to `target`. Returns false when it is not what
// encode_lossless writes, or a relative that it needs is null; `target` then holds anything.
bool decode_lossless(Mode mode, std::span<const std::uint8_t> payload, const Elements& elements,
                     const Relatives& relatives, void* target,
                     const CodecKernel& kernel = best_codec_kernel());

}  // namespace holdfast
