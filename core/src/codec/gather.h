// A gather of AVX-512 that waits for its addresses alone.
#pragma once

#if defined(__AVX512BW__) && defined(__AVX512VL__)
#include <immintrin.h>

namespace holdfast {
namespace {

// Into zeros, and by a mask that GCC does not see through: else it takes any register for the
// target, and the gather waits for whatever that held before.
inline __m512i gather_words(__m512i index, const void* table) {
  __mmask16 all = 0xFFFF;
  __asm__("" : "+k"(all));
  return _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), all, index, table, 4);
}

}  // namespace
}  // namespace holdfast
#endif
