#include "holdfast/segment.h"

#include <nanobind/ndarray.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "bindings.h"
#include "holdfast/chunks.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace holdfast {
namespace {

template <class Item, int Dimensions>
using Column = nb::ndarray<Item, nb::ndim<Dimensions>, nb::c_contig, nb::device::cpu>;
using Rows = Column<const std::uint64_t, 2>;

// An item, as a row of numbers.
struct Row {
  std::uint64_t address;
  std::uint64_t count;
  std::uint64_t item_bytes;
  std::uint64_t kind;
  std::uint64_t row;
  std::uint64_t column;
  std::uint64_t chunk;          // its number in the file
  std::uint64_t is_staged;      // 1: yes
  std::uint64_t master;         // so many items before this one; 0: none
  std::uint64_t second_moment;  // the same
  std::uint64_t base;           // address, or 0
  std::uint64_t next_base;      // address, or 0
  std::uint64_t has_digest;     // 1: the next two numbers are the digest of the base
  std::array<std::uint64_t, 2> digest;
};
constexpr std::size_t kNumbers = 15;
static_assert(sizeof(Row) == kNumbers * sizeof(std::uint64_t));
static_assert(sizeof(Hash128) == sizeof Row::digest);

std::span<const Row> rows_of(const Rows& items) {
  if (items.shape(1) != kNumbers) throw nb::value_error("no such items");
  return {reinterpret_cast<const Row*>(items.data()), items.shape(0)};
}

Elements elements_of(const Row& row) {
  const Elements elements = {row.count, row.item_bytes, static_cast<Kind>(row.kind), row.row,
                             row.column};
  const bool known = row.item_bytes == 1 || row.item_bytes == 2 || row.item_bytes == 4 ||
                     row.item_bytes == 8;
  const bool is_half = elements.kind == Kind::kBf16 || elements.kind == Kind::kF16;
  if (!known || row.kind > 3 || (is_half && row.item_bytes != 2) || row.column >= row.row) {
    throw nb::value_error("no such elements");
  }
  return elements;
}

int before(std::size_t number, std::uint64_t distance) {
  if (distance > number) throw nb::value_error("no such item before this one");
  return distance == 0 ? kNone : static_cast<int>(number - distance);
}

std::vector<SegmentItem> items_of(std::span<const Row> rows, const nb::bytes& head) {
  SeedHead seed_head;
  if (head.size() != sizeof seed_head) throw nb::value_error("no head of a seed");
  std::memcpy(seed_head.data(), head.data(), sizeof seed_head);
  std::vector<SegmentItem> items;
  items.reserve(rows.size());
  for (const Row& row : rows) {
    items.push_back({
        .data = memory_at(row.address),
        .elements = elements_of(row),
        .seed = chunk_seed(seed_head, row.chunk),
        .is_staged = row.is_staged != 0,
        .master = before(items.size(), row.master),
        .second_moment = before(items.size(), row.second_moment),
        .base = memory_at(row.base),
        .base_digest =
            row.has_digest != 0 ? reinterpret_cast<const Hash128*>(&row.digest) : nullptr,
        .next_base = memory_at(row.next_base),
    });
  }
  return items;
}

std::size_t room(const Rows& items) {
  std::size_t bytes = 0;
  for (const Row& row : rows_of(items)) bytes += segment_bytes_max(elements_of(row));
  return bytes;
}

nb::tuple encode(const Rows& items, const nb::bytes& head, std::uintptr_t out,
                 const Column<std::uint32_t, 1>& size_modes,
                 const Column<std::uint64_t, 1>& offsets,
                 const Column<std::uint64_t, 1>& checksums,
                 const Column<std::uint64_t, 2>& digests) {
  const std::vector<SegmentItem> given = items_of(rows_of(items), head);
  const std::size_t count = given.size();
  if (size_modes.shape(0) != count || offsets.shape(0) != count || checksums.shape(0) != count ||
      digests.shape(0) != count || digests.shape(1) != 2) {
    throw nb::value_error("columns of several lengths");
  }
  std::vector<SegmentPayload> payloads(count);
  const Segment made = without_gil([&] {
    return encode_segment(given, reinterpret_cast<std::uint8_t*>(memory_at(out)), payloads);
  });
  std::size_t raw_bytes = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const SegmentPayload& payload = payloads[i];
    if (payload.mode == Mode::kRaw) raw_bytes = std::max(raw_bytes, payload.size_bytes);
    size_modes(i) = static_cast<std::uint32_t>(payload.size_bytes) |
                    static_cast<std::uint32_t>(payload.mode) << 24;
    offsets(i) = payload.offset;
    checksums(i) = payload.checksum;
    std::memcpy(&digests(i, 0), payload.digest.data(), payload.digest.size());
  }
  return nb::make_tuple(made.size_bytes, raw_bytes, made.stage_s);
}

}  // namespace

void bind_segment(nb::module_& module) {
  module.def("segment_bytes_max", &room, "items"_a);
  module.def("segment_encode", &encode, "items"_a, "head"_a, "out"_a, "size_modes"_a, "offsets"_a,
             "checksums"_a, "digests"_a);
}

}  // namespace holdfast
