"""Times of variants of the verification kernels on a GPU: `python gpu_try.py` from the root of the checkout, about a minute."""

import importlib
import os
import shutil
import sys
import tempfile
import time
import traceback
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent
WORK = Path(os.environ.get("GPU_TRY_WORK") or tempfile.mkdtemp(prefix="gpu_try"))
os.environ["GPU_TRY_WORK"] = str(WORK)
os.environ["TRITON_CACHE_DIR"] = str(WORK / "cache")
sys.path[:0] = [str(WORK), str(ROOT)]
import torch  # noqa: E402

TOY = os.environ.get("TRITON_INTERPRET") == "1"  # to see that this script runs
DEVICE = "cpu" if TOY else "cuda"
BATCH, WIDTH, VOCAB = (2, 3, 9000) if TOY else (64, 7, 128256)
BEGAN = time.time()
ROLL = ("vocabulary.py", "tl.static_range(STEPS)", "range(STEPS)")
NO_RESOLVE = ("vocabulary.py", "& (left > 0)", "& (left > 0) & (position == -12345)")
TEXTS = {
    "static": [],
    "rolled": [ROLL],
    "noresolve": [NO_RESOLVE],
    "rnoresolve": [ROLL, NO_RESOLVE],
    "gstages": [("vocabulary.py", "for _ in range(steps):", "for _ in tl.range(steps, num_stages=3):")],
    "gunroll": [("vocabulary.py", "for _ in range(steps):", "for _ in tl.range(steps, loop_unroll_factor=2):")],
    "pdl": [
        (
            "verification.py",
            "    place = tl.program_id(0)\n    split",
            "    tl.extra.cuda.gdc_launch_dependents()\n    place = tl.program_id(0)\n    split",
        ),
        (
            "verification.py",
            "    row = tl.program_id(0).to(tl.int64)\n    slots",
            "    tl.extra.cuda.gdc_wait()\n    row = tl.program_id(0).to(tl.int64)\n    slots",
        ),
    ],
}
# text, steps, lanes, warps, maxnreg, warps of the walk
GREEDY = [
    ("static", 8, 128, 4, None, 4), ("static", 8, 128, 4, None, 1), ("static", 4, 128, 4, None, 1),
    ("static", 16, 128, 4, None, 1), ("static", 32, 128, 4, None, 1), ("static", 4, 256, 8, None, 1),
    ("static", 8, 256, 8, None, 1), ("static", 16, 64, 2, None, 1), ("static", 4, 512, 16, None, 1),
    ("static", 8, 256, 4, None, 1), ("gunroll", 8, 128, 4, None, 1), ("gunroll", 32, 128, 4, None, 1),
    ("gstages", 8, 128, 4, None, 1), ("pdl", 8, 128, 4, None, 1),
]  # fmt: skip
COUPLED = [
    ("static", 8, 128, 4, None, 1), ("static", 4, 128, 4, None, 1), ("static", 2, 128, 4, None, 1),
    ("static", 8, 128, 4, 96, 1), ("static", 8, 128, 4, 80, 1), ("static", 8, 128, 4, 64, 1),
    ("static", 4, 128, 4, 64, 1), ("static", 8, 64, 2, 64, 1), ("static", 4, 256, 8, 64, 1),
    ("rolled", 8, 128, 4, None, 1), ("rolled", 8, 128, 4, 64, 1), ("rolled", 4, 128, 4, 64, 1),
    ("rolled", 4, 256, 8, 64, 1), ("rolled", 8, 256, 8, 64, 1), ("rolled", 8, 128, 4, 48, 1),
    ("noresolve", 8, 128, 4, None, 1), ("rnoresolve", 8, 128, 4, 64, 1),
]  # fmt: skip
REJECTION = [
    ("static", 8, 128, 4, None, 4), ("static", 4, 128, 4, None, 4), ("static", 8, 128, 4, 96, 4),
    ("static", 8, 128, 4, 64, 4), ("rolled", 8, 128, 4, None, 4), ("rolled", 8, 128, 4, 80, 4),
    ("rolled", 8, 128, 4, 64, 4), ("rolled", 4, 128, 4, 64, 4), ("rolled", 4, 256, 8, 64, 4),
    ("rolled", 8, 256, 8, 64, 4), ("rnoresolve", 8, 128, 4, 64, 4), ("rolled", 4, 128, 4, 80, 4),
    ("static", 2, 128, 4, 80, 4), ("rolled", 8, 128, 4, 80, 1),
]  # fmt: skip
RULES = {"greedy": GREEDY, "coupled": COUPLED, "rejection": REJECTION}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def jobs():
    """bf16 first, fp32 of every third variant."""
    for name, dtype in DTYPES.items():
        for rule, variants in RULES.items():
            for i, variant in enumerate(variants):
                if name == "bf16" or i % 3 == 0:
                    yield rule, name, dtype, variant


def write_packages():
    for text, changes in TEXTS.items():
        shutil.copytree(ROOT / "hf_specdec" / "kernels", WORK / f"k_{text}", dirs_exist_ok=True)
        for file, old, new in changes:
            path = WORK / f"k_{text}" / file
            source = path.read_text()
            assert old in source, (text, old)
            path.write_text(source.replace(old, new))


class With:
    """A kernel that is launched with other options."""

    def __init__(self, kernel, options):
        self.kernel, self.options = kernel, options
        self.arg_names = kernel.arg_names

    def __getitem__(self, grid):
        return lambda *args, **kw: self.kernel[grid](*args, **{**kw, **self.options})


def module(text, name):
    return importlib.import_module(f"k_{text}.{name}")


ORIGINAL = {}


def configured(variant):
    """The variant's modules `verification` and `rejection`, set to its configuration."""
    text, steps, _, warps, registers, walk_warps = variant
    verification, rejection = module(text, "verification"), module(text, "rejection")
    options = {"num_warps": warps} | ({} if registers is None else {"maxnreg": registers})
    kernels = ORIGINAL.setdefault(
        text,
        (
            verification._choices_kernel,
            verification._walk_kernel,
            rejection.chain_kernel,
            rejection.rejection_walk_kernel,
        ),
    )
    pdl = {"launch_pdl": True} if text == "pdl" else {}
    verification._choices_kernel = With(kernels[0], options)
    verification._walk_kernel = With(kernels[1], {"num_warps": walk_warps, **pdl})
    rejection.chain_kernel = With(kernels[2], options)
    rejection.rejection_walk_kernel = With(kernels[3], {"num_warps": walk_warps})
    split = lambda rows, vocab, block: (-(-vocab // (block * steps)), steps)  # noqa: E731
    verification.split_vocabulary = rejection.split_vocabulary = split
    return verification, rejection


class Inputs:
    """64 chains of 7 tokens; `rows` of logits."""

    def __init__(self, dtype, rows, device=DEVICE):
        g = torch.Generator(device).manual_seed(1)
        self.logits = (torch.randn(rows, VOCAB, generator=g, device=device) * 2).to(dtype)
        places = BATCH * (WIDTH + 1)
        self.index = (torch.randperm(places, generator=g, device=device) % rows).view(BATCH, WIDTH + 1).contiguous()
        number = lambda high, *s: torch.randint(0, high, s, generator=g, device=device)  # noqa: E731
        self.tokens = number(VOCAB, BATCH, WIDTH)
        greedy = self.logits.argmax(1)[self.index][:, :-1]
        self.tokens = torch.where(number(10, BATCH, WIDTH) < 3, greedy, self.tokens).contiguous()
        self.valid = torch.ones(BATCH, WIDTH, dtype=torch.bool, device=device)
        self.temperature = torch.tensor([1.0, 0.7, 1.3, 2.5], device=device)[number(4, BATCH)]
        self.seeds, self.positions, self.steps = number(2**62, BATCH), number(2**20, BATCH), number(5000, BATCH)
        self.flags = torch.ones(BATCH, dtype=torch.bool, device=device)

    def call(self, rule, variant):
        verification, rejection = configured(variant)
        block = variant[2] * 32
        common = (self.logits, self.index, self.tokens, self.valid)
        if rule == "greedy":
            return lambda: verification.verify_choices(*common, block=block)
        if rule == "coupled":
            return lambda: verification.verify_choices(
                *common, seeds=self.seeds, positions=self.positions, do_sample=self.flags,
                temperature=self.temperature, block=block,
            )  # fmt: skip
        return lambda: rejection.verify_rejection(
            *common, self.seeds, self.positions, self.steps, temperature=self.temperature, block=block
        )

    def choices(self, rule, variant):
        verification, _ = configured(variant)
        noise = {}
        if rule == "coupled":
            noise = dict(seeds=self.seeds, positions=self.positions, do_sample=self.flags, temperature=self.temperature)
        return verification.target_choices(self.logits, self.index, self.valid, block=variant[2] * 32, **noise)

    def definition(self, rule):
        """Choices by torch, and how far the second best is behind."""
        random_bits = module("static", "random_bits")

        found, gaps = [], []
        for row in range(0, BATCH, 8):
            rows = slice(row, row + 8)
            scores = self.logits[self.index[rows]].float()
            if rule == "coupled":
                scores /= self.temperature[rows, None, None]
                depth = torch.arange(WIDTH + 1, device=scores.device).repeat(len(scores))
                seeds = self.seeds[rows].repeat_interleave(WIDTH + 1)
                positions = self.positions[rows].repeat_interleave(WIDTH + 1) + depth
                noise = random_bits.gumbel(seeds, positions, torch.zeros_like(seeds), random_bits.TOKEN_STREAM, VOCAB)
                scores += noise.view_as(scores)
            best = scores.topk(2, dim=2).values
            found.append((scores == best[:, :, :1]).to(torch.uint8).argmax(2))
            gaps.append(best[:, :, 0] - best[:, :, 1])
        return torch.cat(found), torch.cat(gaps)

    def rejected(self):
        """Path and token by the definition in float64, and rows that hang on rounding."""
        random_bits, reference = module("static", "random_bits"), module("static", "reference")

        rows = torch.arange(BATCH, device=self.logits.device)
        parents = torch.arange(-1, WIDTH - 1, device=self.logits.device).expand(BATCH, -1).contiguous()
        wide = lambda node: torch.softmax(  # noqa: E731
            (self.logits[self.index[rows, node]].float() / self.temperature[:, None]).double(), -1
        )
        uniform = random_bits.uniform(self.seeds, self.positions, self.steps, random_bits.ACCEPT_STREAM, WIDTH)
        noise = lambda depth: random_bits.gumbel(  # noqa: E731
            self.seeds, self.positions + depth, self.steps, random_bits.RESIDUAL_STREAM, VOCAB
        ).double()
        found = [
            reference.rejection_walk(
                self.tokens, self.valid, parents, None, None, wide, uniform.double() * factor, noise
            )
            for factor in (1.0, 1 - 1e-5, 1 + 1e-5)
        ]
        near = sum(((o[0] != found[0][0]).any(1) | (o[1] != found[0][1])) for o in found[1:]) > 0
        return *found[0], near


def compile_one(job):
    """In a process of its own: what the job launches, into Triton's cache."""
    rule, _, dtype, variant = job
    try:
        inputs = Inputs(dtype, 8)
        inputs.call(rule, variant)()
        if rule != "rejection":
            inputs.choices(rule, variant)
        if not TOY:
            torch.cuda.synchronize()
        return None
    except Exception as error:
        return f"{job}: {type(error).__name__}: {str(error)[-300:]}"


def milliseconds(run):
    if TOY:
        began = time.time()
        run()
        return 1e3 * (time.time() - began)
    from triton.testing import do_bench

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return do_bench(graph.replay, warmup=10, rep=50, return_mode="median")


def first_kernel_only(rule, variant, inputs):
    """Time without the walk."""
    call = inputs.call(rule, variant)
    verification, rejection = configured(variant)

    class Nothing:
        def __getitem__(self, grid):
            return lambda *args, **kw: None

    verification._walk_kernel = rejection.rejection_walk_kernel = Nothing()
    return milliseconds(call)


def measure(todo):
    source = torch.randn(2**20 if TOY else 2**29, device=DEVICE)
    target = torch.empty_like(source)
    copy = min(milliseconds(lambda: torch.neg(source, out=target)) for _ in range(2))
    bandwidth = 2 * source.nbytes / copy * 1e3
    del target
    total = milliseconds(lambda: source.view(2**13, -1).sum(1))
    print(
        f"copy {bandwidth / 1e9:.0f} GB/s, torch.sum alone of 2 GiB {source.nbytes / total / 1e6:.0f} GB/s", flush=True
    )
    del source
    tiny = torch.zeros(1, device=DEVICE)
    print(f"graph of one tiny kernel {1e3 * milliseconds(lambda: tiny.add_(1)):.1f} us", flush=True)
    inputs = None
    of = None
    expected = {}
    for rule, name, dtype, variant in todo:
        if time.time() - BEGAN > 58:
            print("out of time")
            break
        try:
            if of != name:
                inputs, of, expected = Inputs(dtype, BATCH * (WIDTH + 1)), name, {}
                moved = inputs.logits.nbytes
                floor = moved / bandwidth * 1e6
                for what, run in (("amax", lambda: inputs.logits.amax(1)), ("sum", lambda: inputs.logits.sum(1))):
                    took = 1e3 * milliseconds(run)
                    print(f"{name} torch.{what}: {took:.1f} us, {floor / took:.3f} of bandwidth", flush=True)
            if rule not in expected:
                expected[rule] = inputs.rejected() if rule == "rejection" else inputs.definition(rule)
            wanted = expected[rule]
            if rule == "rejection":
                path, _, token = inputs.call(rule, variant)()
                bad = ((path != wanted[0]).any(1) | (token != wanted[1])) & ~wanted[2]
            else:
                bad = inputs.choices(rule, variant) != wanted[0]
                if rule == "coupled":
                    bad &= wanted[1] > 1e-5
            took = 1e3 * milliseconds(inputs.call(rule, variant))
            alone = 1e3 * first_kernel_only(rule, variant, inputs)
            text, steps, lanes, warps, registers, walk = variant
            print(
                f"{name} {rule:9} {text:10} steps {steps:2} lanes {lanes:3} warps {warps:2} maxnreg {registers!s:4} "
                f"walk warps {walk}: {took:6.1f} us = {floor / took:.3f}; without walk {alone:6.1f} us = "
                f"{floor / alone:.3f}; wrong {int(bad.sum())}",
                flush=True,
            )
        except Exception as error:
            print(f"{name} {rule} {variant}: {type(error).__name__}: {str(error)[-400:]}", flush=True)
            if "CUDA" in str(error):
                traceback.print_exc()


def main():
    write_packages()
    todo = list(jobs())
    import multiprocessing

    if TOY:
        measure([next(job for job in todo if job[:2] == (rule, name)) for name in DTYPES for rule in RULES])
        return
    workers = min(14, os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        for job, future in [(job, pool.submit(compile_one, job)) for job in todo]:
            try:
                problem = future.result()
            except Exception as error:
                problem = f"{job}: {type(error).__name__}"
            if problem:
                print("compile:", problem, flush=True)
    print(f"compiled in {time.time() - BEGAN:.0f} s", flush=True)
    measure(todo)
    print(f"{time.time() - BEGAN:.0f} s in all")


if __name__ == "__main__":
    main()
