// Many calls of the other files' functions in one: a step of a decoder as data.
//
// What a call is given stays the same from step to step but for a few numbers, such as how many rows
// there are; they are written where each call has them, before the first one.

#include <cstdint>
#include <cstring>

#include "program.h"

extern "C" void run_program(const Program* p, const int64_t* values) {
  for (int64_t i = 0; i < p->place_count; ++i) {
    const Place& place = p->places[i];
    const int64_t wide = values[place.value];
    const int32_t narrow = static_cast<int32_t>(wide);
    if (place.bytes == 8) std::memcpy(place.at, &wide, sizeof wide);
    else std::memcpy(place.at, &narrow, sizeof narrow);
  }
  for (int64_t i = 0; i < p->call_count; ++i) p->calls[i].function(p->calls[i].about);
}
