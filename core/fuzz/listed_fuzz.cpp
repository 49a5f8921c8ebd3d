// Headers: where the tensors are read, the columns written again are the text they were read from.
#include "holdfast/listed.h"

#include <string>

#include "input.h"

using namespace holdfast;

namespace {

std::string written(const Listed& listed) {
  std::string all;
  std::size_t key = 0;
  for (const ListedTensor& tensor : listed.tensors) {
    all += all.empty() ? R"(,"tensors":[{"path":[)" : R"(,{"path":[)";
    for (const char* before = "\""; key < tensor.path_end; before = ",\"") {
      all.append(before).append(listed.keys[key++]).append("\"");
    }
    const ListedForm& form = listed.forms[tensor.form];
    all.append(R"(],"dtype":")").append(form.dtype).append(R"(","shape":[)");
    std::size_t at = tensor.form == 0 ? 0 : listed.forms[tensor.form - 1].shape_end;
    for (const char* before = ""; at < form.shape_end; before = ",") {
      all.append(before).append(std::to_string(listed.shapes[at++]));
    }
    all.append(R"(],"codec":)").append(std::to_string(form.codec)).append("}");
  }
  return all + "]";
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const auto listed = read_listed(text);
  if (!listed) return 0;
  fuzz::expect(!listed->tensors.empty(), "a list without tensors is read");
  const std::string_view list = text.substr(listed->begin, listed->end - listed->begin);
  fuzz::expect(written(*listed) == list, "the columns say something else than the text");
  return 0;
}
