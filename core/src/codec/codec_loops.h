// All loops of the codecs, for the one instruction set of the file that includes this.
#pragma once

#include "codec/centre_loops.h"
#include "codec/difference_loops.h"
#include "codec/plane_loops.h"
#include "codec/rans_loops.h"
#include "codec/step_loops.h"

namespace holdfast {
namespace {

constexpr CodecKernel all_loops(const char* name) {
  return {name,          encode,           decode,         split,
          merge,         sum_heads,        find_residuals, add_residuals,
          find_classes,  pack_bits,        unpack_bits,    to_bf16,
          is_bf16,       find_differences, find_exponents, add_differences,
          sum_up,        find_distances,   keep_residuals, keep_residuals_by,
          keep_moments,  keep_where,       gather,         gather_where,
          scatter_where, find_centres,     add_centres,    place_centres,
          find_changed,  find_nonzero,     largest_word,   sum_values,
          make_squares,  find_rests,       find_scales,    find_contexts,
          sum_squares,   subtract,         quantise,       add_steps,
          sum_errors};
}

}  // namespace
}  // namespace holdfast
