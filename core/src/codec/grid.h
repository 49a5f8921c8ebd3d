// Modes grid and grid of moment: f32 by the means of row and column (docs/codecs.md, "Grid").
#pragma once

#include <algorithm>

#include "holdfast/lossless.h"

namespace holdfast {

// Rows that a run of elements touches; the first and the last may be cut.
struct Rows {
  explicit Rows(const Elements& elements)
      : row_(elements.row), column_(elements.column), count_(elements.count) {}

  std::size_t size() const { return (column_ + count_ + row_ - 1) / row_; }

  // Calls body(row, first element, elements, column of the first).
  template <class Body>
  void each(Body body) const {
    std::size_t at = 0;
    for (std::size_t row = 0; at < count_; ++row) {
      const std::size_t column = row == 0 ? column_ : 0;
      const std::size_t length = std::min(row_ - column, count_ - at);
      body(row, at, length, column);
      at += length;
    }
  }

 private:
  std::size_t row_, column_, count_;
};

// A mean in eighths, rounded; of at least one element.
inline std::int16_t eighths(std::uint64_t sum, std::uint64_t count) {
  return static_cast<std::int16_t>((16 * sum + count) / (2 * count));
}

// A vector of means ⇄ differences, zigzag, as two planes of coded symbols.
std::uint8_t* put_means(const std::int16_t* means, std::size_t count, std::uint8_t* out,
                        const CodecKernel& kernel);
bool get_means(std::span<const std::uint8_t>& coded, std::int16_t* means, std::size_t count,
               const CodecKernel& kernel);

// Whether elements are of a dtype and shape that a grid can be laid over.
bool has_grid(const Elements& elements);

// Returns the bytes of the payload, 0 when too many heads escape.
std::size_t encode_grid(Mode mode, const Elements& elements, const std::uint32_t* data,
                        const Relatives& relatives, std::uint8_t* out, const CodecKernel& kernel);

bool decode_grid(Mode mode, std::span<const std::uint8_t> payload, const Elements& elements,
                 const Relatives& relatives, std::uint32_t* target, const CodecKernel& kernel);

// Bytes of a grid, and of one in the contexts of the second moment, where there is one.
struct GridBytes {
  double alone, by_moment;
};

// Of elements of which this is a sample, one in `scale`.
GridBytes estimate_grid(const Elements& sample, const std::uint32_t* data,
                        const Relatives& relatives, double scale, const CodecKernel& kernel);

}  // namespace holdfast
