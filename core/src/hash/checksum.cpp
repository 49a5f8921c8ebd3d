#include "holdfast/checksum.h"

#include <cstring>
#include <vector>

#include "hash/cpu.h"
#include "hash/checksum_variants.h"

namespace holdfast {
namespace {

// Asked here, not in the variants' files: those may use the very instructions in question.
std::vector<ChecksumKernel> supported() {
  std::vector<ChecksumKernel> kernels;
#ifdef __x86_64__
  const Cpu cpu = detect_cpu();
  if (cpu.avx512) kernels.push_back(kAvx512Kernel);
  if (cpu.avx2) kernels.push_back(kAvx2Kernel);
#endif
  kernels.push_back(kBaselineKernel);
  return kernels;
}

// Made as the core is loaded: a child that was forked while they are made would wait for ever.
const std::vector<ChecksumKernel> kernels = supported();

const ChecksumKernel& best() {
  return checksum_kernels().front();
}

}  // namespace

std::span<const ChecksumKernel> checksum_kernels() {
  return kernels;
}

std::uint64_t xxh3_64(const void* data, std::size_t size, std::uint64_t seed) {
  return best().hash_64(data, size, seed);
}

Hash128 xxh3_128(const void* data, std::size_t size) {
  return best().hash_128(data, size);
}

Digest hash_chunk(const void* data, std::size_t size, std::uint64_t seed) {
  return best().digest(nullptr, data, size, seed);
}

Digest copy_and_hash_chunk(void* target, const void* source, std::size_t size, std::uint64_t seed) {
  return best().digest(target, source, size, seed);
}

Hash128 copy_to_cache_and_hash(void* target, const void* source, std::size_t size) {
  return best().copy_to_cache(target, source, size);
}

Hash128 hash_samples(const void* data, std::size_t size, std::size_t item, std::size_t count,
                     std::size_t run) {
  auto* bytes = static_cast<const unsigned char*>(data);
  std::vector<unsigned char> samples(count * run);
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t at = i * ((size - run) / item) / (count - 1) * item;
    std::memcpy(&samples[i * run], bytes + at, run);
  }
  return xxh3_128(samples.data(), samples.size());
}

void copy_chunk(void* target, const void* source, std::size_t size) {
  best().copy(target, source, size);
}

bool is_zero(const void* data, std::size_t size) {
  constexpr std::size_t kStepBytes = 256;  // enough independent words for the vector unit
  auto* bytes = static_cast<const unsigned char*>(data);
  std::size_t at = 0;
  for (; size - at >= kStepBytes; at += kStepBytes) {
    std::uint64_t words[kStepBytes / 8];
    std::memcpy(words, bytes + at, kStepBytes);
    std::uint64_t any = 0;
    for (const std::uint64_t word : words) any |= word;
    if (any != 0) return false;
  }
  unsigned char any = 0;
  for (; at < size; ++at) any = static_cast<unsigned char>(any | bytes[at]);
  return any == 0;
}

}  // namespace holdfast
