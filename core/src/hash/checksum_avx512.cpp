#include "hash/checksum_variants.h"

#ifdef __x86_64__
#include "hash/checksum_kernel.h"

namespace holdfast {

constinit const ChecksumKernel kAvx512Kernel = all_functions("avx512");

}  // namespace holdfast
#endif
