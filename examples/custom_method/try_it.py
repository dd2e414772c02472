"""Uses the method by its path, without installing the package; installed, `"method": "boilerplate"` does."""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_specdec


def main():
    sys.path.insert(0, str(Path(__file__).parent))
    folder = hf_specdec.bundled("tiny")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer("Once upon a time", return_tensors="pt")
    plain = model.generate(**inputs, max_new_tokens=48)
    expected = plain[0].tolist()  # what is written for every customer
    config = {"method": "boilerplate:BoilerplateGenerator", "texts": [expected]}
    output = model.generate(**inputs, max_new_tokens=48, speculative_config=config, return_dict_in_generate=True)
    assert torch.equal(output.sequences, plain)
    print(f"τ = {output.speculation['mean_accepted_length']:.2f}")
    return output


if __name__ == "__main__":
    main()
