// Differences between floats in their order, for one instruction set: plain loops, which the
// compiler turns into vectors. Includes nothing that could emit an inline function.
#pragma once

#include <stdint.h>

#include "codec/codec_kernel.h"
#include "codec/float_bits.h"
#include "codec/float_order.h"
#include "codec/loop_hints.h"

namespace holdfast {
namespace {

// How far the exponent (of f16 with the head of the fraction) is below the top one.
template <unsigned bits>
inline std::uint8_t context_of(std::uint32_t base, int top) {
  int below = top - (int)(base >> (bits - 9) & 0xFF);
  below = below < (int)kExponentContexts - 1 ? below : (int)kExponentContexts - 1;
  return (std::uint8_t)(below > 0 ? below : 0);
}

// 0, 1, and each power of two in two halves: what the exponent of a float and the first bit of its
// fraction say. Large magnitudes lose bits first, which a float would round.
inline int class_of(std::uint32_t magnitude) {
  // By masks: a branch would keep the compiler from making vectors of the loop.
  const std::uint32_t large = 0u - (std::uint32_t)(magnitude >> 24 != 0);
  const float kept = (float)(std::int32_t)(magnitude >> (large & 8));
  const std::uint32_t number = (bits_of(kept) >> 22) - 254 + (large & 16);
  const std::uint32_t small = 0u - (std::uint32_t)(magnitude < 2);
  return (int)((magnitude & small) | (number & ~small));
}

template <class Word>
inline void differences_of(const Word* __restrict data, const Word* __restrict base,
                           std::size_t count, int top, std::uint8_t* __restrict symbols,
                           std::uint8_t* __restrict contexts, std::uint8_t* __restrict lengths,
                           std::uint32_t* __restrict tails) {
  constexpr unsigned kBits = 8 * sizeof(Word);
  for (std::size_t i = 0; i < count; ++i) {
    contexts[i] = context_of<kBits>(base[i], top);
    const Word up = (Word)(place_of<kBits>(data[i]) - place_of<kBits>(base[i]));
    const Word down = (Word)(0u - up);
    const std::uint32_t magnitude = up < down ? up : down;
    const int number = class_of(magnitude);
    const int length = (number >> 1 > 1 ? number >> 1 : 1) - 1;
    symbols[i] = (std::uint8_t)(2 * number - (up < down ? 1 : 0));
    lengths[i] = (std::uint8_t)length;
    tails[i] = magnitude & ((1u << length) - 1);
  }
}

void find_differences(const void* data, const void* base, std::size_t count, std::size_t item,
                      int top, std::uint8_t* symbols, std::uint8_t* contexts, std::uint8_t* lengths,
                      std::uint32_t* tails) {
  if (item == 2) {
    differences_of(static_cast<const std::uint16_t*>(data), static_cast<const std::uint16_t*>(base),
                   count, top, symbols, contexts, lengths, tails);
  } else {
    differences_of(static_cast<const std::uint32_t*>(data), static_cast<const std::uint32_t*>(base),
                   count, top, symbols, contexts, lengths, tails);
  }
}

template <class Word>
inline void exponents_of(const Word* __restrict base, std::size_t count, int top,
                         std::uint8_t* __restrict contexts) {
  for (std::size_t i = 0; i < count; ++i) contexts[i] = context_of<8 * sizeof(Word)>(base[i], top);
}

void find_exponents(const void* base, std::size_t count, std::size_t item, int top,
                    std::uint8_t* contexts) {
  if (item == 2) {
    exponents_of(static_cast<const std::uint16_t*>(base), count, top, contexts);
  } else {
    exponents_of(static_cast<const std::uint32_t*>(base), count, top, contexts);
  }
}

template <class Word>
inline void sums_of(const Word* base, std::size_t count, const std::uint8_t* __restrict symbols,
                    const std::uint32_t* __restrict tails, Word* target) {
  constexpr unsigned kBits = 8 * sizeof(Word);
HOLDFAST_NO_DEPENDENCE  // the base may be the target: each element is read before it is written
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t symbol = symbols[i], number = (symbol + 1) >> 1;
    const std::uint32_t head = 2 | (number & 1), length = (number >> 1) - 1;
    const std::uint32_t least = number < 2 ? number : head << (length & 31);
    const std::uint32_t magnitude = least + tails[i];
    const std::uint32_t place = place_of<kBits>(base[i]);
    const std::uint32_t moved = (symbol & 1) != 0 ? place + magnitude : place - magnitude;
    target[i] = (Word)bits_at<kBits>(moved);
  }
}

void add_differences(const void* base, std::size_t count, std::size_t item,
                     const std::uint8_t* symbols, const std::uint32_t* tails, void* target) {
  if (item == 2) {
    sums_of(static_cast<const std::uint16_t*>(base), count, symbols, tails,
            static_cast<std::uint16_t*>(target));
  } else {
    sums_of(static_cast<const std::uint32_t*>(base), count, symbols, tails,
            static_cast<std::uint32_t*>(target));
  }
}

}  // namespace
}  // namespace holdfast
