// Lossy coding of a chunk: second moments as the product of row and column means, first moments in
// units of their square roots, weights as quantised differences from a base. Pure functions, safe
// from any thread. The payloads are described in docs/codecs.md, "compact".
//
// Decoding is integers, tables and one float addition: the same bits on every machine. What a chunk
// cannot hold (NaN, infinity, a bound) is coded losslessly instead.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "holdfast/lossless.h"

namespace holdfast {

// What bounds the error of a chunk; kNone: the step alone.
enum class Bound : std::uint8_t {
  kNone,
  kShare,    // squared error over the energy of the residual, at most
  kLargest,  // absolute error of any element, at most
  kBits,     // bits of an element, about
  kBf16,     // each f32 rounds to the same bf16 as before; what is not f32 loses nothing
};

struct Steps {
  double step = 1;  // in root mean squares of the scaled residual
  Bound bound = Bound::kNone;
  double limit = 0;
};

// What decoding has lost.
struct Loss {
  double squared_error = 0;
  double largest_error = 0;
  double energy = 0;  // sum of the squares of what was coded: a residual, or the elements
};

// What `decoded` has lost of f32 elements; the energy is that of their difference from `base`, or
// of themselves where it is null.
Loss measure_loss(const float* data, const float* decoded, const float* base, std::size_t count,
                  const CodecKernel& kernel = best_codec_kernel());

struct Lossy {
  Mode mode;
  std::size_t size_bytes;  // for kRaw: nothing was written, the elements are the payload
  Loss loss;
};

// The same elements of other tensors, decoded, or null.
struct Reference {
  const void* base = nullptr;  // of the same tensor in an earlier checkpoint, of its dtype
  const float* second_moment = nullptr;
  const void* master = nullptr;        // f32; for a half-precision weight
  const void* exact_master = nullptr;  // the master before it was coded; of encoding alone
};

// Room that encoding needs.
std::size_t compact_bytes_max(const Elements& elements);

// Each codes elements and puts what decoding gives into `decoded`, which has room for them.
// Second moments, of f32; with `rests` each element within an octave of its own.
Lossy encode_means(const Elements& elements, const void* data, bool rests, std::uint8_t* out,
                   void* decoded, const CodecKernel& kernel = best_codec_kernel());
// First moments, of f32, with steps in units of the square roots of second ones; of step 0: all 0.
Lossy encode_moment(const Elements& elements, const void* data, const Steps& steps,
                    const Reference& reference, std::uint8_t* out, void* decoded,
                    const CodecKernel& kernel = best_codec_kernel());
// Weights, of f32, bf16 or f16.
Lossy encode_steps(const Elements& elements, const void* data, const Steps& steps,
                   const Reference& reference, std::uint8_t* out, void* decoded,
                   const CodecKernel& kernel = best_codec_kernel());

// Decodes a payload of any mode but kRaw to `target`. Returns false when it is not one that
// encoding writes, or a reference that it needs is null; `target` then holds anything.
bool decode_compact(Mode mode, std::span<const std::uint8_t> payload, const Elements& elements,
                    const Reference& reference, void* target,
                    const CodecKernel& kernel = best_codec_kernel());

}  // namespace holdfast
