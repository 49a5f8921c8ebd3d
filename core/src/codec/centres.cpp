#include "codec/centres.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace holdfast {
namespace {

constexpr std::size_t kSampleCount = 256 * kCentresMax;  // 256 a centre, as faiss takes
constexpr int kRounds = 25;
constexpr std::size_t kBins = 1 << 16;

// A number that looks random for each number, and another for another. Sebastiano Vigna's
// SplitMix64, public domain.
std::uint64_t ticket_of(std::uint64_t number) {
  std::uint64_t mixed = (number + 1) * 0x9E3779B97F4A7C15;
  mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9;
  mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB;
  return mixed ^ mixed >> 31;
}

// Bits in the order of the numbers.
std::uint32_t ordered(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  return bits >> 31 != 0 ? ~bits : bits | 0x80000000;
}

// The nearest number that 16 bits of float hold, ties to even; infinity where that is too large.
float rounded_to_half(float value) {
  int exponent;
  std::frexp(value, &exponent);  // |value| in [2^(exponent - 1), 2^exponent)
  const double step = std::ldexp(1.0, std::max(exponent - 11, -24));
  const double rounded = std::nearbyint(value / step) * step;
  return std::fabs(rounded) > 65504 ? std::copysign(INFINITY, value) : static_cast<float>(rounded);
}

double mean_of(const Point& point) {
  return point.sum / point.count;
}

// Sums of all points in front of each.
std::vector<Point> sums_of(const std::vector<Point>& points) {
  std::vector<Point> sums(points.size() + 1);
  for (std::size_t i = 0; i < points.size(); ++i) {
    sums[i + 1] = {sums[i].sum + points[i].sum, sums[i].count + points[i].count};
  }
  return sums;
}

Point between(const std::vector<Point>& sums, std::size_t first, std::size_t end) {
  return {sums[end].sum - sums[first].sum, sums[end].count - sums[first].count};
}

// One row after the other: the best partition of the first points into one cluster more.
class Partition {
 public:
  explicit Partition(const std::vector<Point>& points)
      : sums_(sums_of(points)), count_(points.size()), before_(count_ + 1), least_(count_ + 1) {
    for (std::size_t end = 1; end <= count_; ++end) before_[end] = cost(0, end);
  }

  Centres solve() {
    for (std::size_t clusters = 2; clusters <= kCentresMax; ++clusters) {
      cuts_.emplace_back(count_ + 1);
      find_cuts(clusters, count_, clusters - 1, count_ - 1);
      std::swap(before_, least_);
    }
    Centres found = {.count = kCentresMax};
    std::size_t end = count_;
    for (std::size_t j = kCentresMax; j-- > 0;) {
      const std::size_t first = j > 0 ? cuts_[j - 1][end] : 0;
      found.values[j] = static_cast<float>(mean_of(between(sums_, first, end)));
      end = first;
    }
    return found;
  }

 private:
  // The sum of squares about the mean, less the sum of squares, which all partitions share.
  double cost(std::size_t first, std::size_t end) const {
    const Point all = between(sums_, first, end);
    return -all.sum * all.sum / all.count;
  }

  // For each end from `low` to `high`: where its last cluster begins, between `first` and `last`.
  void find_cuts(std::size_t low, std::size_t high, std::size_t first, std::size_t last) {
    if (low > high) return;
    const std::size_t end = (low + high) / 2;
    std::size_t cut = first;
    double least = INFINITY;
    for (std::size_t at = first; at <= std::min(end - 1, last); ++at) {
      const double found = before_[at] + cost(at, end);
      if (found < least) {
        least = found;
        cut = at;
      }
    }
    least_[end] = least;
    cuts_.back()[end] = static_cast<std::uint32_t>(cut);
    find_cuts(low, end - 1, first, cut);
    find_cuts(end + 1, high, cut, last);
  }

  const std::vector<Point> sums_;
  const std::size_t count_;
  std::vector<double> before_, least_;  // by end
  std::vector<std::vector<std::uint32_t>> cuts_;
};

}  // namespace

float limit_between(float lower, float upper) {
  const double middle = (static_cast<double>(lower) + upper) / 2;
  const auto limit = static_cast<float>(middle);
  return limit > middle ? std::nextafter(limit, -INFINITY) : limit;
}

Centres lloyd_centres(const std::vector<Point>& points) {
  const std::vector<Point> sums = sums_of(points);
  Centres found = {.count = kCentresMax};
  for (std::size_t j = 0; j < kCentresMax; ++j) {
    const std::size_t place = (2 * j + 1) * points.size() / (2 * kCentresMax);
    found.values[j] = static_cast<float>(mean_of(points[place]));
  }
  for (int round = 0; round < kRounds; ++round) {
    float* const centres = found.values;
    std::size_t first = 0;
    for (std::size_t j = 0; j < kCentresMax; ++j) {
      const double limit =
          j + 1 < kCentresMax ? limit_between(centres[j], centres[j + 1]) : INFINITY;
      auto beyond =
          std::partition_point(points.begin() + static_cast<std::ptrdiff_t>(first), points.end(),
                               [limit](const Point& point) { return mean_of(point) <= limit; });
      const auto end = static_cast<std::size_t>(beyond - points.begin());
      if (end > first) centres[j] = static_cast<float>(mean_of(between(sums, first, end)));
      first = end;
    }
  }
  return found;
}

Centres optimal_centres(const std::vector<Point>& points) {
  return Partition(points).solve();
}

Remains::Remains(bool all) : bins_(all ? kBins : 0) {
  drawn_.reserve(4 * kSampleCount);
}

void Remains::add(const float* values, std::size_t count) {
  draw(values, count);
  if (!bins_.empty()) put_in_bins(values, count);
  count_ += count;
}

void Remains::draw(const float* values, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint64_t ticket = ticket_of(count_ + i);
    if (ticket > limit_) continue;
    drawn_.push_back({ticket, values[i]});
    if (drawn_.size() == 4 * kSampleCount) keep_lowest();
  }
}

void Remains::keep_lowest() {
  if (drawn_.size() <= kSampleCount) return;
  const auto last = drawn_.begin() + kSampleCount - 1;
  std::nth_element(drawn_.begin(), last, drawn_.end(),
                   [](const Drawn& a, const Drawn& b) { return a.ticket < b.ticket; });
  limit_ = last->ticket;
  drawn_.resize(kSampleCount);
}

void Remains::put_in_bins(const float* values, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    Point& bin = bins_[ordered(values[i]) >> 16];
    bin.sum += values[i];
    bin.count += 1;
  }
}

std::vector<Point> Remains::points_of_sample() {
  keep_lowest();
  std::sort(drawn_.begin(), drawn_.end(),
            [](const Drawn& a, const Drawn& b) { return a.value < b.value; });
  std::vector<Point> points;
  points.reserve(drawn_.size());
  for (const Drawn& drawn : drawn_) points.push_back({drawn.value, 1});
  return points;
}

Centres Remains::centres(bool half) {
  std::vector<Point> points = points_of_sample();
  if (count_ <= kCentresMax) {
    Centres exact;
    for (const Point& point : points) exact.values[exact.count++] = static_cast<float>(point.sum);
    return exact;
  }
  const bool all = !bins_.empty();
  if (all) {
    std::erase_if(bins_, [](const Point& bin) { return bin.count == 0; });
    if (bins_.size() > kCentresMax) points = std::move(bins_);
  }
  Centres found = all ? optimal_centres(points) : lloyd_centres(points);
  for (std::size_t j = 0; half && j < found.count; ++j) {
    found.values[j] = rounded_to_half(found.values[j]);
  }
  return found;
}

}  // namespace holdfast
