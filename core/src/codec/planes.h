// Byte planes of a chunk: memory for them, and which of them look random.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codec/codec_kernel.h"

namespace holdfast {

inline constexpr std::size_t kPlanesMax = 8;
inline constexpr std::size_t kSlackBytes = 64;  // that packing may touch behind a plane's end

using Planes = std::uint8_t* [kPlanesMax];

// Finds room for `planes` planes of `count` bytes; the same for every chunk that a thread codes.
void plane_memory(std::size_t count, std::size_t planes, Planes& result);

// Returns how many planes, from the lowest on and at most `most`, look random in a sample of the
// elements: they are written where they are to stand, and never counted.
std::size_t random_planes(const void* data, std::size_t count, std::size_t item_bytes, bool rotated,
                          std::size_t most, const CodecKernel& kernel);

}  // namespace holdfast
