"""LangChain with drafts, through transformers' pipeline(). LlamaIndex takes the same model: HuggingFaceLLM(model=..., generate_kwargs=...).

python examples/langchain_pipeline.py --model Qwen/Qwen3-0.6B
"""

import argparse

import hf_specdec  # isort: skip
from langchain_core.prompts import PromptTemplate
from langchain_huggingface import HuggingFacePipeline
from transformers import pipeline


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    args = parser.parse_args(argv)

    writer = pipeline(
        "text-generation",
        model=hf_specdec.resolve_model(args.model),
        speculative_config={"method": "ngram"},
        max_new_tokens=32,
        do_sample=False,
        return_full_text=False,
    )
    chain = PromptTemplate.from_template("Once upon a time there was a {animal} who") | HuggingFacePipeline(
        pipeline=writer
    )
    answers = chain.batch([{"animal": "dog"}, {"animal": "cat"}])
    print("\n---\n".join(answers))
    return answers


if __name__ == "__main__":
    main()
