#include "holdfast/excp.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "bindings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace holdfast {
namespace {

ExcpRole role_of(const std::string& name) {
  if (name == "exp_avg") return ExcpRole::kExpAvg;
  if (name == "exp_avg_sq") return ExcpRole::kExpAvgSq;
  if (name != "weight" && name != "master") throw nb::value_error("no such role");
  return ExcpRole::kWeight;
}

template <class T>
const T* array_at(std::uintptr_t address) {
  return reinterpret_cast<const T*>(address);
}

std::vector<float> centres_of(const ExcpSurvey& survey, const std::string& role) {
  const Centres& centres = survey.centres[static_cast<std::size_t>(role_of(role))];
  return {centres.values, centres.values + centres.count};
}

void bind_types(nb::module_& module) {
  nb::class_<ExcpRule>(module, "ExcpRule")
      .def(
          "__init__",
          [](ExcpRule* self, float alpha, float beta, float cap, bool per_element,
             bool half_centres, bool optimal) {
            new (self) ExcpRule{alpha, beta, cap, per_element, half_centres, optimal};
          },
          "alpha"_a, "beta"_a, "cap"_a, "per_element"_a, "half_centres"_a, "optimal"_a);
  nb::class_<ExcpPart>(module, "ExcpPart")
      .def(
          "__init__",
          [](ExcpPart* self, std::size_t count, std::uintptr_t weight, std::uintptr_t base,
             std::uintptr_t exp_avg, std::uintptr_t exp_avg_sq, std::uintptr_t half) {
            new (self) ExcpPart{count,
                                array_at<float>(weight),
                                array_at<float>(base),
                                array_at<float>(exp_avg),
                                array_at<float>(exp_avg_sq),
                                array_at<std::uint16_t>(half)};
          },
          "count"_a, "weight"_a, "base"_a, "exp_avg"_a, "exp_avg_sq"_a, "half"_a = 0);
  nb::class_<ExcpSurvey>(module, "ExcpSurvey")
      .def_ro("usable", &ExcpSurvey::usable)
      .def_ro("rounded", &ExcpSurvey::rounded)
      .def_ro("median", &ExcpSurvey::median)
      .def_ro("threshold", &ExcpSurvey::threshold)
      .def_ro("moment_threshold", &ExcpSurvey::moment_threshold)
      .def("centres", &centres_of, "role"_a);
}

}  // namespace

void bind_excp(nb::module_& module) {
  bind_types(module);
  module.def("excp_bytes_max", &excp_bytes_max, "count"_a);
  module.def(
      "excp_survey",
      [](const std::vector<ExcpPart>& parts, const ExcpRule& rule) {
        return without_gil([&] { return survey_excp(parts, rule); });
      },
      "parts"_a, "rule"_a);
  module.def(
      "excp_encode",
      [](const ExcpSurvey& survey, const std::string& role, const ExcpPart& part,
         std::uintptr_t base, std::uintptr_t weight, std::uintptr_t exp_avg, std::uintptr_t out,
         std::uintptr_t decoded) {
        const ExcpRole which = role_of(role);
        return without_gil([&] {
          return encode_excp(
              survey, which, part, {memory_at(base), memory_at(weight), memory_at(exp_avg)},
              reinterpret_cast<std::uint8_t*>(out), reinterpret_cast<float*>(decoded));
        });
      },
      "survey"_a, "role"_a, "part"_a, "base"_a, "weight"_a, "exp_avg"_a, "out"_a, "decoded"_a);
  module.def(
      "excp_decode",
      [](const std::string& role, std::uintptr_t payload, std::size_t payload_bytes,
         std::size_t count, std::uintptr_t base, std::uintptr_t weight, std::uintptr_t exp_avg,
         std::uintptr_t target) {
        const ExcpRole which = role_of(role);
        return without_gil([&] {
          return decode_excp(which, {array_at<std::uint8_t>(payload), payload_bytes}, count,
                             {memory_at(base), memory_at(weight), memory_at(exp_avg)},
                             reinterpret_cast<float*>(target));
        });
      },
      "role"_a, "payload"_a, "payload_bytes"_a, "count"_a, "base"_a, "weight"_a, "exp_avg"_a,
      "target"_a);
}

}  // namespace holdfast
