"""Builds hf-specdec-models: the models that hf-specdec's own wheel leaves out. Everything else is in pyproject.toml.

The files lie in `hf_specdec/bundled_models/` of the checkout and are copied from there while a wheel or a source distribution is
built, so the repository holds them once. A source distribution has them beside the package.
"""

import ast
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

HERE = Path(__file__).resolve().parent
PACKAGE = "hf_specdec_models"
CHECKOUT = HERE.parent / "hf_specdec"


def names():
    """`APART` of hf_specdec/bundled.py; it is read, not imported, as the build has no torch."""
    tree = ast.parse((CHECKOUT / "bundled.py").read_text(encoding="utf-8"))
    values = {node.targets[0].id: node.value for node in tree.body if isinstance(node, ast.Assign)}
    return ast.literal_eval(values["APART"])


def folders():
    """The models' folders, in the checkout or in an unpacked source distribution."""
    if (CHECKOUT / "bundled.py").is_file():
        return [CHECKOUT / "bundled_models" / name for name in names()]
    return sorted(path.parent for path in (HERE / PACKAGE).glob("*/config.json"))


def copy_models(place):
    """Copy every model to a folder."""
    for folder in folders():
        shutil.copytree(folder, Path(place) / folder.name, dirs_exist_ok=True)


class BuildModels(build_py):
    """Copies the models into the package that is built."""

    def run(self):
        """Build."""
        super().run()
        if not self.editable_mode:
            copy_models(Path(self.build_lib) / PACKAGE)


class SourceWithModels(sdist):
    """Copies the models into the source distribution."""

    def make_release_tree(self, base_dir, files):
        """Put the distribution together."""
        super().make_release_tree(base_dir, files)
        copy_models(Path(base_dir) / PACKAGE)


setup(packages=[PACKAGE], cmdclass={"build_py": BuildModels, "sdist": SourceWithModels})
