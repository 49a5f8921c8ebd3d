// The tensors of a header are read in the one form in which holdfast writes them, and refused with
// any one byte more, less or otherwise that a rule is about.
#include "holdfast/listed.h"

#include <string>
#include <utility>
#include <vector>

#include "check.h"

namespace holdfast {
namespace {

using Texts = std::vector<std::string>;
using Numbers = std::vector<std::int64_t>;
using Places = std::vector<std::size_t>;

const std::string kBefore = R"({"save_id":"ab","mesh":null,"metrics":{},"codecs":[{"name":"raw"}])";
const std::string kBehind = R"(,"ties":[],"objects":[]})";
const std::string kForm = R"("dtype":"f32","shape":[2,3],"codec":0})";

std::string entry(const std::string& path, const std::string& form = kForm) {
  return R"({"path":[)" + path + "]," + form;
}

std::string list_of(const Texts& entries) {
  std::string list = R"(,"tensors":[)";
  for (const std::string& one : entries) list += (one == entries.front() ? "" : ",") + one;
  return list + "]";
}

const Texts kEntries = {
    entry(R"("t","a.weight")"), entry(R"("")", R"("dtype":"u8","shape":[],"codec":1})"),
    entry(R"("t","größe")"), entry(R"("x")", R"("dtype":"f8_e4m3fn","shape":[0],"codec":12})")};

std::string header() {
  return kBefore + list_of(kEntries) + kBehind;
}

std::string header_of(const std::string& path, const std::string& form = kForm) {
  return kBefore + list_of({entry(path, form)}) + kBehind;
}

bool reads(const std::string& text) {
  return read_listed(text).has_value();
}

std::string replaced(std::string text, const std::string& old, const std::string& put) {
  const std::size_t at = text.find(old);
  CHECK(at != text.npos);
  return at == text.npos ? text : text.replace(at, old.size(), put);
}

std::string repeated(std::size_t count, const std::string& text, const std::string& between = "") {
  std::string all;
  for (std::size_t i = 0; i < count; ++i) all += (i == 0 ? "" : between) + text;
  return all;
}

// Each change of a good header is refused.
void refuse(const std::vector<std::pair<std::string, std::string>>& changes) {
  for (const auto& [old, put] : changes) {
    if (!CHECK(!reads(replaced(header(), old, put)))) {
      std::fprintf(stderr, "  %s is taken in place of %s\n", put.c_str(), old.c_str());
    }
  }
}

}  // namespace

TEST(what_holdfast_writes_is_read) {
  const std::string text = header();
  const auto found = read_listed(text);
  if (!CHECK(found.has_value())) return;
  CHECK_EQ(text.substr(0, found->begin), kBefore);
  CHECK_EQ(text.substr(found->end), kBehind);
  CHECK((Texts(found->keys.begin(), found->keys.end())) ==
        (Texts{"t", "a.weight", "", "t", "größe", "x"}));
  Places path_ends, forms;
  for (const ListedTensor& tensor : found->tensors) {
    path_ends.push_back(tensor.path_end);
    forms.push_back(tensor.form);
  }
  CHECK(path_ends == (Places{2, 3, 5, 6}));
  CHECK(forms == (Places{0, 1, 0, 2}));
  Texts dtypes;
  Places shape_ends;
  Numbers codecs;
  for (const ListedForm& form : found->forms) {
    dtypes.emplace_back(form.dtype);
    shape_ends.push_back(form.shape_end);
    codecs.push_back(form.codec);
  }
  CHECK(dtypes == (Texts{"f32", "u8", "f8_e4m3fn"}));
  CHECK(shape_ends == (Places{2, 2, 3}));
  CHECK(codecs == (Numbers{0, 1, 12}));
  CHECK(found->shapes == (Numbers{2, 3, 0}));
}

TEST(a_text_may_look_like_a_part_of_the_form) {
  for (const char* key : {"a],b", "},{", "[],", "}],", "tensors:[", "\x7f", "],dtype:"}) {
    const std::string text = header_of('"' + std::string(key) + R"(","b")");
    const auto found = read_listed(text);
    CHECK(found && found->keys.size() == 2 && found->keys[0] == key);
  }
}

TEST(many_forms_are_told_apart) {
  constexpr std::size_t kForms = 100, kTensors = 1000;
  Texts entries;
  for (std::size_t i = 0; i < kTensors; ++i) {
    const std::string shape = std::to_string(i * 7 % kForms);
    entries.push_back(entry('"' + std::to_string(i) + '"',
                            R"("dtype":"f32","shape":[)" + shape + R"(],"codec":0})"));
  }
  const std::string text = kBefore + list_of(entries) + kBehind;
  const auto found = read_listed(text);
  if (!CHECK(found && found->tensors.size() == kTensors && found->forms.size() == kForms)) return;
  for (std::size_t i = 0; i < kTensors; ++i) {
    CHECK_EQ(found->tensors[i].form, i % kForms);
    CHECK_EQ(found->shapes[found->tensors[i].form], static_cast<std::int64_t>(i * 7 % kForms));
    CHECK_EQ(found->keys[i], std::to_string(i));
  }
}

TEST(a_header_that_ends_within_the_list_is_refused) {
  const std::string text = header(), ties = R"(,"ties":[)";
  const std::size_t least = text.find(ties) + ties.size();
  for (std::size_t size = 0; size < text.size(); ++size) {
    CHECK_EQ(reads(text.substr(0, size)), size >= least);
  }
}

TEST(a_list_that_is_no_member_of_the_header_is_refused) {
  const std::string list = list_of({entry(R"("t")")}) + kBehind;
  for (const char* before : {
           R"({"a":{"b":1)",      // in an object
           R"({"a":[1)",          // in a list
           R"({"a":[{"b":1}])",   // as it should be
           R"({"a":"b)",          // in a text
           R"({"a":"b\")",        // in a text with a quote
           R"({"a":"b\\\")",      // in a text with a backslash and a quote
           R"({"a":"b\)",         // behind half an escape
           R"({"a":"{[\"]}\\")",  // as it should be
           R"([{"a":1)",          // in another list
           R"(["a")",
           R"("a")",
           R"( {"a":1)",
           R"({"a":1})",        // behind the header
           R"({"a":1}{"b":1)",  // in a second one
           R"({"a":1}})",
           "",
       }) {
    const std::string text = before;
    const bool is_good = text == R"({"a":[{"b":1}])" || text == R"({"a":"{[\"]}\\")";
    CHECK_EQ(reads(text + list), is_good);
  }
}

TEST(only_the_first_list_counts) {
  const std::string list = list_of({entry(R"("t")")});
  CHECK(!reads(R"({"a":{"b":1)" + list + "}" + list + kBehind));
  CHECK(!reads(R"({"a":"b)" + list + list + kBehind));
  const std::string twice = kBefore + list + R"(,"ties":[])" + list + kBehind;
  const auto found = read_listed(twice);
  CHECK(found && found->begin == kBefore.size() && found->tensors.size() == 1);
}

TEST(an_empty_list_is_refused) {
  CHECK(!reads(kBefore + R"(,"tensors":[])" + kBehind));
  CHECK(!reads(kBefore + R"(,"tensors":[{}])" + kBehind));
  CHECK(!reads(kBefore + R"(,"tensors":[{"path":[]})" + kBehind));
}

TEST(a_byte_between_the_pieces_is_refused) {
  const std::string text = header();
  const std::size_t begin = text.find(R"("tensors")"), end = text.find(R"([],"objects")");
  for (std::size_t at = begin + 1; at < end; ++at) {
    for (const char* more : {" ", "\n", "\"", ",", "[", "]", "{", "}", ":", "-", "\xEF\xBB\xBF"}) {
      const std::string changed = text.substr(0, at) + more + text.substr(at);
      const auto found = read_listed(changed);
      if (!found) continue;
      bool is_in_key = false;
      for (const std::string_view key : found->keys) {
        const auto start = static_cast<std::size_t>(key.data() - changed.data());
        is_in_key |= start <= at && at + std::string_view(more).size() <= start + key.size();
      }
      if (!CHECK(is_in_key)) std::fprintf(stderr, "  %s\n", changed.c_str());
    }
  }
}

TEST(a_path_that_is_no_list_of_plain_texts_is_refused) {
  refuse({
      {R"(["t","a.weight"])", "[]"},
      {R"(["t","a.weight"])", R"(["t",])"},
      {R"(["t","a.weight"])", R"([,"t"])"},
      {R"(["t","a.weight"])", R"(["t",,"a"])"},
      {R"(["t","a.weight"])", R"(["t""a"])"},
      {R"(["t","a.weight"])", R"(["t":"a"])"},
      {R"(["t","a.weight"])", R"(["t" ,"a"])"},
      {R"(["t","a.weight"])", R"(["t", "a"])"},
      {R"(["t","a.weight"])", R"([ "t"])"},
      {R"(["t","a.weight"])", R"(["t"])"
                              "\n"},
      {R"(["t","a.weight"])", R"(["t",3])"},
      {R"(["t","a.weight"])", R"(["t",["list",2]])"},
      {R"(["t","a.weight"])", R"(["t",null])"},
      {R"(["t","a.weight"])", R"("t")"},
      {R"(["t","a.weight"])", R"(["t)"},
      {R"(["t","a.weight"])", R"([t"])"},
      {R"(["t","a.weight"])", R"(["t","a"],["b"])"},
  });
}

TEST(a_text_that_reaches_into_the_next_path_is_refused) {
  CHECK(!reads(
      replaced(replaced(header(), R"("a.weight"])", R"("a.weight])"), R"([""])", R"([x""])")));
}

TEST(escapes_and_control_characters_are_refused) {
  refuse({{"a.weight", R"(a\"b)"}, {"a.weight", R"(a\\b)"}, {"a.weight", R"(a\u0062)"}});
  for (char c = 0; c < 0x20; ++c) {
    refuse({{"a.weight", std::string("a") + c}, {"größe", std::string(1, c)}});
  }
  CHECK(reads(replaced(header(), "a.weight", "a weight")));  // the first that is none
}

TEST(other_dtypes_than_lower_case_names_are_refused) {
  refuse({
      {R"("f32")", R"("")"},
      {R"("f32")", R"("F32")"},
      {R"("f32")", R"("f-32")"},
      {R"("f32")", R"("f32 ")"},
      {R"("f32")", R"("é")"},
      {R"("f32")", R"("f\u0033")"},
      {R"("f32")", "32"},
      {R"("f32")", "null"},
      {R"("f32")", R"(["f32"])"},
  });
}

TEST(other_numbers_than_short_whole_ones_are_refused) {
  const std::string longest(18, '9'), longer(19, '1');
  for (const std::string& bad :
       {std::string(), std::string("-1"), std::string("+1"), std::string("00"), std::string("01"),
        std::string("1.0"), std::string("1e3"), std::string("x"), std::string("null"),
        std::string("\"1\""), std::string("[1]"), std::string(" 1"), std::string("1 "), longer}) {
    refuse({{"[2,3]", "[2," + bad + "]"},
            {"[2,3]", "[" + bad + ",3]"},
            {R"("codec":0)", R"("codec":)" + bad}});
  }
  refuse({{"[2,3]", "[2,]"},
          {"[2,3]", "[,3]"},
          {"[2,3]", "[2,,3]"},
          {"[2,3]", "[2 3]"},
          {"[2,3]", "2"},
          {"[2,3]", "null"},
          {"[2,3]", "[2,3"},
          {"[2,3]", "2,3]"}});
  const std::string most = header_of(
      R"("t")", R"("dtype":"f32","shape":[)" + longest + R"(,0],"codec":)" + longest + "}");
  const auto found = read_listed(most);
  CHECK(found && found->shapes == (Numbers{999999999999999999, 0}));
  CHECK(found && found->forms[0].codec == 999999999999999999);
}

TEST(other_keys_and_another_order_of_them_are_refused) {
  refuse({
      {R"("codec":0)", R"("codec":0,"codec":0)"},
      {R"("codec":0)", R"("codec":0,"more":0)"},
      {R"(,"codec":0)", ""},
      {R"("codec":0)", R"("Codec":0)"},
      {R"("shape":[2,3],"codec":0)", R"("codec":0,"shape":[2,3])"},
      {R"("dtype":"f32",)", ""},
      {R"("dtype":"f32",)", R"("dtype":"f32","dtype":"f32",)"},
      {R"("shape":[2,3],)", ""},
      {R"({"path":["t","a.weight"],)", "{"},
      {R"({"path":["t","a.weight"],)", R"({"path":["t"],"path":["t"],)"},
      {R"({"path":["t","a.weight"],"dtype":"f32",)", R"({"dtype":"f32","path":["t"],)"},
  });
}

TEST(other_ends_of_an_entry_and_of_the_list_are_refused) {
  const std::string last = R"("codec":12}])";
  refuse({
      {R"("codec":0},)", R"("codec":0})"},
      {R"("codec":0},)", R"("codec":0},,)"},
      {R"("codec":0},)", R"("codec":0,)"},
      {R"("codec":0},)", R"("codec":0},{},)"},
      {R"("codec":0},)", R"("codec":0},null,)"},
      {last, R"("codec":12}])"
             "]"},
      {last, R"("codec":12},])"},
      {last, R"("codec":12})"},
      {last, R"("codec":12])"},
      {R"(,"ties":[)", R"("ties":[)"},
      {R"(,"ties":[)", R"(, "ties":[)"},
      {R"(,"ties":[)", R"(,"tensors":[],"ties":[)"},
      {R"(,"ties":[)", R"(,"objects":[)"},
      {R"(,"ties":[)", R"(,"ties":null,"a":[)"},
  });
}

TEST(a_path_of_too_many_keys_is_refused) {
  CHECK(reads(header_of(repeated(128, R"("x")", ","))));
  CHECK(!reads(header_of(repeated(129, R"("x")", ","))));
}

// 4096 bytes of four for each character, with brackets and quotes.
TEST(a_path_of_too_many_characters_is_refused) {
  for (const char* character : {"x", "ö", "✓", "😀"}) {
    CHECK(reads(header_of('"' + repeated(1020, character) + '"')));
    CHECK(!reads(header_of('"' + repeated(1021, character) + '"')));
    CHECK(reads(header_of(R"("x",")" + repeated(1016, character) + '"')));
    CHECK(!reads(header_of(R"("x",")" + repeated(1017, character) + '"')));
  }
}

}  // namespace holdfast
