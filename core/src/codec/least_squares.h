// Least squares with a few unknowns, row by row: by Givens rotations, so that nothing is squared.
#pragma once

#include <cmath>
#include <cstddef>

namespace holdfast {

// Finds x with the least sum of (row · x - value)^2.
template <std::size_t Unknowns>
class LeastSquares {
 public:
  // Adds a row; drops one that is not finite. Clang would call it, and the row would go by memory.
  [[gnu::always_inline]] void add(const double (&row)[Unknowns], double value) {
    double rest[Unknowns + 1];
    double sum = 0;
    for (std::size_t j = 0; j < Unknowns; ++j) sum += rest[j] = row[j];
    rest[Unknowns] = value;
    if (!std::isfinite(sum)) return;
    ++rows_;
    for (std::size_t i = 0; i < Unknowns; ++i) {
      if (rest[i] == 0) continue;
      const double length = std::sqrt(r_[i][i] * r_[i][i] + rest[i] * rest[i]);
      const double cosine = r_[i][i] / length, sine = rest[i] / length;
      for (std::size_t j = i; j <= Unknowns; ++j) {
        const double upper = r_[i][j];
        r_[i][j] = cosine * upper + sine * rest[j];
        rest[j] = cosine * rest[j] - sine * upper;
      }
    }
  }

  std::size_t rows() const { return rows_; }

  // Returns false where the rows do not tell the unknowns apart.
  bool solve(double* result) const {
    for (std::size_t i = Unknowns; i-- > 0;) {
      if (!(std::fabs(r_[i][i]) > 0)) return false;
      double value = r_[i][Unknowns];
      for (std::size_t j = i + 1; j < Unknowns; ++j) value -= r_[i][j] * result[j];
      result[i] = value / r_[i][i];
    }
    return true;
  }

 private:
  double r_[Unknowns][Unknowns + 1] = {};
  std::size_t rows_ = 0;
};

}  // namespace holdfast
