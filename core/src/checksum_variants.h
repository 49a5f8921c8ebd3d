// One ChecksumKernel per instruction set, each from its own file with its own compiler flags.
#pragma once

#include "holdfast/checksum.h"

namespace holdfast {

#ifdef __x86_64__
extern const ChecksumKernel kAvx512Kernel;
extern const ChecksumKernel kAvx2Kernel;
#endif
extern const ChecksumKernel kBaselineKernel;

}  // namespace holdfast
