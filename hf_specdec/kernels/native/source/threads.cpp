#include "threads.h"
#include <atomic>
#include <cstdlib>
#include <mutex>
#include <sched.h>
#include <unistd.h>

namespace {

void (*gomp_parallel)(void (*part)(void*), void* data, unsigned threads, unsigned flags);
void (*fork_call)(const void* place, int32_t arguments, void (*part)(int32_t*, int32_t*, void*), ...);
int (*thread_num)();
int (*num_threads)();
pid_t process = 0;  // that the threads are of; 0: there are none

std::mutex busy;
std::atomic<i64> arrived{0}, phase{0};

struct Call {
  i64 wanted;
  const std::function<void(i64, i64)>& work;
};

// All threads come here. A team always has all of them: the runtime ends those that a smaller team leaves out, and starts them again.
void run_part(void* data) {
  const Call& call = *(const Call*)data;
  const i64 part = thread_num(), team = num_threads(), parts = call.wanted < team ? call.wanted : team;
  if (part < parts) call.work(part, parts);
}

void run_forked_part(int32_t*, int32_t*, void* data) { run_part(data); }

void pause_a_moment(i64 turns) {
  if (turns > 2000) sched_yield();
#if defined(__x86_64__)
  else __builtin_ia32_pause();
#endif
}

}  // namespace

bool use_openmp(void* gomp, void* fork, void* thread, void* threads) {
  gomp_parallel = (decltype(gomp_parallel))gomp, fork_call = (decltype(fork_call))fork;
  thread_num = (decltype(thread_num))thread, num_threads = (decltype(num_threads))threads;
  process = (gomp || fork) && thread && threads ? getpid() : 0;
  return process;
}

void run_together(i64 wanted, const std::function<void(i64, i64)>& work) {
  std::unique_lock<std::mutex> lock(busy, std::defer_lock);
  if (wanted <= 1 || process != getpid() || !lock.try_lock()) return work(0, 1);
  arrived = 0;
  Call call = {wanted, work};
  if (gomp_parallel) return gomp_parallel(run_part, &call, 0, 0);
  static const struct { int32_t reserved, flags, more[2]; const char* source; } place = {0, 2, {}, ";hf_specdec;run_together;0;0;;"};
  fork_call(&place, 1, run_forked_part, &call);
}

void barrier(i64 parts) {
  if (parts == 1) return;
  i64 before = phase.load();
  if (arrived.fetch_add(1) == parts - 1) {
    arrived = 0;
    phase.fetch_add(1);
    return;
  }
  for (i64 turns = 0; phase.load() == before; turns++) pause_a_moment(turns);
}

void* scratch(i64 which, i64 bytes) {
  struct Memory {
    void* data = nullptr;
    i64 bytes = 0;
    ~Memory() { free(data); }
  };
  static thread_local Memory memory[4];
  Memory& own = memory[which];
  if (own.bytes < bytes) {
    free(own.data);
    own.bytes = bytes + bytes / 2 + 64;
    if (posix_memalign(&own.data, 64, own.bytes)) abort();  // out of memory, as an allocation in any operator of torch
  }
  return own.data;
}
