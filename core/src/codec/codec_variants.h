// One CodecKernel per instruction set, each from its own file with its own compiler flags.
#pragma once

#include "codec/codec_kernel.h"

namespace holdfast {

#ifdef __x86_64__
extern const CodecKernel kAvx512Codecs;
extern const CodecKernel kAvx2Codecs;
#endif
extern const CodecKernel kBaselineCodecs;

}  // namespace holdfast
