// One ChecksumKernel per instruction set, each from its own file with its own compiler flags.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "holdfast/checksum.h"

namespace holdfast {

// One instruction set's implementation.
struct ChecksumKernel {
  const char* name;
  std::uint64_t (*hash_64)(const void* data, std::size_t size, std::uint64_t seed);
  Hash128 (*hash_128)(const void* data, std::size_t size);
  // Copies first when `target` is not null.
  Digest (*digest)(void* target, const void* source, std::size_t size, std::uint64_t seed);
  Hash128 (*copy_to_cache)(void* target, const void* source, std::size_t size);
  void (*copy)(void* target, const void* source, std::size_t size);
};

// Those this machine can run, fastest first; never empty. The functions of checksum.h use the
// first.
std::span<const ChecksumKernel> checksum_kernels();

#ifdef __x86_64__
extern const ChecksumKernel kAvx512Kernel;
extern const ChecksumKernel kAvx2Kernel;
#endif
extern const ChecksumKernel kBaselineKernel;

}  // namespace holdfast
