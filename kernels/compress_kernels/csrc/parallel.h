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

// Items of a product that are worth a thread: 5 us of work. Handing out a job costs 0.2 to 0.4
// (benchmarks/kernels/team.py), and what one core wrote and another reads as much again a KB. Of an
// item the products of two fp32 numbers, which a core makes 128 of in a nanosecond, and the bytes
// of a weight, of which a cache gives 32.
inline int64_t worth_a_thread(int64_t products, int64_t bytes) {
  return 1 + (5000 * 128) / (products + 4 * bytes + 1);
}

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

// Rows of so many numbers that are worth a thread: 5 to 15 us of copying, norms, activations or
// rounding.
inline int64_t rows_worth_a_thread(int64_t numbers) { return 1 + (32 << 10) / (numbers + 1); }

// body(row) for each row of so many numbers.
template <typename Body>
void row_by_row(int threads, int64_t rows, int64_t numbers, const Body& body) {
  in_parallel(threads, rows, rows_worth_a_thread(numbers), [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) body(row);
  });
}
