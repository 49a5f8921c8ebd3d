// What the inner loops of the codecs do. A set of them is made for each instruction set.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "holdfast/kernel.h"

namespace holdfast {

inline constexpr std::size_t kLanes = 64;  // of a long stream of coded symbols
inline constexpr unsigned kScaleBits = 12;
inline constexpr std::uint32_t kScale = 1 << kScaleBits;
inline constexpr std::uint32_t kStateMin = 1 << 15;  // a state is in [2^15, 2^31)

// What encoding needs to know of the symbols of a context. `packed`: 12 bits of 2^12 - frequency,
// 13 of bias, 4 of shift.
struct EncodeTable {
  std::uint32_t packed[256];
  std::uint32_t reciprocal[256];
};

// What decoding needs to know of the slots of a context: 8 bits symbol, 12 of frequency - 1, 12 of
// bias.
struct DecodeTable {
  std::uint32_t slot[kScale];
};

inline constexpr std::size_t kSumLanes = 16;  // element i of a sum goes to lane i mod 16

// The threshold of the residual of an element: min(cap, alpha / sqrt(square)) * median.
struct ElementRule {
  float alpha, cap, median;
};

// Logarithms of the codec compact: the bits of a float without sign, shifted right by kLogShift;
// eighths of octaves, as between two octaves a parabola says.
inline constexpr unsigned kLogShift = 20;
inline constexpr int kLogMin = 8;  // the smallest normal float
inline constexpr int kLogMax = 2031;
inline constexpr int kParabola = 45000;     // 2^(x/8) within 0.4 %
inline constexpr unsigned kClassShift = 5;  // classes are half octaves
inline constexpr int kEscapeLevel = 127;
inline constexpr int kEscapeSymbol = 253;

// How logarithms are put together: means in units of 2^unit, rests in units of 2^rest.
struct LogShape {
  unsigned unit, rest;
  int floor;  // from kLogMin to kLogMax; no logarithm is less
};

inline constexpr unsigned kExponentContexts = 16;  // of a difference

struct CodecKernel {
  const char* name;

  // Codes whole steps of kLanes symbols, the last first, putting words down in front of `end`;
  // returns the first word. `contexts` may be null.
  std::uint16_t* (*encode)(const std::uint8_t* symbols, const std::uint8_t* contexts,
                           std::size_t count, const EncodeTable* tables, std::uint32_t* states,
                           std::uint16_t* end);
  // Returns the word behind the last one read, or null when there are too few.
  const std::uint8_t* (*decode)(std::uint8_t* symbols, const std::uint8_t* contexts,
                                std::size_t count, const DecodeTable* tables, std::uint32_t* states,
                                const std::uint8_t* words, const std::uint8_t* end);

  // Elements of 1, 2, 4 or 8 bytes ⇄ a plane for each byte, the lowest first; rotated left by one
  // bit, so that a float's sign is in the lowest and its exponent in the highest plane.
  void (*split)(const void* data, std::size_t count, std::size_t item_bytes, bool rotated,
                std::uint8_t* const* planes);
  void (*merge)(void* data, std::size_t count, std::size_t item_bytes, bool rotated,
                const std::uint8_t* const* planes);

  // What follows looks at f32 as a head, of a few symbols, and a tail of 16 to 24 bits; with the
  // sign behind the tail, or without a sign. A head is predicted as (column + row) / 8.
  std::uint32_t (*sum_heads)(const std::uint32_t* data, std::size_t count, unsigned tail_bits,
                             bool with_sign, std::uint32_t* columns);
  // Writes a symbol and three bytes of tail for each; returns how many heads are too far from what
  // is predicted: their symbol is 0.
  std::size_t (*find_residuals)(const std::uint32_t* data, std::size_t count, unsigned tail_bits,
                                bool with_sign, const std::int16_t* columns, int row,
                                std::uint8_t* symbols, std::uint8_t* const* tails);
  void (*add_residuals)(std::uint32_t* data, std::size_t count, unsigned tail_bits, bool with_sign,
                        const std::int16_t* columns, int row, const std::uint8_t* symbols,
                        const std::uint8_t* const* tails);
  void (*find_classes)(const std::uint32_t* data, std::size_t count, unsigned tail_bits,
                       const std::int16_t* columns, int row, std::uint8_t* classes);

  // Bytes below 2^bits ⇄ `bits` bytes for each eight of them. Touch 8 bytes more.
  void (*pack_bits)(const std::uint8_t* values, std::size_t count, unsigned bits,
                    std::uint8_t* packed);
  void (*unpack_bits)(const std::uint8_t* packed, std::size_t count, unsigned bits,
                      std::uint8_t* values);

  void (*to_bf16)(const std::uint32_t* data, std::uint16_t* target, std::size_t count);
  bool (*is_bf16)(const std::uint16_t* data, const std::uint32_t* masters, std::size_t count);

  // Floats of 2 or 4 bytes in their order: how far each is from its base, as a symbol (0 for equal,
  // else twice the class of its magnitude, less one upwards) and the bits that the class does not
  // tell; in contexts by how far the base's exponent is below the top one.
  void (*find_differences)(const void* data, const void* base, std::size_t count,
                           std::size_t item_bytes, int top, std::uint8_t* symbols,
                           std::uint8_t* contexts, std::uint8_t* lengths, std::uint32_t* tails);
  void (*find_exponents)(const void* base, std::size_t count, std::size_t item_bytes, int top,
                         std::uint8_t* contexts);
  // The inverse; `base` may be `target`.
  void (*add_differences)(const void* base, std::size_t count, std::size_t item_bytes,
                          const std::uint8_t* symbols, const std::uint32_t* tails, void* target);

  // What follows keeps the large among f32 and puts zeros for the rest. `sum_up` adds the elements,
  // the bits outside `mask` cleared, and returns the largest of their bits; `find_distances` has
  // the bits of |data - base|, and returns the largest.
  std::uint32_t (*sum_up)(const float* data, std::size_t count, std::uint32_t mask, double* lanes);
  std::uint32_t (*find_distances)(const float* data, const float* base, std::size_t count,
                                  std::uint32_t* distances);
  void (*keep_residuals)(const float* data, const float* base, std::size_t count, float threshold,
                         float* kept);
  void (*keep_residuals_by)(const float* data, const float* base, const float* squares,
                            std::size_t count, const ElementRule* rule, float* kept);
  void (*keep_moments)(const float* data, const float* residuals, std::size_t count,
                       float threshold, float* kept);
  void (*keep_where)(const float* data, const float* others, std::size_t count, float* kept);
  // Puts what is not zero side by side, touching one element more; returns how many they are.
  std::size_t (*gather)(const float* kept, std::size_t count, float* found);
  // The same with the symbols where `likely` is 1, not 0; and back, leaving the others. Both may
  // touch one more of what is found.
  std::size_t (*gather_where)(const std::uint8_t* symbols, const std::uint8_t* likely,
                              std::size_t count, std::uint8_t* found);
  void (*scatter_where)(const std::uint8_t* found, const std::uint8_t* likely, std::size_t count,
                        std::uint8_t* symbols);
  // 0 for zero; else 1 and how many of 14 limits are below the element.
  void (*find_centres)(const float* kept, std::size_t count, const float* limits,
                       std::uint8_t* symbols);
  // base + centres[symbol], of 16; returns the largest bits of their absolute values.
  std::uint32_t (*add_centres)(const float* base, const std::uint8_t* symbols, std::size_t count,
                               const float* centres, float* target);
  void (*place_centres)(const std::uint8_t* symbols, std::size_t count, const float* centres,
                        float* target);
  // 1 where the bits differ; where they are not those of 0 or -0.
  void (*find_changed)(const std::uint32_t* data, const std::uint32_t* base, std::size_t count,
                       std::uint8_t* changed);
  void (*find_nonzero)(const std::uint32_t* data, std::size_t count, std::uint8_t* nonzero);

  // The loops of the codec compact; what they do stands in step_loops.h.
  std::uint32_t (*largest_word)(const std::uint32_t* data, std::size_t count, std::uint32_t mask);
  double (*sum_values)(const float* data, std::size_t count, double* columns);
  void (*make_squares)(std::uint32_t* target, std::size_t count, const std::int16_t* columns,
                       int row, const LogShape& shape, const std::uint8_t* symbols);
  void (*find_rests)(const std::uint32_t* data, std::size_t count, const std::int16_t* columns,
                     int row, const LogShape& shape, std::uint8_t* symbols);
  void (*find_scales)(const std::int16_t* columns, std::size_t count, int row, int radius,
                      std::uint8_t* classes);
  void (*find_contexts)(const std::uint8_t* classes, std::size_t count, const std::uint8_t* limits,
                        std::size_t limit_count, std::uint8_t first, std::uint8_t* contexts);
  void (*sum_squares)(const float* residuals, const std::uint8_t* classes, std::size_t count,
                      const float* scales, std::size_t scale_count, double* sums);
  void (*subtract)(const float* data, const float* base, std::size_t count, float* residuals);
  std::uint8_t (*quantise)(const float* residuals, const std::uint8_t* classes, std::size_t count,
                           const float* scales, std::size_t scale_count, float rounding,
                           std::uint8_t* symbols);
  void (*add_steps)(const float* base, const std::uint8_t* classes, const std::uint8_t* symbols,
                    std::size_t count, const float* steps, std::size_t stride, float* target);
  double (*sum_errors)(const float* data, const float* decoded, std::size_t count,
                       std::uint32_t* largest);
};

// Those this machine can run, fastest first. Never empty. All give the same bytes.
std::span<const CodecKernel> codec_kernels();

}  // namespace holdfast
