#include "holdfast/segment.h"

#include <vector>

#include "bindings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace holdfast {
namespace {

SegmentItem item_of(nb::handle values, int number) {
  const nb::tuple given = nb::borrow<nb::tuple>(values);
  SegmentItem item;
  item.data = memory_at(nb::cast<std::uintptr_t>(given[0]));
  item.elements = nb::cast<const Elements&>(given[1]);
  item.seed = nb::cast<std::uint64_t>(given[2]);
  item.is_staged = nb::cast<bool>(given[3]);
  item.master = nb::cast<int>(given[4]);
  item.second_moment = nb::cast<int>(given[5]);
  for (const int other : {item.master, item.second_moment}) {
    if (other < kNone || other >= number) throw nb::value_error("no such item before this one");
  }
  return item;
}

nb::tuple encode(const nb::list& items, std::uintptr_t out) {
  std::vector<SegmentItem> given;
  for (const nb::handle values : items) {
    given.push_back(item_of(values, static_cast<int>(given.size())));
  }
  std::vector<SegmentPayload> payloads(given.size());
  const Segment made = without_gil([&] {
    return encode_segment(given, reinterpret_cast<std::uint8_t*>(memory_at(out)), payloads);
  });
  nb::list rows;
  for (const SegmentPayload& payload : payloads) {
    rows.append(nb::make_tuple(static_cast<int>(payload.mode), payload.size_bytes, payload.offset,
                               payload.checksum,
                               nb::bytes(payload.digest.data(), payload.digest.size())));
  }
  return nb::make_tuple(rows, made.size_bytes, made.stage_s);
}

}  // namespace

void bind_segment(nb::module_& module) {
  module.def("segment_encode", &encode, "items"_a, "out"_a);
}

}  // namespace holdfast
