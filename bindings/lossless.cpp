#include "holdfast/lossless.h"

#include <nanobind/stl/string.h>

#include <string>

#include "bindings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace holdfast {
namespace {

Elements elements_of(std::size_t count, std::size_t item_bytes, const std::string& kind,
                     std::size_t row, std::size_t column) {
  Elements elements = {count, item_bytes, Kind::kInteger, row, column};
  if (kind == "float") elements.kind = Kind::kFloat;
  if (kind == "bf16") elements.kind = Kind::kBf16;
  if (kind == "f16") elements.kind = Kind::kF16;
  const bool half = elements.kind == Kind::kBf16 || elements.kind == Kind::kF16;
  const bool known = item_bytes == 1 || item_bytes == 2 || item_bytes == 4 || item_bytes == 8;
  if (!known || (half && item_bytes != 2) || row == 0 || column >= row) {
    throw nb::value_error("no such elements");
  }
  return elements;
}

}  // namespace

void bind_lossless(nb::module_& module) {
  nb::class_<Elements>(module, "Elements")
      .def(
          "__init__",
          [](Elements* self, std::size_t count, std::size_t item_bytes, const std::string& kind,
             std::size_t row, std::size_t column) {
            new (self) Elements(elements_of(count, item_bytes, kind, row, column));
          },
          "count"_a, "item_bytes"_a, "kind"_a, "row"_a, "column"_a);
  module.def("lossless_bytes_max", &lossless_bytes_max, "elements"_a);
  module.def(
      "lossless_encode",
      [](const Elements& elements, std::uintptr_t data, std::uintptr_t master,
         std::uintptr_t second_moment, std::uintptr_t base, std::uintptr_t out) {
        const Encoded made = without_gil(elements.size_bytes(), [&] {
          return encode_lossless(elements, memory_at(data),
                                 {memory_at(master), memory_at(second_moment), memory_at(base)},
                                 reinterpret_cast<std::uint8_t*>(memory_at(out)));
        });
        return nb::make_tuple(static_cast<int>(made.mode), made.size_bytes);
      },
      "elements"_a, "data"_a, "master"_a, "second_moment"_a, "base"_a, "out"_a);
  module.def(
      "lossless_encode_difference",
      [](const Elements& elements, std::uintptr_t data, std::uintptr_t base, std::uintptr_t out) {
        const Encoded made = without_gil([&] {
          return encode_as_difference(elements, memory_at(data), memory_at(base),
                                      reinterpret_cast<std::uint8_t*>(memory_at(out)));
        });
        return nb::make_tuple(static_cast<int>(made.mode), made.size_bytes);
      },
      "elements"_a, "data"_a, "base"_a, "out"_a);
  module.def(
      "lossless_decode",
      [](int mode, std::uintptr_t payload, std::size_t payload_bytes, const Elements& elements,
         std::uintptr_t master, std::uintptr_t second_moment, std::uintptr_t base,
         std::uintptr_t target) {
        auto* bytes = reinterpret_cast<const std::uint8_t*>(memory_at(payload));
        return without_gil(elements.size_bytes(), [&] {
          return decode_lossless(static_cast<Mode>(mode), {bytes, payload_bytes}, elements,
                                 {memory_at(master), memory_at(second_moment), memory_at(base)},
                                 memory_at(target));
        });
      },
      "mode"_a, "payload"_a, "payload_bytes"_a, "elements"_a, "master"_a, "second_moment"_a,
      "base"_a, "target"_a);
}

}  // namespace holdfast
