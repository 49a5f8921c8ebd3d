#include "holdfast/pool.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>

#include "bindings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace holdfast {
namespace {

using SlotView = nb::ndarray<nb::memview, std::uint8_t, nb::ndim<1>>;

void check_slot(const Pool& pool, std::size_t slot) {
  if (slot >= pool.slots()) throw nb::index_error("pool slot out of range");
}

}  // namespace

void bind_pool(nb::module_& module) {
  nb::class_<Pool>(module, "Pool")
      .def(nb::new_([](std::size_t slot_bytes, std::size_t slots) {
             return value_of(without_gil([&] { return Pool::create(slot_bytes, slots); }));
           }),
           "slot_bytes"_a, "slots"_a)
      .def_prop_ro("slot_bytes", &Pool::slot_bytes)
      .def_prop_ro("slots", &Pool::slots)
      .def(
          "address",
          [](const Pool& pool, std::size_t slot) {
            check_slot(pool, slot);
            return reinterpret_cast<std::uintptr_t>(pool.address(slot));
          },
          "slot"_a)
      .def(
          "view",
          [](nb::handle self, std::size_t slot) {
            const Pool& pool = nb::cast<const Pool&>(self);
            check_slot(pool, slot);
            return SlotView(pool.address(slot), {pool.slot_bytes()}, self);
          },
          "slot"_a)
      .def("memory", [](nb::handle self) {
        const Pool& pool = nb::cast<const Pool&>(self);
        return SlotView(pool.memory(), {pool.size()}, self);
      });
}

}  // namespace holdfast
