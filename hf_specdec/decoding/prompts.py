"""The prompts of a static batch: which columns of the caller's ids hold them, and the sequences that continue them."""

from __future__ import annotations

import numpy as np
import torch
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from ..core.sequence import Sequence, stream_seeds
from ..sampling.processors import NodeProcessors


def text_length(input_ids: torch.Tensor, attention_mask: torch.Tensor | None, generation_config) -> int:
    """Number of columns of the whole text. Greater than S of `input_ids` [B, S] if the caller passed only the tokens after a cache."""
    if attention_mask is not None:
        return attention_mask.shape[1]
    # generate() drops a mask of ones but keeps its length
    return getattr(generation_config, "_mask_length", input_ids.shape[1])


def prompt_columns(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> list[np.ndarray]:
    """Per row, the columns of the batch [B, S] that hold its prompt. Masked tokens are never attended to and have no position, so they
    are left out. Raises ValueError: an empty batch, an empty row, or one whose last token is masked."""
    if input_ids.shape[0] == 0 or input_ids.shape[1] == 0:
        raise ValueError(
            f"input_ids of shape {list(input_ids.shape)} hold no prompt: pass at least one token, or inputs_embeds."
        )
    if attention_mask is None:
        return [np.arange(input_ids.shape[1])] * input_ids.shape[0]
    columns = [np.flatnonzero(row) for row in (attention_mask != 0).cpu().numpy()]
    for i, places in enumerate(columns):
        if len(places) == 0:
            raise ValueError(f"attention_mask masks all of row {i}: there is no prompt to continue.")
        if places[-1] != input_ids.shape[1] - 1:
            raise ValueError(
                f"attention_mask masks the end of row {i}, where the text continues: pad on the left "
                "(tokenizer.padding_side = 'left')."
            )
    return columns


def sequences_of(
    whole,
    unseen: int,
    columns,
    logits_processor,
    stopping_criteria,
    generation_config,
    seed: int,
    sources=None,
    adapters=None,
) -> list[Sequence]:
    """The rows of a batch.

    Args:
        whole: int64 [B, S], the texts.
        unseen: number of leading columns that the caller did not pass. Processors, criteria and lengths do not count them.
    """
    input_ids = whole[:, unseen:]
    # Criteria are checked after each new token, so a criterion that is already met still lets one token through.
    limits = [
        max(criterion.max_length, input_ids.shape[1] + 1)
        for criterion in stopping_criteria
        if type(criterion) is MaxLengthCriteria
    ]
    max_length = unseen + min([generation_config.max_length, *limits])
    eos = {
        int(token)
        for criterion in stopping_criteria
        if type(criterion) is EosTokenCriteria
        for token in criterion.eos_token_id
    }
    pad = generation_config._pad_token_tensor
    processors = (
        NodeProcessors(logits_processor, input_ids, None if pad is None else int(pad)) if logits_processor else None
    )
    rows = whole.cpu().numpy()
    prompts = [row[places].tolist() for row, places in zip(rows, columns, strict=True)]
    read = [[]] * len(prompts) if sources is None else [source.ids for source in sources]
    seeds = stream_seeds(seed, [ids + prompt for ids, prompt in zip(read, prompts, strict=True)], adapters)
    return [
        Sequence(
            tokens=prompt,
            max_length=max_length - (len(row) - len(prompt)),
            eos_token_ids=frozenset(eos),
            do_sample=bool(generation_config.do_sample),
            seed=seeds[i],
            processors=processors,
            row=i,
            shown_prompt=row[unseen:].tolist(),
            source=None if sources is None else sources[i],
            adapter=None if adapters is None else adapters[i],
        )
        for i, (row, prompt) in enumerate(zip(rows, prompts, strict=True))
    ]
