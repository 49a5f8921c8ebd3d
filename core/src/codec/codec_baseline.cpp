#include "codec/codec_loops.h"
#include "codec/codec_variants.h"

namespace holdfast {

constinit const CodecKernel kBaselineCodecs = all_loops("baseline");

}  // namespace holdfast
