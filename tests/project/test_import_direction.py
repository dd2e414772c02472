"""The rule of the house: imports point one way, down the floors."""

import ast
import re

import pytest
from paths import ROOT

PACKAGE = ROOT / "hf_specdec"
FLOORS = [
    {"kernels"},
    {"core"},
    {"cache"},
    {"model"},
    {"policy"},
    {"sampling"},
    {"verification"},
    {"candidate_generators"},
    {"decoding"},
    {"refusals", "virtual_tokens", "training"},  # from here on the top floor of the picture
    {"learning"},
    {"integration"},
    {"plugin", "assisted", "hf_specdec"},  # the package itself imports the plugin
    {"serve"},
    {"cli"},
    {"__main__"},
]
TOP = set().union(*FLOORS[FLOORS.index({"decoding"}) + 1 :])
LEAVES = {
    "config",
    "bundled",
    "inflation",
    "jsonl",
    "lazy_names",
}  # import nothing of ours, may be imported by all but kernels
FLOOR_OF = {name: i for i, names in enumerate(FLOORS) for name in names}
# The rooms of serve: the engine knows of no other process, and only the HTTP side knows of HTTP.
ROOMS = [
    {"engine", "transfer", "hidden_states"},
    {"ipc", "ranks", "llm", "metrics", "trainer"},
    {"http"},
    {"ray", "proxy"},
]
ROOM_OF = {name: i for i, names in enumerate(ROOMS) for name in names}
FILES = sorted(path for path in PACKAGE.rglob("*.py") if "bundled_models" not in path.parts)


def imports_of(path, source=None):
    """Our own modules that a file imports, as tuples of names below `hf_specdec`; imports inside functions count too."""
    module = path.relative_to(PACKAGE).with_suffix("").parts
    package = module[:-1]
    for node in ast.walk(ast.parse(source if source is not None else path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
            yield from (tuple(name[1:]) for name in names if name[0] == "hf_specdec")
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                base = package[: len(package) - (node.level - 1)]
            elif (node.module or "").split(".")[0] == "hf_specdec":
                base = ()
                node.module = node.module.partition(".")[2]
            else:
                continue
            base = (*base, *(node.module.split(".") if node.module else ()))
            yield from ([base] if base else [(alias.name,) for alias in node.names])


def offences(path, source=None):
    own = path.relative_to(PACKAGE).with_suffix("").parts[0]
    if own == "__init__":
        return []
    found = []
    for target in imports_of(path, source):
        name = target[0] if target else "hf_specdec"
        if name == own:
            parts = path.relative_to(PACKAGE / own).with_suffix("").parts if own == "serve" else ()
            if parts[:1] not in ((), ("__init__",)) and ROOM_OF[parts[0]] < ROOM_OF[target[1]]:
                found.append(f"serve/{parts[0]} imports serve/{target[1]}: that is up")
            continue
        if own in LEAVES or (own == "kernels" and name != own):
            found.append(f"{own} imports {name}: it may import nothing of ours")
        elif name in LEAVES:
            continue
        elif name not in FLOOR_OF:
            found.append(f"{own} imports {name}, which stands on no floor")
        elif FLOOR_OF[own] <= FLOOR_OF[name]:
            found.append(f"{own} imports {name}: that is up")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_down(path):
    assert offences(path) == []


def test_every_module_has_a_floor():
    names = {path.relative_to(PACKAGE).with_suffix("").parts[0] for path in FILES}
    assert names <= set(FLOOR_OF) | LEAVES | {"__init__"}


def test_the_picture_shows_the_imports():
    """Every arrow of docs/architecture.md is an import, and every import goes along arrows."""
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    picture = next(block for block in page.split("```") if block.startswith("mermaid") and "top[" in block)
    arrows = set(re.findall(r"(\w+)(?:\[[^\]]*\])? --> (\w+)", picture))
    room = {name: "top" if name in TOP else name for name in FLOOR_OF}
    first_names = {(path.relative_to(PACKAGE).with_suffix("").parts[0], path) for path in FILES}
    imports = {
        (room[own], room[target[0]])
        for own, path in first_names
        for target in imports_of(path)
        if own in room and target and target[0] in room and room[own] != room[target[0]]
    }
    assert arrows <= imports, arrows - imports
    reached = set(arrows)
    for _ in FLOORS:
        reached |= {(a, d) for a, b in reached for c, d in arrows if b == c}
    assert imports <= reached, imports - reached


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("kernels/x.py", "from ..cache import BlockPool"),
        ("kernels/x.py", "import hf_specdec.config"),
        ("cache/x.py", "from ..model.graphs import GraphRunner"),
        ("model/x.py", "def f():\n    from hf_specdec.decoding import decode"),
        ("core/x.py", "from .. import decoding"),
        ("candidate_generators/x.py", "from ..decoding.stopping import NodeProcessors"),
        ("decoding/x.py", "from .. import integration"),
        ("training/x.py", "def f():\n    from ..plugin import generate"),
        ("learning/x.py", "from ..integration import get_decoder"),
        ("integration.py", "from .serve.llm import LLM"),
        ("training/x.py", "import hf_specdec"),
        ("config.py", "from .kernels import reference"),
        ("bundled.py", "from hf_specdec import config"),
        ("serve/engine/x.py", "from ..ipc.messages import Submit"),
        ("serve/llm.py", "from .http.errors import ApiError"),
        ("serve/http/x.py", "from hf_specdec.serve.ray import run"),
    ],
)
def test_the_rule_is_enforced(file, source):
    assert len(offences(PACKAGE / file, source)) == 1


def test_kernels_know_no_transformers():
    for path in FILES:
        if "kernels" in path.relative_to(PACKAGE).parts:
            roots = {
                name.split(".")[0]
                for node in ast.walk(ast.parse(path.read_text()))
                for name in (
                    [a.name for a in node.names]
                    if isinstance(node, ast.Import)
                    else [getattr(node, "module", None) or ""]
                )
                if isinstance(node, (ast.Import, ast.ImportFrom))
            }
            assert "transformers" not in roots, path


def files_imported_by(path, source=None):
    """Paths of our own files that a file imports, also for type checking only and inside functions."""
    package = path.relative_to(PACKAGE).parts[:-1]
    for node in ast.walk(ast.parse(source if source is not None else path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "hf_specdec":
                    yield from existing(tuple(alias.name.split(".")[1:]))
        elif isinstance(node, ast.ImportFrom):
            names = tuple(node.module.split(".")) if node.module else ()
            if node.level:
                base = (*package[: len(package) - (node.level - 1)], *names)
            elif names[:1] == ("hf_specdec",):
                base = names[1:]
            else:
                continue
            for alias in node.names:
                yield from list(existing((*base, alias.name))) or existing(base)


def existing(module):
    """The file of a module, given as names below `hf_specdec`, if there is one."""
    for path in (PACKAGE.joinpath(*module).with_suffix(".py"), PACKAGE.joinpath(*module, "__init__.py")):
        if module and path.is_file():
            yield path


def circles(imports):
    """Groups of files of which each imports, by way of others, each other (Tarjan's strongly connected components)."""
    index, low, stack, found = {}, {}, [], []

    def visit(path):
        index[path] = low[path] = len(index)
        stack.append(path)
        for other in imports.get(path, ()):
            if other not in index:
                visit(other)
                low[path] = min(low[path], low[other])
            elif other in stack:
                low[path] = min(low[path], index[other])
        if low[path] == index[path]:
            group = stack[stack.index(path) :]
            del stack[stack.index(path) :]
            if len(group) > 1:
                found.append(sorted(str(each.relative_to(PACKAGE)) for each in group))

    for path in imports:
        if path not in index:
            visit(path)
    return found


def test_no_file_imports_itself_by_way_of_others():
    assert circles({path: set(files_imported_by(path)) - {path} for path in FILES}) == []


def test_a_circle_would_be_found():
    graph = {path: set(files_imported_by(path)) - {path} for path in FILES}
    sequence, output = PACKAGE / "core" / "sequence.py", PACKAGE / "core" / "outcome.py"
    assert sequence in graph[output]
    graph[sequence] = set(files_imported_by(sequence, "if TYPE_CHECKING:\n    from .outcome import StepOutcome"))
    assert ["core/outcome.py", "core/sequence.py"] in circles(graph)
