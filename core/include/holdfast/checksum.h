// XXH3 of memory, alone or while copying. Pure functions, safe from any thread, no errors.
// The caller owns all memory. The fastest instruction set of the machine is chosen once, at run
// time; every choice gives the same numbers.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace holdfast {

// What copies so much writes past the cache; below, the target had better stay there.
constexpr std::size_t kStreamBytesMin = 256 << 10;

using Hash128 = std::array<unsigned char, 16>;  // low 64 bits first, each half little-endian

struct Digest {
  std::uint64_t xxh3_64;  // seeded
  Hash128 xxh3_128;       // seed 0
};

std::uint64_t xxh3_64(const void* data, std::size_t size, std::uint64_t seed);
Hash128 xxh3_128(const void* data, std::size_t size);

// Both hashes in one pass over memory.
Digest hash_chunk(const void* data, std::size_t size, std::uint64_t seed);

// Copies, and hashes the bytes as they lie in `target`; the two must not overlap.
Digest copy_and_hash_chunk(void* target, const void* source, std::size_t size, std::uint64_t seed);

// The same with XXH3-128 alone, for bytes that are used at once: they are left in the cache.
Hash128 copy_to_cache_and_hash(void* target, const void* source, std::size_t size);

// XXH3-128 of `count` runs of `run` bytes, evenly spread: the first begins at the first byte, the
// last ends at the last one, each at a multiple of `item`. `size` and `run` are multiples of it
// too, and a run is no longer than the data; count >= 2.
Hash128 hash_samples(const void* data, std::size_t size, std::size_t item, std::size_t count,
                     std::size_t run);

// memcpy, about twice as fast for large copies between cold memory; the two must not overlap.
void copy_chunk(void* target, const void* source, std::size_t size);

bool is_zero(const void* data, std::size_t size);

// What checksums and codecs use of this machine: "AVX-512", "AVX2" or "baseline".
const char* instruction_set();

}  // namespace holdfast
