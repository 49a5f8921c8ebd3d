// Payloads of the modes moment, steps, and steps in classes, in the place of their base too.
#include "holdfast/compact.h"
#include "input.h"

using namespace holdfast;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < fuzz::Input::kHeadBytes) return 0;
  const fuzz::Input input(data, size);
  constexpr Mode kModes[] = {Mode::kMoment, Mode::kSteps, Mode::kStepsInClasses};
  const Mode mode = kModes[input.choice() % std::size(kModes)];
  const Elements elements = input.elements();
  const fuzz::Memory base = input.relative(0, elements.size_bytes());
  const fuzz::Memory square = input.relative(1, 4 * elements.count);
  fuzz::decode_twice(
      input, elements.size_bytes(), base.get(), input.in_place(),
      [&](const CodecKernel& kernel, const std::uint8_t* old, std::uint8_t* target) {
        const Reference reference = {.base = old,
                                     .second_moment = reinterpret_cast<const float*>(square.get())};
        return decode_compact(mode, input.payload(), elements, reference, target, kernel);
      });
  return 0;
}
