#include "holdfast/segment.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <vector>

#include "codec/scratch.h"

namespace holdfast {
namespace {

struct StageMemory;
struct KeptMemory;

double now() {
  using Clock = std::chrono::steady_clock;
  return std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
}

std::size_t align_up(std::size_t offset, Mode mode, std::size_t size) {
  const bool is_large = mode == Mode::kRaw && size >= kLargePayloadBytes;
  const std::size_t align = is_large ? kLargeAlignBytes : kSmallAlignBytes;
  return (offset + align - 1) / align * align;
}

// Writes `size` bytes of a payload behind the last, zeros before them; returns where they are.
std::size_t append(Segment& segment, std::uint8_t* out, Mode mode, std::size_t size) {
  const std::size_t offset = align_up(segment.size_bytes, mode, size);
  std::memset(out + segment.size_bytes, 0, offset - segment.size_bytes);
  segment.size_bytes = offset + size;
  return offset;
}

// Whether a later item is coded by each.
std::vector<bool> referred(std::span<const SegmentItem> items) {
  std::vector<bool> result(items.size());
  for (const SegmentItem& item : items) {
    for (const int other : {item.master, item.second_moment}) {
      if (other != kNone) result[static_cast<std::size_t>(other)] = true;
    }
  }
  return result;
}

}  // namespace

std::size_t segment_bytes_max(const Elements& elements) {
  return lossless_bytes_max(elements) + kLargeAlignBytes;
}

Segment encode_segment(std::span<const SegmentItem> items, std::uint8_t* out,
                       std::span<SegmentPayload> payloads) {
  const std::vector<bool> is_referred = referred(items);
  std::vector<const void*> staged(items.size());
  std::size_t kept = items.size();  // the item that is in the memory for those referred to
  Segment segment = {0, 0};
  for (std::size_t i = 0; i < items.size(); ++i) {
    const SegmentItem& item = items[i];
    SegmentPayload& payload = payloads[i];
    const std::size_t size = item.elements.size_bytes();
    const double started = now();
    if (item.is_staged) {
      staged[i] = item.data;
      payload.digest = hash_chunk(item.data, size, 0).xxh3_128;
    } else {
      if (is_referred[i]) kept = i;
      std::byte* const memory =
          kept == i ? scratch<std::byte, KeptMemory>(size) : scratch<std::byte, StageMemory>(size);
      staged[i] = memory;
      payload.digest = copy_to_cache_and_hash(memory, item.data, size);
    }
    segment.stage_s += now() - started;
    const auto relative = [&](int other) -> const void* {
      const auto at = static_cast<std::size_t>(other);
      return other != kNone && (items[at].is_staged || at == kept) ? staged[at] : nullptr;
    };
    const Relatives relatives = {relative(item.master), relative(item.second_moment), item.base};
    const bool is_unchanged = item.base_digest != nullptr && size > payload.digest.size() &&
                              *item.base_digest == payload.digest;
    const std::size_t next = align_up(segment.size_bytes, Mode::kPlanes, 0);
    const Encoded made =
        is_unchanged ? Encoded{Mode::kUnchanged, payload.digest.size()}
                     : encode_lossless(item.elements, staged[i], relatives, out + next);
    payload.mode = made.mode;
    payload.size_bytes = made.size_bytes;
    payload.offset = made.size_bytes > 0 ? append(segment, out, made.mode, made.size_bytes) : 0;
    if (is_unchanged) std::memcpy(out + payload.offset, payload.digest.data(), made.size_bytes);
    if (made.mode == Mode::kRaw) copy_chunk(out + payload.offset, staged[i], size);
    payload.checksum = xxh3_64(out + payload.offset, made.size_bytes, item.seed);
    if (item.next_base != nullptr) copy_chunk(item.next_base, staged[i], size);
  }
  return segment;
}

}  // namespace holdfast
