"""A LoRA adapter with the base model's EAGLE-3 head. The head was trained for the base, so it accepts less the further the adapter moves
the model; the text is the adapted model's all the same.

    python examples/peft_adapter.py --model meta-llama/Llama-3.1-8B-Instruct --adapter ./my-lora --head yuhuili/EAGLE3-LLaMA3.1-Instruct-8B
"""

import argparse

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_specdec


def with_adapter(model, adapter):
    """The model with a trained adapter, or with a small random one to try."""
    if adapter is not None:
        return PeftModel.from_pretrained(model, adapter)
    torch.manual_seed(0)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            weight.data *= 0.2
    return adapted


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--adapter")
    parser.add_argument("--head", default="tiny-eagle3")
    args = parser.parse_args(argv)

    folder = hf_specdec.resolve_model(args.model)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32 if args.model == "tiny" else "auto")
    chat = [{"role": "user", "content": "Tell me a story about a big dog."}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    config = {"model": args.head, "num_speculative_tokens": 4}
    taus = []
    for each in (model, None):
        each = each if each is not None else with_adapter(model, args.adapter).eval()
        output = each.generate(**inputs, max_new_tokens=64, speculative_config=config, return_dict_in_generate=True)
        assert torch.equal(output.sequences, each.generate(**inputs, max_new_tokens=64))
        taus.append(output.speculation["mean_accepted_length"])
    print(f"τ of the base model {taus[0]:.2f}, with the adapter {taus[1]:.2f}")
    return taus


if __name__ == "__main__":
    main()
