// Columns of numbers that Python lends to one call. Everything here is called with the GIL held.
#pragma once

#include <cstdint>
#include <span>

#include "bindings.h"

namespace holdfast {

// A column that a Python object lends: an array of numbers of the machine's own byte order.
template <class Item>
class Lent {
 public:
  explicit Lent(nanobind::handle object) : view_(object) {
    if (view_.size() % sizeof(Item) != 0 ||
        reinterpret_cast<std::uintptr_t>(view_.data()) % alignof(Item) != 0) {
      throw nanobind::value_error("a column of other numbers");
    }
  }
  std::span<const Item> all() const {
    return {static_cast<const Item*>(view_.data()), view_.size() / sizeof(Item)};
  }

 private:
  BufferView view_;
};

using Words = Lent<std::uint64_t>;
using Halves = Lent<std::uint32_t>;
using Numbers = Lent<std::int64_t>;
using Flags = Lent<std::uint8_t>;

inline void require(bool holds) {
  if (!holds) throw nanobind::value_error("columns of several lengths");
}

}  // namespace holdfast
