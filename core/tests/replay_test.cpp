#include "holdfast/replay.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "check.h"
#include "codec/codec_kernel.h"

namespace holdfast {
namespace {

using Bytes = std::vector<std::uint8_t>;
using Floats = std::vector<float>;

struct Settings {
  double rate = 1e-3, decay = 0.1, beta1 = 0.9, beta2 = 0.95, epsilon = 1e-8;
  int step = 100;
};

// A parameter under torch.optim.AdamW, in its order of operations, whose gradients are random.
struct Parameter {
  explicit Parameter(std::size_t count, unsigned seed)
      : random(seed), weight(count), exp_avg(count), exp_avg_sq(count) {
    std::normal_distribution<float> next(0, 0.02f);
    for (float& value : weight) value = next(random);
  }

  void step(const Settings& settings, float gradient_scale = 1e-3f) {
    std::normal_distribution<float> next(0, gradient_scale);
    const double first = 1 - std::pow(settings.beta1, settings.step);
    const double second = std::sqrt(1 - std::pow(settings.beta2, settings.step));
    const auto kept = static_cast<float>(1 - settings.rate * settings.decay);
    const auto share = static_cast<float>(1 - settings.beta1);
    const auto keep = static_cast<float>(settings.beta2);
    const auto add = static_cast<float>(1 - settings.beta2);
    const auto by = static_cast<float>(-settings.rate / first);
    const auto root = static_cast<float>(second), epsilon = static_cast<float>(settings.epsilon);
    for (std::size_t i = 0; i < weight.size(); ++i) {
      const float gradient = next(random);
      exp_avg[i] += share * (gradient - exp_avg[i]);
      exp_avg_sq[i] = keep * exp_avg_sq[i] + add * gradient * gradient;
      weight[i] = kept * weight[i] + by * exp_avg[i] / (std::sqrt(exp_avg_sq[i]) / root + epsilon);
    }
  }

  std::mt19937_64 random;
  Floats weight, exp_avg, exp_avg_sq;
};

// The same elements and relatives of a moment, and of a weight.
struct Case {
  Case(Parameter first, Parameter second) : before(std::move(first)), after(std::move(second)) {}

  const Floats& data(Mode mode) const {
    return mode == Mode::kReplayMoment ? after.exp_avg_sq : after.weight;
  }
  ReplayRelatives relatives(Mode mode) const {
    const Floats& base = mode == Mode::kReplayMoment ? before.exp_avg_sq : before.weight;
    return {base.data(), after.exp_avg.data(), before.exp_avg.data(), after.exp_avg_sq.data()};
  }

  Parameter before, after;
};

Case one_step(std::size_t count, const Settings& settings, float scale = 1e-3f) {
  Parameter parameter(count, 7);
  for (int i = 0; i < 60; ++i) parameter.step(settings, scale);
  Parameter after = parameter;
  after.step(settings, scale);
  return {std::move(parameter), std::move(after)};
}

Bytes encoded(const Case& one, Mode mode, const CodecKernel& kernel) {
  const Floats& data = one.data(mode);
  Bytes out(replay_bytes_max(data.size()) + 1, 0xEE);
  const std::size_t size =
      encode_replay(mode, data.data(), data.size(), one.relatives(mode), out.data(), kernel);
  CHECK_EQ(int{out.back()}, 0xEE);
  out.resize(size);
  return out;
}

// Bits of an element, after coding with every kernel to the same bytes, and decoding with each.
double round_trip(const Case& one, Mode mode) {
  const Bytes first = encoded(one, mode, codec_kernels().back());
  const Floats& data = one.data(mode);
  for (const CodecKernel& kernel : codec_kernels()) {
    CHECK(encoded(one, mode, kernel) == first);
    if (first.empty()) continue;
    Floats target(data.size() + 1, 5.0f);
    CHECK(decode_replay(mode, first, data.size(), one.relatives(mode), target.data(), kernel));
    CHECK(std::memcmp(target.data(), data.data(), 4 * data.size()) == 0);
    CHECK_EQ(target.back(), 5.0f);
  }
  return 8.0 * static_cast<double>(first.size()) / static_cast<double>(data.size());
}

constexpr Mode kModes[] = {Mode::kReplayMoment, Mode::kReplayWeight};

TEST(a_step_is_repeated_whatever_its_constants) {
  const Settings all[] = {
      {},
      {.beta2 = 0.999},
      {.rate = 3.7e-5, .decay = 0, .beta1 = 0.95, .beta2 = 0.98, .step = 3},
      {.rate = 0.02, .decay = 0.01, .epsilon = 1e-6},
      {.beta1 = 0.8731, .beta2 = 0.9913, .epsilon = 1e-10},
  };
  for (const Settings& settings : all) {
    const Case one = one_step(100'000, settings);
    CHECK(round_trip(one, Mode::kReplayMoment) < 0.8);
    CHECK(round_trip(one, Mode::kReplayWeight) < 0.8);
  }
}

TEST(epsilon_is_found_where_it_matters) {
  for (const double epsilon : {1e-8, 3e-8, 1e-7}) {
    const Case one = one_step(100'000, {.beta2 = 0.999, .epsilon = epsilon}, 1e-7f);
    CHECK(round_trip(one, Mode::kReplayWeight) < 0.5);
  }
}

TEST(what_is_no_step_is_left_alone) {
  const Case one = one_step(10'000, {});
  const Case other = {one.before, Parameter(10'000, 9)};
  const Case many = {Parameter(10'000, 7), one.after};
  for (const Mode mode : kModes) {
    CHECK_EQ(round_trip(other, mode), 0.0);
    CHECK_EQ(round_trip(many, mode), 0.0);
    CHECK_EQ(round_trip(one_step(255, {}), mode), 0.0);
    std::uint8_t out[64];
    CHECK_EQ(encode_replay(mode, one.after.weight.data(), 1000, {}, out), std::size_t{0});
    CHECK(!decode_replay(mode, Bytes(100), 1000, {}, out));
  }
}

TEST(every_bit_pattern_comes_back) {
  Case one = one_step(10'000, {});
  const float odd[] = {
      std::numeric_limits<float>::quiet_NaN(),  std::bit_cast<float>(0xFFA12345u),
      std::numeric_limits<float>::infinity(),   -0.0f,
      std::numeric_limits<float>::denorm_min(), -std::numeric_limits<float>::max()};
  std::size_t at = 0;
  for (const float value : odd) {
    for (Floats* values : {&one.after.weight, &one.after.exp_avg, &one.after.exp_avg_sq,
                           &one.before.weight, &one.before.exp_avg, &one.before.exp_avg_sq}) {
      (*values)[at += 37] = value;
    }
  }
  for (const Mode mode : kModes) {
    const double bits = round_trip(one, mode);
    CHECK(bits > 0 && bits < 1.5);
  }
}

TEST(a_payload_that_is_not_whole_is_refused) {
  Case one = one_step(2000, {});
  one.after.weight[5] = 1e30f;
  one.after.exp_avg_sq[5] = 1e30f;
  for (const Mode mode : kModes) {
    const Bytes whole = encoded(one, mode, best_codec_kernel());
    Floats target(2000);
    for (std::size_t size = 0; size < whole.size(); ++size) {
      CHECK(!decode_replay(mode, {whole.data(), size}, 2000, one.relatives(mode), target.data()));
    }
    Bytes longer = whole;
    longer.push_back(0);
    CHECK(!decode_replay(mode, longer, 2000, one.relatives(mode), target.data()));
    Bytes small = whole;  // an escape that a symbol would have said
    std::memset(small.data() + small.size() - 4, 0, 4);
    CHECK(!decode_replay(mode, small, 2000, one.relatives(mode), target.data()));
  }
}

}  // namespace
}  // namespace holdfast
