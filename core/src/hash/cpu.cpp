#include "hash/cpu.h"

#ifdef __x86_64__
#include <cpuid.h>

#include <cstdlib>
#include <string_view>
#endif

#include "holdfast/checksum.h"

namespace holdfast {

#ifdef __x86_64__

namespace {

constexpr unsigned kPopcnt = 1U << 23;      // of leaf 1, ECX, as the next one
constexpr unsigned kOsxsave = 1U << 27;
constexpr unsigned kAvx2 = 1U << 5;         // of leaf 7, EBX, as the next three
constexpr unsigned kAvx512F = 1U << 16;
constexpr unsigned kAvx512Bw = 1U << 30;
constexpr unsigned kAvx512Vl = 1U << 31;
constexpr unsigned kAvx512 = kAvx512F | kAvx512Bw | kAvx512Vl;
constexpr unsigned kYmmState = 0x06;        // of XCR0: the registers that a switch of threads keeps
constexpr unsigned kZmmState = 0xe6;

unsigned kept_registers() {
  unsigned low = 0;
  unsigned high = 0;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

Cpu find_cpu() {
  unsigned a = 0;
  unsigned b = 0;
  unsigned c = 0;
  unsigned d = 0;
  if (__get_cpuid(1, &a, &b, &c, &d) == 0) return {};
  if ((c & kPopcnt) == 0 || (c & kOsxsave) == 0) return {};
  const unsigned kept = kept_registers();
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return {};
  const bool has_ymm = (kept & kYmmState) == kYmmState;
  const bool has_zmm = (kept & kZmmState) == kZmmState;
  return {has_ymm && (b & kAvx2) != 0, has_zmm && (b & kAvx512) == kAvx512};
}

}  // namespace

Cpu detect_cpu() {
  Cpu cpu = find_cpu();
  if (const char* named = std::getenv("HOLDFAST_CPU"); named != nullptr) {
    const std::string_view widest = named;
    if (widest == "baseline") cpu.avx2 = false;
    if (widest == "baseline" || widest == "avx2") cpu.avx512 = false;
  }
  return cpu;
}

#else

Cpu detect_cpu() {
  return {};
}

#endif

const char* instruction_set() {
  const Cpu cpu = detect_cpu();
  return cpu.avx512 ? "AVX-512" : cpu.avx2 ? "AVX2" : "baseline";
}

}  // namespace holdfast
