"""TRL's GRPO trainer in server mode: it samples from our server and sends it the weights after each step."""

import copy

import pytest
from helpers_server import Process, free_port

pytest.importorskip("trl", reason="needs TRL: pip install trl")

PROMPTS = ["Once upon a time", "The dog", "Lily went to the park", "One day a bird"]


@pytest.mark.slow
def test_grpo_trains_through_the_server(tmp_path, tiny_model, tiny_tokenizer):
    """After three steps the server writes what the trained model writes, drafts and all."""
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from trl import GRPOConfig, GRPOTrainer

    from hf_specdec.serve.trainer import use_with_trl

    use_with_trl()
    model, tokenizer = copy.deepcopy(tiny_model), copy.deepcopy(tiny_tokenizer)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token

    def reward(completion_ids, **_):
        return [len(set(ids)) / len(ids) for ids in completion_ids]

    # The fingerprint is given, because it is pickled otherwise, which fails with some versions of pyarrow.
    dataset = Dataset(InMemoryTable.from_pydict({"prompt": PROMPTS}), fingerprint="prompts")
    config = '{"method": "eagle3", "model": "tiny-eagle3"}'
    with Process.running("--enable-weight-updates", "--speculative-config", config, "--seed", "1") as server:
        options = GRPOConfig(
            str(tmp_path), use_vllm=True, vllm_mode="server", vllm_server_base_url=server.url, vllm_group_port=free_port(),
            use_cpu=True, bf16=False, report_to=[], num_generations=4, per_device_train_batch_size=4, max_completion_length=24,
            max_steps=3, learning_rate=1e-3, warmup_steps=0, lr_scheduler_type="constant", beta=0.0, save_strategy="no",
            logging_steps=1, gradient_checkpointing=False,
        )  # fmt: skip
        trainer = GRPOTrainer(model, reward, options, train_dataset=dataset, processing_class=tokenizer)
        before = [greedy(server, text) for text in PROMPTS]
        figures = [server.metrics()]
        trainer.train()
        trainer.vllm_generation.sync_weights()
        figures.append(server.metrics())
        after = [greedy(server, text) for text in PROMPTS]
        figures.append(server.metrics())
    model.eval()
    assert after == [plain(model, tokenizer, text) for text in PROMPTS] and after != before
    assert before == [plain(tiny_model, tokenizer, text) for text in PROMPTS]
    assert figures[-1]["hf_specdec_weights_updates"] >= 4 and "hf_specdec_weights_updates" not in figures[0]
    # The trainer compares the server's log-probabilities with those of the weights that it trains.
    ratios = [
        step[f"sampling/importance_sampling_ratio/{end}"]
        for step in trainer.state.log_history[:3]
        for end in ("min", "max")
    ]
    assert ratios == pytest.approx([1] * 6, abs=1e-3)
    print(f"ratios {ratios}; tokens per step: {tau(figures[0]):.2f}, after training {tau(figures[2], figures[1]):.2f}")


def greedy(server, text):
    body = {"model": "tiny", "prompt": text, "temperature": 0, "max_tokens": 24, "return_token_ids": True}
    return server.post("/v1/completions", body)[2]["choices"][0]["token_ids"]


def plain(model, tokenizer, text):
    ids = tokenizer(text, return_tensors="pt")
    return model.generate(**ids, max_new_tokens=24, do_sample=False)[0, ids["input_ids"].shape[1] :].tolist()


def tau(now, before=None):
    names = "hf_specdec_generation_tokens_total", "hf_specdec_verification_steps_total"
    tokens, steps = (now[name] - (before or {}).get(name, 0) for name in names)
    return tokens / steps
