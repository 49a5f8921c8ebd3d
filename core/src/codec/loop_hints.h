// What a compiler is told of the loop that follows, in its own words.
#pragma once

// No iteration reads what an earlier one has written.
#ifdef __clang__
#define HOLDFAST_NO_DEPENDENCE _Pragma("clang loop vectorize(assume_safety)")
#else
#define HOLDFAST_NO_DEPENDENCE _Pragma("GCC ivdep")
#endif
