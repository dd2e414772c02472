"""An 8B model in 4 bits with an EAGLE-3 head, for a card of 24 GB. The output is that of the quantized model.

    python examples/quantized_target.py --model meta-llama/Llama-3.1-8B-Instruct --head yuhuili/EAGLE3-LLaMA3.1-Instruct-8B

Weights are quantized at the first call; the bfloat16 ones stay in memory beside them, so that the model can be used without quantization,
too. For 8 billion parameters that is 16 + 5 GB (computed, not measured on such a card). 4 bits read a quarter of the bytes per step,
and with EAGLE-3 there are fewer steps.
"""

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_specdec


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--head", default="tiny-eagle3")
    parser.add_argument("--bits", choices=("wint4", "wint8"), default="wint4")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    args = parser.parse_args(argv)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    folder = hf_specdec.resolve_model(args.model)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map=device)
    chat = [{"role": "user", "content": "Tell me a story about a big dog."}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(
        **inputs.to(device),
        max_new_tokens=args.max_new_tokens,
        speculative_config={"model": args.head, "num_speculative_tokens": 4, "target_quantization": args.bits},
        return_dict_in_generate=True,
    )
    print(tokenizer.decode(output.sequences[0], skip_special_tokens=True))
    print(f"τ = {output.speculation['mean_accepted_length']:.2f}")
    if device == "cuda":
        print(f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB at most")
    return output


if __name__ == "__main__":
    main()
