"""Summaries of all text files of a folder, in batches. Summaries copy from their text, so n-grams draft them well.

python examples/summarise_folder.py papers/ --model Qwen/Qwen3-0.6B --output summaries.jsonl
"""

import argparse
import json
from pathlib import Path

from hf_specdec import LLM, SamplingParams


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--output", type=Path, default=Path("summaries.jsonl"))
    parser.add_argument("--characters", type=int, default=1200, help="of each file that are read")
    parser.add_argument("--max-tokens", type=int, default=48)
    args = parser.parse_args(argv)

    files = sorted(args.folder.glob("*.txt"))
    if not files:
        parser.error(f"{args.folder} has no .txt files.")
    texts = [file.read_text(encoding="utf-8")[: args.characters] for file in files]
    chats = [[{"role": "user", "content": f"Summarise this text in one sentence.\n\n{text}"}] for text in texts]
    llm = LLM(model=args.model, speculative_config={"method": "ngram", "num_speculative_tokens": "auto"})
    outputs = llm.chat(chats, SamplingParams(temperature=0, max_tokens=args.max_tokens))
    with args.output.open("w", encoding="utf-8") as out:
        for file, output in zip(files, outputs):
            print(json.dumps({"file": file.name, "summary": output.outputs[0].text}, ensure_ascii=False), file=out)
    llm.close()
    print(f"{len(files)} summaries in {args.output}")


if __name__ == "__main__":
    main()
