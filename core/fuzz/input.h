// What a fuzz target is given: a head that says what is decoded and how, bytes of which the
// elements of other tensors are made, and the payload, which ends where the memory does.
//
// What is decoded is decoded again by another kernel, to memory that holds other bytes before, and,
// where a decoder allows it, in the place of its base: the same elements must come, each of them.
// Where the head says so, what is refused is looked at again too.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <memory>
#include <span>

#include "codec/codec_kernel.h"
#include "holdfast/lossless.h"

namespace holdfast::fuzz {

using Memory = std::unique_ptr<std::uint8_t[]>;  // of exactly the bytes that are meant

inline void expect(bool held, const char* what) {
  if (held) return;
  std::fprintf(stderr, "fuzz: %s\n", what);
  std::abort();
}

class Input {
 public:
  static constexpr std::size_t kHeadBytes = 16;

  // Where `size` is below kHeadBytes there is nothing to decode.
  Input(const std::uint8_t* data, std::size_t size) : head_(data) {
    const std::size_t room = size - kHeadBytes;
    const std::size_t made = std::min<std::size_t>(data[9], room);
    matter_ = {data + kHeadBytes, made};
    payload_ = {data + kHeadBytes + made, room - made};
  }

  std::uint8_t choice() const { return head_[0]; }
  bool in_place() const { return (head_[1] & 1) != 0; }
  bool has(unsigned relative) const { return (head_[1] >> (1 + relative) & 1) == 0; }
  std::uint8_t extra(std::size_t i) const { return head_[12 + i]; }
  std::span<const std::uint8_t> payload() const { return payload_; }

  bool twice() const { return (head_[1] & 0x20) != 0; }

  // One of all, or the one that follows it.
  const CodecKernel& kernel(unsigned next = 0) const {
    const auto kernels = codec_kernels();
    return kernels[((head_[1] >> 6) + next) % kernels.size()];
  }

  // Mostly few, sometimes more than a block of any loop has.
  std::size_t count() const {
    const std::size_t number = u16(2);
    return number >= 0xF000 ? number % 9000 : number & 0xFF;
  }

  Elements elements() const {
    Elements found = {count(), std::size_t{1} << head_[8] % 4, Kind::kInteger};
    if ((head_[8] & 4) != 0) found.kind = Kind::kFloat;
    if ((head_[8] & 8) != 0) {
      found.item_bytes = 2;
      found.kind = (head_[8] & 16) != 0 ? Kind::kF16 : Kind::kBf16;
    }
    found.row = 1 + u16(4) % 1024;
    found.column = u16(6) % found.row;
    return found;
  }

  Elements f32() const {
    Elements found = elements();
    found.item_bytes = 4;
    found.kind = Kind::kFloat;
    return found;
  }

  // Elements of another tensor, `bytes` of them; null where the head says that there is none.
  Memory relative(unsigned which, std::size_t bytes) const {
    if (!has(which)) return nullptr;
    Memory made(new std::uint8_t[bytes]);
    std::uint32_t noise = head_[11] + 0x9E3779B9u * (which + 1);
    const unsigned quiet = head_[10] % 32;
    const std::size_t words = matter_.size() / 4;
    for (std::size_t at = 0, from = 0; at < bytes; at += 4, ++from) {
      std::uint32_t word = 0;
      if (from >= words) from = 0;
      if (words > 0) std::memcpy(&word, matter_.data() + 4 * from, 4);
      if (quiet > 0) word ^= (noise = noise * 1664525 + 1013904223) >> quiet;
      std::memcpy(made.get() + at, &word, std::min<std::size_t>(4, bytes - at));
    }
    return made;
  }

 private:
  std::size_t u16(std::size_t at) const {
    return static_cast<std::size_t>(head_[at] | head_[at + 1] << 8);
  }

  const std::uint8_t* head_;
  std::span<const std::uint8_t> matter_, payload_;
};

// decode(kernel, base, target) → whether it is a payload. `base` has `bytes` too, or is null.
template <class Decode>
void decode_twice(const Input& input, std::size_t bytes, const std::uint8_t* base, bool in_place,
                  Decode decode) {
  const Memory first(new std::uint8_t[bytes]);
  std::memset(first.get(), 0x55, bytes);
  const bool good = decode(input.kernel(), base, first.get());
  if (!good && !input.twice()) return;
  const Memory second(new std::uint8_t[bytes]);
  std::memset(second.get(), 0xAA, bytes);
  in_place = in_place && base != nullptr;
  if (in_place) std::memcpy(second.get(), base, bytes);
  const std::uint8_t* other = in_place ? second.get() : base;
  expect(decode(input.kernel(1), other, second.get()) == good, "kernels disagree on a payload");
  expect(!good || std::memcmp(first.get(), second.get(), bytes) == 0, "kernels decode otherwise");
}

}  // namespace holdfast::fuzz
