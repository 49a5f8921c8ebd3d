#include "codec/grid.h"

#include <cstring>
#include <vector>

#include "codec/entropy.h"
#include "codec/planes.h"
#include "codec/scratch.h"

namespace holdfast {
namespace {

constexpr std::size_t kRowMin = 16;  // elements of a row, from which on it has a mean
constexpr std::size_t kRowsMin = 4;
constexpr unsigned kMomentContexts = 8;
constexpr unsigned kMantissaBits = 23;
constexpr unsigned kSquareHeadBits = 2;   // of the mantissa, in a second moment's residual
constexpr std::size_t kGridPlanes = 4;    // three of tails, one of symbols
constexpr std::size_t kEscapeShare = 16;  // more escapes than one in so many do not pay

struct GridMemory;
struct SumMemory;
struct ClassMemory;

// Means of the heads of rows and columns, in eighths: a head is predicted as the sum of both.
struct Grid {
  std::int16_t* rows;
  std::int16_t* columns;
};

struct GridShape {
  unsigned tail_bits;
  bool with_sign;
};

constexpr GridShape kSquare = {kMantissaBits - kSquareHeadBits, false};
constexpr GridShape kMoment = {kMantissaBits + 1, true};

Grid grid_memory(const Elements& elements) {
  const std::size_t rows = Rows(elements).size();
  auto* memory = scratch<std::int16_t, GridMemory>(rows + elements.row);
  return {memory, memory + rows};
}

void find_grid(const Elements& elements, const std::uint32_t* data, GridShape shape, Grid& grid,
               const CodecKernel& kernel) {
  const Rows rows(elements);
  auto* columns = scratch<std::uint32_t, SumMemory>(elements.row);
  std::fill_n(columns, elements.row, 0u);
  std::uint64_t total = 0;
  rows.each([&](std::size_t row, std::size_t at, std::size_t length, std::size_t column) {
    const std::uint32_t sum =
        kernel.sum_heads(data + at, length, shape.tail_bits, shape.with_sign, columns + column);
    grid.rows[row] = eighths(sum, length);
    total += sum;
  });
  const std::int16_t mean = eighths(total, elements.count);
  for (std::size_t row = 0; row < rows.size(); ++row) {
    grid.rows[row] = static_cast<std::int16_t>(grid.rows[row] - mean);
  }
  // How many rows have a column differs by one at most, at the cut ends.
  const std::size_t end = elements.column + elements.count;
  for (std::size_t column = 0; column < elements.row; ++column) {
    const std::size_t above = column < elements.column ? 1 : 0;
    const std::size_t count = (end + elements.row - 1 - column) / elements.row - above;
    grid.columns[column] = count > 0 ? eighths(columns[column], count) : mean;
  }
}

}  // namespace

std::uint8_t* put_means(const std::int16_t* means, std::size_t count, std::uint8_t* out,
                        const CodecKernel& kernel) {
  std::vector<std::uint8_t> low(count), high(count);
  std::int16_t before = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const auto difference = static_cast<std::int16_t>(means[i] - before);
    const auto zigzag = static_cast<std::uint16_t>(difference * 2 ^ difference >> 15);
    low[i] = static_cast<std::uint8_t>(zigzag);
    high[i] = static_cast<std::uint8_t>(zigzag >> 8);
    before = means[i];
  }
  out += encode_symbols({.data = low.data(), .count = count}, out, kernel);
  out += encode_symbols({.data = high.data(), .count = count}, out, kernel);
  return out;
}

bool get_means(std::span<const std::uint8_t>& coded, std::int16_t* means, std::size_t count,
               const CodecKernel& kernel) {
  std::vector<std::uint8_t> low(count), high(count);
  if (!decode_symbols(coded, low, nullptr, 1, kernel)) return false;
  if (!decode_symbols(coded, high, nullptr, 1, kernel)) return false;
  std::int16_t before = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const int zigzag = low[i] | high[i] << 8;
    before = static_cast<std::int16_t>(before + (zigzag >> 1 ^ -(zigzag & 1)));
    means[i] = before;
  }
  return true;
}

namespace {

// The residual class of each second moment, computed alike by who encodes and who decodes.
const std::uint8_t* moment_classes(const Elements& elements, const void* second_moment,
                                   const CodecKernel& kernel) {
  auto* data = static_cast<const std::uint32_t*>(second_moment);
  auto* classes = scratch<std::uint8_t, ClassMemory>(elements.count + kSlackBytes);
  Grid grid = grid_memory(elements);
  find_grid(elements, data, kSquare, grid, kernel);
  Rows(elements).each([&](std::size_t row, std::size_t at, std::size_t length, std::size_t column) {
    kernel.find_classes(data + at, length, kSquare.tail_bits, grid.columns + column,
                        grid.rows[row] + 4, classes + at);
  });
  return classes;
}

// Of many elements a sample: where it misses a sign, that element's head escapes.
bool any_sign(const std::uint32_t* data, std::size_t count) {
  std::uint32_t all = 0;
  if (count < kSampledCount) {
    for (std::size_t i = 0; i < count; ++i) all |= data[i];
  } else {
    for_sampled_runs(count, [&](std::size_t, std::size_t at) {
      for (std::size_t i = at; i < at + kSampledRun; ++i) all |= data[i];
    });
  }
  return all >> 31 != 0;
}

// Residuals of all elements; returns how many escape.
std::size_t find_residuals(const Elements& elements, const std::uint32_t* data, GridShape shape,
                           const Grid& grid, std::uint8_t* symbols, Planes& tails,
                           const CodecKernel& kernel) {
  std::size_t escapes = 0;
  Rows(elements).each([&](std::size_t row, std::size_t at, std::size_t length, std::size_t column) {
    std::uint8_t* const parts[3] = {tails[0] + at, tails[1] + at, tails[2] + at};
    escapes +=
        kernel.find_residuals(data + at, length, shape.tail_bits, shape.with_sign,
                              grid.columns + column, grid.rows[row] + 4, symbols + at, parts);
  });
  return escapes;
}

std::uint32_t head_of(std::uint32_t word, GridShape shape) {
  return (shape.with_sign ? word << 1 | word >> 31 : word) >> shape.tail_bits;
}

// Where the next element is whose symbol is 0, or `count`.
std::size_t next_escape(const std::uint8_t* symbols, std::size_t from, std::size_t count) {
  if (from >= count) return count;
  auto* next = static_cast<const std::uint8_t*>(std::memchr(symbols + from, 0, count - from));
  return next != nullptr ? static_cast<std::size_t>(next - symbols) : count;
}

// Unpacks values from the front of a payload, and drops what was read.
bool unpack(std::span<const std::uint8_t>& payload, std::size_t count, unsigned bits,
            std::uint8_t* values, const CodecKernel& kernel) {
  constexpr std::size_t kEnd = 64;  // elements whose words may reach behind the payload
  const std::size_t size = (count + 7) / 8 * bits;
  if (payload.size() < size) return false;
  const std::size_t head = count > kEnd ? (count - kEnd) / 8 * 8 : 0;
  const std::size_t head_bytes = head / 8 * bits;
  kernel.unpack_bits(payload.data(), head, bits, values);
  std::uint8_t end[kEnd + 16] = {};
  std::memcpy(end, payload.data() + head_bytes, size - head_bytes);
  kernel.unpack_bits(end, count - head, bits, values + head);
  payload = payload.subspan(size);
  return true;
}

// Writes the heads of the elements whose symbol is 0.
std::uint8_t* put_escapes(const std::uint32_t* data, const std::uint8_t* symbols,
                          std::size_t escapes, GridShape shape, std::uint8_t* out) {
  for (std::size_t i = 0; escapes > 0; ++i) {
    if (symbols[i] != 0) continue;
    const auto head = static_cast<std::uint16_t>(head_of(data[i], shape));
    std::memcpy(out, &head, 2);
    out += 2;
    --escapes;
  }
  return out;
}

}  // namespace

bool has_grid(const Elements& elements) {
  return elements.kind == Kind::kFloat && elements.item_bytes == 4 && elements.row >= kRowMin &&
         Rows(elements).size() >= kRowsMin;
}

std::size_t encode_grid(Mode mode, const Elements& elements, const std::uint32_t* data,
                        const Relatives& relatives, std::uint8_t* out, const CodecKernel& kernel) {
  const bool with_sign = any_sign(data, elements.count);
  const GridShape shape = with_sign ? kMoment : kSquare;
  const std::size_t count = elements.count;
  Symbols coded = {.count = count};
  if (mode == Mode::kGridOfMoment) {
    coded.contexts = moment_classes(elements, relatives.second_moment, kernel);
    coded.context_count = kMomentContexts;
  }
  Grid grid = grid_memory(elements);
  find_grid(elements, data, shape, grid, kernel);
  std::uint8_t* const begin = out;
  *out++ = with_sign;
  out = put_means(grid.rows, Rows(elements).size(), out, kernel);
  out = put_means(grid.columns, elements.row, out, kernel);
  Planes planes;
  plane_memory(count, kGridPlanes, planes);
  const unsigned bits = shape.tail_bits - 16;
  // Tails that look random go to their place at once.
  const std::size_t random =
      random_planes(data, count, 4, shape.with_sign, shape.tail_bits / 8, kernel);
  for (std::size_t p = 0; p < random; ++p) planes[p] = begin_stored(out, count);
  const std::size_t escapes =
      find_residuals(elements, data, shape, grid, planes[3], planes, kernel);
  if (escapes > count / kEscapeShare) return 0;
  for (std::size_t p = random; p < (bits == 8 ? 3 : 2); ++p) {
    out += encode_symbols({.data = planes[p], .count = count}, out, kernel);
  }
  if (bits != 8) {
    kernel.pack_bits(planes[2], count, bits, out);
    out += (count + 7) / 8 * bits;
  }
  coded.data = planes[3];
  out += encode_symbols(coded, out, kernel);
  return static_cast<std::size_t>(put_escapes(data, planes[3], escapes, shape, out) - begin);
}

bool decode_grid(Mode mode, std::span<const std::uint8_t> payload, const Elements& elements,
                 const Relatives& relatives, std::uint32_t* target, const CodecKernel& kernel) {
  if (!has_grid(elements) || payload.empty() || payload[0] > 1) return false;
  const GridShape shape = payload[0] == 1 ? kMoment : kSquare;
  payload = payload.subspan(1);
  const std::uint8_t* contexts = nullptr;
  std::size_t context_count = 1;
  if (mode == Mode::kGridOfMoment) {
    if (relatives.second_moment == nullptr) return false;
    contexts = moment_classes(elements, relatives.second_moment, kernel);
    context_count = kMomentContexts;
  }
  Grid grid = grid_memory(elements);
  const Rows rows(elements);
  if (!get_means(payload, grid.rows, rows.size(), kernel)) return false;
  if (!get_means(payload, grid.columns, elements.row, kernel)) return false;
  const std::size_t count = elements.count;
  const unsigned bits = shape.tail_bits - 16;
  Planes room;
  plane_memory(count, kGridPlanes, room);
  const std::uint8_t* const symbols = room[3];
  const std::uint8_t* tails[3] = {nullptr, nullptr, room[2]};
  for (unsigned p = 0; p < (bits == 8 ? 3 : 2); ++p) {
    tails[p] = find_symbols(payload, {room[p], count}, kernel);
    if (tails[p] == nullptr) return false;
  }
  if (bits != 8 && !unpack(payload, count, bits, room[2], kernel)) return false;
  if (!decode_symbols(payload, {room[3], count}, contexts, context_count, kernel)) return false;
  rows.each([&](std::size_t row, std::size_t at, std::size_t length, std::size_t column) {
    const std::uint8_t* const parts[3] = {tails[0] + at, tails[1] + at, tails[2] + at};
    kernel.add_residuals(target + at, length, shape.tail_bits, shape.with_sign,
                         grid.columns + column, grid.rows[row] + 4, symbols + at, parts);
  });
  std::size_t at = next_escape(symbols, 0, count);
  for (; at < count && payload.size() >= 2; at = next_escape(symbols, at + 1, count)) {
    std::uint16_t head;
    std::memcpy(&head, payload.data(), 2);
    payload = payload.subspan(2);
    const std::uint32_t tail =
        static_cast<std::uint32_t>(tails[2][at] << 16 | tails[1][at] << 8 | tails[0][at]);
    const std::uint32_t word = static_cast<std::uint32_t>(head) << shape.tail_bits | tail;
    target[at] = shape.with_sign ? word >> 1 | word << 31 : word;
  }
  return at == count && payload.empty();
}

GridBytes estimate_grid(const Elements& sample, const std::uint32_t* data,
                        const Relatives& relatives, double scale, const CodecKernel& kernel) {
  const GridShape shape = any_sign(data, sample.count) ? kMoment : kSquare;
  Symbols coded = {.count = sample.count};
  if (relatives.second_moment != nullptr) {
    coded.contexts = moment_classes(sample, relatives.second_moment, kernel);
    coded.context_count = kMomentContexts;
  }
  Planes planes;
  plane_memory(sample.count, kGridPlanes, planes);
  Grid grid = grid_memory(sample);
  find_grid(sample, data, shape, grid, kernel);
  const std::size_t escapes = find_residuals(sample, data, shape, grid, planes[3], planes, kernel);
  coded.data = planes[3];
  Histogram histogram;
  count_symbols(coded, histogram);
  const double tails =
      static_cast<double>(sample.count) * shape.tail_bits / 8 + 2.0 * static_cast<double>(escapes);
  const double parted = estimate_bytes(histogram, coded.context_count);
  join_contexts(histogram, coded.context_count);
  return {scale * (estimate_bytes(histogram, 1) + tails), scale * (parted + tails)};
}

}  // namespace holdfast
