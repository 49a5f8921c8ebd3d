#include "holdfast/lossless.h"

#include <algorithm>
#include <cstring>

#include "codec/difference.h"
#include "codec/entropy.h"
#include "codec/grid.h"
#include "codec/planes.h"
#include "codec/scratch.h"

namespace holdfast {
namespace {

constexpr std::size_t kSampleCount = 16 << 10;  // elements by which a mode is chosen
constexpr std::size_t kSampleRow = 64;
constexpr std::size_t kConstantRun = 4096;  // bytes, of whole elements, that are copied at once
constexpr double kMeanBytes = 0.75;         // of a column mean

bool is_float(const Elements& elements) {
  return elements.kind != Kind::kInteger;
}

std::size_t encode_planes(const Elements& elements, const void* data, std::uint8_t* out,
                          const CodecKernel& kernel) {
  const std::size_t count = elements.count, item = elements.item_bytes;
  Planes planes;
  plane_memory(count, item, planes);
  std::uint8_t* const begin = out;
  const std::size_t random = random_planes(data, count, item, is_float(elements), item, kernel);
  for (std::size_t p = 0; p < random; ++p) planes[p] = begin_stored(out, count);
  kernel.split(data, count, item, is_float(elements), planes);
  for (std::size_t p = random; p < item; ++p) {
    out += encode_symbols({.data = planes[p], .count = count}, out, kernel);
  }
  return static_cast<std::size_t>(out - begin);
}

bool decode_planes(std::span<const std::uint8_t> payload, const Elements& elements, void* target,
                   const CodecKernel& kernel) {
  Planes room;
  plane_memory(elements.count, elements.item_bytes, room);
  const std::uint8_t* planes[kPlanesMax];
  for (std::size_t p = 0; p < elements.item_bytes; ++p) {
    planes[p] = find_symbols(payload, {room[p], elements.count}, kernel);
    if (planes[p] == nullptr) return false;
  }
  kernel.merge(target, elements.count, elements.item_bytes, is_float(elements), planes);
  return payload.empty();
}

bool is_constant(const Elements& elements, const void* data) {
  auto* bytes = static_cast<const char*>(data);
  return std::memcmp(bytes, bytes + elements.item_bytes,
                     elements.size_bytes() - elements.item_bytes) == 0;
}

bool decode_constant(std::span<const std::uint8_t> payload, const Elements& elements,
                     void* target) {
  if (payload.size() != elements.item_bytes) return false;
  auto* bytes = static_cast<std::uint8_t*>(target);
  const std::size_t size = elements.size_bytes();
  std::size_t done = payload.size();
  std::memcpy(bytes, payload.data(), done);
  for (std::size_t more; done < size; done += more) {
    more = std::min({done, size - done, kConstantRun});
    std::memcpy(bytes + done, bytes, more);
  }
  return true;
}

bool is_rounding(const Elements& elements, const void* data, const void* master,
                 const CodecKernel& kernel) {
  if (elements.kind != Kind::kBf16 || master == nullptr) return false;
  return kernel.is_bf16(static_cast<const std::uint16_t*>(data),
                        static_cast<const std::uint32_t*>(master), elements.count);
}

struct SampleMemory;

// Elements of some columns of all whole rows, copied together: row and column have in it the means
// that they have in the chunk.
struct Sample {
  Elements elements;
  const std::uint32_t* data = nullptr;
  Relatives relatives;
};

Sample sample_of(const Elements& elements, const void* data, const Relatives& relatives) {
  auto* words = static_cast<const std::uint32_t*>(data);
  auto* squares = static_cast<const std::uint32_t*>(relatives.second_moment);
  if (elements.count <= kSampleCount) return {elements, words, relatives};
  const std::size_t first = (elements.row - elements.column) % elements.row;
  const std::size_t rows = (elements.count - first) / elements.row;
  if (rows == 0) return {elements, words, relatives};
  const std::size_t width = std::clamp(kSampleCount / rows, kSampleRow, elements.row);
  const std::size_t step = std::max<std::size_t>(1, rows * width / kSampleCount);
  const std::size_t taken = rows / step, from = (elements.row - width) / 2;
  auto* memory = scratch<std::uint32_t, SampleMemory>(2 * taken * width);
  for (std::size_t row = 0; row < taken; ++row) {
    const std::size_t at = first + row * step * elements.row + from;
    std::memcpy(memory + row * width, words + at, 4 * width);
    if (squares != nullptr) {
      std::memcpy(memory + (taken + row) * width, squares + at, 4 * width);
    }
  }
  Sample sample = {elements, memory, relatives};
  sample.elements.count = taken * width;
  sample.elements.row = width;
  sample.elements.column = 0;
  if (squares != nullptr) sample.relatives.second_moment = memory + taken * width;
  return sample;
}

double estimate_planes(const Elements& sample, const void* data, double scale,
                       const CodecKernel& kernel) {
  Planes planes;
  plane_memory(sample.count, sample.item_bytes, planes);
  kernel.split(data, sample.count, sample.item_bytes, is_float(sample), planes);
  double bytes = 0;
  const auto count = static_cast<double>(sample.count);
  for (std::size_t p = 0; p < sample.item_bytes; ++p) {
    if (sample.count >= kSampledBytes && looks_random(planes[p])) {
      bytes += count;
      continue;
    }
    Histogram histogram;
    count_symbols({.data = planes[p], .count = sample.count}, histogram);
    bytes += std::min(estimate_bytes(histogram, 1), count);
  }
  return scale * bytes;
}

Mode choose(const Elements& elements, const void* data, const Relatives& relatives,
            const CodecKernel& kernel) {
  const bool has_base = relatives.base != nullptr && has_difference(elements);
  if (!has_grid(elements)) {
    if (!has_base) return Mode::kPlanes;
    Elements middle = elements;
    middle.count = std::min(elements.count, kSampleCount);
    const std::size_t from = (elements.count - middle.count) / 2 * elements.item_bytes;
    const double scale = static_cast<double>(elements.count) / static_cast<double>(middle.count);
    const double planes =
        estimate_planes(middle, static_cast<const char*>(data) + from, scale, kernel);
    const double difference = estimate_difference(elements, data, relatives.base, kernel);
    return difference < 0.999 * planes ? Mode::kDifference : Mode::kPlanes;
  }
  const Sample sample = sample_of(elements, data, relatives);
  const double scale =
      static_cast<double>(elements.count) / static_cast<double>(sample.elements.count);
  const GridBytes grid =
      estimate_grid(sample.elements, sample.data, sample.relatives, scale, kernel);
  const double means = kMeanBytes * static_cast<double>(elements.row);
  double least = estimate_planes(sample.elements, sample.data, scale, kernel);
  Mode best = Mode::kPlanes;
  const auto consider = [&](Mode mode, double bytes) {
    if (bytes >= 0.999 * least) return;
    least = bytes;
    best = mode;
  };
  consider(Mode::kGrid, grid.alone + means);
  if (relatives.second_moment != nullptr) consider(Mode::kGridOfMoment, grid.by_moment + means);
  if (has_base && estimate_difference(elements, data, relatives.base, kernel) < 0.999 * least) {
    return Mode::kDifference;
  }
  return best;
}

}  // namespace

std::size_t lossless_bytes_max(const Elements& elements) {
  // Planes, each with a byte of form; or a grid: its means, its escapes, what packing touches.
  const std::size_t others = elements.size_bytes() + 16 +
                             4 * (Rows(elements).size() + elements.row) + elements.count / 8 +
                             kSlackBytes;
  return has_difference(elements) ? std::max(others, difference_bytes_max(elements)) : others;
}

Encoded encode_lossless(const Elements& elements, const void* data, const Relatives& relatives,
                        std::uint8_t* out, const CodecKernel& kernel) {
  const Encoded raw = {Mode::kRaw, elements.size_bytes()};
  if (elements.count == 0) return raw;
  if (is_constant(elements, data)) {
    if (elements.count == 1) return raw;
    std::memcpy(out, data, elements.item_bytes);
    return {Mode::kConstant, elements.item_bytes};
  }
  if (is_rounding(elements, data, relatives.master, kernel)) return {Mode::kRounded, 0};
  Mode mode = choose(elements, data, relatives, kernel);
  std::size_t size = 0;
  if (mode == Mode::kDifference) {
    size = encode_difference(elements, data, relatives.base, out, kernel);
  } else if (mode != Mode::kPlanes) {
    auto* words = static_cast<const std::uint32_t*>(data);
    size = encode_grid(mode, elements, words, relatives, out, kernel);
  }
  if (size == 0) {
    mode = Mode::kPlanes;
    size = encode_planes(elements, data, out, kernel);
  }
  return size < elements.size_bytes() ? Encoded{mode, size} : raw;
}

Encoded encode_as_difference(const Elements& elements, const void* data, const void* base,
                             std::uint8_t* out, const CodecKernel& kernel) {
  const Encoded raw = {Mode::kRaw, elements.size_bytes()};
  if (elements.count == 0 || base == nullptr || !has_difference(elements)) return raw;
  const std::size_t size = encode_difference(elements, data, base, out, kernel);
  return size < elements.size_bytes() ? Encoded{Mode::kDifference, size} : raw;
}

bool decode_lossless(Mode mode, std::span<const std::uint8_t> payload, const Elements& elements,
                     const Relatives& relatives, void* target, const CodecKernel& kernel) {
  if (elements.count == 0) return false;
  switch (mode) {
    case Mode::kConstant:
      return decode_constant(payload, elements, target);
    case Mode::kPlanes:
      return decode_planes(payload, elements, target, kernel);
    case Mode::kGrid:
    case Mode::kGridOfMoment:
      return decode_grid(mode, payload, elements, relatives, static_cast<std::uint32_t*>(target),
                         kernel);
    case Mode::kRounded:
      if (!payload.empty() || elements.kind != Kind::kBf16 || relatives.master == nullptr) {
        return false;
      }
      kernel.to_bf16(static_cast<const std::uint32_t*>(relatives.master),
                     static_cast<std::uint16_t*>(target), elements.count);
      return true;
    case Mode::kDifference:
      return has_difference(elements) && relatives.base != nullptr &&
             decode_difference(payload, elements, relatives.base, target, kernel);
    default:
      break;
  }
  return false;
}

}  // namespace holdfast
