#include "codec/codec_variants.h"

#ifdef __x86_64__
#include "codec/codec_loops.h"

namespace holdfast {

constinit const CodecKernel kAvx512Codecs = all_loops("avx512");

}  // namespace holdfast
#endif
