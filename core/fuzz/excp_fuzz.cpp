// Payloads of centres, of a weight and of both its moments; in the place of the base too.
#include "holdfast/excp.h"
#include "input.h"

using namespace holdfast;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < fuzz::Input::kHeadBytes) return 0;
  const fuzz::Input input(data, size);
  const auto role = static_cast<ExcpRole>(input.choice() % 3);
  const std::size_t count = input.count(), bytes = 4 * count;
  const fuzz::Memory base = input.relative(0, bytes);
  const fuzz::Memory weight = input.relative(1, bytes);
  const fuzz::Memory exp_avg = input.relative(2, bytes);
  fuzz::decode_twice(
      input, bytes, base.get(), input.in_place(),
      [&](const CodecKernel& kernel, const std::uint8_t* old, std::uint8_t* target) {
        return decode_excp(role, input.payload(), count, {old, weight.get(), exp_avg.get()},
                           reinterpret_cast<float*>(target), kernel);
      });
  return 0;
}
