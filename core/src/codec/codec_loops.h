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
  return {
      .name = name,
      .encode = encode,
      .decode = decode,
      .split = split,
      .merge = merge,
      .sum_heads = sum_heads,
      .find_residuals = find_residuals,
      .add_residuals = add_residuals,
      .find_classes = find_classes,
      .pack_bits = pack_bits,
      .unpack_bits = unpack_bits,
      .to_bf16 = to_bf16,
      .is_bf16 = is_bf16,
      .find_differences = find_differences,
      .find_exponents = find_exponents,
      .add_differences = add_differences,
      .sum_up = sum_up,
      .find_distances = find_distances,
      .keep_residuals = keep_residuals,
      .keep_residuals_by = keep_residuals_by,
      .keep_moments = keep_moments,
      .keep_where = keep_where,
      .gather = gather,
      .gather_where = gather_where,
      .scatter_where = scatter_where,
      .find_centres = find_centres,
      .add_centres = add_centres,
      .place_centres = place_centres,
      .find_changed = find_changed,
      .find_nonzero = find_nonzero,
      .largest_word = largest_word,
      .sum_values = sum_values,
      .make_squares = make_squares,
      .find_rests = find_rests,
      .find_scales = find_scales,
      .find_contexts = find_contexts,
      .sum_squares = sum_squares,
      .subtract = subtract,
      .quantise = quantise,
      .add_steps = add_steps,
      .sum_errors = sum_errors,
  };
}

}  // namespace
}  // namespace holdfast
