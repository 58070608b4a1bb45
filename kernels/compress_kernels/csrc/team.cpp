// A team of threads that is kept: starting one took longer than most ops of a step.
//
// A caller publishes a job and takes pieces of it like everyone else, so a helper that sleeps, or
// has lost its core, costs nothing unless it holds a piece. Helpers look for the next job for
// kSpin, then sleep. Plain threads: a second OpenMP runtime next to torch's would spin on the cores
// that torch needs.
//
// One job at a time: who calls while another thread's job runs, or from inside a piece, does all of
// his pieces himself. The processors are busy then, and nobody waits for a job that is not his.
//
// Nothing here is ever freed, and no thread is joined: a process may end while helpers look for
// work. A child of fork has no helpers; it forgets the team and starts another when it needs one.

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;
using Piece = void (*)(const void*, int64_t);

constexpr std::chrono::microseconds kSpin{50};
constexpr int kMostThreads = 1 << 12;
constexpr int64_t kMostPieces = 1 << 20;

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

#ifdef __linux__
inline int processor() { return sched_getcpu(); }
#else
inline int processor() { return -1; }
#endif

inline bool on(int place) { return place >= 0 && place == processor(); }

// Whether ready() came true within kSpin. In vain(): the one who is waited for cannot go on before
// this thread sleeps.
template <typename Ready, typename Vain>
bool soon(const Ready& ready, const Vain& vain) {
  if (ready()) return true;
  const Clock::time_point end = Clock::now() + kSpin;
  do {
    for (int i = 0; i < 32; ++i) {
      pause();
      if (ready()) return true;
    }
  } while (!vain() && Clock::now() < end);
  return false;
}

// Where a thread sleeps until it is woken, once for each time that it went to sleep.
class Bed {
 public:
  // Sleeps unless ready() or until wake(). Whoever makes ready() true calls wake() afterwards.
  template <typename Ready>
  void sleep(const Ready& ready) {
    std::unique_lock<std::mutex> lock(mutex_);
    asleep_ = true;
    if (!ready()) condition_.wait(lock, [&] { return !asleep_; });
    asleep_ = false;
  }

  bool occupied() const { return asleep_; }

  void wake() {
    if (!asleep_.exchange(false)) return;
    { std::lock_guard<std::mutex> lock(mutex_); }  // either asleep by now, or about to look again
    condition_.notify_one();
  }

 private:
  std::mutex mutex_;
  std::condition_variable condition_;
  std::atomic<bool> asleep_{false};
};

// What a helper must know before it may touch a job, in one word: when the number of a job or of
// the pieces left has changed, it gets none. So a job's other fields are read by those alone who
// hold a piece of it, and it cannot end before they are done.
struct Offer {
  uint32_t job;
  int threads, left;

  explicit Offer(uint64_t word)
      : job(word >> 32), threads(word >> 20 & (kMostThreads - 1)), left(word & (kMostPieces - 1)) {}
  static uint64_t word(uint32_t job, int threads, int64_t left) {
    return uint64_t{job} << 32 | uint64_t(threads) << 20 | uint64_t(left);
  }
};

struct Team;

struct alignas(64) Helper {
  Team* team = nullptr;
  int number = 0;  // from 1 on; the caller is 0
  pthread_t thread{};
  Bed bed;
};

struct Team {
  alignas(64) std::atomic<uint64_t> offer{0};
  alignas(64) std::atomic<int64_t> done{0};  // pieces
  Bed bed;                                   // of the caller
  // Of the job; written while none is offered.
  Piece piece = nullptr;
  const void* context = nullptr;
  int64_t pieces = 0;
  std::fenv_t rounding{};
  std::atomic<int> place{-1};  // processor of the caller
  // Of the caller's side, which `busy` guards.
  alignas(64) std::atomic<bool> busy{false};
  std::vector<Helper*> helpers;
  int processors = 0;  // that the caller may use, 0: not looked yet
#ifdef __linux__
  std::mutex mask_mutex;
  cpu_set_t mask{};  // of the caller
#endif
};

std::atomic<Team*> the_team{nullptr};
std::atomic<double> the_quota{0.0};  // processors, 0: no limit
const int at_fork = pthread_atfork(nullptr, nullptr, [] { the_team = nullptr; });

Team* team() {
  Team* found = the_team;
  if (found) return found;
  Team* made = new Team;
  if (the_team.compare_exchange_strong(found, made)) return made;
  delete made;  // another thread was first
  return found;
}

bool offered(const Team& t, int number) {
  const Offer offer(t.offer);
  return offer.left > 0 && number < offer.threads;
}

// Does one piece, if one is left for a thread of this number.
bool take(Team& t, int number) {
  uint64_t word = t.offer;
  for (;;) {
    const Offer offer(word);
    if (offer.left == 0 || number >= offer.threads) return false;
    if (t.offer.compare_exchange_weak(word, word - 1)) {
      const int64_t pieces = t.pieces;
      if (number > 0) std::fesetenv(&t.rounding);
      t.piece(t.context, pieces - offer.left);
      if (t.done.fetch_add(1) + 1 == pieces && number > 0) t.bed.wake();
      return true;
    }
  }
}

// Moves this thread to another processor than the caller's: the system wakes a helper where its
// caller runs if all others have work, and it would stand in his way. False where it cannot.
bool step_aside(Team& t) {
#ifdef __linux__
  std::lock_guard<std::mutex> lock(t.mask_mutex);
  cpu_set_t others = t.mask;
  const int place = t.place;
  if (place >= 0 && place < CPU_SETSIZE) CPU_CLR(place, &others);
  return CPU_COUNT(&others) > 0 && sched_setaffinity(0, sizeof others, &others) == 0;
#else
  return false;
#endif
}

void* help(void* argument) {
  Helper& me = *static_cast<Helper*>(argument);
  Team& t = *me.team;
  for (;;) {
    const auto ready = [&] { return offered(t, me.number); };
    if (soon(ready, [&] { return on(t.place) && !step_aside(t); })) take(t, me.number);
    else me.bed.sleep(ready);
  }
}

// Signals are for the threads of Python.
bool start(Team& t) {
  Helper* helper = new Helper;
  helper->team = &t;
  helper->number = static_cast<int>(t.helpers.size()) + 1;
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  const bool started = pthread_create(&helper->thread, nullptr, help, helper) == 0;
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (!started) {
    delete helper;
    return false;
  }
  pthread_detach(helper->thread);
  t.helpers.push_back(helper);
  return true;
}

// Looks where the caller may run, and sends the helpers there.
void look_around(Team& t) {
  t.processors = 0;
#ifdef __linux__
  cpu_set_t mask;
  if (sched_getaffinity(0, sizeof mask, &mask) == 0) {
    t.processors = CPU_COUNT(&mask);
    std::lock_guard<std::mutex> lock(t.mask_mutex);
    if (!CPU_EQUAL(&mask, &t.mask))
      for (const Helper* helper : t.helpers)
        pthread_setaffinity_np(helper->thread, sizeof mask, &mask);
    t.mask = mask;
  }
#endif
  if (t.processors == 0) t.processors = std::max(1u, std::thread::hardware_concurrency());
}

// How many of `wanted` threads can run at once. Looks around where one has to be woken, which costs
// more, or where there may be more processors by now.
int useful(Team& t, int wanted) {
  const double quota = the_quota;
  if (quota > 0.0) wanted = std::min(wanted, std::max(1, static_cast<int>(quota)));
  bool known = t.processors >= wanted && static_cast<int>(t.helpers.size()) >= wanted - 1;
  for (int i = 0; known && i < wanted - 1; ++i) known = !t.helpers[i]->bed.occupied();
  if (!known) look_around(t);
  wanted = std::min(wanted, t.processors);
  while (static_cast<int>(t.helpers.size()) < wanted - 1)
    if (!start(t)) return static_cast<int>(t.helpers.size()) + 1;
  return wanted;
}

}  // namespace

// `processors`: how many of them the container grants this process, 0 for no limit.
extern "C" void team_quota(double processors) { the_quota = processors; }

// As parallel.h says.
extern "C" void team_run(int threads, int64_t pieces, Piece piece, const void* context) {
  Team& t = *team();
  if (threads < 2 || pieces < 2 || pieces >= kMostPieces || t.busy.exchange(true)) {
    for (int64_t i = 0; i < pieces; ++i) piece(context, i);
    return;
  }
  const int most = static_cast<int>(std::min<int64_t>(pieces, kMostThreads - 1));
  const int together = useful(t, std::min(threads, most));
  t.piece = piece;
  t.context = context;
  t.pieces = pieces;
  t.done = 0;
  std::fegetenv(&t.rounding);
  t.place = processor();
  t.offer = Offer::word(Offer(t.offer).job + 1, together, pieces);
  for (int i = 0; i < together - 1; ++i) t.helpers[i]->bed.wake();
  while (take(t, 0)) continue;
  const auto finished = [&] { return t.done == pieces; };
  while (!soon(finished, [] { return false; })) t.bed.sleep(finished);
  t.busy = false;
}
