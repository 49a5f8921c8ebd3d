// The centres of the codec "excp": k-means in one dimension.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "holdfast/excp.h"

namespace holdfast {

// Equal values, or values that lie close together.
struct Point {
  double sum = 0;
  double count = 0;
};

// What is left of a tensor, from which its centres are found; the same whatever the chunks.
class Remains {
 public:
  explicit Remains(bool all);

  // Takes the next elements that are not zero.
  void add(const float* values, std::size_t count);

  // 15 centres, or the elements themselves where they are no more. To be asked once.
  Centres centres(bool half);

 private:
  struct Drawn {
    std::uint64_t ticket;
    float value;
  };

  void draw(const float* values, std::size_t count);
  void keep_lowest();
  void put_in_bins(const float* values, std::size_t count);
  std::vector<Point> points_of_sample();

  std::uint64_t count_ = 0;
  std::vector<Drawn> drawn_;     // those of the lowest tickets: a sample without replacement
  std::uint64_t limit_ = ~0ull;  // a ticket above is not among the lowest
  std::vector<Point> bins_;      // of all elements, by their upper 16 bits; or empty
};

// 15 centres of points in ascending order, more than 15: from quantiles on, 25 rounds of Lloyd's
// algorithm (S. Lloyd, "Least squares quantization in PCM", 1982).
Centres lloyd_centres(const std::vector<Point>& points);

// Those of the least sum of squares, by dynamic programming whose rows are monotone: X. Wu,
// "Optimal quantization by matrix searching", J. Algorithms 12 (1991), with divide and conquer in
// place of matrix searching: O(k n log n).
Centres optimal_centres(const std::vector<Point>& points);

// The largest value that is nearer to the lower of two centres, or as near.
float limit_between(float lower, float upper);

}  // namespace holdfast
