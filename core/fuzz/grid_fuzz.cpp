// Payloads of the modes grid and grid in contexts.
#include "input.h"

using namespace holdfast;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < fuzz::Input::kHeadBytes) return 0;
  const fuzz::Input input(data, size);
  const Mode mode = input.choice() % 2 == 0 ? Mode::kGrid : Mode::kGridOfMoment;
  const Elements elements = (input.choice() & 0x80) != 0 ? input.elements() : input.f32();
  const fuzz::Memory square = input.relative(0, 4 * elements.count);
  fuzz::decode_twice(input, elements.size_bytes(), nullptr, false,
                     [&](const CodecKernel& kernel, const std::uint8_t*, std::uint8_t* target) {
                       return decode_lossless(mode, input.payload(), elements,
                                              {.second_moment = square.get()}, target, kernel);
                     });
  return 0;
}
