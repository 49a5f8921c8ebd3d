// A second moment, and a weight, by repeating the step of the optimizer that made them: Adam, in
// the order of operations of torch.optim. D. Kingma, J. Ba, "Adam", arXiv:1412.6980; I. Loshchilov,
// F. Hutter, "Decoupled Weight Decay Regularization", arXiv:1711.05101.
//
// The constants of the step (learning rate, decay, betas, epsilon, bias corrections) are found from
// the elements themselves, by least squares: no optimizer has to be asked. What the repeated step
// misses is stored, so nothing is lost. Pure functions, safe from any thread; the payloads are
// described in docs/codecs.md, "Replay".
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "holdfast/lossless.h"

namespace holdfast {

// The same elements of other tensors, all f32, as a reader has them.
struct ReplayRelatives {
  const void* base = nullptr;          // of the tensor itself: one step before
  const void* exp_avg = nullptr;       // after the step
  const void* exp_avg_base = nullptr;  // before it; for a second moment
  const void* exp_avg_sq = nullptr;    // after it; for a weight
};

// Room that encode_replay needs.
constexpr std::size_t replay_bytes_max(std::size_t count) {
  return 16 + 2 * count;
}

// Codes f32 of a second moment (mode kReplayMoment) or of a weight (kReplayWeight). Returns the
// bytes written to `out`: 0 where a relative is null, or no such step led here.
std::size_t encode_replay(Mode mode, const void* data, std::size_t count,
                          const ReplayRelatives& relatives, std::uint8_t* out,
                          const CodecKernel& kernel = best_codec_kernel());

// Whether encode_replay would code it, by a sample of the elements.
bool fits_replay(Mode mode, const void* data, std::size_t count, const ReplayRelatives& relatives);

// Decodes to `target`, which may be the base. Returns false when the payload is not what
// encode_replay writes, or a relative is null; `target` then holds anything.
bool decode_replay(Mode mode, std::span<const std::uint8_t> payload, std::size_t count,
                   const ReplayRelatives& relatives, void* target,
                   const CodecKernel& kernel = best_codec_kernel());

}  // namespace holdfast
