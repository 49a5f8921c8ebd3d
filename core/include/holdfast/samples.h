// Samples of memory: what a change of it is seen by without a look at all of it. Pure functions,
// safe from any thread, no errors. The caller owns all memory.
//
// Up to 4 KiB all bytes are looked at. Of more, there are 3 samples and one more for each MiB: 128
// bytes at a random place in each of as many equal stretches. Most of what one costs is the way to
// its page. The places follow from the size and the seed alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace holdfast {

struct Bytes {
  const std::byte* data;
  std::size_t size;
};

// Elements anywhere in memory. `shape` and `strides` count elements, slowest dimension first.
struct Strided {
  const std::byte* data;
  std::size_t element_bytes;  // a power of 2, at most 128
  std::span<const std::int64_t> shape;
  std::span<const std::int64_t> strides;
};

// The hash of the samples of parts that follow each other: where they are cut makes no difference.
std::uint64_t hash_spread(std::span<const Bytes> parts, std::uint64_t seed);

// The same of the elements in row-major order.
std::uint64_t hash_spread(const Strided& elements, std::uint64_t seed);

}  // namespace holdfast
