// Floats and their bits, for the loops of one instruction set: nothing here is shared between
// files.
#pragma once

#include <stdint.h>
#include <string.h>

namespace holdfast {
namespace {

inline uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

}  // namespace
}  // namespace holdfast
