#include "hash/checksum_kernel.h"
#include "hash/checksum_variants.h"

namespace holdfast {

constinit const ChecksumKernel kBaselineKernel = all_functions("baseline");

}  // namespace holdfast
