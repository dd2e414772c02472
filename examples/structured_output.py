"""JSON by a schema, with drafts: every node of a draft is masked with its own state, so the text is what plain decoding would write.

python examples/structured_output.py --model Qwen/Qwen3-0.6B
"""

import argparse
import json

from hf_specdec import LLM, SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {
        "animal": {"enum": ["dog", "cat", "bird"]},
        "legs": {"type": "integer", "minimum": 0, "maximum": 9},
        "is_big": {"type": "boolean"},
    },
    "required": ["animal", "legs", "is_big"],
    "additionalProperties": False,
}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    args = parser.parse_args(argv)

    llm = LLM(model=args.model, speculative_config={"method": "ngram"})
    # Small models like to write white space where a schema allows it.
    wanted = {"json": SCHEMA, "disable_any_whitespace": True}
    params = SamplingParams(temperature=0, max_tokens=60, structured_outputs=wanted)
    stories = ["The big dog ran to the park.", "A small bird sat in a tree."]
    outputs = llm.chat([[{"role": "user", "content": f"Which animal is it? {story}"}] for story in stories], params)
    found = [json.loads(output.outputs[0].text) for output in outputs]
    llm.close()
    print(*found, sep="\n")
    return found


if __name__ == "__main__":
    main()
