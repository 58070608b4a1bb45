// Many calls of compiled functions as data; see program.cpp.

#pragma once

#include <cstdint>

// All mirrored in cpu/program.py.
struct Call {
  void (*function)(const void*);
  const void* about;
};

struct Place {
  void* at;       // in what a function is given
  int32_t value;  // which of a run's
  int32_t bytes;  // 4 or 8
};

struct Program {
  const Call* calls;
  const Place* places;
  int64_t call_count, place_count;
};

extern "C" void run_program(const Program* p, const int64_t* values);
