#include "holdfast/compact.h"

#include <nanobind/stl/string.h>

#include <string>

#include "bindings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace holdfast {
namespace {

const float* floats_at(std::uintptr_t address) {
  return reinterpret_cast<const float*>(memory_at(address));
}

std::uint8_t* bytes_at(std::uintptr_t address) {
  return reinterpret_cast<std::uint8_t*>(memory_at(address));
}

Steps steps_of(double step, const std::string& bound, double limit) {
  Steps steps = {step, Bound::kNone, limit};
  if (bound == "rel") steps.bound = Bound::kShare;
  if (bound == "abs") steps.bound = Bound::kLargest;
  if (bound == "bits") steps.bound = Bound::kBits;
  if (bound == "bf16_exact") steps.bound = Bound::kBf16;
  return steps;
}

nb::tuple result_of(const Lossy& made) {
  return nb::make_tuple(static_cast<int>(made.mode), made.size_bytes, made.loss.squared_error,
                        made.loss.largest_error, made.loss.energy);
}

}  // namespace

void bind_compact(nb::module_& module) {
  module.def(
      "measure_loss",
      [](std::uintptr_t data, std::uintptr_t decoded, std::uintptr_t base, std::size_t count) {
        const Loss loss = without_gil([&] {
          return measure_loss(floats_at(data), floats_at(decoded), floats_at(base), count);
        });
        return nb::make_tuple(loss.squared_error, loss.largest_error, loss.energy);
      },
      "data"_a, "decoded"_a, "base"_a, "count"_a);
  module.def("compact_bytes_max", &compact_bytes_max, "elements"_a);
  module.def(
      "compact_means",
      [](const Elements& elements, std::uintptr_t data, bool rests, std::uintptr_t out,
         std::uintptr_t decoded) {
        return result_of(without_gil([&] {
          return encode_means(elements, memory_at(data), rests, bytes_at(out), memory_at(decoded));
        }));
      },
      "elements"_a, "data"_a, "rests"_a, "out"_a, "decoded"_a);
  module.def(
      "compact_moment",
      [](const Elements& elements, std::uintptr_t data, double step, std::uintptr_t second_moment,
         std::uintptr_t out, std::uintptr_t decoded) {
        const Reference reference = {.second_moment = floats_at(second_moment)};
        return result_of(without_gil([&] {
          return encode_moment(elements, memory_at(data), {.step = step}, reference, bytes_at(out),
                               memory_at(decoded));
        }));
      },
      "elements"_a, "data"_a, "step"_a, "second_moment"_a, "out"_a, "decoded"_a);
  module.def(
      "compact_steps",
      [](const Elements& elements, std::uintptr_t data, double step, const std::string& bound,
         double limit, std::uintptr_t base, std::uintptr_t second_moment, std::uintptr_t master,
         std::uintptr_t exact_master, std::uintptr_t out, std::uintptr_t decoded) {
        const Reference reference = {memory_at(base), floats_at(second_moment), memory_at(master),
                                     memory_at(exact_master)};
        const Steps steps = steps_of(step, bound, limit);
        return result_of(without_gil([&] {
          return encode_steps(elements, memory_at(data), steps, reference, bytes_at(out),
                              memory_at(decoded));
        }));
      },
      "elements"_a, "data"_a, "step"_a, "bound"_a, "limit"_a, "base"_a, "second_moment"_a,
      "master"_a, "exact_master"_a, "out"_a, "decoded"_a);
  module.def(
      "compact_decode",
      [](int mode, std::uintptr_t payload, std::size_t payload_bytes, const Elements& elements,
         std::uintptr_t base, std::uintptr_t second_moment, std::uintptr_t master,
         std::uintptr_t target) {
        const Reference reference = {memory_at(base), floats_at(second_moment), memory_at(master)};
        return decode_compact(static_cast<Mode>(mode), {bytes_at(payload), payload_bytes}, elements,
                              reference, memory_at(target));
      },
      "mode"_a, "payload"_a, "payload_bytes"_a, "elements"_a, "base"_a, "second_moment"_a,
      "master"_a, "target"_a, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace holdfast
