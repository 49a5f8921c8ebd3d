// The inner loops of the codecs: one set of them for each instruction set. The fastest that the
// machine can run is chosen once, as the core is loaded; every choice gives the same bytes. What is
// in a set, only the core knows (codec/codec_kernel.h).
#pragma once

namespace holdfast {

struct CodecKernel;

const CodecKernel& best_codec_kernel();

}  // namespace holdfast
