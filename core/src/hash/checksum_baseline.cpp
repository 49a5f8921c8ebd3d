#include "hash/checksum_kernel.h"
#include "hash/checksum_variants.h"

namespace holdfast {

constinit const ChecksumKernel kBaselineKernel = {"baseline", hash_64, hash_128,
                                                  digest, copy_to_cache, copy};

}  // namespace holdfast
