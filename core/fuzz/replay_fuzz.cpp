// Payloads of a repeated step, of a second moment and of a weight; in the place of the base too.
#include "holdfast/replay.h"
#include "input.h"

using namespace holdfast;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < fuzz::Input::kHeadBytes) return 0;
  const fuzz::Input input(data, size);
  const Mode mode = input.choice() % 2 == 0 ? Mode::kReplayMoment : Mode::kReplayWeight;
  const std::size_t count = input.count(), bytes = 4 * count;
  const fuzz::Memory base = input.relative(0, bytes);
  const fuzz::Memory exp_avg = input.relative(1, bytes);
  const fuzz::Memory exp_avg_base = input.relative(2, bytes);
  const fuzz::Memory exp_avg_sq = input.relative(3, bytes);
  fuzz::decode_twice(
      input, bytes, base.get(), input.in_place(),
      [&](const CodecKernel& kernel, const std::uint8_t* old, std::uint8_t* target) {
        return decode_replay(mode, input.payload(), count,
                             {old, exp_avg.get(), exp_avg_base.get(), exp_avg_sq.get()}, target,
                             kernel);
      });
  return 0;
}
