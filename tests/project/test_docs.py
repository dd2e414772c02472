"""What the documentation shows is valid: code runs, configurations work, commands and keys exist, links lead somewhere."""

import ast
import importlib.util
import inspect
import json
import re
import shlex
import xml.etree.ElementTree as ElementTree
from functools import cache

import pytest
import torch
from paths import ROOT, load_script

import hf_specdec
from hf_specdec import available_methods, parse_config
from hf_specdec.cli import build_parser
from hf_specdec.cli.models import shared_fields

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
TEXTS = [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
OTHERS = [
    *(ROOT / name for name in ("CHANGELOG.md", "SECURITY.md", "benchmarks/LOG.md", ".github/PULL_REQUEST_TEMPLATE.md")),
    *(ROOT / folder / "README.md" for folder in ("examples", "models", "notebooks")),
    *sorted(ROOT.glob("recipes/*/README.md")),
]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
REPOSITORY = "https://github.com/hf-specdec/hf-specdec"
# Heads on the Hub, and the bundled ones that stand in for them here.
STAND_INS = {
    '"yuhuili/EAGLE-LLaMA3-Instruct-8B"': '"tiny-eagle"',
    '"yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"': '"tiny-eagle3"',
    '"ibm-fms/llama3-8b-accelerator"': '"tiny-mlp_speculator"',
    '"Snowflake/Arctic-LSTM-Speculator-Llama-3.1-8B-Instruct"': '"tiny-mlp_speculator"',
    '"FasterDecoding/medusa-vicuna-7b-v1.3"': '"tiny-medusa"',
    '"ankner/hydra-vicuna-7b-v1.3",\n    "speculative_token_tree": "medusa_mc_sim_7b_63"': '"tiny-hydra", "branching_factors": [4, 2, 1]',
    '"z-lab/Qwen3-8B-DFlash-b16"': '"tiny-dflash"',
    '"amd/PARD-Llama-3.2-1B"': '"tiny-draft", "mask_token_id": 0',
    '"model": "..."': '"model": "tiny-draft"',
}
NOT_RUN = {
    "image-text-to-text": "needs a vision model of several GB; tests/model/test_multimodal.py has small ones",
    "google/gemma-4": "needs a Gemma 4 target; tests/candidate_generators/test_gemma4_assistant.py has small ones",
}
HAS_SUFFIX = importlib.util.find_spec("arctic_inference") is not None


def blocks(path, language):
    """The code blocks of a page in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(encoding="utf-8"), flags=re.S | re.M)


def name_of(path):
    return str(path.relative_to(ROOT))


def examples(path):
    """Every dict that a page assigns to `speculative_config` or passes as it."""
    for block in blocks(path, "python"):
        for node in ast.walk(ast.parse(block)):
            named = isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "speculative_config"
            if (named or (isinstance(node, ast.keyword) and node.arg == "speculative_config")) and isinstance(
                node.value, ast.Dict
            ):
                yield ast.literal_eval(node.value)


# ---- code -----------------------------------------------------------------------------------------------------------


def runnable(block):
    """The block with bundled heads in place of those on the Hub, or None if it cannot run here."""
    if any(word in block for word in NOT_RUN) or ('"suffix"' in block and not HAS_SUFFIX):
        return None
    for hub, bundled in STAND_INS.items():
        block = block.replace(hub, bundled)
    return block


def assigned_configs(block):
    """What a block assigns to `speculative_config`: each is used once."""
    for node in ast.parse(block).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "speculative_config":
            yield ast.literal_eval(node.value)


@pytest.mark.parametrize("path", [path for path in TEXTS[:-1] if blocks(path, "python")], ids=name_of)
def test_the_code_of_a_page_runs(path, tiny_model, tiny_tokenizer, tmp_path, monkeypatch):
    """Block after block in one namespace, as a reader would who has a model, a tokenizer and inputs; a `speculative_config` that is only
    assigned decodes a few tokens."""
    monkeypatch.chdir(tmp_path)
    inputs = tiny_tokenizer("Once upon a time there was a dog. Once upon", return_tensors="pt")
    known = {"hf_specdec": hf_specdec, "model": tiny_model, "tokenizer": tiny_tokenizer, "inputs": inputs}
    plain = tiny_model.generate(**inputs, max_new_tokens=8)
    ran = 0
    for block in blocks(path, "python"):
        compile(block, name_of(path), "exec")
        code = runnable(block)
        if code is None:
            continue
        exec(compile(code, name_of(path), "exec"), known)
        for values in assigned_configs(code):
            output = tiny_model.generate(**inputs, max_new_tokens=8, speculative_config=values)
            assert torch.equal(output, plain), values
        ran += 1
    for each in list(known.values()):
        if isinstance(each, hf_specdec.LLM):
            each.close()
    hf_specdec.release()
    if not ran:
        pytest.skip("it needs arctic-inference, or a target of several GB")


@pytest.mark.parametrize("path", TEXTS, ids=name_of)
def test_commands_exist(path):
    """Every `hf-specdec` command of a shell block is one that the command line accepts."""
    for block in blocks(path, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            for part in re.split(r"&&|\||;", line) if "hf-specdec " in line else []:
                words = shlex.split(part, comments=True)
                words = words[: words.index("&")] if "&" in words else words
                if words[:1] == ["hf-specdec"] and "..." not in words:
                    build_parser().parse_args(words[1:])


# ---- configurations, keys, methods ----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [path for path in PAGES if list(examples(path))], ids=name_of)
def test_example_parses(path):
    for values in examples(path):
        if "method" in values:
            assert parse_config(values).method in (values["method"], "mlp_speculator")
        else:
            assert set(values) >= {"model"}, "the method can only be inferred from a checkpoint"


def test_every_method_has_a_page_with_an_example_and_a_figure():
    own = [method for method, config in available_methods().items() if config.__module__.startswith("hf_specdec.")]
    for method in own:  # other tests may have registered theirs
        page = DOCS / "methods" / ("mlp_speculator.md" if method == "arctic" else f"{method}.md")
        exists = page.is_file()
        text = page.read_text(encoding="utf-8") if exists else ""
        wanted = {
            f'an example: speculative_config = {{"method": "{method}"}}': exists
            and method in {values.get("method") for values in examples(page)},
            "a step figure (../figures/step-..) or a mermaid block": "../figures/step-" in text or "```mermaid" in text,
            **{f"a paragraph {title}": title in text for title in ("**Choose it**", "**It costs**", "**Keys:**")},
            "a link to it in docs/methods.md": f"methods/{page.name}"
            in (DOCS / "methods.md").read_text(encoding="utf-8"),
        }
        missing = [what for what, is_there in wanted.items() if not is_there]
        assert not missing, f"{'complete' if exists else 'write'} {name_of(page)} with {'; '.join(missing)}"


@cache
def known_names():
    """Keys of any configuration, fields of a request, flags of the server and arguments of generate()."""
    fields = [f.name for f in shared_fields()]
    for config in available_methods().values():
        fields += [f.name for f in config.__dataclass_fields__.values()]
    fields += list(hf_specdec.SamplingParams.__dataclass_fields__)
    return {*fields, "MODEL", "assistant_model=model", "metrics.speculative_decoding"}


@cache
def server_flags():
    serve = build_parser()._subparsers._group_actions[0].choices["serve"]  # argparse has no public way to its own flags
    return set(serve._option_string_actions)


@pytest.mark.parametrize("path", sorted((DOCS / "coming-from").glob("*.md")), ids=name_of)
def test_what_a_table_translates_to_exists(path):
    """The second column of the tables "coming from": every key, method and flag of ours."""
    rows = [line.split("|") for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    rows = [row for row in rows if row[2].strip() != "here" and not row[1].strip().startswith("`vllm serve")]
    ours = [name for row in rows for name in re.findall(r"`([^`]+)`", row[2]) if name != "hf-specdec serve"]
    assert len(ours) > 8
    values = {"rejection", "block", "coupled", "typical", *available_methods()}
    for name in ours:
        if name.startswith("--"):
            assert name in server_flags(), name
        elif name.startswith('"method"'):
            assert json.loads("{" + name + "}")["method"] in available_methods(), name
        elif name == '"num_speculative_tokens": "auto"':
            assert parse_config({"method": "ngram", "num_speculative_tokens": "auto"}).draft_length == "auto"
        elif name.startswith('"model"'):
            continue
        elif name.startswith('"'):
            assert name.strip('"') in values, name
        else:
            assert name in known_names(), name


# ---- links and figures ----------------------------------------------------------------------------------------------


def anchors(path):
    """Anchors of a page's headings, as GitHub and the site make them."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.S | re.M)
    found = set()
    for heading in re.findall(r"^#+ (.+)$", text, flags=re.M):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        found.add(re.sub(r"[^\w\- ]", "", plain.lower()).strip().replace(" ", "-"))
    return found


def prose(path):
    """A page's text, or the markdown of a notebook, without code blocks."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown"]
        text = "\n\n".join("".join(cell["source"]) for cell in cells)
    return re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)


def sentences(path):
    """What a page says outside tables, headings and code. A list of code spans counts as one word."""
    text = re.sub(r"<!--.*?-->|\]\([^)]*\)|^(?:\||#|    |:::).*$", "", prose(path), flags=re.M)
    text = re.sub(r"`[^`]*`(, `[^`]*`)*", "X", text)
    for block in re.split(r"\n\s*\n|\n\s*(?:[*-]|\d+\.) ", text):
        yield from re.split(r"(?<=[.!?:])\**\s+(?=[A-Z*\[τ\"])", " ".join(block.split()))


WRITTEN = [*TEXTS, ROOT / "CHANGELOG.md", ROOT / "examples" / "README.md", *NOTEBOOKS]


@pytest.mark.parametrize("path", [path for path in WRITTEN if path.name != "keys.md"], ids=name_of)
def test_sentences_are_short(path):
    """At most 25 words; docs/keys.md shows docstrings."""
    assert not [text for text in sentences(path) if len(re.findall(r"\w[\w'.,/-]*", text)) > 25]


@pytest.mark.parametrize("path", [*TEXTS, *OTHERS, *NOTEBOOKS], ids=name_of)
def test_links_lead_somewhere(path):
    """Files and anchors that a page links to exist; addresses of the repository name files of it."""
    text = prose(path)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        inside = re.match(
            rf"({REPOSITORY}/blob/main/|https://colab\.research\.google\.com/github/hf-specdec/hf-specdec/blob/main/)(.*)",
            target,
        )
        if inside:
            assert (ROOT / inside.group(2).split("#")[0]).exists(), target
        elif not target.startswith(("http://", "https://", "mailto:")):
            file, _, anchor = target.partition("#")
            page = (path.parent / file) if file else path
            assert page.exists(), target
            assert not anchor or anchor in anchors(page), target


def documented(path):
    """What an API page shows: each name, and a class's public functions with it."""
    for name in re.findall(r"^::: (\S+)$", path.read_text(encoding="utf-8"), flags=re.M):
        module, _, attribute = name.rpartition(".")
        found = getattr(importlib.import_module(module), attribute)
        yield name, found
        if inspect.isclass(found):
            yield from (
                (f"{name}.{key}", each)
                for key, each in vars(found).items()
                if key[0] != "_" and inspect.isroutine(each)
            )


def parameters(found):
    """Names that a function takes, or a class: a data class's base may take its own."""
    return inspect.signature(getattr(found, "__func__", found)).parameters


@pytest.mark.parametrize("path", sorted((DOCS / "api").glob("*.md")), ids=name_of)
def test_docstrings_name_parameters_that_exist(path):
    """One line for each parameter and attribute: the site's build takes two on a line for one that does not exist."""
    for name, found in documented(path):
        text = (inspect.getdoc(found) or "") + "\n"
        for title in ("Args", "Attributes"):
            section = re.search(rf"^{title}:\n((?: +.*\n|\n)+)", text, flags=re.M)
            given = re.findall(r"^ {4}(\S[^:]*):", section.group(1), flags=re.M) if section else []
            assert all(re.fullmatch(r"\**\w+", each) for each in given), (name, given)
            if given and title == "Args":
                assert {each.lstrip("*") for each in given} <= set(parameters(found)), (name, given)


def test_every_page_is_in_the_menu():
    """But for those that mkdocs.yml says are not."""
    settings, menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")
    outside = re.findall(r"[\w/-]+\.md", re.search(r"^not_in_nav: (.*?) *#", settings, flags=re.M).group(1))
    assert sorted([*re.findall(r"[\w/-]+\.md", menu), *outside]) == sorted(
        str(path.relative_to(DOCS)) for path in PAGES
    )


def test_figures_are_drawings():
    figures = sorted((DOCS / "figures").glob("*.svg"))
    assert len(figures) >= 24
    for figure in figures:
        assert ElementTree.parse(figure).getroot().tag.endswith("svg")


def drawn(figure):
    """What a plot shows: its text, and the points of its lines and bars in tenths of a point, without matplotlib's ids."""
    root = ElementTree.parse(figure).getroot()
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    paths = [re.findall(r"-?[\d.]+", each.get("d")) for each in root.iter("{http://www.w3.org/2000/svg}path")]
    return texts, [[round(float(number), 1) for number in numbers] for numbers in paths]


def test_the_plots_of_benchmarks_show_the_kept_results(tmp_path, monkeypatch):
    """docs/performance.md shows every plot that scripts/benchmark_plots.py draws, as the results draw them now."""
    mpl = pytest.importorskip("matplotlib", reason="pip install 'hf-specdec[train]'")
    kept = {figure.name: figure for figure in (DOCS / "figures").glob("bench-*.svg")}
    assert set(re.findall(r"bench-[\w-]+\.svg", (DOCS / "performance.md").read_text(encoding="utf-8"))) == set(kept)
    with mpl.rc_context():
        plots = load_script(ROOT / "scripts" / "benchmark_plots.py")
        monkeypatch.setattr(plots, "FIGURES", tmp_path)
        plots.main()
    assert {figure.name for figure in tmp_path.iterdir()} == set(kept)
    for name, figure in kept.items():
        by = re.search(r"Matplotlib v([\d.]+)", figure.read_text(encoding="utf-8")).group(1)
        (texts, paths), (now_texts, now_paths) = drawn(figure), drawn(tmp_path / name)
        assert texts == now_texts, name
        if by == mpl.__version__:  # another version may set margins otherwise
            assert all(a == pytest.approx(b, abs=0.2) for a, b in zip(paths, now_paths, strict=True)), name


def test_tables_show_the_kept_results():
    """The pages have every table that scripts/result_tables.py makes, as the results have it now."""
    tables = load_script(ROOT / "scripts" / "result_tables.py")
    text = "".join(page.read_text(encoding="utf-8") for page in tables.PAGES)
    assert re.findall(r"<!-- table: ([\w-]+) -->", text) == list(tables.TABLES)
    assert tables.filled(text) == text, "write it anew: python scripts/result_tables.py"
    for file in ("acceptance", "acceptance-hybrid", "training-cpu"):
        assert all(result["equal"] == result["prompts"] for result in tables.read(file)["results"]), file


def test_the_speed_in_readme_is_the_measured_one():
    """README's multiples of batch size 1 are those of the H200's file."""
    rows = load_script(ROOT / "scripts" / "result_tables.py").read("gpu-h200-decoding")["rows"]
    speed = {row["name"]: row["value"] for row in rows}
    ours, eagle3 = speed["ours, plain, graphs, batch 1"], speed["ours, EAGLE-3, graphs, batch 1"]
    plain = speed["transformers, plain, batch 1"]
    shown = re.findall(r"\b(\d+\.\d) times", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert sorted(shown) == sorted(f"{ratio:.1f}" for ratio in (eagle3 / plain, eagle3 / ours, ours / plain))
