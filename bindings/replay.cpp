#include "holdfast/replay.h"

#include "bindings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace holdfast {
namespace {

ReplayRelatives relatives_at(std::uintptr_t base, std::uintptr_t exp_avg,
                             std::uintptr_t exp_avg_base, std::uintptr_t exp_avg_sq) {
  return {memory_at(base), memory_at(exp_avg), memory_at(exp_avg_base), memory_at(exp_avg_sq)};
}

}  // namespace

void bind_replay(nb::module_& module) {
  module.def("replay_bytes_max", &replay_bytes_max, "count"_a);
  module.def(
      "replay_fits",
      [](int mode, std::uintptr_t data, std::size_t count, std::uintptr_t base,
         std::uintptr_t exp_avg, std::uintptr_t exp_avg_base, std::uintptr_t exp_avg_sq) {
        return fits_replay(static_cast<Mode>(mode), memory_at(data), count,
                           relatives_at(base, exp_avg, exp_avg_base, exp_avg_sq));
      },
      "mode"_a, "data"_a, "count"_a, "base"_a, "exp_avg"_a, "exp_avg_base"_a, "exp_avg_sq"_a,
      nb::call_guard<nb::gil_scoped_release>());
  module.def(
      "replay_encode",
      [](int mode, std::uintptr_t data, std::size_t count, std::uintptr_t base,
         std::uintptr_t exp_avg, std::uintptr_t exp_avg_base, std::uintptr_t exp_avg_sq,
         std::uintptr_t out) {
        return encode_replay(static_cast<Mode>(mode), memory_at(data), count,
                             relatives_at(base, exp_avg, exp_avg_base, exp_avg_sq),
                             reinterpret_cast<std::uint8_t*>(memory_at(out)));
      },
      "mode"_a, "data"_a, "count"_a, "base"_a, "exp_avg"_a, "exp_avg_base"_a, "exp_avg_sq"_a,
      "out"_a, nb::call_guard<nb::gil_scoped_release>());
  module.def(
      "replay_decode",
      [](int mode, std::uintptr_t payload, std::size_t payload_bytes, std::size_t count,
         std::uintptr_t base, std::uintptr_t exp_avg, std::uintptr_t exp_avg_base,
         std::uintptr_t exp_avg_sq, std::uintptr_t target) {
        auto* bytes = reinterpret_cast<const std::uint8_t*>(memory_at(payload));
        return decode_replay(static_cast<Mode>(mode), {bytes, payload_bytes}, count,
                             relatives_at(base, exp_avg, exp_avg_base, exp_avg_sq),
                             memory_at(target));
      },
      "mode"_a, "payload"_a, "payload_bytes"_a, "count"_a, "base"_a, "exp_avg"_a, "exp_avg_base"_a,
      "exp_avg_sq"_a, "target"_a, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace holdfast
