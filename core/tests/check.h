// The whole test framework: TEST registers, CHECK and CHECK_EQ count failures, main() runs all.
#pragma once

#include <cstdio>
#include <sstream>
#include <string>
#include <vector>

namespace check {

struct Test {
  const char* name;
  void (*run)();
};

inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

inline int failures = 0;

inline bool add(const char* name, void (*run)()) {
  tests().push_back({name, run});
  return true;
}

inline bool report(bool good, const char* file, int line, const std::string& text) {
  if (!good) {
    ++failures;
    std::fprintf(stderr, "%s:%d: %s\n", file, line, text.c_str());
  }
  return good;
}

template <class Found, class Expected>
bool equal(const Found& found, const Expected& expected, const char* file, int line,
           const char* text) {
  if (found == expected) return true;
  std::ostringstream out;
  out << text << ": found " << found << ", expected " << expected;
  return report(false, file, line, out.str());
}

inline void skip(const char* why) {
  std::fprintf(stderr, "  skipped: %s\n", why);
}

}  // namespace check

#define TEST(name)                                          \
  static void name();                                       \
  static const bool name##_added = check::add(#name, name); \
  static void name()
#define CHECK(condition) check::report((condition) ? true : false, __FILE__, __LINE__, #condition)
#define CHECK_EQ(found, expected) \
  check::equal((found), (expected), __FILE__, __LINE__, #found " == " #expected)

int main() {
  for (const check::Test& test : check::tests()) {
    std::fprintf(stderr, "%s\n", test.name);
    test.run();
  }
  if (check::failures > 0) std::fprintf(stderr, "%d checks failed\n", check::failures);
  return check::failures == 0 ? 0 : 1;
}
