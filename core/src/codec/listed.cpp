#include "holdfast/listed.h"

#include <algorithm>
#include <map>

namespace holdfast {
namespace {

// As format/spec.py has them.
constexpr std::size_t kPathKeysMax = 128;
constexpr std::size_t kPathBytesMax = 4096;

constexpr std::size_t kUtf8BytesMax = 4;  // of a character
constexpr std::size_t kPathCharactersMax = kPathBytesMax / kUtf8BytesMax;
constexpr std::size_t kDigitsMax = 18;  // of a number below 2^63, whichever they are
constexpr std::size_t kFewTensors = 64, kFewForms = 16;  // as many as most small models have
constexpr std::string_view kBegin = R"(,"tensors":[{"path":[)";
constexpr std::string_view kNext = R"(,{"path":[)";
constexpr std::string_view kTies = R"(,"ties":[)";

// Whether a header that begins so has only its own object open at the end.
bool is_in_header(std::string_view before) {
  if (!before.starts_with('{')) return false;
  std::size_t depth = 0;
  bool in_text = false;
  for (std::size_t at = 0; at < before.size(); ++at) {
    const char c = before[at];
    if (c == '"') {
      in_text = !in_text;
    } else if (in_text) {
      if (c == '\\') ++at;
    } else if (c == '{' || c == '[') {
      ++depth;
    } else if (c == '}' || c == ']') {
      if (--depth == 0) return false;
    }
  }
  return depth == 1 && !in_text;
}

bool is_control(char c) {
  return static_cast<unsigned char>(c) < 0x20;
}

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

bool is_of_name(char c) {
  return (c >= 'a' && c <= 'z') || is_digit(c) || c == '_';
}

// Characters of UTF-8; of other bytes anything.
std::size_t characters_of(std::string_view text) {
  const auto is_first = [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; };
  return static_cast<std::size_t>(std::count_if(text.begin(), text.end(), is_first));
}

// Takes one piece of the form after the other. Once a piece is missing, nothing more may be taken.
class Scanner {
 public:
  Scanner(std::string_view text, std::size_t at) : text_(text), at_(at) {}

  std::size_t at() const { return at_; }
  std::string_view since(std::size_t start) const { return text_.substr(start, at_ - start); }

  bool take(std::string_view piece) {
    if (!text_.substr(at_).starts_with(piece)) return false;
    at_ += piece.size();
    return true;
  }

  bool take_text(std::string_view& out) {
    if (!take("\"")) return false;
    const std::size_t start = at_;
    while (at_ < text_.size() && text_[at_] != '"') {
      if (is_control(text_[at_]) || text_[at_] == '\\') return false;
      ++at_;
    }
    out = since(start);
    return take("\"");
  }

  bool take_name(std::string_view& out) {
    const std::size_t start = at_;
    while (at_ < text_.size() && is_of_name(text_[at_])) ++at_;
    out = since(start);
    return !out.empty();
  }

  bool take_number(std::int64_t& out) {
    const std::size_t start = at_;
    out = 0;
    while (at_ < text_.size() && is_digit(text_[at_]) && at_ - start < kDigitsMax) {
      out = 10 * out + (text_[at_++] - '0');
    }
    const std::size_t digits = at_ - start;
    return digits == 1 || (digits > 1 && text_[start] != '0');
  }

  bool take_numbers(std::vector<std::int64_t>& out) {
    do {
      std::int64_t number = 0;
      if (!take_number(number)) return false;
      out.push_back(number);
    } while (take(","));
    return true;
  }

  bool take_path(std::vector<std::string_view>& out) {
    const std::size_t start = at_, first = out.size();
    do {
      std::string_view key;
      if (!take_text(key) || out.size() - first == kPathKeysMax) return false;
      out.push_back(key);
    } while (take(","));
    const std::string_view all = since(start);  // without the brackets
    constexpr std::size_t kMost = kPathCharactersMax - 2;
    return all.size() <= kMost || characters_of(all) <= kMost;
  }

  bool take_form(ListedForm& out, std::vector<std::int64_t>& shape) {
    const std::size_t start = at_;
    if (!take(R"("dtype":")") || !take_name(out.dtype) || !take(R"(","shape":[)")) return false;
    if (!take("]") && !(take_numbers(shape) && take("]"))) return false;
    if (!take(R"(,"codec":)") || !take_number(out.codec)) return false;
    out.text = since(start);
    return true;
  }

 private:
  std::string_view text_;
  std::size_t at_;
};

// Finds forms by their text.
class Forms {
 public:
  // Returns the place of a form. A new one gets the place behind the others: put it there.
  std::size_t place_of(std::string_view text, const std::vector<ListedForm>& forms) {
    const std::size_t few = std::min(forms.size(), kFewForms);
    for (std::size_t i = 0; i < few; ++i) {
      if (forms[i].text == text) return i;
    }
    return few < kFewForms ? few : further_.try_emplace(text, forms.size()).first->second;
  }

 private:
  // Of those behind the first few. It is ordered, and not hashed: no header can make it slow.
  std::map<std::string_view, std::size_t> further_;
};

// What few tensors need. To grow from nothing, step by step, took a quarter of their scan.
void reserve(Listed& out) {
  out.tensors.reserve(kFewTensors);
  out.keys.reserve(kFewTensors);
  out.forms.reserve(kFewForms);
  out.shapes.reserve(2 * kFewForms);
}

bool take_tensors(Scanner& scanner, Listed& out) {
  Forms forms;
  do {
    if (!scanner.take_path(out.keys) || !scanner.take("],")) return false;
    ListedForm form;
    const std::size_t shape_start = out.shapes.size();
    if (!scanner.take_form(form, out.shapes) || !scanner.take("}")) return false;
    const std::size_t place = forms.place_of(form.text, out.forms);
    if (place == out.forms.size()) {
      form.shape_end = out.shapes.size();
      out.forms.push_back(form);
    } else {
      out.shapes.resize(shape_start);
    }
    out.tensors.push_back({out.keys.size(), place});
  } while (scanner.take(kNext));
  return true;
}

}  // namespace

std::optional<Listed> read_listed(std::string_view text) {
  Listed found{};
  found.begin = text.find(kBegin);
  if (found.begin == text.npos || !is_in_header(text.substr(0, found.begin))) return {};
  Scanner scanner(text, found.begin + kBegin.size());
  reserve(found);
  if (!take_tensors(scanner, found) || !scanner.take("]")) return {};
  found.end = scanner.at();
  if (!scanner.take(kTies)) return {};
  return found;
}

}  // namespace holdfast
