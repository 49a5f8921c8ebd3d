#include "hash/checksum_variants.h"

#ifdef __x86_64__
#include "hash/checksum_kernel.h"

namespace holdfast {

constinit const ChecksumKernel kAvx2Kernel = {"avx2", hash_64, hash_128,
                                              digest, copy_to_cache, copy};

}  // namespace holdfast
#endif
