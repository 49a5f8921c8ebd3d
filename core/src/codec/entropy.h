// Entropy coding of byte symbols: static rANS, interleaved, a table of frequencies per context.
// Pure functions, safe from any thread; memory is the caller's. The format is in docs/codecs.md,
// "Coded symbols".
//
// rANS: J. Duda, "Asymmetric numeral systems", arXiv:1311.2540; interleaving: F. Giesen,
// "Interleaved entropy coders", arXiv:1402.3392.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "codec/codec_kernel.h"

namespace holdfast {

inline constexpr std::size_t kContextsMax = 16;

// Each lane costs about 6 bytes: there are 64, 8 or 1 of them, more where that is little beside the
// bytes of the stream.
inline constexpr std::size_t kManyLanesBytes = 16 << 10;
inline constexpr std::size_t kSomeLanesBytes = 2 << 10;

// Symbols to code, and the context of each.
struct Symbols {
  const std::uint8_t* data = nullptr;
  std::size_t count = 0;
  const std::uint8_t* contexts = nullptr;  // each below context_count; null: all 0
  std::size_t context_count = 1;           // at most kContextsMax
};

// How often each symbol occurs, in each context: of many about how often, but never 0 of one that
// does.
struct Histogram {
  std::uint32_t counts[kContextsMax][256];
};

void count_symbols(const Symbols& symbols, Histogram& histogram);

// Adds the counts of all contexts to those of the first.
void join_contexts(Histogram& histogram, std::size_t context_count);

// Bytes that the symbols of a histogram take when coded, tables included, to about 1 %.
double estimate_bytes(const Histogram& histogram, std::size_t context_count);

// Of long streams a sample of evenly spread runs is looked at first: where it looks random (less
// than 2 % to gain), as the low bits of floats do, the symbols are stored uncounted.
inline constexpr std::size_t kSampledCount = 32 << 10;  // symbols from which on a stream is long
inline constexpr std::size_t kSampledRuns = 16;
inline constexpr std::size_t kSampledRun = 256;
inline constexpr std::size_t kSampledBytes = kSampledRuns * kSampledRun;

template <class Body>
void for_sampled_runs(std::size_t count, Body body) {
  for (std::size_t run = 0; run < kSampledRuns; ++run) {
    body(run, run * (count - kSampledRun) / (kSampledRuns - 1));
  }
}

// Of kSampledBytes bytes.
bool looks_random(const std::uint8_t* sample);

// Begins a stream of symbols that are stored; returns where they are to be put.
inline std::uint8_t* begin_stored(std::uint8_t*& out, std::size_t count) {
  *out = 0;
  std::uint8_t* symbols = out + 1;
  out += 1 + count;
  return symbols;
}

// Writes a stream of one symbol or more, all the same; returns its end.
inline std::uint8_t* put_repeated(std::uint8_t* out, std::uint8_t symbol) {
  out[0] = 1;
  out[1] = symbol;
  return out + 2;
}

// Room that encode_symbols needs.
constexpr std::size_t coded_bytes_max(std::size_t count) {
  return count + 2;
}

// Codes symbols in the smallest form; returns the number of bytes written to `out`.
std::size_t encode_symbols(const Symbols& symbols, std::uint8_t* out,
                           const CodecKernel& kernel = best_codec_kernel());

// Decodes as many symbols as `target` has from the front of `coded`, and drops what was read there.
// Returns false when the bytes are not what encode_symbols writes; `target` then holds anything.
bool decode_symbols(std::span<const std::uint8_t>& coded, std::span<std::uint8_t> target,
                    const std::uint8_t* contexts = nullptr, std::size_t context_count = 1,
                    const CodecKernel& kernel = best_codec_kernel());

// The same without contexts, where symbols that are stored as they are need no copy: returns where
// they stand, in `coded` or in `room`, or null.
const std::uint8_t* find_symbols(std::span<const std::uint8_t>& coded, std::span<std::uint8_t> room,
                                 const CodecKernel& kernel = best_codec_kernel());

}  // namespace holdfast
