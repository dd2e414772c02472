"""Keys of method `auto`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ...config import config_key
from ..combined import checked_part
from ..corpora import CorpusConfig
from ..lookup_cache import LookupCacheConfig


@dataclass
class AutoConfig(LookupCacheConfig, CorpusConfig):
    """Drafts with whatever is fastest, row by row and step by step, by measured costs and acceptance. It finds
    drafters by itself."""

    name = "auto"
    has_parts = True
    default_num_speculative_tokens: ClassVar[int] = 16

    draft_length: str = config_key("auto", "'auto': this method always measures", choices=("auto",))
    methods: Any = config_key(None, "drafters to choose among, by name or configuration; by default all that are found")
    model: str | None = config_key(
        None, "a head or a small model to draft with, besides the look-ups; by default one is searched for"
    )
    max_download_gb: float = config_key(2.0, "largest head that may be downloaded from the Hub; 0: none", minimum=0)
    memory: bool | str = config_key(
        True,
        "keep measured costs and rates of acceptance from process to process, but no text: true (a folder of the cache), a "
        "folder, or false",
    )

    def __post_init__(self) -> None:
        self.check_keys()
        super().__post_init__()
        if not isinstance(self.memory, (bool, str)) or self.memory == "":
            raise self.fail("memory", f"must be true, false or a folder, not {self.memory!r}.")
        if self.methods is not None:
            if not isinstance(self.methods, (list, tuple)) or not self.methods:
                raise self.fail(
                    "methods",
                    f"must be a list of methods or configurations, e.g. ['ngram', 'mtp'], not {self.methods!r}.",
                )
            self.methods = [self._checked(part) for part in self.methods]

    def _checked(self, part: Any) -> dict[str, Any]:
        """One of `methods` as a checked configuration, with an automatic draft length unless it gives one."""
        given = {"method": part} if isinstance(part, str) else part
        if isinstance(given, dict):
            given = {"num_speculative_tokens": "auto", **given}
        return checked_part(self, "methods", given)
