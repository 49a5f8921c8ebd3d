#include "holdfast/chunks.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <vector>

#include "bindings.h"
#include "holdfast/copy.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace holdfast {
namespace {

template <class Item, int Dimensions>
using Column = nb::ndarray<Item, nb::ndim<Dimensions>, nb::c_contig, nb::device::cpu>;
using Words = Column<const std::uint64_t, 1>;
using Digests = Column<const std::uint64_t, 2>;
using DigestsOut = Column<std::uint64_t, 2>;

template <class Item>
void require(const Column<Item, 1>& column, std::size_t count) {
  if (column.shape(0) != count) throw nb::value_error("columns of several lengths");
}

template <class Item>
void require(const Column<Item, 2>& column, std::size_t count) {
  if (column.shape(0) != count || column.shape(1) != 2) throw nb::value_error("no such digests");
}

template <class Item>
std::span<Item> span_of(const Column<Item, 1>& column) {
  return {column.data(), column.shape(0)};
}

std::span<const Hash128> span_of(const Digests& column) {
  return {reinterpret_cast<const Hash128*>(column.data()), column.shape(0)};
}

std::span<Hash128> span_of(const DigestsOut& column) {
  return {reinterpret_cast<Hash128*>(column.data()), column.shape(0)};
}

std::uint64_t sum(const Words& column) {
  std::uint64_t total = 0;
  for (const std::uint64_t number : span_of(column)) total += number;
  return total;
}

SeedHead head_of(const nb::bytes& head) {
  SeedHead result;
  if (head.size() != sizeof result) throw nb::value_error("no head of a seed");
  std::memcpy(result.data(), head.data(), sizeof result);
  return result;
}

template <class Byte>
std::vector<Byte*> addresses_of(const Words& column) {
  std::vector<Byte*> result;
  result.reserve(column.shape(0));
  for (const std::uint64_t address : span_of(column)) result.push_back(memory_at(address));
  return result;
}

std::vector<Piece> pieces_of(const Words& targets, const Words& sources, const Words& sizes) {
  const std::size_t count = sizes.shape(0);
  require(targets, count);
  require(sources, count);
  std::vector<Piece> pieces(count);
  for (std::size_t i = 0; i < count; ++i) {
    pieces[i] = {memory_at(targets(i)), memory_at(sources(i)), sizes(i)};
  }
  return pieces;
}

std::size_t copy_and_hash(const Words& targets, const Words& sources, const Words& sizes,
                          std::size_t threads, const Words& seeds,
                          const Column<std::uint64_t, 1>& checksums, const DigestsOut& digests,
                          const Column<std::uint8_t, 1>& known, std::uintptr_t room,
                          std::size_t room_bytes, const Column<const std::uint8_t, 1>& hurry) {
  const std::vector<Piece> pieces = pieces_of(targets, sources, sizes);
  require(seeds, pieces.size());
  require(checksums, pieces.size());
  require(digests, pieces.size());
  require(known, pieces.size());
  require(hurry, 1);
  const PieceHashes hashes{span_of(seeds), span_of(checksums), span_of(digests), span_of(known)};
  return value_of(without_gil([&] {
    return copy_and_hash_if_there(pieces, threads, hashes, {memory_at(room), room_bytes},
                                  *hurry.data());
  }));
}

std::vector<std::uint64_t> place(const Words& sizes, const Words& counts, const Words& row_bytes,
                                 std::size_t header_bytes, std::size_t file_bytes,
                                 std::size_t footer_bytes, std::size_t window_bytes,
                                 const Column<std::uint64_t, 1>& offsets,
                                 const Column<std::uint8_t, 1>& turns,
                                 const Column<std::uint32_t, 1>& files) {
  require(row_bytes, counts.shape(0));
  require(files, counts.shape(0));
  require(offsets, sizes.shape(0));
  require(turns, sizes.shape(0));
  if (sum(counts) != sizes.shape(0)) throw nb::value_error("not as many chunks as shards have");
  const Places places =
      place_chunks({span_of(sizes), span_of(counts), span_of(row_bytes)},
                   {header_bytes, file_bytes, footer_bytes, window_bytes});
  std::copy(places.offset.begin(), places.offset.end(), offsets.data());
  std::copy(places.turns.begin(), places.turns.end(), turns.data());
  std::copy(places.file.begin(), places.file.end(), files.data());
  return places.end;
}

void stage(const Words& targets, const Words& sources, const Words& sizes, const nb::bytes& head,
           std::uint64_t first_row, const Column<std::uint64_t, 1>& checksums,
           const DigestsOut& digests) {
  const std::size_t count = targets.shape(0);
  require(sources, count);
  require(sizes, count);
  require(checksums, count);
  require(digests, count);
  const auto to = addresses_of<std::byte>(targets);
  const auto from = addresses_of<const std::byte>(sources);
  const SeedHead seed_head = head_of(head);
  without_gil(sum(sizes), [&] {
    stage_chunks(to, from, span_of(sizes), seed_head, first_row,
                 {span_of(checksums), span_of(digests)});
  });
}

void seed_rows(const nb::bytes& head, const Column<std::uint64_t, 1>& out) {
  const SeedHead seed_head = head_of(head);
  for (std::size_t row = 0; row < out.shape(0); ++row) out(row) = chunk_seed(seed_head, row);
}

void digest(const Digests& digests, const Words& counts, const DigestsOut& out) {
  require(out, counts.shape(0));
  require(digests, sum(counts));
  digest_shards(span_of(digests), span_of(counts), span_of(out));
}

}  // namespace

void bind_chunks(nb::module_& module) {
  module.def(
      "copy_if_there",
      [](const Words& targets, const Words& sources, const Words& sizes, std::size_t threads) {
        const std::vector<Piece> pieces = pieces_of(targets, sources, sizes);
        return value_of(without_gil([&] { return copy_if_there(pieces, threads); }));
      },
      "targets"_a, "sources"_a, "sizes"_a, "threads"_a);
  module.def("copy_and_hash_if_there", &copy_and_hash, "targets"_a, "sources"_a, "sizes"_a,
             "threads"_a, "seeds"_a, "checksums"_a, "digests"_a, "known"_a, "room"_a,
             "room_bytes"_a, "hurry"_a);
  module.def(
      "copy_pieces",
      [](const Words& targets, const Words& sources, const Words& sizes, std::size_t threads) {
        const std::vector<Piece> pieces = pieces_of(targets, sources, sizes);
        without_gil([&] { copy_pieces(pieces, threads); });
      },
      "targets"_a, "sources"_a, "sizes"_a, "threads"_a);
  module.def("place_chunks", &place, "sizes"_a, "counts"_a, "row_bytes"_a, "header_bytes"_a,
             "file_bytes"_a, "footer_bytes"_a, "window_bytes"_a, "offsets"_a, "turns"_a,
             "files"_a);
  module.def("stage_chunks", &stage, "targets"_a, "sources"_a, "sizes"_a, "head"_a, "first_row"_a,
             "checksums"_a, "digests"_a);
  module.def("chunk_seeds", &seed_rows, "head"_a, "out"_a);
  module.def("digest_shards", &digest, "digests"_a, "counts"_a, "out"_a);
}

}  // namespace holdfast
