// Floats in their order, as unsigned integers.
#pragma once

#include <type_traits>

namespace holdfast {

// Neighbours differ by one; of both zeros the negative one comes first.
template <class Word>
Word place_of(Word bits) {
  constexpr unsigned kSign = 8 * sizeof(Word) - 1;
  using Signed = std::make_signed_t<Word>;
  const auto flip = static_cast<Word>(static_cast<Signed>(bits) >> kSign | Word{1} << kSign);
  return static_cast<Word>(bits ^ flip);
}

template <class Word>
Word bits_at(Word place) {
  constexpr unsigned kSign = 8 * sizeof(Word) - 1;
  using Signed = std::make_signed_t<Word>;
  const auto flip = static_cast<Word>(static_cast<Signed>(~place) >> kSign | Word{1} << kSign);
  return static_cast<Word>(place ^ flip);
}

}  // namespace holdfast
