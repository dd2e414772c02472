"""How far a step travels through the package, and hashes of what is generated: to compare before and after a rearrangement.

    python scripts/house_figures.py                    # calls, files and changes of file of one step; hashes of ten outputs
    TRITON_INTERPRET=1 HF_SPECDEC_KERNELS=triton python scripts/house_figures.py --outputs 4   # through the Triton kernels

A call is one of a Python function of this package, a change one whose file is not that of the call before it. The step is the
second-last of a generation, so that nothing is done for the first time in it.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

PROMPTS = ["Once upon a time there was a little", "Tom and Lily went to the park. Tom and"]
EAGLE3_TREE = {"method": "eagle3", "model": "tiny-eagle3", "top_k": 4, "total_tokens": 12, "num_speculative_tokens": 3}
STEPS = {
    "n-gram, two rows": {"method": "ngram", "num_speculative_tokens": 4},
    "EAGLE-3, a tree, two rows": EAGLE3_TREE,
}
SAMPLED = {"do_sample": True, "temperature": 0.9, "top_k": 40, "top_p": 0.95}
OUTPUTS = [  # (speculative_config, sampling)
    ({"method": "none"}, {}),
    ({"method": "ngram", "num_speculative_tokens": 4}, {}),
    (EAGLE3_TREE, {}),
    (EAGLE3_TREE, SAMPLED),
    ({"method": "ngram", "num_speculative_tokens": 4}, SAMPLED),
    ({"method": "none"}, SAMPLED),
    ({"method": "eagle3", "model": "tiny-eagle3", "rejection_sample_method": "rejection"}, SAMPLED),
    ({"method": "eagle3", "model": "tiny-eagle3", "rejection_sample_method": "block"}, SAMPLED),
    ({"method": "token_recycling"}, SAMPLED),
    ({"method": "ngram", "deterministic": True}, {}),
]


def main() -> None:
    """Count, hash and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--outputs", type=int, default=len(OUTPUTS), help="how many of the outputs are hashed")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    figures = {"steps": {}, "outputs": []}
    if not os.environ.get("TRITON_INTERPRET"):
        for name, config in STEPS.items():
            figures["steps"][name] = step = travelled(config)
            print(f"{name}: {step['calls']} calls in {step['files']} files, {step['changes']} changes of file")
    for config, sampling in OUTPUTS[: options.outputs]:
        found = hashlib.sha256(json.dumps(generated(config, sampling)).encode()).hexdigest()[:16]
        figures["outputs"].append(found)
        print(f"{found}  {'sampled' if sampling else 'greedy '}  {json.dumps(config)}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


def generated(config: dict, sampling: dict, num_tokens: int = 24) -> list[list[int]]:
    """The ids that the bundled model writes after PROMPTS."""
    model, inputs = _model()
    sampling = sampling or {"do_sample": False}
    out = model.generate(**inputs, **sampling, max_new_tokens=num_tokens, speculative_config={**config, "seed": 7})
    return out.tolist()


def travelled(config: dict) -> dict[str, int]:
    """Calls, files and changes of file in the second-last step of a generation."""
    from hf_specdec.decoding.decoder import SpeculativeDecoder

    package = str(ROOT / "hf_specdec") + os.sep
    steps: list[list[str]] = []

    def follow(frame, event, argument):
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(package):
            steps[-1].append(file)

    begin, finish = SpeculativeDecoder.begin, SpeculativeDecoder.finish

    def beginning(*args, **kwargs):
        steps.append([])
        sys.setprofile(follow)
        return begin(*args, **kwargs)

    def finishing(*args, **kwargs):
        results = finish(*args, **kwargs)
        sys.setprofile(None)
        return results

    generated(config, {})
    SpeculativeDecoder.begin, SpeculativeDecoder.finish = beginning, finishing
    try:
        generated(config, {})
    finally:
        sys.setprofile(None)
        SpeculativeDecoder.begin, SpeculativeDecoder.finish = begin, finish
    files = steps[-2]
    changes = sum(one != other for one, other in itertools.pairwise(files))
    return {"calls": len(files), "files": len(set(files)), "changes": changes}


_made: list = []


def _model():
    if not _made:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        import hf_specdec

        torch.set_num_threads(1)
        folder = hf_specdec.bundled("tiny")
        tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        _made.extend([model, tokenizer(PROMPTS, return_tensors="pt", padding=True)])
    return _made


if __name__ == "__main__":
    main()
