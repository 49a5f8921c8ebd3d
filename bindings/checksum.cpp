#include "holdfast/checksum.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <span>
#include <vector>

#include "bindings.h"
#include "holdfast/samples.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace holdfast {
namespace {

nb::bytes to_bytes(const Hash128& hash) {
  return nb::bytes(hash.data(), hash.size());
}

using Words = nb::ndarray<const std::uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

nb::tuple to_tuple(const Digest& digest) {
  return nb::make_tuple(digest.xxh3_64, to_bytes(digest.xxh3_128));
}

std::vector<Bytes> parts_of(const Words& addresses, const Words& sizes, const Words& counts) {
  std::size_t needed = 0;
  for (std::size_t i = 0; i < counts.shape(0); ++i) needed += counts(i);
  if (addresses.shape(0) != needed || sizes.shape(0) != needed) {
    throw nb::value_error("addresses and sizes are not as many as the counts say");
  }
  std::vector<Bytes> parts(needed);
  for (std::size_t i = 0; i < needed; ++i) parts[i] = {memory_at(addresses(i)), sizes(i)};
  return parts;
}

}  // namespace

void bind_checksum(nb::module_& module) {
  module.def(
      "xxh3_64",
      [](nb::handle data, std::uint64_t seed) {
        const BufferView view(data);
        return without_gil(view.size(), [&] { return xxh3_64(view.data(), view.size(), seed); });
      },
      "data"_a, "seed"_a = 0);
  module.def(
      "xxh3_128",
      [](nb::handle data) {
        const BufferView view(data);
        return to_bytes(
            without_gil(view.size(), [&] { return xxh3_128(view.data(), view.size()); }));
      },
      "data"_a);
  module.def(
      "hash_samples",
      [](std::uintptr_t address, std::size_t size, std::size_t item, std::size_t count,
         std::size_t run) {
        return to_bytes(
            without_gil([&] { return hash_samples(memory_at(address), size, item, count, run); }));
      },
      "address"_a, "size"_a, "item"_a, "count"_a, "run"_a);
  module.def(
      "hash_chunk",
      [](std::uintptr_t address, std::size_t size, std::uint64_t seed) {
        return to_tuple(
            without_gil(size, [&] { return hash_chunk(memory_at(address), size, seed); }));
      },
      "address"_a, "size"_a, "seed"_a);
  module.def(
      "copy_and_hash_chunk",
      [](std::uintptr_t target, std::uintptr_t source, std::size_t size, std::uint64_t seed) {
        return to_tuple(without_gil(size, [&] {
          return copy_and_hash_chunk(memory_at(target), memory_at(source), size, seed);
        }));
      },
      "target"_a, "source"_a, "size"_a, "seed"_a);
  module.def(
      "checksum",
      [](std::uintptr_t address, std::size_t size, std::uint64_t seed) {
        return without_gil(size, [&] { return xxh3_64(memory_at(address), size, seed); });
      },
      "address"_a, "size"_a, "seed"_a);
  module.def(
      "copy",
      [](std::uintptr_t target, std::uintptr_t source, std::size_t size) {
        without_gil(size, [&] { copy_chunk(memory_at(target), memory_at(source), size); });
      },
      "target"_a, "source"_a, "size"_a);
  module.def(
      "hash_spread",
      [](const Words& addresses, const Words& sizes, const Words& counts, std::uint64_t seed) {
        const std::vector<Bytes> parts = parts_of(addresses, sizes, counts);
        std::vector<std::uint64_t> hashes(counts.shape(0));
        without_gil([&] {
          const Bytes* part = parts.data();
          for (std::size_t i = 0; i < hashes.size(); part += counts(i++)) {
            hashes[i] = hash_spread(std::span(part, counts(i)), seed);
          }
        });
        return nb::bytes(hashes.data(), hashes.size() * sizeof(std::uint64_t));
      },
      "addresses"_a, "sizes"_a, "counts"_a, "seed"_a);
  module.def(
      "hash_spread_strided",
      [](std::uintptr_t address, std::size_t element_bytes, const std::vector<std::int64_t>& shape,
         const std::vector<std::int64_t>& strides, std::uint64_t seed) {
        return without_gil([&] {
          return hash_spread(Strided{memory_at(address), element_bytes, shape, strides}, seed);
        });
      },
      "address"_a, "element_bytes"_a, "shape"_a, "strides"_a, "seed"_a);
  module.def("instruction_set", &instruction_set);
  module.def(
      "is_zero",
      [](std::uintptr_t address, std::size_t size) { return is_zero(memory_at(address), size); },
      "address"_a, "size"_a, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace holdfast
