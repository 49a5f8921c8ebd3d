// The same bytes on every kind of machine: what codecs make of elements that are made of integers
// alone, as hashes that stand here. `make arm` runs this as a machine of ARM's does.
#include <cstring>
#include <vector>

#include "check.h"
#include "codec/codec_kernel.h"
#include "holdfast/checksum.h"
#include "holdfast/compact.h"
#include "holdfast/excp.h"
#include "holdfast/lossless.h"
#include "holdfast/replay.h"

namespace holdfast {
namespace {

constexpr std::size_t kRow = 256, kRows = 300, kCount = kRow * kRows;

using Bytes = std::vector<std::uint8_t>;
using Floats = std::vector<float>;

// Numerical Recipes' generator, and about normal numbers out of it.
struct Random {
  std::uint64_t state;

  std::uint32_t next() {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<std::uint32_t>(state >> 32);
  }
  float about_normal(float scale) {
    int sum = 0;
    for (int i = 0; i < 4; ++i) sum += static_cast<int>(next() >> 8 & 0xFFFF);
    return static_cast<float>(sum - 131070) * 3.0517578e-5f * 0.739085133f * scale;
  }
};

// A parameter before and after a step of Adam, each product rounded by itself.
struct Parameter {
  Floats weight, exp_avg, exp_avg_sq;
};

struct Step {
  Parameter before, after;

  Step() {
    Random random = {20240614};
    for (Parameter* one : {&before, &after}) {
      for (Floats* values : {&one->weight, &one->exp_avg, &one->exp_avg_sq}) values->resize(kCount);
    }
    for (std::size_t i = 0; i < kCount; ++i) {
      const auto own = static_cast<float>(1u << (random.next() >> 20) % 6);
      const float scale = 0x1p-17f * own * static_cast<float>(1 + i / kRow % 17) *
                          static_cast<float>(1 + i % kRow % 13);
      before.weight[i] = random.about_normal(0x1p-5f);
      before.exp_avg[i] = random.about_normal(scale);
      const float root = scale + 0.25f * random.about_normal(scale);
      before.exp_avg_sq[i] = root * root;
      step(i, random.about_normal(scale));
    }
  }

  void step(std::size_t i, float gradient) {
    const volatile float moved = 0.1f * (gradient - before.exp_avg[i]);
    after.exp_avg[i] = before.exp_avg[i] + moved;
    const volatile float kept = 0.95f * before.exp_avg_sq[i];
    const volatile float share = 0.05f * gradient;
    const volatile float square = share * gradient;
    after.exp_avg_sq[i] = kept + square;
    const volatile float decayed = 0.9999f * before.weight[i];
    const volatile float by = -1e-3f * after.exp_avg[i];
    const volatile float below = __builtin_sqrtf(after.exp_avg_sq[i]) + 1e-8f;
    const volatile float quotient = by / below;
    after.weight[i] = decayed + quotient;
  }
};

const Step& made() {
  static const Step step;
  return step;
}

constexpr Elements kElements = {
    .count = kCount, .item_bytes = 4, .kind = Kind::kFloat, .row = kRow, .column = 0};

std::uint64_t hash_of(const void* data, std::size_t size) {
  return xxh3_64(data, size, 0);
}

void check(const char* what, std::uint64_t found, std::uint64_t expected) {
  if (found == expected) return;
  char text[160];
  std::snprintf(text, sizeof text, "%s: found 0x%016llX, expected 0x%016llX", what,
                static_cast<unsigned long long>(found), static_cast<unsigned long long>(expected));
  check::report(false, __FILE__, __LINE__, text);
}

// Codes by every set of instructions, and decodes.
void check_lossless(const char* what, const Elements& elements, const void* data,
                    const Relatives& relatives, Mode mode, std::uint64_t expected) {
  for (const CodecKernel& kernel : codec_kernels()) {
    Bytes out(lossless_bytes_max(elements)), back(elements.size_bytes());
    const Encoded coded = encode_lossless(elements, data, relatives, out.data(), kernel);
    CHECK(coded.mode == mode);
    check(what, hash_of(out.data(), coded.size_bytes), expected);
    CHECK(decode_lossless(mode, {out.data(), coded.size_bytes}, elements, relatives, back.data(),
                          kernel));
    CHECK(std::memcmp(back.data(), data, back.size()) == 0);
  }
}

// Hashes what decoding gives: that is what must not depend on the machine.
void check_lossy(const char* what, Mode mode, const Reference& reference, std::uint64_t expected,
                 std::uint64_t decoded, auto encode) {
  for (const CodecKernel& kernel : codec_kernels()) {
    Bytes out(compact_bytes_max(kElements));
    Floats told(kCount), back(kCount);
    const Lossy coded = encode(out.data(), told.data(), kernel);
    CHECK(coded.mode == mode);
    check(what, hash_of(out.data(), coded.size_bytes), expected);
    CHECK(decode_compact(mode, {out.data(), coded.size_bytes}, kElements, reference, back.data(),
                         kernel));
    CHECK(std::memcmp(back.data(), told.data(), 4 * kCount) == 0);
    check(what, hash_of(back.data(), 4 * kCount), decoded);
  }
}

std::vector<std::uint16_t> halves_of(const Floats& values) {
  std::vector<std::uint16_t> halves(values.size());
  std::vector<std::uint32_t> words(values.size());
  std::memcpy(words.data(), values.data(), 4 * values.size());
  best_codec_kernel().to_bf16(words.data(), halves.data(), values.size());
  return halves;
}

}  // namespace

TEST(lossless_modes_are_the_same) {
  const Parameter &now = made().after, &old = made().before;
  check_lossless("weight", kElements, now.weight.data(), {}, Mode::kPlanes, 0x9712D071935D3676);
  check_lossless("exp_avg_sq", kElements, now.exp_avg_sq.data(), {}, Mode::kGrid,
                 0x614FEA2F2077EF6F);
  check_lossless("exp_avg", kElements, now.exp_avg.data(), {nullptr, now.exp_avg_sq.data()},
                 Mode::kGridOfMoment, 0xCE28DF2093964C4B);
  const Relatives base = {nullptr, nullptr, old.weight.data()};
  check_lossless("difference", kElements, now.weight.data(), base, Mode::kDifference,
                 0x3E6BF00908E8002D);
  const auto halves = halves_of(now.weight), before = halves_of(old.weight);
  Elements half = kElements;
  half.item_bytes = 2;
  half.kind = Kind::kBf16;
  check_lossless("bf16", half, halves.data(), {}, Mode::kPlanes, 0x81AEF73B5E9F25E6);
  const Relatives half_base = {nullptr, nullptr, before.data()};
  check_lossless("bf16 difference", half, halves.data(), half_base, Mode::kDifference,
                 0xAEF55E4B42C4285D);
}

TEST(lossy_modes_are_the_same) {
  const Parameter &now = made().after, &old = made().before;
  const Reference squares = {nullptr, now.exp_avg_sq.data()};
  const Reference base = {old.weight.data()};
  const Reference both = {old.weight.data(), now.exp_avg_sq.data()};
  check_lossy("means", Mode::kMeans, {}, 0xBEA78748085BF098, 0x58F54EF9B960A6CB,
              [&](auto* out, auto* told, auto& kernel) {
                return encode_means(kElements, now.exp_avg_sq.data(), true, out, told, kernel);
              });
  check_lossy("moment", Mode::kMoment, squares, 0xDF7B207B96BE25A7, 0x8C90E223627A055C,
              [&](auto* out, auto* told, auto& kernel) {
                return encode_moment(kElements, now.exp_avg.data(), {.step = 1.5}, squares, out,
                                     told, kernel);
              });
  check_lossy("steps in classes", Mode::kStepsInClasses, both, 0x06F989325C646C90,
              0xF8A6421BAC761FC7, [&](auto* out, auto* told, auto& kernel) {
                return encode_steps(kElements, now.weight.data(), {.step = 0.8}, both, out, told,
                                    kernel);
              });
  check_lossy("steps", Mode::kSteps, base, 0xAB9A9D4C675E9B79, 0xDF9E67CC8E115109,
              [&](auto* out, auto* told, auto& kernel) {
                return encode_steps(kElements, now.weight.data(), {.step = 1.6}, base, out, told,
                                    kernel);
              });
  check_lossy("rounding", Mode::kRounding, base, 0xAEF55E4B42C4285D, 0x189373A72D438A81,
              [&](auto* out, auto* told, auto& kernel) {
                const Steps exact = {.step = 1, .bound = Bound::kBf16};
                return encode_steps(kElements, now.weight.data(), exact, base, out, told, kernel);
              });
}

TEST(replayed_steps_are_the_same) {
  const Parameter &now = made().after, &old = made().before;
  for (const Mode mode : {Mode::kReplayMoment, Mode::kReplayWeight}) {
    const bool moment = mode == Mode::kReplayMoment;
    const Floats& data = moment ? now.exp_avg_sq : now.weight;
    const ReplayRelatives relatives = {moment ? old.exp_avg_sq.data() : old.weight.data(),
                                       now.exp_avg.data(), old.exp_avg.data(),
                                       now.exp_avg_sq.data()};
    for (const CodecKernel& kernel : codec_kernels()) {
      Bytes out(replay_bytes_max(kCount));
      Floats back(kCount);
      const std::size_t size =
          encode_replay(mode, data.data(), kCount, relatives, out.data(), kernel);
      CHECK(size > 0);
      check(moment ? "replayed moment" : "replayed weight", hash_of(out.data(), size),
            moment ? 0x5D69CD7084CE7A21 : 0x85679364AFB4549C);
      CHECK(decode_replay(mode, {out.data(), size}, kCount, relatives, back.data(), kernel));
      CHECK(std::memcmp(back.data(), data.data(), 4 * kCount) == 0);
    }
  }
}

TEST(excp_is_the_same) {
  const Parameter &now = made().after, &old = made().before;
  const ExcpPart part = {
      kCount, now.weight.data(), old.weight.data(), now.exp_avg.data(), now.exp_avg_sq.data(),
      nullptr};
  for (const CodecKernel& kernel : codec_kernels()) {
    const ExcpSurvey survey = survey_excp({&part, 1}, {}, kernel);
    CHECK(survey.usable);
    Bytes out(excp_bytes_max(kCount));
    Floats weight(kCount), moment(kCount);
    ExcpRelatives relatives = {old.weight.data()};
    const std::size_t size =
        encode_excp(survey, ExcpRole::kWeight, part, relatives, out.data(), weight.data(), kernel);
    check("excp weight", hash_of(out.data(), size), 0x983CC41EEA7AB08B);
    check("excp decoded weight", hash_of(weight.data(), 4 * kCount), 0x84B5D46DD070A494);
    relatives.weight = weight.data();
    const std::size_t more =
        encode_excp(survey, ExcpRole::kExpAvg, part, relatives, out.data(), moment.data(), kernel);
    check("excp moment", hash_of(out.data(), more), 0x79E03A39715E1A70);
    check("excp decoded moment", hash_of(moment.data(), 4 * kCount), 0x891E5809A121C6FB);
  }
}

}  // namespace holdfast
