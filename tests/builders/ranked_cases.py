"""What two processes run together for test_ranks.py: `torchrun --nproc_per_node 2 ranked_cases.py OUTPUT CASE..`.

Each case returns something JSON can hold; rank r writes OUTPUT.r as {case: result}. The processes start once for many cases.
"""

from __future__ import annotations

import functools
import json
import sys
import tempfile
import time
import traceback
from pathlib import Path

import families
import helpers_eagle3
import helpers_medusa
import helpers_mtp
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer, StoppingCriteriaList
from transformers.distributed import DistributedConfig
from transformers.generation.streamers import BaseStreamer

import hf_specdec
from hf_specdec import LLM, SamplingParams
from hf_specdec.candidate_generators.auto import generator
from hf_specdec.core import clock
from hf_specdec.decoding import decoder as decoding
from hf_specdec.integration import kept_decoders
from hf_specdec.model.options import prepacked

PROMPTS = ["Once upon a time, there was a little", "The dog", "One day, Tom and Lily went to the park and"]
CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


@functools.cache
def target(name="tiny", size=None):
    """A sharded model; size 1: a whole one."""
    size = dist.get_world_size() if size is None else size
    more = {"distributed_config": DistributedConfig(tp_size=size)} if size > 1 else {}
    folder = hf_specdec.bundled(name) if size <= 2 else stored("more heads")
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **more).eval()


def with_more_heads():
    """The bundled model with each of its two KV heads twice, which computes the same and can be on four ranks."""
    model = AutoModelForCausalLM.from_pretrained(hf_specdec.bundled("tiny"), dtype=torch.float32)
    width = model.config.head_dim
    model.config.num_key_value_heads *= 2
    for layer in model.model.layers:
        for each in (layer.self_attn.k_proj, layer.self_attn.v_proj):
            heads = each.weight.detach().view(-1, width, each.in_features)
            each.weight = torch.nn.Parameter(heads.repeat_interleave(2, 0).reshape(-1, each.in_features))
    return model


@functools.cache
def prompts():
    tokenizer = AutoTokenizer.from_pretrained(hf_specdec.bundled("tiny"), padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer(PROMPTS, padding=True, return_tensors="pt")


def run(config, model=None, new=16, **more):
    model = target() if model is None else model
    more.setdefault("do_sample", False)
    ids = model.generate(**prompts(), max_new_tokens=new, pad_token_id=0, speculative_config=config, **more)
    return getattr(ids, "sequences", ids).tolist()


def plain():
    return _plain(16)


@functools.cache
def _plain(new):
    model = target(size=1)
    return model.generate(**prompts(), max_new_tokens=new, pad_token_id=0, do_sample=False).tolist()


METHODS = {
    "none": {"method": "none"},
    "ngram": {"method": "ngram", "num_speculative_tokens": 4},
    "suffix": {"method": "suffix"},
    "draft_model": {"method": "draft_model", "model": "tiny-draft", "num_speculative_tokens": 4},
    "eagle3": {"method": "eagle3", "model": "tiny-eagle3"},
    "mtp": {"method": "mtp", "model": "tiny-mtp"},
    "medusa": {"method": "medusa", "model": "tiny-medusa"},
}
SLOW = {"all_methods", "experts", "error_in_a_forward"}


@case
def methods():
    """Text equal to one whole process's own generate(); the last method twice."""
    return {name: run(config) == plain() for name, config in METHODS.items()} | {
        "again": run(METHODS["medusa"]) == plain()
    }


FOLDER = Path(tempfile.gettempdir())  # of models that are made here; set in main


@functools.cache
def stored(name):
    """Folder of a random model, made by rank 0."""
    folder = FOLDER / name.replace(" ", "_")
    if dist.get_rank() == 0:
        if name == "moe eagle3":
            helpers_eagle3.write(folder, "yuhuili")
        elif name == "moe medusa":
            helpers_medusa.write(folder, helpers_medusa.original(), helpers_medusa.ORIGINAL | {"medusa_num_heads": 4})
        elif name == "moe draft":
            families.build("llama", 5, hidden_size=32, head_dim=8, num_hidden_layers=1).save_pretrained(folder)
        elif name == "more heads":
            with_more_heads().save_pretrained(folder)
        elif name == "GLM-4.5":
            helpers_mtp.store(folder, "GLM-4.5")
        else:
            size = {"hidden_size": 32, "head_dim": 8} if name == "Qwen3-MoE" else {}
            families.make(name, **size).save_pretrained(folder)
    dist.barrier()
    return str(folder)


@functools.cache
def random_target(name, tp_size=2, **more):
    config = {} if tp_size == 1 else {"distributed_config": DistributedConfig(tp_size=tp_size, **more)}
    return AutoModelForCausalLM.from_pretrained(stored(name), dtype=torch.float32, **config).eval()


def random_run(model, config, **more):
    ids = torch.arange(2 * 7).view(2, 7) * 5 % 61
    more = {"speculative_config": config, **more} if config else more
    return model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, pad_token_id=0, **{"do_sample": False, **more}
    ).tolist()


@case
def mixture():
    """Qwen3-MoE, and GLM-4.5's for MTP: sharded text equal to the whole model's own."""
    methods = {
        "ngram": METHODS["ngram"],
        "suffix": METHODS["suffix"],
        "draft_model": {"method": "draft_model", "model": stored("moe draft"), "num_speculative_tokens": 3},
        "eagle3": {"method": "eagle3", "model": stored("moe eagle3")},
        "medusa": {"method": "medusa", "model": stored("moe medusa")},
    }
    plain = random_run(random_target("Qwen3-MoE", 1), None)
    found = {name: random_run(random_target("Qwen3-MoE"), config) == plain for name, config in methods.items()}
    plain = random_run(random_target("GLM-4.5", 1), None)
    return {**found, "mtp": random_run(random_target("GLM-4.5"), {"method": "mtp"}) == plain}


@case
def lengths_by_clock():
    """The measured lengths and choices of rank 0 hold. Rank 1's clock tells other times, so that it would choose others."""
    honest = clock.clock_for
    if dist.get_rank():
        now = iter(range(10**9))
        clock.clock_for = decoding.clock_for = generator.clock_for = lambda device: lambda: next(now) * 1.7 % 3
    hf_specdec.release()
    configs = {"eagle3": {**METHODS["eagle3"], "draft_length": "auto"}, "auto": {"method": "auto"}}
    found = {name: run(config, new=40) == _plain(40) for name, config in configs.items()}
    clock.clock_for = decoding.clock_for = generator.clock_for = honest
    hf_specdec.release()
    return found


@case
def unseeded():
    """Ranks with unlike seeds of torch's generator; the test compares the ranks' texts."""
    torch.manual_seed(1000 + dist.get_rank())
    return [run(METHODS[name], do_sample=True) for name in ("ngram", "draft_model")]


@case
def seeded():
    """As one process samples with that seed."""
    config = {**METHODS["draft_model"], "seed": 7}
    found = [run(config, do_sample=True), run({"method": "none", "seed": 7}, do_sample=True)]
    whole = run(config, model=target(size=1), do_sample=True)
    return [each == whole for each in found]


@case
def rejection():
    """Probabilities of drafts are rank 0's too; the test compares the ranks."""
    torch.manual_seed(2000 + dist.get_rank())
    return run({**METHODS["draft_model"], "rejection_sample_method": "rejection"}, do_sample=True)


@case
def unlike_drafts():
    """Rank 1 drafts other tokens, and shorter: chains of n-grams, trees of a head."""
    found = {}
    trees = {**METHODS["eagle3"], "top_k": 2, "total_tokens": 6, "num_speculative_tokens": 3}
    for name, config in {"ngram": METHODS["ngram"], "trees": trees}.items():
        run(config)
        drafter = kept_decoders(target())[-1].generator
        propose = drafter.propose

        def wrong(sequences, limits, propose=propose):
            drafts = propose(sequences, limits)
            if dist.get_rank() and drafts.tokens.shape[1]:
                drafts.tokens = drafts.tokens.roll(1, 1) + 1
                drafts.lengths = [max(length - 1, 0) for length in drafts.lengths]
            return drafts

        drafter.propose = wrong
        found[name] = run(config) == plain()
        del drafter.propose
    return {**found, "after": run(METHODS["ngram"]) == plain()}


class Fails(BaseStreamer):
    def __init__(self):
        self.count = 0

    def put(self, value):
        self.count += 1
        if self.count == 5:
            raise OSError("the pipe is broken")

    def end(self):
        pass


def raised(function):
    began = time.perf_counter()
    try:
        function()
    except Exception as error:
        return [type(error).__name__, str(error), time.perf_counter() - began]
    return ["nothing", "", 0.0]


@case
def errors():
    """An exception on one rank is one on both, at once, and the next call works."""
    found, rank = {}, dist.get_rank()
    for failing in (0, 1):
        more = {"streamer": Fails()} if rank == failing else {}
        row = {name: value[:1] for name, value in prompts().items()}
        found[f"streamer {failing}"] = raised(
            lambda row=row, more=more: target().generate(
                **row, max_new_tokens=24, pad_token_id=0, speculative_config=METHODS["ngram"], do_sample=False, **more
            )
        )
    drafter = kept_decoders(target())[-1].generator
    if rank == 1:
        drafter.propose = lambda *args: 1 / 0
    found["drafter 1"] = raised(lambda: run(METHODS["ngram"]))
    vars(drafter).pop("propose", None)

    def criterion(ids, scores, **more):
        raise KeyError("criterion")

    found["criterion 0"] = raised(lambda: run(METHODS["eagle3"], stopping_criteria=StoppingCriteriaList([criterion])))
    found["unlike inputs"] = raised(lambda: run({**METHODS["ngram"], "num_speculative_tokens": 2 + rank}))
    found["after"] = run(METHODS["ngram"]) == plain() and run(METHODS["eagle3"]) == plain()
    return found


@case
def stopping():
    """max_time, a random criterion and stop strings end the text where they do on rank 0; the test compares the ranks."""
    tokenizer = AutoTokenizer.from_pretrained(hf_specdec.bundled("tiny"))
    torch.manual_seed(3000 + dist.get_rank())

    def criterion(ids, scores, **more):
        return torch.rand(ids.shape[0]) < 0.06

    return {
        "max_time": run(METHODS["ngram"], new=200, max_time=0.3 if dist.get_rank() == 0 else 60.0),
        "random": run(METHODS["eagle3"], new=40, stopping_criteria=StoppingCriteriaList([criterion])),
        "string": run(METHODS["eagle3"], new=40, stop_strings=["."], tokenizer=tokenizer),
        "string of whole": run(METHODS["eagle3"], target(size=1), new=40, stop_strings=["."], tokenizer=tokenizer),
        "overlapping": run({**METHODS["none"], "async_scheduling": True}) == plain(),
    }


@case
def hook_on_one_rank():
    """It does nothing, but the ranks must judge the model, and make decoders, in the same way. Before the first call, and after it."""
    found = []
    for first in (True, False):
        model = random_target("Llama") if first else target()
        expected = random_run(random_target("Llama", 1), None) if first else plain()
        handles = []
        if dist.get_rank() == 0:
            handles.append(model.model.layers[0].register_forward_hook(lambda *args: None))
        for _ in range(2):
            found.append((random_run(model, METHODS["ngram"]) if first else run(METHODS["ngram"])) == expected)
            for handle in handles:
                handle.remove()
    return found


@case
def bytes_per_rank():
    """Bytes of the KV pool, sharded and whole."""
    more = {"return_dict_in_generate": True, "do_sample": False, "max_new_tokens": 8, "pad_token_id": 0}
    return [
        model.generate(**prompts(), **more, speculative_config=METHODS["ngram"]).speculation["kv_cache_bytes"]
        for model in (target(), target(size=1))
    ]


@case
def options():
    """Options that follow the shards."""
    prepacked._FLOAT32_WEIGHTS = 1  # the bundled model's are small
    found = {"deterministic": run({**METHODS["ngram"], "deterministic": True}) == plain()}
    quantized = [run({**METHODS[name], "target_quantization": "wint8"}) for name in ("none", "eagle3")]
    found["quantized"] = quantized[0] == quantized[1]
    found["prepacked"] = run({**METHODS["eagle3"], "prepack_weights": True}) == plain()
    prepacked._FLOAT32_WEIGHTS = 512 * 512
    found["early exit"] = run({"method": "draft_model", "early_exit": 3, "num_speculative_tokens": 3}) == plain()
    found["draft tp"] = [
        run({**METHODS[name], "draft_tensor_parallel_size": size}) == plain()
        for name, size in (("draft_model", 1), ("draft_model", 2), ("eagle3", 1))
    ]
    return found


@case
def refusals():
    """Each is one sentence."""
    one_kv = families.make("Llama", num_key_value_heads=1)
    if dist.get_rank() == 0:
        one_kv.save_pretrained(FOLDER / "one")
    dist.barrier()
    one, pipeline = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, distributed_config=DistributedConfig(**sizes))
        for folder, sizes in ((FOLDER / "one", {"tp_size": 2}), (hf_specdec.bundled("tiny"), {"pp_size": 2}))
    )
    return {
        "kv heads": raised(lambda: random_run(one, METHODS["ngram"])),
        "pipeline": raised(lambda: run(METHODS["ngram"], pipeline)),
        "native": raised(lambda: run({**METHODS["ngram"], "native": True})),
        "draft tp": raised(lambda: run({**METHODS["draft_model"], "draft_tensor_parallel_size": 3})),
        "native is off": kept_decoders(target())[-1].target.native is None,
    }


@case
def engine():
    """The continuous batching engine, whose requests and seed come from rank 0 alone."""
    llm = LLM(target(), AutoTokenizer.from_pretrained(hf_specdec.bundled("tiny")), speculative_config=METHODS["eagle3"], seed=None,
              max_num_seqs=2, kv_cache_memory_bytes=4 << 20)  # fmt: skip
    greedy = [
        each.outputs[0].token_ids
        for each in llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)
    ]
    sampled = [
        each.outputs[0].token_ids
        for each in llm.generate(PROMPTS, SamplingParams(temperature=1, max_tokens=24), use_tqdm=False)
    ]
    brought = [
        each.outputs[0].token_ids
        for each in llm.generate(PROMPTS, [
            SamplingParams(temperature=0, max_tokens=24, prediction=[*greedy[0][:8], 5, 6, *greedy[0][9:]]),
            SamplingParams(temperature=0, max_tokens=24, structured_outputs={"regex": "(Tom|Lily) was very (happy|sad)\\."}),
            SamplingParams(temperature=0, max_tokens=24),
        ], use_tqdm=False)
    ]  # fmt: skip
    llm.close()
    return {"greedy": greedy, "sampled": sampled, "brought": brought}


@case
def all_methods():
    """The rest of the methods; slow."""
    configs = {
        "token_recycling": {"method": "token_recycling"},
        "lookahead": {"method": "lookahead"},
        "eagle": {"method": "eagle", "model": "tiny-eagle"},
        "hydra": {"method": "hydra", "model": "tiny-hydra"},
        "mlp_speculator": {"method": "mlp_speculator", "model": "tiny-mlp_speculator"},
        "dflash": {"method": "dflash", "model": "tiny-dflash"},
        "hybrid": {"method": "hybrid", "first": {"method": "ngram"}, "second": METHODS["eagle3"]},
        "draft trees": {**METHODS["draft_model"], "branching_factors": [2, 2, 1, 1]},
        "deterministic": {**METHODS["eagle3"], "deterministic": True},
    }
    return {name: raised(lambda config=config: run(config)) if dist.get_world_size() > 2 and name == "deterministic"
             else run(config) == plain() for name, config in configs.items()}  # fmt: skip


@case
def experts():
    """Experts on ranks of their own (ep_size), equal to the whole model."""
    size, found = dist.get_world_size(), {}
    for name in ("Qwen3-MoE", "gpt-oss", "DeepSeek-V3"):
        plain = random_run(random_target(name, 1), None)
        model = random_target(name, size, ep_size=size)
        found[name] = [random_run(model, {"method": method}) == plain for method in ("ngram", "token_recycling")]
    return found


@case
def error_in_a_forward():
    """Rank 1's forward raises between two collectives: rank 0's process ends, with the message."""
    run(METHODS["ngram"])
    if dist.get_rank():
        target().model.layers[4].mlp.register_forward_pre_hook(lambda *args: 1 / 0)
    return raised(lambda: run(METHODS["ngram"]))


if __name__ == "__main__":
    output, *names = sys.argv[1:]
    FOLDER = Path(output + ".models")
    dist.init_process_group("gloo")
    results = {}
    for name in names or [name for name in CASES if name not in SLOW]:
        began = time.perf_counter()
        try:
            results[name] = CASES[name]()
        except Exception:
            results[name] = "raised: " + traceback.format_exc()[-700:]
        results[name + ".seconds"] = time.perf_counter() - began
    with open(f"{output}.{dist.get_rank()}", "w") as file:
        json.dump(results, file)
    dist.destroy_process_group()
