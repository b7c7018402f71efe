// PARVL_CHECK: states an invariant of our own code; a failure is our bug, prints where, and aborts.
#pragma once

#include <cstdio>
#include <cstdlib>

#define PARVL_CHECK(condition, message)                                                                    \
  do {                                                                                                     \
    if (!(condition)) {                                                                                    \
      std::fprintf(stderr, "%s:%d: internal error: %s (%s)\n", __FILE__, __LINE__, (message), #condition); \
      std::abort();                                                                                        \
    }                                                                                                      \
  } while (false)
