#include "holdfast/excp.h"

#include <bit>
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

constexpr ExcpRole kRoles[] = {ExcpRole::kWeight, ExcpRole::kExpAvg, ExcpRole::kExpAvgSq};

// The tensors of a parameter some steps after its base.
struct Unit {
  Floats weight, base, exp_avg, exp_avg_sq;

  ExcpPart part(std::size_t first, std::size_t count) const {
    return {count,
            weight.data() + first,
            base.data() + first,
            exp_avg.data() + first,
            exp_avg_sq.data() + first,
            nullptr};
  }

  std::vector<ExcpPart> parts(std::size_t most) const {
    std::vector<ExcpPart> found;
    for (std::size_t at = 0; at < weight.size(); at += most) {
      found.push_back(part(at, std::min(most, weight.size() - at)));
    }
    return found;
  }
};

Unit unit_of(std::size_t count, unsigned seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> next;
  Unit unit;
  for (std::size_t i = 0; i < count; ++i) {
    unit.base.push_back(0.02f * next(random));
    unit.weight.push_back(unit.base.back() + 1e-4f * next(random));
    unit.exp_avg_sq.push_back(std::exp2(3 * next(random) - 40));
    unit.exp_avg.push_back(std::sqrt(unit.exp_avg_sq.back()) * next(random));
  }
  return unit;
}

struct Coded {
  Bytes payload;
  Floats decoded;
};

// A chunk of a unit, as it is written: the weight, then the moments.
std::vector<Coded> coded(const ExcpSurvey& survey, const ExcpPart& part,
                         const CodecKernel& kernel) {
  std::vector<Coded> made;
  ExcpRelatives relatives = {.base = part.base};
  for (const ExcpRole role : kRoles) {
    Coded& next = made.emplace_back(Bytes(excp_bytes_max(part.count)), Floats(part.count));
    next.payload.resize(encode_excp(survey, role, part, relatives, next.payload.data(),
                                    next.decoded.data(), kernel));
    if (role == ExcpRole::kWeight) relatives.weight = next.decoded.data();
    if (role == ExcpRole::kExpAvg) relatives.exp_avg = next.decoded.data();
  }
  return made;
}

ExcpRelatives relatives_of(const ExcpPart& part, const std::vector<Coded>& made) {
  return {part.base, made[0].decoded.data(), made[1].decoded.data()};
}

bool same_bits(const Floats& one, const Floats& other) {
  return one.size() == other.size() && std::memcmp(one.data(), other.data(), 4 * one.size()) == 0;
}

bool same(const ExcpSurvey& one, const ExcpSurvey& other) {
  const auto bits = [](const ExcpSurvey& survey) {
    std::vector<std::uint32_t> found = {std::bit_cast<std::uint32_t>(survey.median),
                                        std::bit_cast<std::uint32_t>(survey.threshold),
                                        std::bit_cast<std::uint32_t>(survey.moment_threshold)};
    for (const Centres& centres : survey.centres) {
      found.push_back(static_cast<std::uint32_t>(centres.count));
      for (const float value : centres.values) found.push_back(std::bit_cast<std::uint32_t>(value));
    }
    return found;
  };
  return one.usable == other.usable && bits(one) == bits(other);
}

TEST(every_kernel_writes_the_same_bytes_and_reads_what_was_promised) {
  for (const std::size_t count : {40, 257, 5000, 70001}) {
    const Unit unit = unit_of(count, static_cast<unsigned>(count));
    for (int kind = 0; kind < 4; ++kind) {
      ExcpRule rule;
      rule.per_element = kind == 1;
      rule.optimal = kind == 2;
      rule.cap = kind == 3 ? 0.1f : 2.5f;
      const std::vector<ExcpPart> parts = unit.parts(30011);
      const ExcpSurvey first = survey_excp(parts, rule, codec_kernels().back());
      CHECK(first.usable);
      for (const ExcpPart& part : parts) {
        const auto truth = coded(first, part, codec_kernels().back());
        for (const CodecKernel& kernel : codec_kernels()) {
          const ExcpSurvey survey = survey_excp(parts, rule, kernel);
          CHECK(same(survey, first));
          const auto made = coded(survey, part, kernel);
          for (const ExcpRole role : kRoles) {
            const auto place = static_cast<std::size_t>(role);
            CHECK(made[place].payload == truth[place].payload);
            CHECK(same_bits(made[place].decoded, truth[place].decoded));
            if (made[place].payload.empty()) continue;
            Floats target(part.count + 1, 7.0f);
            CHECK(decode_excp(role, made[place].payload, part.count, relatives_of(part, made),
                              target.data(), kernel));
            CHECK(target.back() == 7.0f);
            target.pop_back();
            CHECK(same_bits(target, made[place].decoded));
          }
        }
      }
    }
  }
}

TEST(a_weight_is_decoded_in_place_of_its_base) {
  const Unit unit = unit_of(70001, 3);
  const std::vector<ExcpPart> parts = unit.parts(70001);
  for (const CodecKernel& kernel : codec_kernels()) {
    const auto made = coded(survey_excp(parts, {}, kernel), parts[0], kernel);
    Floats target = unit.base;
    const ExcpRelatives relatives = {.base = target.data()};
    CHECK(decode_excp(ExcpRole::kWeight, made[0].payload, target.size(), relatives, target.data(),
                      kernel));
    CHECK(same_bits(target, made[0].decoded));
  }
}

TEST(damage_is_refused_or_decodes_to_something_and_nothing_else_is_touched) {
  std::mt19937_64 random(5);
  const Unit unit = unit_of(20001, 9);
  const std::vector<ExcpPart> parts = unit.parts(20001);
  const auto made = coded(survey_excp(parts, {}), parts[0], best_codec_kernel());
  const ExcpRelatives relatives = relatives_of(parts[0], made);
  std::size_t refused = 0;
  for (int trial = 0; trial < 3000; ++trial) {
    const ExcpRole role = kRoles[trial % 3];
    Bytes damaged = made[static_cast<std::size_t>(role)].payload;
    damaged[random() % std::min<std::size_t>(damaged.size(), trial % 2 ? 1u << 30 : 80)] ^=
        static_cast<std::uint8_t>(1 << random() % 8);
    if (trial % 5 == 0) damaged.resize(random() % damaged.size());
    Floats target(unit.weight.size() + 1, 7.0f);
    refused += !decode_excp(role, damaged, unit.weight.size(), relatives, target.data());
    CHECK(target.back() == 7.0f);
  }
  CHECK(refused > 1000);
}

TEST(what_is_not_a_number_is_not_surveyed) {
  for (const float odd : {NAN, INFINITY, -INFINITY}) {
    for (int which = 0; which < 4; ++which) {
      Unit unit = unit_of(3000, 1);
      Floats* const tensors[] = {&unit.weight, &unit.base, &unit.exp_avg, &unit.exp_avg_sq};
      (*tensors[which])[2999] = odd;
      for (const CodecKernel& kernel : codec_kernels()) {
        CHECK(!survey_excp(unit.parts(1000), {}, kernel).usable);
      }
    }
  }
  CHECK(!survey_excp({}, {}).usable);
}

}  // namespace
}  // namespace holdfast
