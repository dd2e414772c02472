// What Python calls.
#include <cstring>
#include "choice.h"
#include "program.h"
#include "threads.h"
#if defined(HAS_AMX_BF16) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

#if defined(HAS_AMX_BF16)
// True if the CPU has AMX for bfloat16, and the system saves tiles and lets this process use them, for which a process on Linux must
// ask first. Call it only on CPUs with AVX-512.
bool has_tiles() {
#if defined(__linux__)
  unsigned a, b, c, features = 0, kept, high;
  constexpr unsigned BF16 = 1u << 22, TILE = 1u << 24, STATES = 3u << 17;  // configuration and data of tiles
  constexpr long ASK = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &features) || ~features & (BF16 | TILE)) return false;
  asm volatile("xgetbv" : "=a"(kept), "=d"(high) : "c"(0));
  return !(~kept & STATES) && !syscall(SYS_arch_prctl, ASK, TILE_DATA);
#else
  return false;
#endif
}
#endif

const Kernels* choose() {
#if defined(__x86_64__)
  __builtin_cpu_init();
#if defined(HAS_AVX512_BF16)
  if (__builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq")) {
#if defined(HAS_AMX_BF16)
    if (has_tiles()) return amx_bf16_kernels();
#endif
    return avx512_bf16_kernels();
  }
#endif
#if defined(HAS_AVX512)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq"))
    return avx512_kernels();
#endif
#if defined(HAS_AVX2)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) return avx2_kernels();
#endif
#endif
  return baseline_kernels();
}

const Kernels* kernels = choose();

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// The version of the structures; Python refuses another one.
i64 specdec_version() { return 13; }

// See `use_openmp`.
i64 specdec_use_openmp(void* gomp_parallel, void* fork_call, void* thread_num, void* num_threads) {
  return use_openmp(gomp_parallel, fork_call, thread_num, num_threads);
}

// The instruction set in use.
const char* specdec_instruction_set() { return kernels->name; }

// Use the kernels of another instruction set, for tests; 0: this build or this CPU does not have it.
i64 specdec_use(const char* name) {
  const Kernels* best = choose();
  const Kernels* known[] = {
    baseline_kernels(),
#if defined(HAS_AVX2)
    avx2_kernels(),
#endif
#if defined(HAS_AVX512)
    avx512_kernels(),
#endif
#if defined(HAS_AVX512_BF16)
    avx512_bf16_kernels(),
#endif
#if defined(HAS_AMX_BF16)
    amx_bf16_kernels(),
#endif
  };
  for (const Kernels* each : known) {  // in ascending order: a CPU has all sets before its best one
    if (!strcmp(each->name, name)) { kernels = each; return 1; }
    if (each == best) return 0;
  }
  return 0;
}

void specdec_linear(const Linear* call, i64 threads) {
  run_together(threads, [&](i64 part, i64 parts) {
    kernels->linear(*call, share_of(*call, part, parts), share_of(*call, part + 1, parts));
  });
}

// y [n, k] (its rows `ldy` apart) = the call's quantized weights.
void specdec_dequantize(const Linear* call, i64 threads) {
  run_together(threads, [&](i64 part, i64 parts) {
    kernels->dequantize(*call, share_of(*call, part, parts), share_of(*call, part + 1, parts));
  });
}

void specdec_attention(const Attention* call, i64 threads) {
  run_together(threads, [&](i64 part, i64 parts) { kernels->attention(*call, part, parts); });
}

void specdec_choices(const Choice* call, i64 threads) {
  run_together(threads, [&](i64 part, i64 parts) {
    for (i64 row = call->rows * part / parts; row < call->rows * (part + 1) / parts; row++)
      call->out[row] = choice_of(call->sampling, call->keys[row], call->scores + row * call->vocab, call->vocab, call->ahead, call->stream);
  });
}

void specdec_follow_choices(const Drafts* drafts, i64 threads) {
  run_together(threads, [&](i64 part, i64 parts) {
    for (i64 row = drafts->rows * part / parts; row < drafts->rows * (part + 1) / parts; row++) follow_choices(*drafts, row);
  });
}

i64 specdec_run(const Op* ops, i64 num_ops, char* const* slots, const Step* step, i64 threads) {
  i64 problem = check_ids(ops, num_ops, *step);
  if (problem >= 0) return problem;
  run_together(threads, [&](i64 part, i64 parts) { run_program(*kernels, ops, num_ops, slots, *step, part, parts); });
  return -1;
}

i64 specdec_round(const Round* round, i64 threads) { return run_round(*kernels, *round, threads); }

}
#pragma GCC visibility pop
