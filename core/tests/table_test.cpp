// A plain table is accepted as it is, and refused with any one number changed that a rule is about.
#include "holdfast/table.h"

#include <functional>
#include <limits>
#include <vector>

#include "check.h"

namespace holdfast {
namespace {

// Two files: tensor 0 (f32, 3 x 5) in two shards, one in each file, and tensor 1 (u8, 70000), which
// is large, behind the first of these; a chunk has 1 << 20 elements at most.
struct Columns {
  std::vector<std::uint64_t> file_bytes{80000, 200};
  std::vector<std::uint32_t> file_rank{0, 1}, file_number{0, 0}, file_chunks{2, 1};
  std::vector<std::uint32_t> shard_tensor{0, 1, 0}, shard_file{0, 0, 1};
  std::vector<std::uint32_t> shard_first_chunk{0, 1, 0}, shard_chunks{1, 1, 1};
  std::vector<std::int64_t> shard_box{0, 0, 2, 5, 0, 70000, 2, 0, 1, 5};
  std::vector<std::uint32_t> chunk_size_mode{40, 70000, 20}, chunk_offset{1, 64, 1};
  std::vector<std::int64_t> item_bytes{4, 1}, chunk_elements{1 << 20, 1 << 20}, ndim{2, 1};
  std::vector<std::int64_t> shape{3, 5, 70000};
  std::uint64_t world_size = 2;
};

struct Derived {
  std::vector<std::int64_t> file_first_chunk, payload_end, shard_first_row, box_start;
  std::vector<std::int64_t> tensor_order, tensor_first, chunk_start, chunk_bytes, gap_start;
  std::vector<std::uint8_t> is_cut;
};

bool derive(const Columns& c, Derived& d) {
  const std::size_t files = c.file_bytes.size(), shards = c.shard_tensor.size();
  const std::size_t chunks = c.chunk_offset.size(), tensors = c.ndim.size();
  d.file_first_chunk.resize(files + 1);
  d.payload_end.resize(files);
  d.shard_first_row.resize(shards);
  d.box_start.resize(shards + 1);
  d.tensor_order.resize(shards);
  d.tensor_first.resize(tensors + 1);
  for (auto* column : {&d.chunk_start, &d.chunk_bytes, &d.gap_start}) column->resize(chunks);
  d.is_cut.resize(tensors);
  const TableColumns table{c.file_bytes,  c.file_rank,  c.file_number,       c.file_chunks,
                           c.shard_tensor, c.shard_file, c.shard_first_chunk, c.shard_chunks,
                           c.shard_box,   c.chunk_size_mode, c.chunk_offset};
  return derive_plain(table, {c.item_bytes, c.chunk_elements, c.ndim, c.shape}, c.world_size,
                      {d.file_first_chunk, d.payload_end, d.shard_first_row, d.box_start,
                       d.tensor_order, d.tensor_first, d.chunk_start, d.chunk_bytes, d.gap_start,
                       d.is_cut});
}

using Numbers = std::vector<std::int64_t>;

}  // namespace

TEST(a_plain_table_is_accepted_and_what_follows_is_derived) {
  Derived derived;
  CHECK(derive({}, derived));
  CHECK(derived.file_first_chunk == (Numbers{0, 2, 3}));
  CHECK(derived.payload_end == (Numbers{4096 + 70000, 84}));
  CHECK(derived.shard_first_row == (Numbers{0, 1, 2}));
  CHECK(derived.box_start == (Numbers{0, 4, 6, 10}));
  CHECK(derived.tensor_order == (Numbers{0, 2, 1}));
  CHECK(derived.tensor_first == (Numbers{0, 2, 3}));
  CHECK(derived.chunk_start == (Numbers{64, 4096, 64}));
  CHECK(derived.chunk_bytes == (Numbers{40, 70000, 20}));
  CHECK(derived.gap_start == (Numbers{64, 104, 64}));
  CHECK(derived.is_cut == (std::vector<std::uint8_t>{1, 0}));
}

TEST(a_table_of_nothing_is_accepted) {
  Columns none;
  for (auto* column : {&none.file_rank, &none.file_number, &none.file_chunks, &none.shard_tensor,
                       &none.shard_file, &none.shard_first_chunk, &none.shard_chunks,
                       &none.chunk_size_mode, &none.chunk_offset}) {
    column->clear();
  }
  none.file_bytes.clear();
  none.shard_box.clear();
  Derived derived;
  CHECK(derive(none, derived));
  CHECK(derived.tensor_first == (Numbers{0, 0, 0}));
}

// Tensor 1 in chunks of 30000 elements: two full ones, and the rest.
Columns with_many_chunks() {
  Columns c;
  c.file_chunks[0] = 4;
  c.shard_chunks[1] = 3;
  c.chunk_elements[1] = 30000;
  c.chunk_size_mode = {40, 30000, 30000, 10000, 20};
  c.chunk_offset = {1, 2, 2 + 469, 2 + 2 * 469, 1};
  return c;
}

TEST(all_chunks_of_a_shard_but_the_last_are_full) {
  Derived derived;
  CHECK(derive(with_many_chunks(), derived));
  CHECK(derived.shard_first_row == (Numbers{0, 1, 4}));
  CHECK(derived.chunk_bytes == (Numbers{40, 30000, 30000, 10000, 20}));
  CHECK(derived.gap_start == (Numbers{64, 104, 128 + 30000, 128 + 469 * 64 + 30000, 64}));
  const std::vector<std::function<void(Columns&)>> breaks = {
      [](Columns& c) { c.chunk_size_mode[1] = 29999; },
      [](Columns& c) { c.chunk_size_mode[2] = 29999; },
      [](Columns& c) { c.chunk_size_mode[3] = 9999; },
      [](Columns& c) { c.chunk_elements[1] = 29999; },
      [](Columns& c) { c.chunk_elements[1] = 70000; },
      [](Columns& c) { c.shard_chunks[1] = 2; },
      [](Columns& c) { c.shard_chunks[1] = 4; },
      [](Columns& c) {  // a chunk that no shard has
        c.chunk_offset.push_back(2);
        c.chunk_size_mode.push_back(20);
        c.file_chunks[1] = 2;
      },
  };
  for (const auto& change : breaks) {
    Columns columns = with_many_chunks();
    change(columns);
    CHECK(!derive(columns, derived));
  }
}

// Products of them wrap around to what would be right.
TEST(numbers_whose_product_no_integer_holds_are_refused) {
  constexpr std::int64_t kHuge = std::int64_t{1} << 62;
  constexpr std::int64_t kSeventh = 5270498306774157606;  // of 10 + 2 ** 65
  const std::vector<std::function<void(Columns&)>> breaks = {
      [](Columns& c) {  // elements of the first shard: 10, as they were
        c.shape = {7, kSeventh, 70000};
        c.shard_box[2] = 7;
        c.shard_box[3] = kSeventh;
      },
      [](Columns& c) {  // bytes of a full chunk
        c.chunk_elements[0] = kHuge;
        c.item_bytes[0] = 4;
      },
      [](Columns& c) { c.shard_box[0] = std::numeric_limits<std::int64_t>::max(); },
  };
  for (const auto& change : breaks) {
    Columns columns;
    change(columns);
    Derived derived;
    CHECK(!derive(columns, derived));
  }
}

TEST(each_broken_rule_is_refused) {
  const std::vector<std::function<void(Columns&)>> breaks = {
      [](Columns& c) { c.file_bytes[1] = (std::uint64_t{1} << 38) + 1; },
      [](Columns& c) { c.file_bytes[1] = 84 + 31; },  // no room for a trailer
      [](Columns& c) { c.file_rank[1] = 2; },
      [](Columns& c) { c.file_rank[1] = 0; },  // the number of the file before it
      [](Columns& c) { c.file_chunks[0] = 1; },
      [](Columns& c) { c.file_chunks[1] = 2; },
      [](Columns& c) { c.shard_tensor[0] = 2; },
      [](Columns& c) { c.shard_file[2] = 2; },
      [](Columns& c) { c.shard_file[2] = 0; },
      [](Columns& c) { c.shard_first_chunk[1] = 0; },
      [](Columns& c) { c.shard_chunks[0] = 2; },
      [](Columns& c) { c.shard_chunks[2] = 0; },
      [](Columns& c) { c.shard_box[0] = -1; },
      [](Columns& c) { c.shard_box[0] = 2; },  // leaves the tensor
      [](Columns& c) { c.shard_box[2] = 0; },
      [](Columns& c) { c.shard_box[5] = 70001; },
      [](Columns& c) { c.shard_box.push_back(0); },
      [](Columns& c) { c.shard_box.pop_back(); },
      [](Columns& c) { c.chunk_size_mode[0] = 36; },
      [](Columns& c) { c.chunk_size_mode[0] = 0; },
      [](Columns& c) { c.chunk_size_mode[0] |= 1U << 24; },  // encoded: not for this pass
      [](Columns& c) { c.chunk_offset[0] = 0; },
      [](Columns& c) { c.chunk_offset[0] = 65; },
      [](Columns& c) { c.chunk_offset[1] = 65; },   // large, and on no page
      [](Columns& c) { c.chunk_offset[1] = 128; },  // a gap of a page and more
      [](Columns& c) { c.chunk_offset[2] = 2; c.file_bytes[1] = 84; },
      [](Columns& c) { c.item_bytes[0] = 0; },
      [](Columns& c) { c.chunk_elements[1] = 0; },
      [](Columns& c) { c.shape.push_back(1); },
      [](Columns& c) { c.chunk_elements[0] = 9; },  // then the first shard has two chunks
      [](Columns& c) { c.shape.pop_back(); },
      [](Columns& c) { c.world_size = 1; },
  };
  for (const auto& change : breaks) {
    Columns columns;
    change(columns);
    Derived derived;
    CHECK(!derive(columns, derived));
  }
}

}  // namespace holdfast
