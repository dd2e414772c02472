// Threads that run one function together. They sleep between calls; inside a call they meet at barriers.
#pragma once
#include <functional>
#include "abi.h"

// Run `work(part, parts)` in up to `wanted` threads, the caller's included; returns when all have ended. If the threads are busy
// with another call, or cannot be started, the caller does all the work: parts is then 1.
void run_together(i64 wanted, const std::function<void(i64 part, i64 parts)>& work);

// Wait until all `parts` threads of the running call are here.
void barrier(i64 parts);
