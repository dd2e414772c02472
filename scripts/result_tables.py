"""Fills the tables of docs/performance.md, docs/formats.md, docs/models.md and benchmarks/LOG.md from the files in benchmarks/results.

    python scripts/result_tables.py            # writes the pages
    python scripts/result_tables.py --check    # exit status 1 if a page shows other figures

A table stands between `<!-- table: NAME -->` and `<!-- end -->`; NAME is a key of TABLES.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGES, RESULTS = (
    [ROOT / name for name in ("docs/performance.md", "docs/formats.md", "docs/models.md", "benchmarks/LOG.md")],
    ROOT / "benchmarks" / "results",
)


def read(name: str) -> dict[str, Any]:
    """A file of results."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def table(heads: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """Lines of markdown; numbers get two digits after the point, a missing one a dash."""
    heads = list(heads)
    shown = [["–" if v is None else f"{v:.2f}" if isinstance(v, float) else str(v) for v in row] for row in rows]
    return "\n".join(
        ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|", *("| " + " | ".join(r) + " |" for r in shown)]
    )


def engines(*sources: tuple[str, dict[str, str]]) -> str:
    """Speed over `generate()` by task and batch size. A source: a file, and a title for each way to take from it."""
    speeds: dict[tuple[str, int], dict[str, float]] = {}
    for file, titles in sources:
        for row in read(file)["rows"]:
            if row["name"] in titles:
                speeds.setdefault((row["task"], row["batch_size"]), {})[titles[row["name"]]] = row["over_plain"]
    columns = [title for _, titles in sources for title in titles.values()]
    return table(["task", "batch", *columns], [[*key, *map(row.get, columns)] for key, row in speeds.items()])


def h200() -> str:
    """Tokens per second of `generate()`, and multiples of it, by batch size."""
    speeds: dict[int, dict[str, float]] = {}
    for row in read("gpu-h200-decoding")["rows"]:
        match = re.fullmatch(r"(transformers|ours), ([\w\-=, ]+?)(?:, graphs)?, batch (\d+)", row["name"])
        if match and row["unit"] == "tokens/s":
            speeds.setdefault(int(match[3]), {})[f"{match[1]}, {match[2]}"] = row["value"]
    plain = "transformers, plain"
    ways = [f"ours, {way}" for way in ("plain", "ngram", "EAGLE-3", "EAGLE-3, K = 3", "EAGLE-3 tree", "draft model")]
    heads = ["batch", "`generate()`, tokens/s", *(way.removeprefix("ours, ") for way in ways)]
    rows = [
        [size, round(of[plain]), *(of[way] / of[plain] if way in of else None for way in ways)]
        for size, of in speeds.items()
    ]
    return table(heads, rows)


def servers() -> str:
    """Tokens per second over those of `transformers serve`, by load."""
    loads = read("serve-cpu-bf16-85M")["loads"]
    ways = [way for way in next(iter(loads.values())) if way != "transformers"]
    heads = ["load", *(way if "vLLM" in way else f"ours, {way}" for way in ways)]
    return table(heads, [[load, *(of[way]["tokens_per_second_ratio"] for way in ways)] for load, of in loads.items()])


def auto() -> str:
    """Speed over `none` after the first texts: the best fixed method, and `auto`, at temperatures 0 and 1."""
    rows: dict[str, list[list[str]]] = {}
    for cell in read("auto-cpu-f32-85M")["cells"]:
        best, of = cell["warm"]["best"], cell["warm"]["speed_up"]
        own = [f"`{best}` {of[best]:.2f}", f"{of['auto']:.2f}", f"{of['auto, kept']:.2f}"]
        rows.setdefault(cell["task"], []).append(own)
    cells = [[task, *map("/".join, zip(*own, strict=True))] for task, own in rows.items()]
    return table(["task", "best fixed method", "`auto`", "`auto`, kept"], cells)


def quantized() -> str:
    """Time of a step over that of the model as it is, by the number of tokens."""
    report = read("quantized-cpu-bf16-319M")
    tokens, names = (1, 6, 16, 256), ("as it is", "wint8", "wint4")
    rows = [
        [name, round(report["mebibytes"][name]), *(report["ratio"][f"{name}, {count}"] for count in tokens)]
        for name in names
    ]
    return table(["weights", "MiB", "1 token", *(f"{count} tokens" for count in tokens[1:])], rows)


def loaded_quantized() -> str:
    """Targets that other libraries have quantized: path, equal rows and CPU time over `generate()`, in float32/bfloat16."""
    results = read("loaded-quantized-cpu")["results"]
    paths = {"operators": "operators", "native": "whole", "dequantized, native": "whole"}
    rows: dict[tuple[str, str], list[list[str]]] = {}
    for kind in dict.fromkeys(name.rpartition(", ")[0] for name in results if not name.startswith("unquantized")):
        found = [results.get(f"{kind}, {dtype}", {}) for dtype in ("float32", "bfloat16")]
        library, _, weights = kind.partition(" ")
        equal = "/".join(each.get("equal", "–").partition("/")[0] for each in found)
        times = [each.get("over_plain", {}).get("batch 1", {}).get("none") for each in found]
        speed = "/".join("–" if each is None else f"{each:.2f}" for each in times)
        own = rows.setdefault((library, paths.get(found[1]["path"], "called")), [])
        own.append([weights.replace(", ", " "), equal, speed])
    cells = [[key[0], *map(", ".join, zip(*own, strict=True)), key[1]] for key, own in rows.items()]
    return table(["", "weights", "equal", "CPU time", "path"], cells)


def acceptance() -> str:
    """τ of every method with the bundled heads, over all prompts."""
    taus: dict[str, dict[str, float]] = {}
    for each in read("acceptance")["results"]:
        taus.setdefault(each["method"], {})[each["shape"]] = each["tasks"]["all"]["tau"]
    return table(["method", "chain", "tree"], [[f"`{m}`", of.get("chain"), of.get("tree")] for m, of in taus.items()])


def training() -> str:
    """τ of heads trained with as many steps and parameters, by loss."""
    taus: dict[str, dict[str, float]] = {}
    for each in read("training-cpu")["results"]:
        taus.setdefault(each["method"], {})[each["loss"]] = each["tau"]
    losses = ("kl", "ce", "lk", "dpace")
    return table(["", *(f"`{loss}`" for loss in losses)], [[name, *map(of.get, losses)] for name, of in taus.items()])


def hybrid_acceptance() -> str:
    """τ and speed for the bundled target with recurrent layers."""
    results = read("acceptance-hybrid")["results"]
    none = results[0]["tasks"]["all"]["tokens_per_second"]
    rows = [
        [
            f"`{each['method']}`, {each['shape']}".removesuffix(", –"),
            whole["tau"],
            whole["tokens_per_second"] / none,
            whole["speed_up"],
        ]
        for each in results
        for whole in [each["tasks"]["all"]]
    ]
    return table(["method", "τ", "× `none`", "× `generate()`"], rows)


def latent() -> str:
    """Milliseconds of a step with latent attention, gathered and over pages, by context."""
    found: dict[str, dict[int, str]] = {}
    for dtype in ("float32", "bfloat16"):
        for step in read("latent-cpu")[dtype]["steps"]:
            if step["tokens"] == 1:
                name = f"{dtype}, batch {step['rows']}"
                found.setdefault(name, {})[step["context"]] = f"{step['gathered']:.0f}/{step['pages']:.0f}"
    lengths = (512, 2048, 16384)
    return table(["", *map(str, lengths)], [[name, *map(of.get, lengths)] for name, of in found.items()])


OURS = {"ours plain": "plain", "ours ngram": "n-gram", "ours ngram, auto length": "n-gram, auto"}
EAGLE = {"ours EAGLE-3": "EAGLE-3"}


def formats() -> str:
    """The largest difference of draft logits from a reference, by format."""
    rows = [[row["format"], row["reference"], f"{row['difference']:.0e}"] for row in read("formats")["rows"]]
    return table(["format", "reference", "difference"], rows)


def encoder_decoder() -> str:
    """Words per second of encoder-decoder models over `generate()` with all rows in one batch."""
    drafted = {"n-gram": "n-gram", "right drafter": "drafter that is right"}
    rows = []
    for task, results in read("encoder-decoder-cpu")["tasks"].items():
        of = {row["name"]: row for row in results["rows"]}
        for way, title in drafted.items():
            if f"ours, {way}" in of:
                names = (f"transformers, one by one, {way}", f"ours, one by one, {way}", "ours, plain", f"ours, {way}")
                figures = [of[name]["over_batch"] if name in of else None for name in names]
                rows.append([task, title, *figures, of[names[-1]]["accepted_length"]])
    return table(["task", "drafts", "assisted, one by one", "ours, one by one", "ours, plain", "ours", "τ"], rows)


def reading() -> str:
    """Prompt tokens per CPU second, and that over each engine's, by model and by texts × length."""
    engines = {"transformers plain": "`generate()`", "vLLM plain": "vLLM", "llama.cpp plain": "llama.cpp"}
    rows = []
    for model in ("bf16-6M", "f32-6M", "bf16-85M", "bf16-250M"):
        for row in [row for length in (512, 2048) for row in read(f"read{length}-cpu-{model}")["rows"]]:
            if row["name"] == "ours plain":
                texts = f"{row['batch_size']} × {row['task'].removeprefix('read')}"
                rows.append([model, texts, round(row["tokens_per_second"]), *map(row["over"].get, engines)])
    return table(["model", "texts", "tokens/s", *(f"× {title}" for title in engines.values())], rows)


TABLES = {
    "h200": h200,
    "engines-amd": lambda: engines(
        ("decode-cpu-bf16-250M", {**OURS, **EAGLE, "vLLM plain": "vLLM", "llama.cpp plain": "llama.cpp"})
    ),
    "engines-amx": lambda: engines(
        ("decode-cpu-amx-bf16-250M", OURS),
        ("decode-cpu-amx-bf16-250M-eagle3", EAGLE),
        ("decode-cpu-amx-bf16-250M", {"vLLM plain": "vLLM", "vLLM ngram": "vLLM n-gram"}),
    ),
    "servers": servers,
    "auto": auto,
    "acceptance": acceptance,
    "training": training,
    "acceptance-hybrid": hybrid_acceptance,
    "encoder-decoder": encoder_decoder,
    "quantized": quantized,
    "latent": latent,
    "formats": formats,
    "loaded-quantized": loaded_quantized,
    "reading": reading,
}


def filled(text: str) -> str:
    """The page with every table as the results have it now."""
    pattern = re.compile(r"<!-- table: ([\w-]+) -->\n.*?<!-- end -->", flags=re.S)
    return pattern.sub(lambda match: f"<!-- table: {match[1]} -->\n{TABLES[match[1]]()}\n<!-- end -->", text)


def main() -> int:
    """Write the pages, or compare them."""
    texts = {page: page.read_text(encoding="utf-8") for page in PAGES}
    if sys.argv[1:] == ["--check"]:
        return int(any(filled(text) != text for text in texts.values()))
    for page, text in texts.items():
        page.write_text(filled(text), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
