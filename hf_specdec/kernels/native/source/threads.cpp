#include "threads.h"
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <sched.h>
#include <system_error>
#include <thread>
#include <unistd.h>

namespace {

// A fork leaves the parent's threads behind, so a child process gets a pool of its own; the old one is left as it is.
struct Pool {
  pid_t process = getpid();
  std::mutex busy, mutex;
  std::condition_variable begin;
  i64 started = 0, parts = 0, generation = 0;
  const std::function<void(i64, i64)>* work = nullptr;
  std::atomic<i64> running{0};
  std::atomic<i64> arrived{0}, phase{0};
};

std::atomic<Pool*> current{nullptr};

void pause_a_moment(i64 turns) {
  if (turns > 2000) sched_yield();
#if defined(__x86_64__)
  else __builtin_ia32_pause();
#endif
}

void loop(Pool* pool, i64 part, i64 seen) {
  std::unique_lock<std::mutex> lock(pool->mutex);
  for (;;) {
    pool->begin.wait(lock, [&] { return pool->generation != seen; });
    seen = pool->generation;
    if (part >= pool->parts) continue;
    const std::function<void(i64, i64)>* work = pool->work;
    i64 parts = pool->parts;
    lock.unlock();
    (*work)(part, parts);
    pool->running.fetch_sub(1);
    lock.lock();
  }
}

Pool* pool_of_process() {
  Pool* pool = current.load();
  while (!pool || pool->process != getpid()) {
    Pool* own = new Pool;
    if (current.compare_exchange_strong(pool, own)) return own;
    delete own;
  }
  return pool;
}

}  // namespace

void run_together(i64 wanted, const std::function<void(i64, i64)>& work) {
  if (wanted <= 1) return work(0, 1);
  Pool* pool = pool_of_process();
  std::unique_lock<std::mutex> busy(pool->busy, std::try_to_lock);
  if (!busy.owns_lock()) return work(0, 1);
  i64 parts = wanted;
  {
    std::lock_guard<std::mutex> lock(pool->mutex);
    try {
      for (; pool->started < wanted - 1; pool->started++) std::thread(loop, pool, pool->started + 1, pool->generation).detach();
    } catch (const std::system_error&) {
      parts = pool->started + 1;  // the system gives no more threads: these do the work
    }
    pool->parts = parts;
    pool->work = &work;
    pool->running = parts - 1;
    pool->arrived = 0;
    pool->generation++;
  }
  pool->begin.notify_all();
  work(0, parts);
  for (i64 turns = 0; pool->running.load(); turns++) pause_a_moment(turns);
}

void barrier(i64 parts) {
  if (parts == 1) return;
  Pool* pool = current.load();
  i64 phase = pool->phase.load();
  if (pool->arrived.fetch_add(1) == parts - 1) {
    pool->arrived = 0;
    pool->phase.fetch_add(1);
    return;
  }
  for (i64 turns = 0; pool->phase.load() == phase; turns++) pause_a_moment(turns);
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
