#include "holdfast/checksum.h"

#include "bindings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace holdfast {
namespace {

nb::bytes to_bytes(const Hash128& hash) {
  return nb::bytes(hash.data(), hash.size());
}

nb::tuple to_tuple(const Digest& digest) {
  return nb::make_tuple(digest.xxh3_64, to_bytes(digest.xxh3_128));
}

}  // namespace

void bind_checksum(nb::module_& module) {
  module.def(
      "xxh3_64",
      [](nb::handle data, std::uint64_t seed) {
        const BufferView view(data);
        return without_gil([&] { return xxh3_64(view.data(), view.size(), seed); });
      },
      "data"_a, "seed"_a = 0);
  module.def(
      "xxh3_128",
      [](nb::handle data) {
        const BufferView view(data);
        return to_bytes(without_gil([&] { return xxh3_128(view.data(), view.size()); }));
      },
      "data"_a);
  module.def(
      "hash_chunk",
      [](std::uintptr_t address, std::size_t size, std::uint64_t seed) {
        return to_tuple(without_gil([&] { return hash_chunk(memory_at(address), size, seed); }));
      },
      "address"_a, "size"_a, "seed"_a);
  module.def(
      "copy_and_hash_chunk",
      [](std::uintptr_t target, std::uintptr_t source, std::size_t size, std::uint64_t seed) {
        return to_tuple(without_gil(
            [&] { return copy_and_hash_chunk(memory_at(target), memory_at(source), size, seed); }));
      },
      "target"_a, "source"_a, "size"_a, "seed"_a);
  module.def(
      "checksum",
      [](std::uintptr_t address, std::size_t size, std::uint64_t seed) {
        return xxh3_64(memory_at(address), size, seed);
      },
      "address"_a, "size"_a, "seed"_a, nb::call_guard<nb::gil_scoped_release>());
  module.def(
      "copy",
      [](std::uintptr_t target, std::uintptr_t source, std::size_t size) {
        copy_chunk(memory_at(target), memory_at(source), size);
      },
      "target"_a, "source"_a, "size"_a, nb::call_guard<nb::gil_scoped_release>());
  module.def(
      "is_zero",
      [](std::uintptr_t address, std::size_t size) { return is_zero(memory_at(address), size); },
      "address"_a, "size"_a, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace holdfast
