// Splits [0, count) into pieces, which the threads of a kept team (team.cpp) take in turn.

#pragma once

#include <algorithm>
#include <cstdint>

// Runs piece(context, i) once for each i in [0, pieces), on at most `threads` threads, the caller's
// among them. Returns when all are done.
extern "C" void team_run(int threads, int64_t pieces, void (*piece)(const void*, int64_t),
                         const void* context);

// Of a thread: one that loses its core holds the others up by one piece at most.
constexpr int64_t kPieces = 4;

// body(first, last) runs on at most `threads` threads, with at least `grain` items for each; more
// than once on each. Who runs which piece differs from call to call, so no result may depend on it.
template <typename Body>
void in_parallel(int threads, int64_t count, int64_t grain, const Body& body) {
  const int64_t wanted = std::max<int64_t>(1, std::min<int64_t>(threads, count / grain));
  if (wanted == 1) return body(0, count);
  struct Split {
    const Body& body;
    int64_t count, pieces;
  };
  const Split split{body, count, std::min(count, wanted * kPieces)};
  team_run(
      static_cast<int>(wanted), split.pieces,
      [](const void* context, int64_t i) {
        const Split& s = *static_cast<const Split*>(context);
        s.body(s.count * i / s.pieces, s.count * (i + 1) / s.pieces);
      },
      &split);
}
