"""A git repository of a made-up vLLM: real git writes the diffs that the tests read."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

WHO = {
    "GIT_AUTHOR_NAME": "A", "GIT_AUTHOR_EMAIL": "a@example.org",
    "GIT_COMMITTER_NAME": "A", "GIT_COMMITTER_EMAIL": "a@example.org",
    "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull,
}  # fmt: skip


class Repo:
    """Files are written with `write`; each `commit` can be had as a mail."""

    def __init__(self, root: Path, files: Mapping[str, str | bytes]) -> None:
        self.root = root
        root.mkdir()
        self.git("init", "-q")
        self.write(files)
        self.commit("base")
        self.base = self.git("rev-parse", "HEAD").decode().strip()

    def git(self, *arguments: str) -> bytes:
        return subprocess.run(
            ["git", *arguments], cwd=self.root, env={**os.environ, **WHO}, check=True,
            capture_output=True,
        ).stdout  # fmt: skip

    def write(self, files: Mapping[str, str | bytes | None]) -> None:
        """Write files; None removes one."""
        for name, text in files.items():
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if text is None:
                path.unlink()
            else:
                path.write_bytes(text if isinstance(text, bytes) else text.encode())

    def commit(self, message: str) -> None:
        self.git("add", "-A")
        self.git("commit", "-q", "--no-verify", "-m", message)

    def diff(self, *options: str) -> bytes:
        """Return the diff of everything since the base."""
        self.git("add", "-A")
        return self.git("diff", "--cached", *options, self.base)

    def mails(self) -> bytes:
        """Return every commit since the base as git format-patch writes them."""
        return self.git("format-patch", "-q", "--stdout", self.base)
