// Threads that run one function together, and meet at barriers in it. They are those of the OpenMP runtime that torch uses: its threads
// keep their cores for milliseconds after an operator of torch, so threads of our own would wait for them.
#pragma once
#include <functional>
#include "abi.h"

// Take the threads of a runtime whose functions these are; null: it lacks them. One of `gomp_parallel` (GCC's interface) and `fork_call`
// (LLVM's, the only one on macOS) is enough. False: too many are missing, and callers will do all the work.
bool use_openmp(void* gomp_parallel, void* fork_call, void* thread_num, void* num_threads);

// Run `work(part, parts)` in up to `wanted` threads, the caller's included; returns when all have ended. The caller does all the work,
// and parts is 1, while another call runs, and in a forked process, which has none of the runtime's threads.
void run_together(i64 wanted, const std::function<void(i64 part, i64 parts)>& work);

// Wait until all `parts` threads of the running call are here.
void barrier(i64 parts);
