"""GRPO in TRL with drafts for the rollouts: `generation_kwargs` reaches generate(). Weights may change between steps.

python examples/trl_rollouts.py --model Qwen/Qwen3-0.6B --max-steps 200
"""

import argparse
import importlib.util
import tempfile

from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

import hf_specdec

# Completions of one prompt resemble each other, which suffix trees see; without arctic-inference n-grams do.
METHOD = "suffix" if importlib.util.find_spec("arctic_inference") else "ngram"


def many_words(completions, **_):
    """A reward: different words of a completion."""
    texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
    return [float(len(set(text.split()))) for text in texts]


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--max-steps", type=int, default=2)
    args = parser.parse_args(argv)

    folder = hf_specdec.resolve_model(args.model)
    prompts = [f"Once upon a time there was a {animal}" for animal in ("dog", "cat", "bird", "fish")]
    with tempfile.TemporaryDirectory() as output:
        config = GRPOConfig(
            output_dir=output,
            max_steps=args.max_steps,
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=24,
            generation_kwargs={"speculative_config": {"method": METHOD}},
            report_to=[],
            save_strategy="no",
            logging_steps=1,
            bf16=False,
            fp16=False,
        )
        trainer = GRPOTrainer(
            model=folder,
            reward_funcs=many_words,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=AutoTokenizer.from_pretrained(folder, padding_side="left"),
        )
        trainer.train()
    print([round(row["reward"], 2) for row in trainer.state.log_history if "reward" in row])
    return trainer


if __name__ == "__main__":
    main()
