// The functions of one instruction set: the compiler flags of the including file decide which.
// Includes nothing that could emit an inline function which the linker might then pick for a
// machine without these instructions.
//
// digest() walks memory once for both hashes, in blocks of 1 KiB. xxhash.h's own streaming needs a
// copy, a pass for XXH3-64 and one for XXH3-128, which cannot overlap: half as fast when memory is
// cold. So the loop of the specification (doc/xxhash_spec.md, "XXH3 Algorithm (for inputs longer
// than 240 bytes)") is here, over xxhash.h's accumulate, scramble and merge. The sum is defined by
// the specification: checksum_test.cpp holds it to XXH3_64bits_withSeed and XXH3_128bits.
//
// xxhash.h promises to keep none of those three. They were tried in releases 0.8.0 to 0.8.3. With a
// later one, long_digest calls the public functions instead: a copy, then one pass for each hash.
#pragma once

#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "hash/checksum_variants.h"

static_assert(XXH_VERSION_NUMBER >= 800,
              "holdfast needs xxHash 0.8.0 or later, whose XXH3 is final: install a newer "
              "libxxhash-dev, or name its folder with cmake -DXXHASH_INCLUDE=FOLDER");
// Before this number rises: checksum_test must pass with the new release.
#if XXH_VERSION_NUMBER > 803 && !defined(HOLDFAST_PUBLIC_XXH3)
#define HOLDFAST_PUBLIC_XXH3
#endif

namespace holdfast {
namespace {

constexpr std::size_t kStripeBytes = 64;
constexpr std::size_t kShortBytesMax = 240;         // up to here XXH3 is another function
constexpr std::size_t kPrefetchBytes = 1024;        // measured: 512 to 2048 are alike
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);

Hash128 to_bytes(XXH128_hash_t hash) {
  Hash128 bytes;
  static_assert(sizeof bytes == 16);
  memcpy(&bytes, &hash.low64, 8);
  memcpy(reinterpret_cast<unsigned char*>(&bytes) + 8, &hash.high64, 8);
  return bytes;
}

std::uint64_t hash_64(const void* data, std::size_t size, std::uint64_t seed) {
  return XXH3_64bits_withSeed(data, size, seed);
}

Hash128 hash_128(const void* data, std::size_t size) {
  return to_bytes(XXH3_128bits(data, size));
}

// The vector of this instruction set; `Load` may be unaligned, `Stream` goes past the cache.
#if defined(__AVX512F__)
using Vector = __m512i;
inline Vector load(const std::uint8_t* from) {
  return _mm512_loadu_si512(from);
}
inline void store(std::uint8_t* to, Vector bytes) {
  _mm512_storeu_si512(to, bytes);
}
inline void stream(std::uint8_t* to, Vector bytes) {
  _mm512_stream_si512(reinterpret_cast<Vector*>(to), bytes);
}
#elif defined(__AVX2__)
using Vector = __m256i;
inline Vector load(const std::uint8_t* from) {
  return _mm256_loadu_si256(reinterpret_cast<const Vector*>(from));
}
inline void store(std::uint8_t* to, Vector bytes) {
  _mm256_storeu_si256(reinterpret_cast<Vector*>(to), bytes);
}
inline void stream(std::uint8_t* to, Vector bytes) {
  _mm256_stream_si256(reinterpret_cast<Vector*>(to), bytes);
}
#elif defined(__SSE2__)
using Vector = __m128i;
inline Vector load(const std::uint8_t* from) {
  return _mm_loadu_si128(reinterpret_cast<const Vector*>(from));
}
inline void store(std::uint8_t* to, Vector bytes) {
  _mm_storeu_si128(reinterpret_cast<Vector*>(to), bytes);
}
inline void stream(std::uint8_t* to, Vector bytes) {
  _mm_stream_si128(reinterpret_cast<Vector*>(to), bytes);
}
#else
using Vector = std::uint64_t;
inline Vector load(const std::uint8_t* from) {
  Vector bytes;
  memcpy(&bytes, from, sizeof bytes);
  return bytes;
}
inline void store(std::uint8_t* to, Vector bytes) {
  memcpy(to, &bytes, sizeof bytes);
}
inline void stream(std::uint8_t* to, Vector bytes) {
  store(to, bytes);
}
#endif

// Copies by vectors: for a constant size GCC would write `rep movs` in place of memcpy, three times
// slower here. Streaming, the target is not read before it is overwritten, what the caches hold
// stays, and the bytes are left in `staged` too.
template <bool streamed>
inline void copy_stripe(std::uint8_t* target, const std::uint8_t* source, std::uint8_t* staged) {
  for (std::size_t at = 0; at < kStripeBytes; at += sizeof(Vector)) {
    const Vector bytes = load(source + at);
    if constexpr (streamed) stream(target + at, bytes);
    store((streamed ? staged : target) + at, bytes);
  }
}

// Streamed stores are ordered with nothing: other threads and devices must see them.
inline void finish_stream() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

enum class Copy { kNone, kCached, kStreamed };

#ifdef HOLDFAST_PUBLIC_XXH3

template <Copy copy, bool both = true>
Digest long_digest(std::uint8_t* target, const std::uint8_t* source, std::size_t size,
                   std::uint64_t seed) {
  if constexpr (copy != Copy::kNone) {
    memcpy(target, source, size);
    source = target;
  }
  return {both ? hash_64(source, size, seed) : 0, hash_128(source, size)};
}

#else

constexpr std::size_t kSecretBytes = XXH_SECRET_DEFAULT_SIZE;
constexpr std::size_t kBlockStripes = (kSecretBytes - kStripeBytes) / 8;
constexpr std::size_t kBlockBytes = kBlockStripes * kStripeBytes;
constexpr std::size_t kLastStripeSecret = kSecretBytes - kStripeBytes - 7;
constexpr std::size_t kLowMergeSecret = 11;
constexpr std::size_t kHighMergeSecret = kSecretBytes - kStripeBytes - 11;
static_assert(kBlockBytes == 1024);

// The state of both hashes, or of XXH3-128 alone, over a long input.
template <bool both>
struct Lanes {
  alignas(64) xxh_u64 seeded[8] = XXH3_INIT_ACC;
  alignas(64) xxh_u64 plain[8] = XXH3_INIT_ACC;
  alignas(64) std::uint8_t secret[kSecretBytes];  // derived from the seed

  explicit Lanes(std::uint64_t seed) { XXH3_initCustomSecret(secret, seed); }

  void add_stripe(const std::uint8_t* stripe, std::size_t secret_offset) {
    if constexpr (both) XXH3_accumulate_512(seeded, stripe, secret + secret_offset);
    XXH3_accumulate_512(plain, stripe, XXH3_kSecret + secret_offset);
  }

  void scramble() {
    if constexpr (both) XXH3_scrambleAcc(seeded, secret + kSecretBytes - kStripeBytes);
    XXH3_scrambleAcc(plain, XXH3_kSecret + kSecretBytes - kStripeBytes);
  }

  // The last block, which is never empty and may be whole, and the last 64 bytes once more.
  void add_tail(const std::uint8_t* tail, std::size_t size) {
    for (std::size_t stripe = 0; stripe < (size - 1) / kStripeBytes; ++stripe) {
      add_stripe(tail + stripe * kStripeBytes, stripe * 8);
    }
    add_stripe(tail + size - kStripeBytes, kLastStripeSecret);
  }

  Digest finish(std::size_t size) const {
    const xxh_u64 low = size * XXH_PRIME64_1;
    const xxh_u64 high = ~(size * XXH_PRIME64_2);
    const XXH128_hash_t wide = {XXH3_mergeAccs(plain, XXH3_kSecret + kLowMergeSecret, low),
                                XXH3_mergeAccs(plain, XXH3_kSecret + kHighMergeSecret, high)};
    return {XXH3_mergeAccs(seeded, secret + kLowMergeSecret, low), to_bytes(wide)};
  }
};

template <Copy copy, bool both = true>
Digest long_digest(std::uint8_t* target, const std::uint8_t* source, std::size_t size,
                   std::uint64_t seed) {
  constexpr bool kStreamed = copy == Copy::kStreamed;
  Lanes<both> lanes(seed);
  alignas(64) std::uint8_t staged[kStripeBytes];
  const std::size_t tail_begin = (size - 1) / kBlockBytes * kBlockBytes;
  for (std::size_t begin = 0; begin < tail_begin; begin += kBlockBytes) {
    for (std::size_t stripe = 0; stripe < kBlockStripes; ++stripe) {
      const std::size_t at = begin + stripe * kStripeBytes;
      const std::uint8_t* hashed = source + at;
      __builtin_prefetch(source + at + kPrefetchBytes);
      if constexpr (copy != Copy::kNone) {
        // Hashed are the bytes copied, not the source again: it may be changing.
        copy_stripe<kStreamed>(target + at, source + at, staged);
        hashed = kStreamed ? staged : target + at;
      }
      lanes.add_stripe(hashed, stripe * 8);
    }
    lanes.scramble();
  }
  if constexpr (kStreamed) finish_stream();
  if constexpr (copy != Copy::kNone) {
    memcpy(target + tail_begin, source + tail_begin, size - tail_begin);
    source = target;
  }
  lanes.add_tail(source + tail_begin, size - tail_begin);
  return lanes.finish(size);
}

#endif

Digest digest(void* target, const void* source, std::size_t size, std::uint64_t seed) {
  auto* to = static_cast<std::uint8_t*>(target);
  auto* from = static_cast<const std::uint8_t*>(source);
  if (size <= kShortBytesMax) {
    if (to != nullptr && size > 0) from = static_cast<const std::uint8_t*>(memcpy(to, from, size));
    return {hash_64(from, size, seed), hash_128(from, size)};
  }
  if (to == nullptr) return long_digest<Copy::kNone>(to, from, size, seed);
  if (size >= kStreamBytesMin && reinterpret_cast<std::uintptr_t>(to) % kStripeBytes == 0) {
    return long_digest<Copy::kStreamed>(to, from, size, seed);
  }
  return long_digest<Copy::kCached>(to, from, size, seed);
}

Hash128 copy_to_cache(void* target, const void* source, std::size_t size) {
  auto* to = static_cast<std::uint8_t*>(target);
  auto* from = static_cast<const std::uint8_t*>(source);
  if (size > kShortBytesMax) {
    return long_digest<Copy::kCached, /*both=*/false>(to, from, size, 0).xxh3_128;
  }
  if (size > 0) memcpy(to, from, size);
  return hash_128(to, size);
}

// memcpy streams only from a share of the last cache on, on large machines hundreds of MiB: below,
// it reads every line of the target that it is about to overwrite.
void copy(void* target, const void* source, std::size_t size) {
  auto* to = static_cast<std::uint8_t*>(target);
  auto* from = static_cast<const std::uint8_t*>(source);
  if (size >= kStreamBytesMin) {
    const std::size_t head = -reinterpret_cast<std::uintptr_t>(to) % kStripeBytes;
    const std::size_t end = head + (size - head) / kStripeBytes * kStripeBytes;
    memcpy(to, from, head);
    for (std::size_t at = head; at < end; at += kStripeBytes) {
      __builtin_prefetch(from + at + kPrefetchBytes);
      for (std::size_t part = at; part < at + kStripeBytes; part += sizeof(Vector)) {
        stream(to + part, load(from + part));
      }
    }
    finish_stream();
    to += end;
    from += end;
    size -= end;
  }
  if (size > 0) memcpy(to, from, size);
}

constexpr ChecksumKernel all_functions(const char* name) {
  return {
      .name = name,
      .hash_64 = hash_64,
      .hash_128 = hash_128,
      .digest = digest,
      .copy_to_cache = copy_to_cache,
      .copy = copy,
  };
}

}  // namespace
}  // namespace holdfast
