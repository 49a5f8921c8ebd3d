#include "holdfast/reads.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "columns.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace holdfast {
namespace {

// Numbers that are places: each below `end`.
void within(Column numbers, std::size_t end) {
  for (const std::int64_t number : numbers) {
    if (number < 0 || static_cast<std::uint64_t>(number) >= end) {
      throw nb::index_error("a number is outside of its column");
    }
  }
}

template <class Item>
nb::bytes bytes_of(const std::vector<Item>& items) {
  return nb::bytes(reinterpret_cast<const char*>(items.data()), items.size() * sizeof(Item));
}

// Python's columns of all chunks, held while a function looks at them.
class Chunks {
 public:
  explicit Chunks(const nb::tuple& columns)
      : first_(columns[0]), start_(columns[1]), bytes_(columns[2]), gap_start_(columns[3]) {
    require(bytes_.all().size() == count() && gap_start_.all().size() == count());
  }
  std::size_t count() const { return start_.all().size(); }
  ChunkColumns all() const {
    return {first_.all(), start_.all(), bytes_.all(), gap_start_.all()};
  }

 private:
  Numbers first_, start_, bytes_, gap_start_;
};

nb::object whole(const nb::tuple& columns, nb::handle tensors) {
  const Numbers order(columns[0]), first(columns[1]), first_row(columns[2]);
  const Halves chunks(columns[3]);
  const Flags is_cut(columns[4]);
  const Numbers wanted(tensors);
  require(first.all().size() == is_cut.all().size() + 1);
  require(first_row.all().size() == chunks.all().size());
  within(wanted.all(), is_cut.all().size());
  const auto cut = [&](std::int64_t tensor) {
    return is_cut.all()[static_cast<std::size_t>(tensor)] != 0;
  };
  if (std::ranges::any_of(wanted.all(), cut)) return nb::none();
  within(order.all(), chunks.all().size());
  const Wanted found =
      rows_of_whole(order.all(), first.all(), first_row.all(), chunks.all(), wanted.all());
  return nb::make_tuple(bytes_of(found.number), bytes_of(found.row),
                        bytes_of(std::vector<std::uint8_t>(found.row.size(), 1)));
}

nb::tuple in_order(const nb::tuple& columns, nb::handle number, nb::handle row, nb::handle exact) {
  const Chunks chunks(columns);
  const Numbers numbers(number), rows(row);
  const Flags exacts(exact);
  require(numbers.all().size() == rows.all().size() && exacts.all().size() == rows.all().size());
  within(rows.all(), chunks.count());
  const ChunkColumns of = chunks.all();
  const ReadColumns reads = without_gil(rows.all().size_bytes(), [&] {
    return reads_in_order(of.file_first_chunk, of.start, numbers.all(), rows.all(), exacts.all());
  });
  return nb::make_tuple(bytes_of(reads.row), bytes_of(reads.first), bytes_of(reads.count),
                        bytes_of(reads.wants), bytes_of(reads.exact));
}

nb::list join(const nb::tuple& columns, nb::handle row, nb::handle begin, std::int64_t bytes_max,
              std::int64_t bytes_min) {
  const Chunks chunks(columns);
  const Numbers rows(row), begins(begin);
  within(rows.all(), chunks.count());
  within(begins.all(), rows.all().size());
  require(std::ranges::is_sorted(begins.all()));
  nb::list found;
  for (const Run& run : join_runs(chunks.all(), rows.all(), begins.all(), {bytes_max, bytes_min})) {
    found.append(nb::make_tuple(run.file, run.offset, run.bytes, run.begin, run.end));
  }
  return found;
}

std::size_t damaged(const nb::tuple& columns, nb::handle checksum, nb::handle row, std::size_t file,
                    std::intptr_t base, const nb::bytes& head) {
  const Chunks chunks(columns);
  const Words checksums(checksum);
  const Numbers rows(row);
  const ChunkColumns of = chunks.all();
  within(rows.all(), std::min(chunks.count(), checksums.all().size()));
  SeedHead seed_head;
  require(head.size() == sizeof seed_head && file < of.file_first_chunk.size());
  std::memcpy(seed_head.data(), head.data(), sizeof seed_head);
  std::size_t total = 0;
  for (const std::int64_t number : rows.all()) {
    total += static_cast<std::size_t>(of.bytes[static_cast<std::size_t>(number)]);
  }
  return without_gil(total, [&] {
    return first_damaged_read(of, checksums.all(), rows.all(), file,
                              memory_at(static_cast<std::uintptr_t>(base)), seed_head);
  });
}

nb::object place(const nb::tuple& columns, const nb::tuple& shard_columns, const nb::tuple& reads,
                 nb::handle address, std::intptr_t base) {
  const Chunks chunks(columns);
  const Numbers first_row(shard_columns[0]), steps(shard_columns[2]), items(shard_columns[3]);
  const Halves tensor(shard_columns[1]);
  const Numbers rows(reads[0]), firsts(reads[1]), counts(reads[2]), wants(reads[3]);
  const Flags exact(reads[4]);
  const Words addresses(address);
  const std::size_t count = rows.all().size(), pairs = wants.all().size();
  require(firsts.all().size() == count && counts.all().size() == count);
  require(exact.all().size() == pairs && tensor.all().size() == first_row.all().size());
  require(steps.all().size() == items.all().size() && (count == 0 || !tensor.all().empty()));
  within(rows.all(), chunks.count());
  std::size_t total = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const auto begin = static_cast<std::size_t>(firsts.all()[i]);
    const auto more = static_cast<std::size_t>(counts.all()[i]);
    require(begin <= pairs && more <= pairs - begin);
    // Of its own pairs alone: the column has those of all runs.
    within(wants.all().subspan(begin, more), addresses.all().size());
    const auto row = static_cast<std::size_t>(rows.all()[i]);
    total += static_cast<std::size_t>(chunks.all().bytes[row]) * more;
  }
  const ShardRows shards{first_row.all(), tensor.all(), steps.all(), items.all()};
  const Placing placing{rows.all(),  firsts.all(), counts.all(),
                        wants.all(), exact.all(),  addresses.all()};
  const Elsewhere others = without_gil(total, [&] {
    return place_reads(chunks.all(), shards, placing, memory_at(static_cast<std::uintptr_t>(base)));
  });
  if (others.read.empty()) return nb::none();
  return nb::make_tuple(bytes_of(others.read), bytes_of(others.pair));
}

std::vector<std::int64_t> numbers_of(const nb::list& list) {
  std::vector<std::int64_t> found;
  found.reserve(list.size());
  for (const nb::handle item : list) {
    found.push_back(static_cast<std::int64_t>(nb::cast<std::uint64_t>(item)));
  }
  return found;
}

nb::list overlaps(const nb::list& addresses, const nb::list& sizes) {
  const auto begin = numbers_of(addresses), bytes = numbers_of(sizes);
  require(begin.size() == bytes.size());
  nb::list found;
  for (const std::size_t index : overlapping(begin, bytes)) found.append(index);
  return found;
}

}  // namespace

void bind_reads(nb::module_& module) {
  module.def("rows_of_whole", &whole, "columns"_a, "tensors"_a);
  module.def("reads_in_order", &in_order, "chunks"_a, "number"_a, "rows"_a, "exact"_a);
  module.def("join_runs", &join, "chunks"_a, "rows"_a, "begins"_a, "bytes_max"_a, "bytes_min"_a);
  module.def("first_damaged", &damaged, "chunks"_a, "checksums"_a, "rows"_a, "file"_a, "base"_a,
             "head"_a);
  module.def("place_reads", &place, "chunks"_a, "shards"_a, "reads"_a, "address"_a, "base"_a);
  module.def("overlapping", &overlaps, "addresses"_a, "sizes"_a);
}

}  // namespace holdfast
