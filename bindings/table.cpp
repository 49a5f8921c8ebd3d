#include "holdfast/table.h"

#include <vector>

#include "columns.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace holdfast {
namespace {

// Hands out `out` piece by piece.
class Pieces {
 public:
  explicit Pieces(std::span<std::int64_t> out) : rest_(out) {}
  std::span<std::int64_t> next(std::size_t count) {
    require(count <= rest_.size());
    const auto piece = rest_.first(count);
    rest_ = rest_.subspan(count);
    return piece;
  }

 private:
  std::span<std::int64_t> rest_;
};

// Bytes of an element, elements of a chunk, dimensions and shapes of every tensor.
class Tensors {
 public:
  Tensors(const nb::list& item_bytes, const nb::list& shapes, std::int64_t chunk_elements,
          std::span<std::int64_t> items, std::span<std::int64_t> steps)
      : items_(items), steps_(steps) {
    require(shapes.size() == items.size() && item_bytes.size() == items.size());
    ndim_.reserve(items.size());
    for (std::size_t i = 0; i < items.size(); ++i) {
      items[i] = nb::cast<std::int64_t>(item_bytes[i]);
      // As `elements_per_chunk` of layout.py: no chunk has more bytes than one of 8-byte elements.
      steps[i] = items[i] == 16 ? chunk_elements / 2 + chunk_elements % 2 : chunk_elements;
      const auto shape = nb::cast<nb::tuple>(shapes[i]);
      ndim_.push_back(static_cast<std::int64_t>(shape.size()));
      for (const nb::handle extent : shape) shape_.push_back(nb::cast<std::int64_t>(extent));
    }
  }
  TensorColumns all() const { return {items_, steps_, ndim_, shape_}; }

 private:
  std::span<const std::int64_t> items_, steps_;
  std::vector<std::int64_t> ndim_, shape_;
};

bool derive(const nb::tuple& columns, const nb::list& item_bytes, const nb::list& shapes,
            std::int64_t chunk_elements, std::uint64_t world_size, nb::handle out,
            nb::handle is_cut) {
  require(columns.size() == 11);
  const Words file_bytes(columns[0]);
  const Halves file_rank(columns[1]), file_number(columns[2]), file_chunks(columns[3]);
  const Halves shard_tensor(columns[4]), shard_file(columns[5]);
  const Halves shard_first_chunk(columns[6]), shard_chunks(columns[7]);
  const Numbers shard_box(columns[8]);
  const Halves chunk_size_mode(columns[9]), chunk_offset(columns[10]);
  const TableColumns table{file_bytes.all(),  file_rank.all(),         file_number.all(),
                           file_chunks.all(), shard_tensor.all(),      shard_file.all(),
                           shard_first_chunk.all(), shard_chunks.all(), shard_box.all(),
                           chunk_size_mode.all(), chunk_offset.all()};
  const Numbers numbers_out(out);
  const Flags cut_out(is_cut);
  const std::size_t files = table.file_bytes.size(), shards = table.shard_tensor.size();
  const std::size_t chunks = table.chunk_offset.size(), count = shapes.size();
  for (const auto& column : {table.file_rank, table.file_number, table.file_chunks}) {
    require(column.size() == files);
  }
  for (const auto& column : {table.shard_file, table.shard_first_chunk, table.shard_chunks}) {
    require(column.size() == shards);
  }
  require(table.chunk_size_mode.size() == chunks && cut_out.all().size() == count);
  const auto all = numbers_out.all();
  Pieces pieces({const_cast<std::int64_t*>(all.data()), all.size()});
  const auto steps = pieces.next(count), items = pieces.next(count);
  const Tensors tensors(item_bytes, shapes, chunk_elements, items, steps);
  DerivedColumns derived;
  derived.file_first_chunk = pieces.next(files + 1);
  derived.payload_end = pieces.next(files);
  derived.shard_first_row = pieces.next(shards);
  derived.box_start = pieces.next(shards + 1);
  derived.tensor_order = pieces.next(shards);
  derived.tensor_first = pieces.next(count + 1);
  derived.chunk_start = pieces.next(chunks);
  derived.chunk_bytes = pieces.next(chunks);
  derived.chunk_gap_start = pieces.next(chunks);
  derived.is_cut = {const_cast<std::uint8_t*>(cut_out.all().data()), count};
  return without_gil(chunks * sizeof(std::uint64_t),
                     [&] { return derive_plain(table, tensors.all(), world_size, derived); });
}

}  // namespace

void bind_table(nb::module_& module) {
  module.def("derive_plain", &derive, "columns"_a, "item_bytes"_a, "shapes"_a,
             "chunk_elements"_a, "world_size"_a, "out"_a, "is_cut"_a);
}

}  // namespace holdfast
