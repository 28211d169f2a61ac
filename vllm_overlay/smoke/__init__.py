"""The checks of a serving model, asked over HTTP: ``vllm-overlay smoke``."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from vllm_overlay.errors import EXIT_FAILED, ConfigError, UsageError
from vllm_overlay.runs import Run, find_run, live_runs

FOLDER = Path(__file__).parent
ORDER = ("server", "answers", "engine", "overlay")


def smoke_server(home: Path, *, port: int | None, url: str | None, as_json: bool) -> int:
    """Check this node's server, or with ``url`` any other (without what only this node knows).

    Returns the exit status. Raises UsageError if there is no server to check.
    """
    if url is not None:
        run = next((one for one in live_runs(home) if one.url == url.rstrip("/")), None)
        return run_smoke(url, run.expectations if run else [], as_json=as_json, run=run)
    run = find_run(home, port)
    if run is None:
        raise UsageError("no server is running on this node", remedy="give --url")
    return run_smoke(run.url, run.expectations, as_json=as_json, run=run)


def run_smoke(
    url: str,
    expectations: Sequence[Mapping[str, str]],
    *,
    as_json: bool = False,
    run: Run | None = None,
) -> int:
    """Run every check against ``url``, print one line each, and return the exit status.

    ``expectations`` are the recipe's known answers. ``run`` adds what only this node can tell.
    """
    try:
        import pytest
    except ImportError:
        raise ConfigError(
            "the smoke checks need pytest", remedy="install vllm-overlay[smoke]"
        ) from None
    from vllm_overlay.smoke.plugin import Plugin

    plugin = Plugin(url.rstrip("/"), tuple(expectations), run, None if as_json else sys.stdout)
    options = ["-p", "no:terminal", "-p", "no:cacheprovider", "-p", "no:logging"]
    files = [str(FOLDER / f"check_{name}.py") for name in ORDER]
    with _alone():
        status = pytest.main([*files, "-c", str(FOLDER / "pytest.ini"), *options], [plugin])
    # A run that ends early, or collects nothing, has proved nothing.
    ok = status == pytest.ExitCode.OK and bool(plugin.checks) and not plugin.failed
    if as_json:
        print(json.dumps({"ok": ok, "checks": plugin.checks}, indent=1))
    else:
        print(plugin.summary())
    return 0 if ok else EXIT_FAILED


@contextmanager
def _alone() -> Iterator[None]:
    """Keep the user's own pytest options and plugins out."""
    changed = {"PYTEST_ADDOPTS": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": ""}
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
