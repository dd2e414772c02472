"""Draft checkpoints that cannot be used: one clear error each, nothing executed, nothing half-loaded."""

import json
import os
import pickle
import shutil
import subprocess
import sys

import pytest
import torch
from oracle import assert_clean, ragged, tiny_llama
from safetensors.torch import load_file, save_file
from torch import nn

import hf_specdec
from hf_specdec import SpeculativeConfigError, integration, parse_config
from hf_specdec.candidate_generators.checkpoints import files
from hf_specdec.candidate_generators.checkpoints.files import (
    Checkpoint,
    CheckpointError,
    Plan,
    infer_format,
    load_module,
    open_checkpoint,
)

H, INNER, V = 32, 64, 61  # of oracle.tiny_llama


def eagle_tensors(hidden: int = H, vocab: int = V) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "embed_tokens.weight": (vocab, hidden), "fc.weight": (hidden, 2 * hidden),
        "layers.0.self_attn.q_proj.weight": (hidden, hidden), "layers.0.self_attn.k_proj.weight": (hidden // 2, hidden),
        "layers.0.self_attn.v_proj.weight": (hidden // 2, hidden), "layers.0.self_attn.o_proj.weight": (hidden, hidden),
        "layers.0.mlp.gate_proj.weight": (INNER, hidden), "layers.0.mlp.up_proj.weight": (INNER, hidden),
        "layers.0.mlp.down_proj.weight": (hidden, INNER), "layers.0.post_attention_layernorm.weight": (hidden,),
    }  # fmt: skip
    return {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()}


def eagle_config(hidden: int = H, vocab: int = V) -> dict:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden, "intermediate_size": INNER,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1, "vocab_size": vocab, "rms_norm_eps": 1e-6,
        "bias": False,
    }  # fmt: skip


def write(folder, tensors=None, config=None, file="model.safetensors"):
    folder.mkdir(exist_ok=True)
    tensors = eagle_tensors() if tensors is None else tensors
    (folder / "config.json").write_text(json.dumps(eagle_config() if config is None else config))
    if file.endswith(".safetensors"):
        save_file(tensors, folder / file)
    else:
        torch.save(tensors, folder / file)
    return folder


def without(name):
    return {key: value for key, value in eagle_tensors().items() if key != name}


class Bomb:
    """A pickle that would run a command."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def truncated(folder):
    write(folder)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    return folder


def with_code(folder):
    folder = write(folder)
    (folder / "model.safetensors").unlink()
    with open(folder / "pytorch_model.bin", "wb") as f:
        pickle.dump({"fc.weight": Bomb(folder / "executed")}, f)
    return folder


def index_without_shard(folder):
    folder = write(folder)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(eagle_tensors(), "model-00001-of-00002.safetensors")})
    )
    return folder


BAD = {
    "missing key": (
        lambda p: write(p, without("layers.0.mlp.up_proj.weight")), "missing layers.0.mlp.up_proj.weight",
    ),
    "extra key": (
        lambda p: write(p, eagle_tensors() | {"layers.0.mlp.extra.weight": torch.ones(2)}), "unused layers.0.mlp.extra.weight",
    ),
    "wrong shape": (
        lambda p: write(p, eagle_tensors() | {"layers.0.mlp.down_proj.weight": torch.ones(H, INNER + 1)}),
        r"layers.0.mlp.down_proj.weight has shape \[32, 65\], the configuration says \[32, 64\]",
    ),
    "truncated": (truncated, "model.safetensors cannot be read as safetensors: it is damaged"),
    "pickle with code": (with_code, "a pickle with code, which is never run"),
    "missing shard": (index_without_shard, "has no file model-00001-of-00002.safetensors"),
    "another target": (lambda p: write(p, eagle_tensors(hidden=64), eagle_config(hidden=64)), "width 64; the target's have 32"),
    "another vocabulary": (
        lambda p: write(p, eagle_tensors(vocab=9), eagle_config(vocab=9) | {"vocab_size": 9}), "another|vocabulary|tokens",
    ),
    "no weights": (lambda p: (write(p) and (p / "model.safetensors").unlink()) or p, "holds no weights"),
    "broken config": (lambda p: write(p) and (p / "config.json").write_text("{") and p, "config.json is not valid JSON"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_one_clear_error_and_the_next_call_works(case, tmp_path):
    make, message = BAD[case]
    folder = make(tmp_path / "head")
    if case == "another vocabulary":
        model = tiny_llama(vocab_size=600)
    else:
        model = tiny_llama()
    inputs = ragged([5, 9])
    with pytest.raises(CheckpointError, match=message) as raised:
        model.generate(**inputs, max_new_tokens=4, speculative_config={"method": "eagle", "model": str(folder)})
    assert "head" in str(raised.value), "the message names the checkpoint"
    assert not (folder / "executed").exists()
    assert_clean(model)
    plain = model.generate(**inputs, max_new_tokens=8)
    config = {"method": "ngram", "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    assert torch.equal(model.generate(**inputs, max_new_tokens=8, speculative_config=config), plain)


def test_the_bomb_would_go_off(tmp_path):
    """The pickle of the test above does run code where it is loaded without care."""
    folder = with_code(tmp_path / "head")
    code = f"import pickle; pickle.load(open({str(folder / 'pytorch_model.bin')!r}, 'rb'))"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert (folder / "executed").exists()


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_pickles_of_tensors_and_shards_load(tmp_path, file):
    whole = Checkpoint(write(tmp_path / "whole", file=file))
    assert sorted(whole.names()) == sorted(eagle_tensors())
    assert whole.shape("fc.weight") == (H, 2 * H)
    assert torch.equal(whole.tensor("fc.weight"), eagle_tensors()["fc.weight"])
    assert infer_format(whole).method == "eagle"


def test_only_the_wanted_shards_are_opened(tmp_path):
    folder = tmp_path / "sharded"
    folder.mkdir()
    save_file({"mtp.fc.weight": torch.ones(2, 2)}, folder / "b.safetensors")
    (folder / "a.safetensors").write_bytes(b"not a checkpoint")
    weight_map = {"model.embed.weight": "a.safetensors", "mtp.fc.weight": "b.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    checkpoint = open_checkpoint(str(folder), wanted=lambda name: name.startswith("mtp."))
    assert checkpoint.names() == ["mtp.fc.weight"]
    with pytest.raises(CheckpointError, match=r"a.safetensors cannot be read"):
        open_checkpoint(str(folder)).names()


INDEX = json.dumps({"weight_map": dict.fromkeys(eagle_tensors(), "b.bin")})


@pytest.mark.parametrize(
    ("stored", "fetched"),
    [
        (["model.safetensors", "pytorch_model.bin"], ["model.safetensors"]),
        (["head.pth"], ["head.pth"]),
        (["training_args.bin", "head.pt"], ["head.pt", "training_args.bin"]),
        (["b.bin", "other.bin", "pytorch_model.bin.index.json"], ["b.bin", "pytorch_model.bin.index.json"]),
    ],
    ids=lambda names: names[0],
)
def test_only_the_files_that_are_read_are_downloaded(monkeypatch, tmp_path, stored, fetched):
    hub, cache = tmp_path / "hub", tmp_path / "cache"
    cache.mkdir()
    for file in stored:
        if file.endswith(".json"):
            (hub / file).write_text(INDEX)
        else:
            write(hub, file=file)

    def download(repo, allow_patterns, **options):
        for path in hub.iterdir():
            if any(path.match(pattern) for pattern in allow_patterns):
                shutil.copy(path, cache)
        return str(cache)

    monkeypatch.setattr(files, "snapshot_download", download)
    monkeypatch.setattr(files, "hf_hub_download", lambda repo, file, **options: download(repo, [file]))
    checkpoint = open_checkpoint("someone/head")
    assert checkpoint.shape("fc.weight") == (H, 2 * H)
    assert sorted(path.name for path in cache.iterdir()) == sorted([*fetched, "config.json"])


def test_nothing_is_filled_before_everything_fits(tmp_path):
    checkpoint = Checkpoint(write(tmp_path / "head"))
    module = nn.ModuleDict({"fc": nn.Linear(2 * H, H, bias=False), "other": nn.Linear(3, 3)})
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"missing other.bias; missing other.weight; unused embed_tokens.weight"):
        load_module(module, Plan(checkpoint, lambda name: name), torch.device("cpu"), torch.float32)
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())


def test_method_is_inferred_and_logged(tmp_path, caplog):
    folder = write(tmp_path / "some-head")
    with caplog.at_level("INFO", logger="hf_specdec"):
        assert parse_config({"model": str(folder)}).method == "eagle"
    assert "inferred" in caplog.text and "EAGLE-1/2" in caplog.text
    assert parse_config({"model": "tiny-draft"}).method == "draft_model"
    model, inputs = tiny_llama(), ragged([7])
    output = model.generate(**inputs, max_new_tokens=9, speculative_config={"model": str(folder)})
    assert torch.equal(output, model.generate(**inputs, max_new_tokens=9))
    hf_specdec.release(model)


def test_another_head_in_the_same_folder_is_seen(tmp_path):
    folder = write(tmp_path / "head")
    assert parse_config({"model": str(folder)}).method == "eagle"
    medusa = {"0.0.linear.weight": torch.ones(H, H), "0.0.linear.bias": torch.ones(H), "0.1.weight": torch.ones(V, H)}
    write(folder, medusa, {"medusa_num_heads": 1})
    os.utime(folder / "model.safetensors", (2e9, 2e9))  # file systems with coarse clocks
    assert parse_config({"model": str(folder)}).method == "medusa"


@pytest.mark.parametrize("method", ["eagle", "draft_model"])
def test_retrained_weights_in_the_same_folder_are_loaded(tmp_path, method):
    """While a decoder with the old ones is kept. Two configurations share weights that are the same."""
    model, decoders = tiny_llama(), []
    if method == "eagle":
        folder = write(tmp_path / "head")
    else:
        folder = tmp_path / "drafter"
        tiny_llama(seed=1).save_pretrained(folder)

    def drafter(num_tokens):
        config = parse_config({"method": method, "model": str(folder), "num_speculative_tokens": num_tokens})
        decoders.append(integration.get_decoder(model, config))
        return decoders[-1].generator.modules()[0]

    before = drafter(2)
    assert drafter(3) is before
    file = folder / "model.safetensors"
    save_file({name: value + 1 for name, value in load_file(file).items()}, tmp_path / "new", {"format": "pt"})
    os.replace(tmp_path / "new", file)
    os.utime(file, (1e9, 1e9))  # an older time, as of a copy that keeps it
    after = drafter(4).state_dict()
    assert all(torch.equal(after[name], value + 1) for name, value in before.state_dict().items())
    hf_specdec.release(model)


def test_an_unknown_format_says_what_was_tried(tmp_path):
    folder = write(tmp_path / "head", {"blob.weight": torch.ones(2)}, {"model_type": "llama"})
    with pytest.raises(
        SpeculativeConfigError, match=r"no known format. Tried: .*EAGLE-1/2.*Its tensors are blob.weight"
    ):
        parse_config({"model": str(folder)})


def test_a_name_that_is_nowhere():
    with pytest.raises(SpeculativeConfigError, match="'no/such-head' is neither a bundled name nor a folder"):
        parse_config({"model": "no/such-head"})


def test_a_token_is_never_saved():
    config = parse_config({"method": "eagle", "model": "x", "token": "hf_secret"})
    assert config.token == "hf_secret"
    assert "hf_secret" not in config.to_json() + repr(config)


HYDRA = {"hydra_mlp.0.0.linear.weight": torch.zeros(H, 2 * H), "hydra_lm_heads.0.0.weight": torch.zeros(V, H)}
DFLASH = {name: torch.zeros(2, 2) for name in ("fc.weight", "hidden_norm.weight", "layers.0.self_attn.q_norm.weight")}
# type → (tensors, method, message)
SPECULATORS = {
    "hydra": (HYDRA, "hydra", "'hydra', whose trainer shows a head the token that it predicts: it cannot draft"),
    "jetspec": (DFLASH, "dflash", "of speculators type 'jetspec', whose drafts no method here can make"),
    "dsv4_dspark": ({"mtp.0.main_proj.weight": torch.zeros(2, 2)}, "dflash", "of speculators type 'dsv4_dspark', whose drafts no"),
    "independent": ({"lm_head.weight": torch.zeros(2, 2)}, "eagle3", "of speculators type 'independent', whose drafts no"),
}  # fmt: skip


@pytest.mark.parametrize("kind", SPECULATORS)
def test_types_of_speculators_that_no_method_reads(model, tmp_path, kind):
    tensors, method, message = SPECULATORS[kind]
    folder = str(write(tmp_path / "head", tensors, {"speculators_model_type": kind, "num_hydra_heads": 1}))
    for config in ({"model": folder}, {"model": folder, "method": method}):
        with pytest.raises(SpeculativeConfigError, match=message):
            model.generate(**ragged([5]), max_new_tokens=2, speculative_config=config)
