// Payloads of the mode means.
#include "holdfast/compact.h"
#include "input.h"

using namespace holdfast;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < fuzz::Input::kHeadBytes) return 0;
  const fuzz::Input input(data, size);
  const Elements elements = (input.choice() & 0x80) != 0 ? input.elements() : input.f32();
  fuzz::decode_twice(
      input, elements.size_bytes(), nullptr, false,
      [&](const CodecKernel& kernel, const std::uint8_t*, std::uint8_t* target) {
        return decode_compact(Mode::kMeans, input.payload(), elements, {}, target, kernel);
      });
  return 0;
}
