"""Write a trained model the way it ships: float16 files that load as float32, tokenizer, defaults, model card."""

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

CARD = Path(__file__).with_name("card.md")


def table(values: dict[str, float], header: str) -> str:
    rows = "\n".join(f"| {name} | {value:.3f} |" for name, value in values.items())
    return f"| {header} | |\n|---|---|\n{rows}"


def export_model(model, tokenizer, folder: Path) -> None:
    """Write weights (float16), configs and tokenizer to `folder`; leaves `model` in float32, rounded to float16."""
    folder.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(
        eos_token_id=model.config.eos_token_id, pad_token_id=model.config.pad_token_id, do_sample=False
    )
    model.half().save_pretrained(folder)
    model.float()
    config = json.loads((folder / "config.json").read_text())
    config["dtype"] = "float32"
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    (folder / "model.safetensors").chmod(0o644)


def write_card(model, folder: Path, **facts) -> None:
    """Fill in the model card; `facts` are the placeholders of `card.md` that the model itself does not know."""
    c = model.config
    shape = (
        c.hidden_size,
        c.num_hidden_layers,
        c.num_attention_heads,
        c.num_key_value_heads,
        c.head_dim,
        c.intermediate_size,
    )
    known = {
        "parameters": model.num_parameters(),
        "shape": " / ".join(map(str, shape)),
        "vocabulary": c.vocab_size,
        "context": c.max_position_embeddings,
        "megabytes": (folder / "model.safetensors").stat().st_size / 1e6,
    }
    (folder / "README.md").write_text(CARD.read_text().format(**known, **facts))


def load_exported(folder: Path):
    """The exported model in float32, evaluation mode."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
