// Coded symbols: every form, in contexts or without.
#include <algorithm>

#include "codec/entropy.h"
#include "input.h"

using namespace holdfast;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < fuzz::Input::kHeadBytes) return 0;
  const fuzz::Input input(data, size);
  const std::size_t count = input.count();
  const std::size_t parts = 1 + input.extra(0) % kContextsMax;
  const fuzz::Memory contexts = input.relative(0, count);
  for (std::size_t i = 0; contexts != nullptr && i < count; ++i) {
    contexts[i] = static_cast<std::uint8_t>(contexts[i] % parts);
  }
  std::size_t left[2] = {}, call = 0;
  fuzz::decode_twice(
      input, count, nullptr, false,
      [&](const CodecKernel& kernel, const std::uint8_t*, std::uint8_t* target) {
        std::span<const std::uint8_t> coded = input.payload();
        bool good = false;
        if (contexts == nullptr && call == 1) {
          const std::uint8_t* found = find_symbols(coded, {target, count}, kernel);
          good = found != nullptr;
          if (good && found != target) std::copy_n(found, count, target);
        } else {
          good = decode_symbols(coded, {target, count}, contexts.get(),
                                contexts != nullptr ? parts : 1, kernel);
        }
        left[call++] = good ? coded.size() : 0;
        return good;
      });
  fuzz::expect(call < 2 || left[0] == left[1], "kernels read other bytes");
  return 0;
}
