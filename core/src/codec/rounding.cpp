// Mode rounding: an f32 weight by how far its bf16 rounding is from that of its base.
#include <bit>

#include "codec/compact_parts.h"
#include "codec/difference.h"

namespace holdfast {
namespace {

struct WordMemory;
struct BaseWordMemory;

Elements halves(std::size_t count) {
  return {count, 2, Kind::kBf16, 1, 0};
}

template <class Memory>
std::uint16_t* rounded(const float* data, std::size_t count, const CodecKernel& kernel) {
  auto* words = scratch<std::uint16_t, Memory>(count);
  kernel.to_bf16(reinterpret_cast<const std::uint32_t*>(data), words, count);
  return words;
}

// What rounds to what the base does is taken to be the base.
void widen(const std::uint16_t* words, const std::uint16_t* below, const float* base,
           std::size_t count, float* target) {
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t word = static_cast<std::uint32_t>(words[i]) << 16;
    target[i] = words[i] == below[i] ? base[i] : std::bit_cast<float>(word);
  }
}

}  // namespace

std::size_t put_rounding(const float* data, const float* base, std::size_t count, std::uint8_t* out,
                         float* decoded, const CodecKernel& kernel) {
  const std::uint16_t* words = rounded<WordMemory>(data, count, kernel);
  const std::uint16_t* below = rounded<BaseWordMemory>(base, count, kernel);
  const std::size_t size = encode_difference(halves(count), words, below, out, kernel);
  widen(words, below, base, count, decoded);
  return size;
}

bool get_rounding(std::span<const std::uint8_t> payload, const float* base, std::size_t count,
                  float* target, const CodecKernel& kernel) {
  const std::uint16_t* below = rounded<BaseWordMemory>(base, count, kernel);
  auto* words = scratch<std::uint16_t, WordMemory>(count);
  if (!decode_difference(payload, halves(count), below, words, kernel)) return false;
  widen(words, below, base, count, target);
  return true;
}

}  // namespace holdfast
