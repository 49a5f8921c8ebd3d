// The tensors of a JSON header (docs/format.md §6) as columns, read from the one form in which
// holdfast writes them. A pure function, safe from any thread. It knows no other JSON, and no error
// texts. What it refuses may be damaged, or merely written otherwise: the strict parser decides.
//
// What it accepts means to the strict parser what the columns say, under two conditions: the header
// without its list of tensors is valid JSON, and all texts are UTF-8. The caller checks both. Why:
//
// 1. The header begins with `{`. Where `,"tensors":[{"path":[` first stands, that bracket alone is
//    open, and no text is. So the list is a member of the header's own object.
// 2. From there to `],"ties":[` each byte belongs to one form: no space, no further key, no other
//    order of keys.
// 3. A text has no control character and no backslash. So it ends at the first quote, and says what
//    its bytes are.
// 4. A number has 1 to 18 digits, and begins with 0 only where it is 0. So it is below 2^63, and
//    equal numbers are written alike.
// 5. A path has 1 to 128 texts. It takes at most 4096 bytes even if each character took four.
// 6. Two tensors share a form exactly where dtype, shape and codec are equal.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

namespace holdfast {

// All of a tensor but its path.
struct ListedForm {
  std::string_view text;   // in which all of it stands
  std::string_view dtype;  // lower-case letters, digits and underscores; maybe of no known dtype
  std::size_t shape_end;   // in `Listed::shapes`; it begins where that of the form before ends
  std::int64_t codec;      // maybe of none that the header has
};

struct ListedTensor {
  std::size_t path_end;  // in `Listed::keys`; it begins where that of the tensor before ends
  std::size_t form;      // in `Listed::forms`
};

// Refers to the text it was read from.
struct Listed {
  std::size_t begin, end;  // of the list in the text, with its key and the comma before that
  std::vector<ListedTensor> tensors;
  std::vector<std::string_view> keys;  // of all paths, one behind the other
  std::vector<ListedForm> forms;       // each once, in the order in which they first stand
  std::vector<std::int64_t> shapes;    // of all forms, one behind the other
};

// Returns at least one tensor, or nothing: the text has another form.
std::optional<Listed> read_listed(std::string_view text);

}  // namespace holdfast
