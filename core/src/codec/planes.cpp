#include "codec/planes.h"

#include <cstring>

#include "codec/entropy.h"
#include "codec/scratch.h"

namespace holdfast {
namespace {

struct PlaneMemory;

}  // namespace

void plane_memory(std::size_t count, std::size_t planes, Planes& result) {
  const std::size_t stride = (count + kSlackBytes + 63) / 64 * 64;
  auto* memory = scratch<std::uint8_t, PlaneMemory>(planes * stride);
  for (std::size_t p = 0; p < planes; ++p) result[p] = memory + p * stride;
}

std::size_t random_planes(const void* data, std::size_t count, std::size_t item_bytes, bool rotated,
                          std::size_t most, const CodecKernel& kernel) {
  if (count < kSampledCount) return 0;
  alignas(8) std::uint8_t gathered[kSampledBytes * kPlanesMax];
  std::uint8_t parts[kPlanesMax][kSampledBytes];
  Planes planes;
  for (std::size_t p = 0; p < item_bytes; ++p) planes[p] = parts[p];
  auto* bytes = static_cast<const std::uint8_t*>(data);
  for_sampled_runs(count, [&](std::size_t run, std::size_t at) {
    const std::size_t size = kSampledRun * item_bytes;
    std::memcpy(gathered + run * size, bytes + at * item_bytes, size);
  });
  kernel.split(gathered, kSampledBytes, item_bytes, rotated, planes);
  std::size_t random = 0;
  while (random < most && looks_random(parts[random])) ++random;
  return random;
}

}  // namespace holdfast
