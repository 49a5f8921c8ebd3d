// Mode difference: floats by how far they are from those of a base (docs/codecs.md, "Difference").
#pragma once

#include "holdfast/lossless.h"

namespace holdfast {

// Whether elements are of a dtype that differences are taken of.
bool has_difference(const Elements& elements);

// Room that encode_difference needs.
std::size_t difference_bytes_max(const Elements& elements);

// Returns the bytes of the payload.
std::size_t encode_difference(const Elements& elements, const void* data, const void* base,
                              std::uint8_t* out, const CodecKernel& kernel);

bool decode_difference(std::span<const std::uint8_t> payload, const Elements& elements,
                       const void* base, void* target, const CodecKernel& kernel);

// Bytes that encode_difference would take, by evenly spread runs of the elements.
double estimate_difference(const Elements& elements, const void* data, const void* base,
                           const CodecKernel& kernel);

}  // namespace holdfast
