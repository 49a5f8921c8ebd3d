// Payloads of the modes constant, planes and rounded.
#include "input.h"

using namespace holdfast;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < fuzz::Input::kHeadBytes) return 0;
  const fuzz::Input input(data, size);
  constexpr Mode kModes[] = {Mode::kConstant, Mode::kPlanes, Mode::kPlanes, Mode::kRounded};
  const Mode mode = kModes[input.choice() % std::size(kModes)];
  const Elements elements = input.elements();
  const fuzz::Memory master = input.relative(0, 4 * elements.count);
  fuzz::decode_twice(input, elements.size_bytes(), nullptr, false,
                     [&](const CodecKernel& kernel, const std::uint8_t*, std::uint8_t* target) {
                       return decode_lossless(mode, input.payload(), elements,
                                              {.master = master.get()}, target, kernel);
                     });
  return 0;
}
