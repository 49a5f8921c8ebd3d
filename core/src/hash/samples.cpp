#include "holdfast/samples.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "holdfast/checksum.h"

namespace holdfast {
namespace {

constexpr std::size_t kSampleBytes = 128;  // two lines of the cache, which come together
constexpr std::size_t kSamplesMin = 3;
constexpr std::size_t kStretchBytes = 1 << 20;
constexpr std::size_t kWholeBytes = 4096;  // a page: to read all of it takes no longer

// A random number below `below` (splitmix64, and Lemire's multiplication in place of a division).
std::size_t pick(std::uint64_t seed, std::size_t number, std::size_t below) {
  std::uint64_t bits = seed + (number + 1) * 0x9E3779B97F4A7C15;
  bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9;
  bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB;
  bits ^= bits >> 31;
  return static_cast<std::size_t>((static_cast<unsigned __int128>(bits) * below) >> 64);
}

// Calls read(at, size, target) for each sample of `size` bytes, in ascending order.
template <class Read>
std::uint64_t hash_samples_of(std::size_t size, std::uint64_t seed, Read read) {
  alignas(64) std::array<std::byte, kWholeBytes> room;
  if (size <= kWholeBytes) {
    read(0, size, room.data());
    return xxh3_64(room.data(), size, size);
  }
  const std::size_t places = (size + kSampleBytes - 1) / kSampleBytes;
  const std::size_t count = kSamplesMin + size / kStretchBytes;
  std::uint64_t hash = size;
  std::size_t filled = 0;
  std::size_t begin = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t end = (i + 1) * places / count;
    const std::size_t at = (begin + pick(seed, i, end - begin)) * kSampleBytes;
    begin = end;
    const std::size_t taken = std::min(kSampleBytes, size - at);
    read(at, taken, room.data() + filled);
    filled += taken;
    if (filled + kSampleBytes > room.size() || i + 1 == count) {
      hash = xxh3_64(room.data(), filled, hash);
      filled = 0;
    }
  }
  return hash;
}

// Where the elements of a Strided are, one after the other.
class Walk {
 public:
  explicit Walk(const Strided& elements) : elements_(elements), place_(elements.shape.size()) {}

  void seek(std::int64_t element) {
    at_ = 0;
    for (std::size_t i = place_.size(); i-- > 0;) {
      place_[i] = element % elements_.shape[i];
      element /= elements_.shape[i];
      at_ += place_[i] * elements_.strides[i];
    }
  }

  void next() {
    for (std::size_t i = place_.size(); i-- > 0;) {
      at_ += elements_.strides[i];
      if (++place_[i] < elements_.shape[i]) return;
      at_ -= place_[i] * elements_.strides[i];
      place_[i] = 0;
    }
  }

  const std::byte* address() const {
    return elements_.data + at_ * static_cast<std::int64_t>(elements_.element_bytes);
  }

 private:
  const Strided& elements_;
  std::vector<std::int64_t> place_;
  std::int64_t at_ = 0;  // in elements
};

}  // namespace

std::uint64_t hash_spread(std::span<const Bytes> parts, std::uint64_t seed) {
  std::size_t size = 0;
  for (const Bytes& part : parts) size += part.size;
  auto part = parts.begin();
  std::size_t begin = 0;  // of this part
  return hash_samples_of(size, seed, [&](std::size_t at, std::size_t left, std::byte* target) {
    while (left > 0) {
      while (at - begin >= part->size) begin += (part++)->size;
      const std::size_t here = std::min(left, part->size - (at - begin));
      std::memcpy(target, part->data + (at - begin), here);
      target += here;
      at += here;
      left -= here;
    }
  });
}

std::uint64_t hash_spread(const Strided& elements, std::uint64_t seed) {
  const std::size_t width = elements.element_bytes;
  std::size_t size = width;
  for (const std::int64_t extent : elements.shape) size *= static_cast<std::size_t>(extent);
  Walk walk(elements);
  return hash_samples_of(size, seed, [&](std::size_t at, std::size_t left, std::byte* target) {
    walk.seek(static_cast<std::int64_t>(at / width));
    for (std::size_t done = 0; done < left; done += width, walk.next()) {
      std::memcpy(target + done, walk.address(), width);
    }
  });
}

}  // namespace holdfast
