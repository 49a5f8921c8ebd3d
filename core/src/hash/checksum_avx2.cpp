#include "hash/checksum_variants.h"

#ifdef __x86_64__
#include "hash/checksum_kernel.h"

namespace holdfast {

constinit const ChecksumKernel kAvx2Kernel = all_functions("avx2");

}  // namespace holdfast
#endif
