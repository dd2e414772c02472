"""Files of heads as wrappers, broken tools and jokers write them: they load, or end in one clear error, soon and in little memory."""

import json
import shutil
import tracemalloc
from pathlib import Path

import pytest
import torch
from oracle import tiny_llama
from safetensors.torch import load_file, save_file
from test_checkpoints import eagle_config, eagle_tensors, write

import hf_specdec
from hf_specdec.candidate_generators.checkpoints.files import CheckpointError
from hf_specdec.candidate_generators.checkpoints.target_parts import fits_vocabulary

HEADS = ("eagle", "eagle3", "mtp", "mlp_speculator", "medusa", "hydra", "dflash")


def changed(folder: Path, method: str, change) -> str:
    """A copy of a bundled head after `change(tensors, config)`; what that returns takes the tensors' place."""
    shutil.copytree(hf_specdec.bundled(f"tiny-{method}"), folder)
    (file,) = folder.glob("*.safetensors")
    tensors, config = load_file(file), json.loads((folder / "config.json").read_text())
    tensors = change(tensors, config) or tensors
    file.unlink()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def refused(model, method: str, folder, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as raised:
        model.generate(
            torch.arange(4, 9)[None], max_new_tokens=3, speculative_config={"method": method, "model": str(folder)}
        )
    assert Path(folder).name in str(raised.value) and "\n" not in str(raised.value)


# ---- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "model.safetensors.index.json is not valid JSON"),
        ("[" * 100_000, "model.safetensors.index.json is not valid JSON"),
        ("[]", "index.json does not hold an object"),
        ("{}", "has no weight_map from tensors' names to files' names"),
        ('{"weight_map": [1]}', "has no weight_map"),
        ('{"weight_map": {"fc.weight": 3}}', "has no weight_map"),
    ],
    ids=["cut", "deep", "list", "empty", "list of numbers", "numbers"],
)
def test_indices(tmp_path, index, message):
    folder = write(tmp_path / "head")
    (folder / "model.safetensors.index.json").write_text(index)
    refused(tiny_llama(), "eagle", folder, message)


def test_a_pickle_with_numbers_for_names(tmp_path):
    folder = write(tmp_path / "head", {0: torch.ones(2), 1: torch.ones(2)}, file="pytorch_model.bin")
    refused(tiny_llama(), "eagle", folder, "does not hold a dictionary of tensors by name")


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin", "two shards"])
def test_a_wrapped_module(tmp_path, file):
    """DistributedDataParallel puts "module." before every name."""
    model, ids = tiny_llama(), torch.arange(4, 12)[None]
    wrapped = {f"module.{name}": tensor for name, tensor in eagle_tensors().items()}
    plain, folder = write(tmp_path / "plain"), tmp_path / "wrapped"
    if file == "two shards":
        names = list(wrapped)
        shards = {"a.safetensors": names[:4], "b.safetensors": names[4:]}
        write(folder)
        (folder / "model.safetensors").unlink()
        for shard, own in shards.items():
            save_file({name: wrapped[name] for name in own}, folder / shard)
        weight_map = {name: shard for shard, own in shards.items() for name in own}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    else:
        write(folder, wrapped, file=file)
    for method in ("eagle", None):  # also where the method is found from the file
        outputs = [
            model.generate(
                ids,
                max_new_tokens=10,
                return_dict_in_generate=True,
                speculative_config={"model": str(head), "method": method},
            )
            for head in (plain, folder)
        ]
        assert torch.equal(outputs[0].sequences, outputs[1].sequences)
        assert outputs[0].speculation == outputs[1].speculation


@pytest.mark.parametrize("method", HEADS)
def test_every_kind_of_head_wrapped(tmp_path, tiny_model, method):
    folder = changed(tmp_path / "head", method, lambda t, c: {f"module.{name}": tensor for name, tensor in t.items()})
    drafted = []
    for head in (f"tiny-{method}", folder):
        config = {"method": method, "model": head}
        output = tiny_model.generate(
            torch.arange(4, 30)[None],
            max_new_tokens=6,
            do_sample=False,
            return_dict_in_generate=True,
            speculative_config=config,
        )
        drafted.append(output.speculation)
    assert drafted[0] == drafted[1] and drafted[0].num_draft_tokens > 0
    hf_specdec.release(tiny_model)


# ---- numbers --------------------------------------------------------------------------------------------------------

FLAT = torch.zeros(8, 8)
HUGE = {
    "Medusa head": ("medusa", lambda t, c: t.update({"1000000.0.linear.weight": FLAT}), "head 1000000 and none of head 4"),
    "Medusa block": ("medusa", lambda t, c: t.update({"0.1000000.linear.weight": FLAT}), "block 1000000 and none of block 2"),
    "Hydra head": ("hydra", lambda t, c: t.update({"hydra_mlp.1000000.0.linear.weight": FLAT}), "head 1000000 and none of head 3"),
    "MTP module": (
        "mtp", lambda t, c: t.update({"model.layers.1000007.eh_proj.weight": FLAT}), "MTP module 1000000 and none of MTP module 1",
    ),
    "steps": (
        "mlp_speculator", lambda t, c: c.update(n_predict=1_000_000, tie_weights=False, top_k_tokens_per_head=[1]),
        "n_predict = 1000000, but the file has the heads of 1 steps",
    ),
    "EAGLE layers": (
        "eagle", lambda t, c: c.update(num_hidden_layers=1_000_000), "num_hidden_layers = 1000000, but the file has tensors of 1",
    ),
    "EAGLE-3 layers": ("eagle3", lambda t, c: c.update(num_hidden_layers=10**12), "num_hidden_layers = 1000000000000, but the file has"),
    "DFlash layers": ("dflash", lambda t, c: c.update(num_hidden_layers=10**12), "num_hidden_layers = 1000000000000, but the file has"),
}  # fmt: skip


@pytest.mark.parametrize("case", HUGE)
def test_nothing_is_built_that_the_file_does_not_hold(tmp_path, tiny_model, case):
    method, change, message = HUGE[case]
    folder = changed(tmp_path / "head", method, lambda t, c: change(t, c) and None)
    tracemalloc.start()
    refused(tiny_model, method, folder, message)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 200e6


def test_many_steps_of_tied_weights_are_no_more_weights(tmp_path, tiny_model):
    folder = changed(tmp_path / "head", "mlp_speculator", lambda t, c: c.update(n_predict=100_000))
    config = {"method": "mlp_speculator", "model": folder, "num_speculative_tokens": 2}
    ids = torch.arange(4, 12)[None]
    assert torch.equal(
        tiny_model.generate(ids, max_new_tokens=4, do_sample=False, speculative_config=config),
        tiny_model.generate(ids, max_new_tokens=4, do_sample=False),
    )
    hf_specdec.release(tiny_model)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads = 0; it must be an integer of at least 1"),
        ({"num_attention_heads": "4"}, "num_attention_heads = '4'; it must be an integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0; it must be an integer of at least 1"),
        ({"hidden_act": "sliu"}, r"hidden_act = 'sliu' \(did you mean 'silu'\?\)"),
        ({"vocab_size": "many"}, "vocab_size = 'many'; it must be an integer"),
        ({"hidden_act": ["silu"]}, r"hidden_act = \['silu'\]; it must be a name"),
        ({"layer_types": 3}, "layer_types = 3; it must be a list of names"),
        ({"architectures": 3}, "architectures = 3; it must be a list of names"),
        ({"intermediate_size": "x"}, "intermediate_size = 'x'; it must be an integer"),
        ({"intermediate_size": 10**18}, "config.json describes no drafter that can be built: .*overflow"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps = 'x'; it must be a number"),
        ({"num_attention_heads": 7}, "attention heads"),
    ],
)
def test_bad_values(tmp_path, changes, message):
    tensors = {name: tensor for name, tensor in eagle_tensors().items() if name != "embed_tokens.weight"}
    refused(tiny_llama(), "eagle", write(tmp_path / "head", tensors, eagle_config() | changes), message)


@pytest.mark.parametrize(
    "name", ["layers.0.self_attn.q_proj.weight", "fc.weight", "embed_tokens.weight", "lm_head.weight"]
)
def test_flat_matrices(tmp_path, name):
    folder = write(tmp_path / "head", eagle_tensors() | {name: torch.zeros(32)})
    refused(tiny_llama(), "eagle", folder, rf"{name} has shape \[32\]; it must be a matrix")


# ---- vocabularies ---------------------------------------------------------------------------------------------------


def test_a_larger_vocabulary_is_a_padded_one():
    assert all(fits_vocabulary(size, 61) for size in (59, 60, 61, 64, 128, 512))
    assert not any(fits_vocabulary(size, 61) for size in (62, 161, 461, 573, 574, 1024))
    assert fits_vocabulary(152_064, 151_936)  # Qwen 2.5 of 7 and of 3 billion parameters
    assert fits_vocabulary(151_936, 152_064) and not fits_vocabulary(1000, 152_064)


@pytest.mark.parametrize("method", HEADS)
def test_a_larger_vocabulary_than_the_targets(tmp_path, tiny_model, method):
    """The bundled model's heads beside a target with a quarter of its tokens."""
    own = tiny_model.config
    target = tiny_llama(
        vocab_size=1024, hidden_size=own.hidden_size, num_hidden_layers=own.num_hidden_layers, intermediate_size=8, head_dim=8,
    )  # fmt: skip

    def with_tables(tensors, config):
        """Of its own, where the bundled file leaves them to the target."""
        table, layer = torch.zeros(own.vocab_size, own.hidden_size), own.num_hidden_layers
        more = {
            "eagle": ["embed_tokens"],
            "mtp": [f"model.layers.{layer}.embed_tokens"],
            "medusa": [f"{i}.2" for i in range(4)],
        }
        tensors.update({f"{name}.weight": table.clone() for name in more.get(method, [])})

    folder = changed(tmp_path / "head", method, with_tables)
    refused(target, method, folder, r"(vocabulary|logits for|names tokens).*the target has 1024")
