// Mode means: second moments as the product of the means of their rows and columns.
#include <algorithm>
#include <cmath>

#include "codec/compact_parts.h"

namespace holdfast {
namespace {

constexpr int kFloorDepth = 320;     // eighths: nothing is decoded below 2^-40 of the largest
constexpr unsigned kUnit = 1;        // means in quarters of octaves
constexpr unsigned kCoarseUnit = 3;  // of many elements that have no grid: octaves
constexpr unsigned kRest = 4;        // rests in units of two octaves
constexpr unsigned kUnitMax = 7;

struct MeanMemory;
struct ColumnMemory;
struct RestMemory;
struct FlagMemory;

struct Means {
  std::int16_t* rows;
  std::int16_t* columns;
  std::uint8_t* zero;  // 1: all of the row is 0
};

Means mean_memory(const Elements& view) {
  const std::size_t rows = Rows(view).size();
  auto* memory = scratch<std::int16_t, MeanMemory>(rows + view.row);
  return {memory, memory + rows, scratch<std::uint8_t, FlagMemory>(rows)};
}

// The logarithm of a positive value, in eighths of octaves.
double log_of(double value) {
  const double log = 8 * (std::log2(value) + 127);
  return std::clamp<double>(log, kLogMin, kLogMax);
}

std::int16_t in_units(double log, unsigned unit) {
  return static_cast<std::int16_t>(std::floor(log / (1 << unit) + 0.5));
}

void find_means(const Elements& view, const float* data, unsigned unit, Means& means,
                const CodecKernel& kernel) {
  const Rows rows(view);
  auto* columns = scratch<double, ColumnMemory>(view.row);
  std::fill_n(columns, view.row, 0.0);
  double sum = 0;
  std::int16_t before = 0;
  rows.each([&](std::size_t row, std::size_t at, std::size_t length, std::size_t column) {
    const double of_row = kernel.sum_values(data + at, length, columns + column);
    sum += of_row;
    means.zero[row] = of_row == 0 ? 1 : 0;
    if (of_row > 0) before = in_units(log_of(of_row / static_cast<double>(length)), unit);
    means.rows[row] = before;
  });
  // A row alone is put right by its columns, whose means are its elements.
  const double mean = rows.size() == 1 ? means.rows[0] * (1 << unit)
                                       : log_of(sum / static_cast<double>(view.count));
  const std::size_t end = view.column + view.count;
  for (std::size_t column = 0; column < view.row; ++column) {
    const std::size_t above = column < view.column ? 1 : 0;
    const std::size_t count = (end + view.row - 1 - column) / view.row - above;
    const double log = columns[column] > 0 ? log_of(columns[column] / static_cast<double>(count))
                                           : (count > 0 ? kLogMin : mean);
    means.columns[column] = in_units(log - mean, unit);
  }
}

void make(const Elements& view, const Means& means, const LogShape& shape,
          const std::uint8_t* rests, float* target, const CodecKernel& kernel) {
  auto* words = reinterpret_cast<std::uint32_t*>(target);
  Rows(view).each([&](std::size_t row, std::size_t at, std::size_t length, std::size_t column) {
    if (means.zero[row] != 0) {
      std::memset(words + at, 0, length * sizeof *words);
      return;
    }
    kernel.make_squares(words + at, length, means.columns + column, means.rows[row], shape,
                        rests != nullptr ? rests + at : nullptr);
  });
}

std::uint8_t* find_rests(const Elements& view, const float* data, const Means& means,
                         const LogShape& shape, const CodecKernel& kernel) {
  auto* rests = scratch<std::uint8_t, RestMemory>(view.count);
  Rows(view).each([&](std::size_t row, std::size_t at, std::size_t length, std::size_t column) {
    if (means.zero[row] != 0) {
      std::memset(rests + at, 128, length);
      return;
    }
    kernel.find_rests(reinterpret_cast<const std::uint32_t*>(data) + at, length,
                      means.columns + column, means.rows[row], shape, rests + at);
  });
  return rests;
}

}  // namespace

std::size_t put_squares(const Elements& elements, const float* data, bool rests, std::uint8_t* out,
                        float* decoded, const CodecKernel& kernel) {
  const std::uint32_t largest =
      kernel.largest_word(reinterpret_cast<const std::uint32_t*>(data), elements.count, ~0u);
  if (largest >= kInfinity) return 0;
  const std::uint32_t width = width_of(elements);
  const Elements view = viewed(elements, width);
  const bool fine = width == 0 && elements.count < kFineCount;
  LogShape shape = {width != 0 || fine ? kUnit : kCoarseUnit, rests && width != 0 ? kRest : 0, 0};
  shape.floor = std::max(static_cast<int>(largest >> kLogShift) - kFloorDepth, kLogMin);
  shape.floor = std::min(shape.floor, kLogMax);
  Means means = mean_memory(view);
  find_means(view, data, shape.unit, means, kernel);
  std::uint8_t* const begin = out;
  out = put(out, width);
  out = put(out, static_cast<std::uint8_t>(shape.unit));
  out = put(out, static_cast<std::uint8_t>(shape.rest));
  out = put(out, static_cast<std::uint16_t>(shape.floor));
  const std::size_t rows = Rows(view).size();
  out += encode_symbols({.data = means.zero, .count = rows}, out, kernel);
  out = put_means(means.rows, rows, out, kernel);
  out = put_means(means.columns, view.row, out, kernel);
  const std::uint8_t* symbols = nullptr;
  if (shape.rest != 0) {
    symbols = find_rests(view, data, means, shape, kernel);
    out += encode_symbols({.data = symbols, .count = view.count}, out, kernel);
  }
  make(view, means, shape, symbols, decoded, kernel);
  return static_cast<std::size_t>(out - begin);
}

bool get_squares(std::span<const std::uint8_t> payload, const Elements& elements, float* target,
                 const CodecKernel& kernel) {
  std::uint32_t width = 0;
  std::uint8_t unit = 0, rest = 0;
  std::uint16_t floor = 0;
  if (!take(payload, width) || width > elements.count) return false;
  if (!take(payload, unit) || !take(payload, rest) || !take(payload, floor)) return false;
  if (unit > kUnitMax || rest > kUnitMax || floor < kLogMin || floor > kLogMax) return false;
  const Elements view = viewed(elements, width);
  const std::size_t rows = Rows(view).size();
  Means means = mean_memory(view);
  if (!decode_symbols(payload, {means.zero, rows}, nullptr, 1, kernel)) return false;
  if (std::any_of(means.zero, means.zero + rows, [](auto flag) { return flag > 1; })) return false;
  if (!get_means(payload, means.rows, rows, kernel)) return false;
  if (!get_means(payload, means.columns, view.row, kernel)) return false;
  const LogShape shape = {unit, rest, floor};
  std::uint8_t* symbols = nullptr;
  if (rest != 0) {
    symbols = scratch<std::uint8_t, RestMemory>(view.count);
    if (!decode_symbols(payload, {symbols, view.count}, nullptr, 1, kernel)) return false;
  }
  make(view, means, shape, symbols, target, kernel);
  return payload.empty();
}

}  // namespace holdfast
