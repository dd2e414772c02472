"""What every test shares: one thread, no network, fixed seeds, and the bundled models."""

import atexit
import os
import shutil
import tempfile

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_SPECDEC_CACHE"] = tempfile.mkdtemp(prefix="hf_specdec-")  # what methods keep between processes
os.environ["HF_MODULES_CACHE"] = os.environ["HF_SPECDEC_CACHE"] + "/modules"  # models' own code, apart for each worker

import hf_specdec  # isort: skip  # before transformers: it holds back what torchao prints while it loads

import pytest
import torch
from oracle import drafter_of, load_bundled, method_configs, tiny_llama
from transformers import AutoTokenizer

torch.set_num_threads(1)
atexit.register(shutil.rmtree, os.environ["HF_SPECDEC_CACHE"], ignore_errors=True)


def pytest_addoption(parser):
    parser.addoption("--fast", action="store_true", help="only the first case of each test: see `make test-fast`")


def pytest_collection_modifyitems(config, items):
    """The longest first, so that no worker is left alone with one at the end."""
    if config.getoption("fast"):
        first = {(item.path, item.originalname): item for item in reversed(items) if _is_fast(item)}
        items[:] = reversed(first.values())
    long = ("test_triton_compile.py", "test_triton_interpreted.py")
    items.sort(key=lambda item: not any(name in item.nodeid for name in long))


def _is_fast(item) -> bool:
    """Whether a test starts no process, and neither interprets anything nor takes seconds."""
    long = item.get_closest_marker("slow") or item.get_closest_marker("long") or hasattr(item.module, "subprocess")
    return not long and "triton" not in item.path.name


def pytest_ignore_collect(collection_path, config):
    """Without these folders, whose tests start processes, train, simulate or count, collecting is faster too."""
    long = {"cli", "gpu", "inflation", "learning", "policy", "project", "serve", "training", "verification"}
    return True if config.getoption("fast") and collection_path.name in long else None


@pytest.fixture(autouse=True)
def fixed_seed():
    """Every test starts from the same random state."""
    torch.manual_seed(0)


@pytest.fixture
def forget_decoders(model):
    """Drafters are kept with a module's `model` between calls; what a test wraps around them must not be."""
    yield
    hf_specdec.release(model)


@pytest.fixture(scope="module")
def model():
    """A small random Llama, new for every module."""
    return tiny_llama()


@pytest.fixture(scope="module")
def drafter_path(model, tmp_path_factory):
    """The folder of a perturbed copy of `model`, which drafts for it."""
    folder = tmp_path_factory.mktemp("drafter")
    drafter_of(model).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def configs(drafter_path):
    """A configuration for each kind of method, by name."""
    return method_configs(drafter_path)


@pytest.fixture(scope="session")
def tiny_model():
    """The bundled target."""
    return load_bundled("tiny")


@pytest.fixture(scope="session")
def tiny_draft():
    """The bundled drafter of `tiny_model`."""
    return load_bundled("tiny-draft")


@pytest.fixture(scope="session")
def tiny_tokenizer():
    """The tokenizer both bundled models use."""
    return AutoTokenizer.from_pretrained(hf_specdec.bundled("tiny"), padding_side="left")


@pytest.fixture(scope="module")
def client(server):
    """The openai client of the module's `server` (see helpers_server.Process)."""
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as made:
        yield made
