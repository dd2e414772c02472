"""One llama.cpp context, driven by `benchmarks/decode.py --llama-cpp-python` through pipes. Runs in an environment of its own
(llama-cpp-python, gguf, safetensors; see scripts/peers_venv.sh).

The first line it reads is {"model": folder, "dtype": .., "threads": n, "rows": most sequences,
"length": most tokens of each, 512 by default}: a Llama checkpoint in transformers'
layout, which it writes as GGUF beside the weights, with a vocabulary of names only, since it gets ids. A folder with a config.json alone
stands for random weights. Then, as vllm_worker.py, one
{"prompts": [[ids]], "max_tokens": n} a line, answered by {"tokens": [[ids]], "seconds": s, "cpu_seconds": s}. All sequences of a request
decode together, greedily.
"""

import ctypes
import json
import os
import sys
import time
from pathlib import Path

import numpy as np

LAYER = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
FIXED = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def to_gguf(folder: Path, dtype: str) -> Path:
    """Write a Llama checkpoint as GGUF, matrices in `dtype` ("bfloat16", "float32", "q4_0"), and return the file."""
    import gguf  # pyright: ignore[reportMissingImports]
    from safetensors import safe_open

    config = json.loads((folder / "config.json").read_text())
    kind = {
        "bfloat16": gguf.GGMLQuantizationType.BF16, "float32": gguf.GGMLQuantizationType.F32, "q4_0": gguf.GGMLQuantizationType.Q4_0,
    }[dtype]  # fmt: skip
    path = folder / f"model-{dtype}.gguf"
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    if path.exists() and not any(folder.glob("*.safetensors")):
        return path
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"<{i}>" for i in range(config["vocab_size"])])
    writer.add_token_scores([0.0] * config["vocab_size"])
    writer.add_token_types([1] * config["vocab_size"])

    shapes = _random_shapes(config, width) if not any(folder.glob("*.safetensors")) else {}
    random: dict[tuple[int, ...], np.ndarray] = {}
    for name, shape in shapes.items():
        if len(shape) == 1:
            writer.add_tensor(name, np.ones(shape, dtype=np.float32))
            continue
        if shape not in random:  # equal ones are written from one array
            numbers = np.random.default_rng(0).standard_normal((16, shape[1]), dtype=np.float32) / shape[1] ** 0.5
            random[shape] = np.tile(gguf.quants.quantize(numbers, kind), (shape[0] // 16, 1))
        writer.add_tensor(name, random[shape], raw_dtype=kind)

    def add(name: str, tensor: np.ndarray) -> None:
        own = kind if tensor.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(tensor, own), raw_dtype=own)

    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                tensor, base = tensors.get_tensor(name).float().numpy(), name.removesuffix(".weight")
                if base in FIXED:
                    add(f"{FIXED[base]}.weight", tensor)
                    continue
                index, part = base.removeprefix("model.layers.").split(".", 1)
                if part in (
                    "self_attn.q_proj",
                    "self_attn.k_proj",
                ):  # llama.cpp rotates neighbours, transformers halves
                    count = heads if "q_proj" in part else kv_heads
                    tensor = tensor.reshape(count, 2, width // 2, -1).swapaxes(1, 2).reshape(tensor.shape)
                add(f"blk.{index}.{LAYER[part]}.weight", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _random_shapes(config: dict, width: int) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a Llama model, by its name in GGUF."""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    queries, keys = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
    layer = {
        "attn_norm": (hidden,), "ffn_norm": (hidden,), "attn_q": (queries, hidden), "attn_k": (keys, hidden), "attn_v": (keys, hidden),
        "attn_output": (hidden, queries), "ffn_gate": (inner, hidden), "ffn_up": (inner, hidden), "ffn_down": (hidden, inner),
    }  # fmt: skip
    found = {"token_embd.weight": (vocab, hidden), "output_norm.weight": (hidden,), "output.weight": (vocab, hidden)}
    for i in range(config["num_hidden_layers"]):
        found |= {f"blk.{i}.{name}.weight": shape for name, shape in layer.items()}
    return found


class Context:
    """A model and room for `rows` sequences of `length` tokens."""

    def __init__(self, path: Path, threads: int, rows: int, length: int):
        import llama_cpp  # pyright: ignore[reportMissingImports]

        self.api = api = llama_cpp
        api.llama_log_set(_SILENT, None)
        api.llama_backend_init()
        self.model = api.llama_model_load_from_file(str(path).encode(), api.llama_model_default_params())
        options = api.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_seq_max = rows * length, max(512, length), rows
        options.n_threads = options.n_threads_batch = threads
        self.context = api.llama_init_from_model(self.model, options)
        if not self.model or not self.context:
            raise RuntimeError(f"llama.cpp does not load {path}.")
        self.vocab_size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.model))
        self.batch = api.llama_batch_init(max(512, length), 0, 1)

    def forward(self, tokens: list[tuple[int, int, int, bool]]) -> np.ndarray:
        """Ids of the likeliest next tokens after those that are asked for; tokens are (id, position, sequence, asked)."""
        batch = self.batch
        batch.n_tokens = len(tokens)
        for i, (token, position, sequence, asked) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, asked
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
        if self.api.llama_decode(self.context, batch):
            raise RuntimeError("llama_decode failed.")
        rows = [i for i, each in enumerate(tokens) if each[3]]
        pointers = [self.api.llama_get_logits_ith(self.context, i) for i in rows]
        return np.array([np.ctypeslib.as_array(each, (self.vocab_size,)).argmax() for each in pointers])

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        """Greedy answers of `max_tokens` tokens."""
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)
        answers = []
        for row, ids in enumerate(prompts):
            last = len(ids) - 1
            answers.append([int(self.forward([(each, i, row, i == last) for i, each in enumerate(ids)])[0])])
        for step in range(max_tokens - 1):
            found = self.forward(
                [
                    (own[-1], len(ids) + step, row, True)
                    for row, (ids, own) in enumerate(zip(prompts, answers, strict=True))
                ]
            )
            for own, token in zip(answers, found, strict=True):
                own.append(int(token))
        return answers


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
def _SILENT(level, text, data):
    """llama.cpp's log goes nowhere."""


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import llama_cpp  # pyright: ignore[reportMissingImports]

    given = json.loads(sys.stdin.readline())
    context = Context(
        to_gguf(Path(given["model"]), given["dtype"]), given["threads"], given["rows"], given.get("length", 512)
    )
    print(json.dumps({"version": llama_cpp.__version__}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        begin, cpu = time.perf_counter(), time.process_time()
        tokens = context.generate(request["prompts"], request["max_tokens"])
        figures = {"seconds": time.perf_counter() - begin, "cpu_seconds": time.process_time() - cpu}
        print(json.dumps({"tokens": tokens, **figures}), file=answers, flush=True)


if __name__ == "__main__":
    main()
