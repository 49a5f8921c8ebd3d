#include "codec/contexts.h"

#include <algorithm>
#include <numeric>
#include <vector>

namespace holdfast {
namespace {

// With groups of rows: measured, 4 · 4 contexts take 3 % less than 8 by class alone, 8 % less of
// embeddings.
constexpr std::size_t kGroups = 4;
constexpr std::size_t kGroupLimits = 3;
constexpr std::size_t kGroupRowsMin = 64;
constexpr std::size_t kGroupCountMin = 1 << 14;

constexpr std::size_t kManyCount = 1 << 18;  // elements from which on tables take next to nothing
constexpr std::size_t kSampleStride =
    13;  // of elements that are counted; shares no factor with most rows

struct ContextMemory;
struct GroupMemory;

// Parts the classes between about equal numbers of elements.
void find_limits(const Classes& classes, std::size_t count, std::size_t most, Parts& parts) {
  const std::size_t stride = count < kManyCount ? 1 : kSampleStride;
  std::uint32_t counts[256] = {};
  for (std::size_t i = 0; i < count; i += stride) ++counts[classes.of[i]];
  const std::size_t all = (count + stride - 1) / stride;
  std::size_t below = 0, part = 1;
  for (int c = 0; c + 1 < classes.count() && below < all; ++c) {
    below += counts[c];
    if (below * (most + 1) < part * all || below == all) continue;
    parts.limits[parts.limit_count++] = static_cast<std::uint8_t>(c + 1);
    part = below * (most + 1) / all + 1;
  }
}

// Equally many rows in each group, those with the smallest levels in the first.
void find_groups(const Elements& view, const std::uint8_t* symbols, Parts& parts) {
  const Rows rows(view);
  std::vector<std::uint64_t> levels(rows.size());
  rows.each([&](std::size_t row, std::size_t at, std::size_t length, std::size_t) {
    std::uint32_t sum = 0;
    for (std::size_t i = at; i < at + length; ++i) sum += (symbols[i] + 1u) >> 1;
    levels[row] = (std::uint64_t{sum} << 20) / length;
  });
  std::vector<std::uint32_t> order(rows.size());
  std::iota(order.begin(), order.end(), 0u);
  std::stable_sort(order.begin(), order.end(),
                   [&](std::uint32_t a, std::uint32_t b) { return levels[a] < levels[b]; });
  auto* groups = scratch<std::uint8_t, GroupMemory>(rows.size());
  for (std::size_t place = 0; place < order.size(); ++place) {
    groups[order[place]] = static_cast<std::uint8_t>(place * kGroups / order.size());
  }
  parts.groups = kGroups;
  parts.of_rows = groups;
}

// Whether what parts save is more than what their tables take.
bool pays(const Symbols& coded) {
  if (coded.count >= kManyCount) return true;
  Histogram histogram;
  count_symbols(coded, histogram);
  const double parted = estimate_bytes(histogram, coded.context_count);
  join_contexts(histogram, coded.context_count);
  return parted < estimate_bytes(histogram, 1);
}

bool get_parts(std::span<const std::uint8_t>& payload, const Classes& classes, Parts& parts,
               const CodecKernel& kernel) {
  std::uint8_t limit_count = 0, groups = 0;
  if (!take(payload, limit_count) || limit_count > kContextLimits) return false;
  parts.limit_count = limit_count;
  for (std::size_t i = 0; i < limit_count; ++i) {
    if (!take(payload, parts.limits[i])) return false;
  }
  if (!take(payload, groups) || groups < 1 || groups > kRowGroups) return false;
  parts.groups = groups;
  if (parts.count() > kContextsMax || (parts.count() > 1 && classes.of == nullptr)) return false;
  if (groups == 1) return true;
  const std::size_t rows = Rows(classes.view).size();
  auto* of_rows = scratch<std::uint8_t, GroupMemory>(rows);
  if (!decode_symbols(payload, {of_rows, rows}, nullptr, 1, kernel)) return false;
  parts.of_rows = of_rows;
  return std::all_of(of_rows, of_rows + rows, [&](std::uint8_t group) { return group < groups; });
}

}  // namespace

Parts find_parts(const Classes& classes, const std::uint8_t* symbols, std::size_t count) {
  Parts parts;
  if (classes.of == nullptr) return parts;
  const bool groups = classes.view.count == count && count >= kGroupCountMin &&
                      Rows(classes.view).size() >= kGroupRowsMin;
  find_limits(classes, count, groups ? kGroupLimits : kContextLimits, parts);
  if (groups) find_groups(classes.view, symbols, parts);
  return parts;
}

Symbols in_contexts(const Classes& classes, const Parts& parts, const std::uint8_t* symbols,
                    std::size_t count, const CodecKernel& kernel) {
  if (parts.count() == 1) return {.data = symbols, .count = count};
  auto* contexts = scratch<std::uint8_t, ContextMemory>(count);
  if (parts.groups == 1) {
    kernel.find_contexts(classes.of, count, parts.limits, parts.limit_count, 0, contexts);
    return {symbols, count, contexts, parts.count()};
  }
  Rows(classes.view).each([&](std::size_t row, std::size_t at, std::size_t length, std::size_t) {
    const std::size_t first = parts.of_rows[row] * (parts.limit_count + 1);
    kernel.find_contexts(classes.of + at, length, parts.limits, parts.limit_count,
                         static_cast<std::uint8_t>(first), contexts + at);
  });
  return {symbols, count, contexts, parts.count()};
}

std::uint8_t* put_symbols(const Classes& classes, const std::uint8_t* symbols, std::size_t count,
                          std::uint8_t* out, const CodecKernel& kernel) {
  Parts parts = find_parts(classes, symbols, count);
  Symbols coded = in_contexts(classes, parts, symbols, count, kernel);
  if (parts.count() > 1 && !pays(coded)) {
    parts = {};
    coded = {.data = symbols, .count = count};
  }
  out = put(out, static_cast<std::uint8_t>(parts.limit_count));
  out = std::copy_n(parts.limits, parts.limit_count, out);
  out = put(out, static_cast<std::uint8_t>(parts.groups));
  if (parts.groups > 1) {
    const std::size_t rows = Rows(classes.view).size();
    out += encode_symbols({.data = parts.of_rows, .count = rows}, out, kernel);
  }
  return out + encode_symbols(coded, out, kernel);
}

bool get_symbols(std::span<const std::uint8_t>& payload, const Classes& classes,
                 std::span<std::uint8_t> symbols, const CodecKernel& kernel) {
  Parts parts;
  if (!get_parts(payload, classes, parts, kernel)) return false;
  const Symbols coded = in_contexts(classes, parts, symbols.data(), symbols.size(), kernel);
  return decode_symbols(payload, symbols, coded.contexts, coded.context_count, kernel);
}

}  // namespace holdfast
