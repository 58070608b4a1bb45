// Static split of [0, count) over threads.
//
// Plain threads: a second OpenMP runtime next to torch's would spin on the cores torch needs.

#pragma once

#include <algorithm>
#include <cstdint>
#include <thread>
#include <vector>

// body(first, last) runs on at most `threads` threads, with at least `grain` items each.
template <typename Body>
void in_parallel(int threads, int64_t count, int64_t grain, const Body& body) {
  const int64_t wanted = std::max<int64_t>(1, std::min<int64_t>(threads, count / grain));
  std::vector<std::thread> others;
  for (int64_t t = 1; t < wanted; ++t)
    others.emplace_back([&, t] { body(count * t / wanted, count * (t + 1) / wanted); });
  body(0, count / wanted);
  for (std::thread& thread : others) thread.join();
}
