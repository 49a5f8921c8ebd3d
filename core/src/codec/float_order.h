// Floats in their order, as unsigned integers of 16 or 32 bits. For the loops of one instruction
// set too: nothing here is shared between files.
#pragma once

#include <stdint.h>

namespace holdfast {
namespace {

// Neighbours differ by one; of both zeros the negative one comes first.
template <unsigned bits>
inline uint32_t place_of(uint32_t word) {
  constexpr uint32_t kSign = 1u << (bits - 1), kAll = kSign | (kSign - 1);
  return word ^ ((word & kSign) != 0 ? kAll : kSign);
}

template <unsigned bits>
inline uint32_t bits_at(uint32_t place) {
  constexpr uint32_t kSign = 1u << (bits - 1), kAll = kSign | (kSign - 1);
  return place ^ ((place & kSign) != 0 ? kSign : kAll);
}

}  // namespace
}  // namespace holdfast
