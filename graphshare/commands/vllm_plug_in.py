"""Whether vLLM would load graphshare's plug-in; for ``graphshare doctor``."""

from __future__ import annotations

import importlib.metadata
import os

from graphshare.commands.finding import Finding
from graphshare.commands.installed import UNREADABLE, version_of

__all__ = ["look_at_plug_in"]


def look_at_plug_in() -> list[Finding]:
    """Whether the vLLM that is installed will find graphshare, and whether it is one of those."""
    version, _ = version_of("vllm")
    if version is None:
        return []
    # Not earlier: the rest of the report does without the adapters.
    from graphshare.adapters.vllm.versions import SUPPORTED

    try:
        entries = importlib.metadata.entry_points(group="vllm.general_plugins")
    except UNREADABLE as error:
        return [
            Finding(
                "vLLM plug-in",
                None,
                "broken",
                False,
                f"entry points cannot be read, nor by vLLM ({type(error).__name__}: {error})",
                "install the package with the damaged entry_points.txt again",
            )
        ]
    chosen = os.environ.get("VLLM_PLUGINS")
    status, remedy = "ok", ""
    detail = "asleep unless GRAPHSHARE_VLLM is set"
    if "graphshare" not in entries.names:
        status, detail = "missing", "vLLM does not find graphshare among the packages"
        remedy = "install graphshare as a package, where vLLM is"
    elif chosen is not None and "graphshare" not in chosen.split(","):
        status, detail = "missing", f"VLLM_PLUGINS={chosen} leaves graphshare out"
        remedy = "add graphshare to VLLM_PLUGINS"
    elif version.partition("+")[0] not in SUPPORTED:
        status, detail = "unsupported", f"for vLLM {', '.join(SUPPORTED)}"
    found = "graphshare" if "graphshare" in entries.names else None
    return [Finding("vLLM plug-in", found, status, False, detail, remedy)]
