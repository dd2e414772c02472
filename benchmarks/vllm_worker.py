"""One vLLM engine, driven by `benchmarks/decode.py --vllm-python` through pipes. Runs in vLLM's own environment.

Reads one JSON object a line ({"prompts": [[ids]], "max_tokens": n}) and answers {"tokens": [[ids]], "seconds": s, "cpu_seconds": s};
the first line it reads is the engine's arguments, the first it writes {"version": ...}.
"""

import json
import os
import sys
import time

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # an engine that waits must not spin beside the others


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints to standard output
    import vllm  # pyright: ignore[reportMissingImports]

    engine = vllm.LLM(**json.loads(sys.stdin.readline()))
    print(json.dumps({"version": vllm.__version__}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        n = request["max_tokens"]
        sampling = vllm.SamplingParams(temperature=0, max_tokens=n, min_tokens=n, ignore_eos=True, detokenize=False)
        begin, cpu = time.perf_counter(), time.process_time()
        outputs = engine.generate([{"prompt_token_ids": ids} for ids in request["prompts"]], sampling, use_tqdm=False)
        figures = {"seconds": time.perf_counter() - begin, "cpu_seconds": time.process_time() - cpu}
        tokens = [list(out.outputs[0].token_ids) for out in outputs]
        print(json.dumps({"tokens": tokens, **figures}), file=answers, flush=True)


if __name__ == "__main__":
    main()
