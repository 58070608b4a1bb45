// Run by team.py: microseconds that an op of two threads with nothing to do takes, by quantiles.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <thread>
#include <vector>

#include "parallel.h"

namespace {

using Clock = std::chrono::steady_clock;

volatile int64_t written[8];

void nothing(int64_t first, int64_t last) {
  for (int64_t i = first; i < last; ++i) written[i] = i;
}

void started() {
  std::thread other(nothing, 4, 8);
  nothing(0, 4);
  other.join();
}

void kept() { in_parallel(2, 8, 1, nothing); }

double microseconds(Clock::time_point since) {
  return std::chrono::duration<double, std::micro>(Clock::now() - since).count();
}

// gap: microseconds of other work between two ops.
void measure(const char* name, void (*op)(), int gap) {
  std::vector<double> times;
  for (int i = 0; i < 4000; ++i) {
    for (const auto begin = Clock::now(); microseconds(begin) < gap;) continue;
    const auto begin = Clock::now();
    op();
    times.push_back(microseconds(begin));
  }
  std::sort(times.begin(), times.end());
  std::printf("%s %d %.2f %.2f %.2f\n", name, gap, times[80], times[2000], times[3600]);
}

}  // namespace

int main() {
  for (int gap : {0, 10, 30, 100, 1000}) {
    measure("started", started, gap);
    measure("kept", kept, gap);
  }
}
