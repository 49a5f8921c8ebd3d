// Payloads of the modes difference and rounding, in the place of their base too.
#include "holdfast/compact.h"
#include "input.h"

using namespace holdfast;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < fuzz::Input::kHeadBytes) return 0;
  const fuzz::Input input(data, size);
  const Mode mode = input.choice() % 4 == 0 ? Mode::kRounding : Mode::kDifference;
  const Elements elements = input.elements();
  const fuzz::Memory base = input.relative(0, elements.size_bytes());
  fuzz::decode_twice(
      input, elements.size_bytes(), base.get(), input.in_place(),
      [&](const CodecKernel& kernel, const std::uint8_t* old, std::uint8_t* target) {
        if (mode == Mode::kRounding) {
          return decode_compact(mode, input.payload(), elements, {.base = old}, target, kernel);
        }
        return decode_lossless(mode, input.payload(), elements, {.base = old}, target, kernel);
      });
  return 0;
}
