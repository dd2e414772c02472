"""The offline examples of vLLM's and vLLM-Ascend's pages on speculative decoding: their arguments, with bundled models for the Hub's."""

import pytest
import torch
from safetensors import safe_open

from hf_specdec import LLM, SamplingParams
from hf_specdec.serve.hidden_states import KVTransferConfig, cleanup_hidden_states, load_hidden_states

PROMPTS = ["The future of AI is"]
LLAMA, QWEN = "meta-llama/Meta-Llama-3.1-8B-Instruct", "Qwen/Qwen3-8B"
HERE = {  # what stands for a name of the Hub
    LLAMA: "tiny", QWEN: "tiny", "facebook/opt-6.7b": "tiny", "Qwen/Qwen3-0.6B": "tiny-draft", "facebook/opt-125m": "tiny-draft",
    "ibm-ai-platform/llama3-8b-accelerator": "tiny-mlp_speculator", "yuhuili/EAGLE-LLaMA3-Instruct-8B": "tiny-eagle",
    "RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3": "tiny-eagle3", "z-lab/Qwen3-8B-DFlash-b16": "tiny-dflash",
}  # fmt: skip
EXAMPLES = {
    "n-gram": ("ngram", dict(model=LLAMA, tensor_parallel_size=1, speculative_config={
        "method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4})),
    "draft model": ("draft_model", dict(model=QWEN, tensor_parallel_size=1, speculative_config={
        "model": "Qwen/Qwen3-0.6B", "num_speculative_tokens": 5, "method": "draft_model"})),
    "MLP speculator": ("mlp_speculator", dict(model=LLAMA, tensor_parallel_size=1, speculative_config={
        "model": "ibm-ai-platform/llama3-8b-accelerator", "draft_tensor_parallel_size": 1, "method": "mlp_speculator"})),
    "EAGLE": ("eagle", dict(model=LLAMA, tensor_parallel_size=4, speculative_config={
        "model": "yuhuili/EAGLE-LLaMA3-Instruct-8B", "draft_tensor_parallel_size": 1, "num_speculative_tokens": 2, "method": "eagle"})),
    "EAGLE on Ascend": ("eagle", dict(
        model=LLAMA, tensor_parallel_size=4, distributed_executor_backend="mp", enforce_eager=True, async_scheduling=True,
        speculative_config={"method": "eagle", "model": "yuhuili/EAGLE-LLaMA3-Instruct-8B", "draft_tensor_parallel_size": 1,
                            "num_speculative_tokens": 2})),
    "EAGLE-3": ("eagle3", dict(model=LLAMA, tensor_parallel_size=2, speculative_config={
        "model": "RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3", "draft_tensor_parallel_size": 2, "num_speculative_tokens": 2,
        "method": "eagle3"})),
    "DFlash on Ascend": ("dflash", dict(
        model=QWEN, tensor_parallel_size=1, distributed_executor_backend="mp", max_model_len=512, max_num_seqs=16,
        gpu_memory_utilization=0.8, enable_prefix_caching=False, compilation_config={"cudagraph_mode": "FULL_DECODE_ONLY"},
        speculative_config={"method": "dflash", "model": "z-lab/Qwen3-8B-DFlash-b16", "num_speculative_tokens": 5})),
    "suffix": ("suffix", dict(model=QWEN, tensor_parallel_size=1, speculative_config={"method": "suffix", "num_speculative_tokens": 32})),
    "suffix on Ascend": ("suffix", dict(model=LLAMA, tensor_parallel_size=1, enforce_eager=True, speculative_config={
        "method": "suffix", "num_speculative_tokens": 15})),
    "older n-gram": ("ngram", dict(
        model="facebook/opt-6.7b", tensor_parallel_size=1, speculative_model="[ngram]", num_speculative_tokens=5,
        ngram_prompt_lookup_max=4, use_v2_block_manager=True)),
    "older draft model": ("draft_model", dict(
        model="facebook/opt-6.7b", tensor_parallel_size=1, speculative_model="facebook/opt-125m", num_speculative_tokens=5,
        use_v2_block_manager=True)),
    "older MLP speculator": ("mlp_speculator", dict(
        model=LLAMA, tensor_parallel_size=4, speculative_model="ibm-ai-platform/llama3-8b-accelerator",
        speculative_draft_tensor_parallel_size=1)),
    "older EAGLE": ("eagle", dict(
        model=LLAMA, tensor_parallel_size=4, speculative_model="yuhuili/EAGLE-LLaMA3-Instruct-8B",
        speculative_draft_tensor_parallel_size=1, num_speculative_tokens=2)),
}  # fmt: skip


def here(value):
    """The arguments with bundled models, which have too few heads for several ranks (`test_followers.py` has two)."""
    if isinstance(value, dict):
        return {key: 1 if key == "tensor_parallel_size" else here(each) for key, each in value.items()}
    return HERE.get(value, value) if isinstance(value, str) else value


@pytest.mark.filterwarnings("ignore:speculative_model.*:FutureWarning")
@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_that_generate(name, tiny_model, tiny_tokenizer):
    """As they stand, and greedily, where the answer is known."""
    method, arguments = EXAMPLES[name]
    if method == "suffix":
        pytest.importorskip("arctic_inference")
    llm = LLM(**here(arguments))
    assert llm.engine.decoder.config.method == method
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0.8, top_p=0.95))
    for output in outputs:
        assert output.prompt == PROMPTS[0] and isinstance(output.outputs[0].text, str)
        assert 0 < len(output.outputs[0].token_ids) <= 16  # vLLM's default
        assert output.kv_transfer_params is None
    greedy = SamplingParams(temperature=0.0, max_tokens=20)
    (found,) = llm.generate(PROMPTS, greedy, use_tqdm=False)
    ids = tiny_tokenizer(PROMPTS, return_tensors="pt")["input_ids"]
    expected = tiny_model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)
    assert found.outputs[0].token_ids == expected[0, ids.shape[1] :].tolist()
    llm.close()


def of_transformers(model, ids, layers):
    with torch.no_grad():
        found = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    return torch.stack([found[layer][0] for layer in layers], dim=1)


@pytest.mark.parametrize("as_object", [True, False], ids=["vLLM", "Ascend"])
def test_examples_that_save_hidden_states(tmp_path, as_object, tiny_model):
    transfer = {
        "kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }  # fmt: skip
    layers = [1, 2, 3, 4]
    llm = LLM(
        model="tiny", dtype="float32", enable_chunked_prefill=False,
        speculative_config={
            "method": "extract_hidden_states", "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": layers}},
        },
        kv_transfer_config=KVTransferConfig(**transfer) if as_object else transfer,
    )  # fmt: skip
    outputs = llm.generate(["Hello, how are you?", "What is machine learning?"] * 2, SamplingParams(max_tokens=1))
    paths = [output.kv_transfer_params["hidden_states_path"] for output in outputs]
    assert len(set(paths)) == 4 and all(path.startswith(str(tmp_path)) for path in paths)
    for output, path in zip(outputs, paths, strict=True):
        with safe_open(path, "pt") as file:
            ids, hidden = file.get_tensor("token_ids"), file.get_tensor("hidden_states")
        assert ids.tolist() == output.prompt_token_ids and hidden.shape[1] == len(layers)
        torch.testing.assert_close(
            hidden, of_transformers(tiny_model, output.prompt_token_ids, layers), atol=1e-4, rtol=1e-4
        )
        loaded = load_hidden_states(path)
        assert torch.equal(loaded["hidden_states"], hidden) and torch.equal(loaded["token_ids"], ids)
        cleanup_hidden_states(path)
    assert not list(tmp_path.iterdir())
    llm.close()


HIDDEN = {"method": "extract_hidden_states"}
CONNECTOR = {"kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_producer"}


@pytest.mark.parametrize(
    ("config", "transfer", "message"),
    [
        (
            HIDDEN,
            {**CONNECTOR, "kv_connector": "P2pNcclConnector"},
            "'P2pNcclConnector' as 'kv_producer' is not served",
        ),
        (HIDDEN, {**CONNECTOR, "kv_role": "kv_consumer"}, "'kv_consumer' is not served"),
        (HIDDEN, {**CONNECTOR, "kv_rank": 0}, "unexpected keyword"),
        ({"method": "ngram"}, CONNECTOR, "needs speculative_config"),
        (None, CONNECTOR, "needs speculative_config"),
        ({**HIDDEN, "output_dir": "x"}, CONNECTOR, "both name a folder"),
    ],
)
def test_transfers_that_are_not_served(config, transfer, message):
    with pytest.raises(ValueError, match=message):
        LLM(model="tiny", speculative_config=config, kv_transfer_config=transfer)
