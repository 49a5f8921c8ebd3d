#include "holdfast/compact.h"

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "check.h"
#include "codec/codec_kernel.h"

namespace holdfast {
namespace {

using Bytes = std::vector<std::uint8_t>;
using Floats = std::vector<float>;

struct Group {
  Floats square, moment, weight, base;
};

Group group(std::size_t count, std::size_t row, unsigned seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<double> next;
  Floats rows(count / row + 2), columns(row);
  for (float& scale : rows) scale = static_cast<float>(std::exp2(2 * next(random)));
  for (float& scale : columns) scale = static_cast<float>(std::exp2(next(random)));
  Group made;
  for (std::size_t i = 0; i < count; ++i) {
    const double scale = rows[i / row] * columns[i % row], gradient = next(random);
    made.square.push_back(static_cast<float>(1e-9 * scale * gradient * gradient));
    made.moment.push_back(static_cast<float>(1e-5 * std::sqrt(scale) * next(random)));
    made.base.push_back(static_cast<float>(0.02 * next(random)));
    const double change = 1e-3 * std::pow(scale, 0.1) * next(random);
    made.weight.push_back(static_cast<float>(made.base.back() + change));
  }
  return made;
}

struct Made {
  Lossy lossy;
  Bytes payload;
  Floats decoded;
};

// Codes with every set of instructions, which must give the same; decodes with every one.
template <class Encode>
Made same_from_all(const Elements& elements, const Reference& reference, Encode encode) {
  Made first;
  for (const CodecKernel& kernel : codec_kernels()) {
    Bytes out(compact_bytes_max(elements));
    Floats decoded(elements.count), target(elements.count + 1, 5.0f);
    const Lossy lossy = encode(out.data(), decoded.data(), kernel);
    out.resize(lossy.size_bytes);
    if (first.payload.empty()) first = {lossy, out, decoded};
    CHECK(lossy.mode == first.lossy.mode);
    CHECK(out == first.payload);
    CHECK(lossy.loss.squared_error == first.lossy.loss.squared_error);
    CHECK(lossy.loss.largest_error == first.lossy.loss.largest_error);
    CHECK(lossy.loss.energy == first.lossy.loss.energy);
    CHECK(decode_compact(lossy.mode, out, elements, reference, target.data(), kernel));
    CHECK(std::memcmp(target.data(), first.decoded.data(), elements.size_bytes()) == 0);
    CHECK(target.back() == 5.0f);
  }
  return first;
}

void check_group(const Elements& elements, const Group& made, const Steps& steps) {
  const Made square = same_from_all(elements, {}, [&](auto* out, auto* decoded, auto& kernel) {
    return encode_means(elements, made.square.data(), elements.count % 2 == 0, out, decoded,
                        kernel);
  });
  CHECK(square.lossy.mode == Mode::kMeans);
  const Reference moments = {.second_moment = square.decoded.data()};
  const Made moment = same_from_all(elements, moments, [&](auto* out, auto* decoded, auto& kernel) {
    return encode_moment(elements, made.moment.data(), {.step = 1.5}, moments, out, decoded,
                         kernel);
  });
  CHECK(moment.lossy.mode == Mode::kMoment);
  for (const float* second_moment : {static_cast<const float*>(nullptr), square.decoded.data()}) {
    const Reference reference = {.base = made.base.data(), .second_moment = second_moment};
    const Made weight =
        same_from_all(elements, reference, [&](auto* out, auto* decoded, auto& kernel) {
          return encode_steps(elements, made.weight.data(), steps, reference, out, decoded, kernel);
        });
    CHECK(weight.lossy.mode == (second_moment ? Mode::kStepsInClasses : Mode::kSteps));
  }
}

TEST(every_set_of_instructions_writes_and_reads_the_same) {
  const Steps balanced = {.step = 1.6}, share = {.bound = Bound::kShare, .limit = 0.05};
  for (const Steps& steps : {balanced, share}) {
    check_group({40001, 4, Kind::kFloat, 129, 77}, group(40001, 129, 1), steps);
    check_group({30000, 4, Kind::kFloat, 1, 0}, group(30000, 1, 2), steps);
    check_group({1 << 17, 4, Kind::kFloat, 1, 0}, group(1 << 17, 1, 3), steps);
    check_group({77, 4, Kind::kFloat, 7, 3}, group(77, 7, 4), steps);
  }
}

TEST(a_rounding_is_kept) {
  const Group made = group(20'000, 200, 8);
  const Elements elements = {20'000, 4, Kind::kFloat, 200, 0};
  const Reference reference = {.base = made.base.data()};
  const Made weight =
      same_from_all(elements, reference, [&](auto* out, auto* decoded, auto& kernel) {
        const Steps steps = {.bound = Bound::kBf16};
        return encode_steps(elements, made.weight.data(), steps, reference, out, decoded, kernel);
      });
  CHECK(weight.lossy.mode == Mode::kRounding);
  std::vector<std::uint16_t> words(20'000);
  for (const CodecKernel& kernel : codec_kernels()) {
    kernel.to_bf16(reinterpret_cast<const std::uint32_t*>(made.weight.data()), words.data(),
                   20'000);
    CHECK(kernel.is_bf16(words.data(),
                         reinterpret_cast<const std::uint32_t*>(weight.decoded.data()), 20'000));
  }
  for (std::size_t size = 0; size < weight.payload.size(); size += 97) {
    Floats target(20'000);
    CHECK(!decode_compact(Mode::kRounding, {weight.payload.data(), size}, elements, reference,
                          target.data()));
  }
}

TEST(halves_that_keep_their_rounding_are_decoded_as_a_difference) {
  const Group made = group(20'000, 200, 8);
  std::vector<std::uint16_t> weight(20'000), base(20'000), decoded(20'000), target(20'000);
  const CodecKernel& kernel = best_codec_kernel();
  kernel.to_bf16(reinterpret_cast<const std::uint32_t*>(made.weight.data()), weight.data(), 20'000);
  kernel.to_bf16(reinterpret_cast<const std::uint32_t*>(made.base.data()), base.data(), 20'000);
  const Elements elements = {20'000, 2, Kind::kBf16, 200, 0};
  const Reference reference = {.base = base.data()};
  Bytes out(compact_bytes_max(elements));
  const Lossy coded = encode_steps(elements, weight.data(), {.bound = Bound::kBf16}, reference,
                                   out.data(), decoded.data());
  CHECK(coded.mode == Mode::kDifference);
  CHECK(decode_compact(coded.mode, {out.data(), coded.size_bytes}, elements, reference,
                       target.data()));
  CHECK(target == weight);
}

TEST(damage_touches_nothing_else) {
  std::mt19937_64 random(9);
  const std::size_t count = 64 * 300;
  const Elements elements = {count, 4, Kind::kFloat, 300, 0};
  const Group made = group(count, 300, 5);
  const Reference reference = {.base = made.base.data(), .second_moment = made.square.data()};
  std::vector<Made> all(3);
  for (Made& each : all) each = {{}, Bytes(compact_bytes_max(elements)), Floats(count)};
  all[0].lossy = encode_means(elements, made.square.data(), true, all[0].payload.data(),
                              all[0].decoded.data());
  all[1].lossy = encode_moment(elements, made.moment.data(), {.step = 1.5}, reference,
                               all[1].payload.data(), all[1].decoded.data());
  all[2].lossy = encode_steps(elements, made.weight.data(), {.step = 1.6}, reference,
                              all[2].payload.data(), all[2].decoded.data());
  for (const Made& each : all) {
    for (int trial = 0; trial < 600; ++trial) {
      const std::size_t size = each.lossy.size_bytes;
      // Memory that ends with the payload: reading on is seen by a sanitizer.
      Bytes damaged(each.payload.data(), each.payload.data() + size);
      damaged[random() % (trial % 2 ? size : 40)] ^= static_cast<std::uint8_t>(1 << random() % 8);
      if (trial % 5 == 0) damaged = Bytes(damaged.data(), damaged.data() + random() % size);
      Floats target(count);
      const CodecKernel& kernel = codec_kernels()[random() % codec_kernels().size()];
      decode_compact(each.lossy.mode, damaged, elements, reference, target.data(), kernel);
    }
  }
}

}  // namespace
}  // namespace holdfast
