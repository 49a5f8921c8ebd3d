#include "codec/codec_kernel.h"

#include <vector>

#include "codec/codec_variants.h"
#include "hash/cpu.h"

namespace holdfast {
namespace {

// Asked here, not in the variants' files: those may use the very instructions in question.
std::vector<CodecKernel> supported() {
  std::vector<CodecKernel> kernels;
#ifdef __x86_64__
  const Cpu cpu = detect_cpu();
  if (cpu.avx512) kernels.push_back(kAvx512Codecs);
  if (cpu.avx2) kernels.push_back(kAvx2Codecs);
#endif
  kernels.push_back(kBaselineCodecs);
  return kernels;
}

// Made as the core is loaded: a child that was forked while they are made would wait for ever.
const std::vector<CodecKernel> kernels = supported();

}  // namespace

std::span<const CodecKernel> codec_kernels() {
  return kernels;
}

const CodecKernel& best_codec_kernel() {
  return kernels.front();
}

}  // namespace holdfast
