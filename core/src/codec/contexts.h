// Symbols of steps, coded in contexts: by the class of an element and the group of its row.
#pragma once

#include "codec/compact_parts.h"

namespace holdfast {

inline constexpr std::size_t kContextLimits = 7;  // of classes, at most
inline constexpr std::size_t kRowGroups = 8;      // at most

struct Parts {
  std::size_t limit_count = 0;
  std::uint8_t limits[kContextLimits] = {};
  std::size_t groups = 1;
  const std::uint8_t* of_rows = nullptr;  // the group of each row of the view

  std::size_t count() const { return (limit_count + 1) * groups; }
};

// Limits of classes that about as many elements are between; and, where `symbols` are those of a
// whole view of many rows, groups of rows by how large their symbols are.
Parts find_parts(const Classes& classes, const std::uint8_t* symbols, std::size_t count);

// Finds the contexts, and returns the symbols in them.
Symbols in_contexts(const Classes& classes, const Parts& parts, const std::uint8_t* symbols,
                    std::size_t count, const CodecKernel& kernel);

// The parts, and the symbols in them where that pays.
std::uint8_t* put_symbols(const Classes& classes, const std::uint8_t* symbols, std::size_t count,
                          std::uint8_t* out, const CodecKernel& kernel);
bool get_symbols(std::span<const std::uint8_t>& payload, const Classes& classes,
                 std::span<std::uint8_t> symbols, const CodecKernel& kernel);

}  // namespace holdfast
