"""LangChain and LlamaIndex with drafts, through transformers' pipeline() and its model.

python examples/langchain_pipeline.py --model Qwen/Qwen3-0.6B
python examples/langchain_pipeline.py --llama-index   # needs llama-index-llms-huggingface instead of langchain-huggingface
"""

import argparse

import hf_specdec  # isort: skip
from transformers import pipeline

CONFIG = {"method": "ngram"}
PROMPT = "Once upon a time there was a {animal} who"
ANIMALS = ("dog", "cat")


def langchain(writer):
    """The pipeline carries the configuration, so a chain needs nothing more."""
    from langchain_core.prompts import PromptTemplate
    from langchain_huggingface import HuggingFacePipeline

    chain = PromptTemplate.from_template(PROMPT) | HuggingFacePipeline(pipeline=writer)
    return chain.batch([{"animal": animal} for animal in ANIMALS])


def llama_index(writer):
    """LlamaIndex calls generate() itself, with `generate_kwargs`."""
    from llama_index.llms.huggingface import HuggingFaceLLM

    llm = HuggingFaceLLM(
        model=writer.model,
        tokenizer=writer.tokenizer,
        context_window=writer.model.config.max_position_embeddings,
        max_new_tokens=32,
        generate_kwargs={"speculative_config": CONFIG, "do_sample": False},
    )
    return [llm.complete(PROMPT.format(animal=animal)).text for animal in ANIMALS]


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--llama-index", action="store_true")
    args = parser.parse_args(argv)

    writer = pipeline(
        "text-generation",
        model=hf_specdec.resolve_model(args.model),
        speculative_config=CONFIG,
        max_new_tokens=32,
        do_sample=False,
        return_full_text=False,
    )
    answers = llama_index(writer) if args.llama_index else langchain(writer)
    print("\n---\n".join(answers))
    return answers


if __name__ == "__main__":
    main()
