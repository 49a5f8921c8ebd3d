// What of the processor holdfast may use. Knows nothing else of the machine.
#pragma once

namespace holdfast {

struct Cpu {
  bool avx2 = false;    // and POPCNT, as is true of the next
  bool avx512 = false;  // F, BW and VL: what the widest kernels are built from
};

// Asked of the processor (CPUID) and of what the operating system keeps of its registers (XGETBV):
// Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, sections 14.3 and 15.2.
// By hand, since not every compiler's library has what __builtin_cpu_supports reads. HOLDFAST_CPU
// in the environment, "baseline" or "avx2", names the widest to use: so a test meets each of them.
Cpu detect_cpu();

}  // namespace holdfast
