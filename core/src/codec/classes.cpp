// Classes of scale: how large the second moments of an element's row and column are.
#include <algorithm>

#include "codec/compact_parts.h"

namespace holdfast {
namespace {

struct ClassMemory;
struct SumMemory;
struct CountMemory;
struct MeanMemory;

// Sums of the logarithms of rows and columns; rows that are all 0 are left out.
struct LogSums {
  std::uint32_t* columns;
  std::uint32_t* counts;  // rows that a column has in the sum
  std::int16_t* rows;
  std::uint64_t total = 0, count = 0;
};

constexpr std::int16_t kNoMean = INT16_MIN;

LogSums sum_logs(const Elements& view, const std::uint32_t* squares, const CodecKernel& kernel) {
  LogSums sums = {scratch<std::uint32_t, SumMemory>(view.row),
                  scratch<std::uint32_t, CountMemory>(view.row),
                  scratch<std::int16_t, MeanMemory>(Rows(view).size() + view.row)};
  std::fill_n(sums.columns, view.row, 0u);
  std::fill_n(sums.counts, view.row, 0u);
  std::uint32_t whole = 0;
  Rows(view).each([&](std::size_t row, std::size_t at, std::size_t length, std::size_t column) {
    sums.rows[row] = kNoMean;
    if (kernel.largest_word(squares + at, length, ~0u) == 0) return;
    const std::uint32_t sum =
        kernel.sum_heads(squares + at, length, kLogShift, false, sums.columns + column);
    sums.rows[row] = eighths(sum, length);
    sums.total += sum;
    sums.count += length;
    if (length == view.row) {
      ++whole;
      return;
    }
    for (std::size_t i = column; i < column + length; ++i) ++sums.counts[i];
  });
  for (std::size_t i = 0; i < view.row; ++i) sums.counts[i] += whole;
  return sums;
}

}  // namespace

const std::uint8_t* find_classes(const Elements& view, const float* second_moment, int radius,
                                 const CodecKernel& kernel) {
  const LogSums sums =
      sum_logs(view, reinterpret_cast<const std::uint32_t*>(second_moment), kernel);
  auto* classes = scratch<std::uint8_t, ClassMemory>(view.count);
  const int mean = sums.count > 0 ? eighths(sums.total, sums.count) : 0;
  std::int16_t* columns = sums.rows + Rows(view).size();
  for (std::size_t i = 0; i < view.row; ++i) {
    const std::uint32_t count = sums.counts[i];
    columns[i] = count > 0 ? eighths(sums.columns[i], count) : static_cast<std::int16_t>(mean);
  }
  Rows(view).each([&](std::size_t row, std::size_t at, std::size_t length, std::size_t column) {
    if (sums.rows[row] == kNoMean) {
      std::memset(classes + at, 0, length);
      return;
    }
    const int of_row = sums.rows[row] - 2 * mean + (1 << (kClassShift - 1));
    kernel.find_scales(columns + column, length, of_row, radius, classes + at);
  });
  return classes;
}

}  // namespace holdfast
