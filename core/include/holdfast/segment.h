// A part of a data file in memory: payloads of many chunks, one behind the other, as they will be
// written. For a save whose codec is lossless: it stages, encodes and places by one call. Safe from
// any thread; all memory is the caller's. Where a payload may start, and what lies between two, is
// said in docs/format.md §4.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "holdfast/checksum.h"
#include "holdfast/lossless.h"

namespace holdfast {

inline constexpr std::size_t kSmallAlignBytes = 64;
inline constexpr std::size_t kLargeAlignBytes = 4096;
inline constexpr std::size_t kLargePayloadBytes = 1 << 16;  // of kRaw

inline constexpr int kNone = -1;

struct SegmentItem {
  const void* data = nullptr;  // may change meanwhile, unless it is staged
  Elements elements;
  std::uint64_t seed = 0;  // of the payload's checksum
  bool is_staged = false;  // nobody changes the data: they need no copy
  // Items before this one that it may be coded by, or kNone. One that is not staged is there only
  // until the next that an item refers to: later ones are coded without it.
  int master = kNone;
  int second_moment = kNone;
  const void* base = nullptr;             // the same elements in an earlier checkpoint
  const Hash128* base_digest = nullptr;   // of these; elements that have it are not coded
  void* next_base = nullptr;              // gets the elements, when nothing needs the base any more
};

struct SegmentPayload {
  Mode mode = Mode::kRaw;
  std::size_t size_bytes = 0;
  std::size_t offset = 0;  // 0 for an empty payload, which stands nowhere
  std::uint64_t checksum = 0;
  Hash128 digest = {};  // of the elements
};

struct Segment {
  std::size_t size_bytes;  // up to the end of the last payload
  double stage_s;          // seconds that copying and hashing took
};

// Room that `segment_bytes_max` says for each item, added up, is needed at `out`, where a page of
// the file begins. `payloads` has one for each item.
std::size_t segment_bytes_max(const Elements& elements);

Segment encode_segment(std::span<const SegmentItem> items, std::uint8_t* out,
                       std::span<SegmentPayload> payloads);

}  // namespace holdfast
