"""``python -m vllm_overlay.demo``: make the model, serve the demo recipe, show what is applied."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import httpx
from rich.console import Console
from rich.markup import escape

from vllm_overlay.background import (
    EndedError,
    background,
    interruptible,
    last_lines,
    log_file,
    shell_status,
    wait_up,
)
from vllm_overlay.demo.model import NAME
from vllm_overlay.errors import EXIT_FAILED, ConfigError
from vllm_overlay.folders import Folders, find_folders

RECIPE = "demo"
QUESTION = "What is the capital of France?"
COMMAND = Path(sys.executable).with_name("vllm-overlay")


class Ended(Exception):
    """A step of the demo that failed; what it said is on the terminal already."""

    def __init__(self, status: int) -> None:
        self.status = status


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until a signal. Returns 0 then, and else the status of the step that failed."""
    parser = argparse.ArgumentParser(prog="vllm_overlay.demo", description=__doc__)
    parser.add_argument("--port", type=int, help="another port than the recipe's")
    port = parser.parse_args(arguments).port
    flags = ["--", "--port", str(port)] if port else []
    console = Console(highlight=False, soft_wrap=True)
    with interruptible():  # to the end: a second Ctrl-C changes nothing
        try:
            folders = find_folders(os.environ)
            make_model(folders, console)
            serve(flags, folders, console)
        except KeyboardInterrupt:
            console.print("Stopped.")
            return 0
        except ConfigError as error:
            print(error, file=sys.stderr)
            return error.exit_code
        except Ended as ended:
            return ended.status
        except (OSError, httpx.HTTPError) as error:
            print(f"vllm-overlay demo: {error}", file=sys.stderr)
            return EXIT_FAILED


def make_model(folders: Folders, console: Console) -> None:
    if (folders.models / NAME).is_dir():
        return
    command = [sys.executable, "-m", "vllm_overlay.demo.model", str(folders.models)]
    log = log_file(folders.home, "demo-model")
    with (
        log.open("w") as out,
        console.status(f"Making the model {folders.models / NAME}: a minute, once"),
    ):
        status = subprocess.run(command, stdout=out, stderr=out, check=False).returncode
    if status:
        fail("the model was not made", status, log)
    console.print(f"Made the model {folders.models / NAME}")


def serve(flags: Sequence[str], folders: Folders, console: Console) -> NoReturn:
    """Serve the recipe and show it at work. Ends by an exception, with the server stopped."""
    planned = plan(flags, console)
    host, port = planned["serve"]["host"], planned["serve"]["port"]
    url = f"http://{host}:{port}"
    log = log_file(folders.home, f"demo-{port}")
    with background([COMMAND, "serve", RECIPE, *flags], log) as server:
        console.print(f"vllm-overlay serve {RECIPE}: process {server.pid}, log {log}")
        wait_healthy(server, url, log, console)
        show(url, planned["served_model"], console)
        fail("the server ended", server.wait(), log)


def plan(flags: Sequence[str], console: Console) -> dict[str, Any]:
    """Return the plan of the demo recipe. Its errors go to the terminal."""
    command = [str(COMMAND), "plan", RECIPE, "--json", *flags]
    with console.status("Resolving the recipe: the first time asks vLLM for its flags"):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stderr, end="", file=sys.stderr)
        raise Ended(done.returncode)
    resolved: dict[str, Any] = json.loads(done.stdout)
    return resolved


def wait_healthy(server: subprocess.Popen[bytes], url: str, log: Path, console: Console) -> None:
    """Wait until this server is up at ``url``, then let `vllm-overlay health` judge it."""
    began = time.monotonic()
    with console.status("vLLM starts") as status:

        def waiting() -> None:
            line = escape(last_lines(log, 1)[:100])
            status.update(f"vLLM starts: {time.monotonic() - began:.0f} s  [dim]{line}[/dim]")

        try:
            wait_up(server, url, waiting)
        except EndedError as ended:
            fail("the server ended before it was healthy", ended.status, log)
    console.print(f"Up after {time.monotonic() - began:.0f} s")
    run_command("health")


def show(url: str, model: str, console: Console) -> None:
    """Print an answer, the table of processes and fixes, and a request to try."""
    body = {"model": model, "temperature": 0, "messages": [{"role": "user", "content": QUESTION}]}
    chat = f"{url}/v1/chat/completions"
    reply = httpx.post(chat, json=body, timeout=120).raise_for_status().json()
    answer = reply["choices"][0]["message"]["content"]
    console.print(f"\n[bold]{QUESTION}[/bold]\n{answer}\n")
    run_command("status")
    console.print(
        f"\nTry it: curl -s {chat} -H 'content-type: application/json' -d '{json.dumps(body)}'",
        markup=False,
    )
    console.print("Serving until Ctrl-C.")


def run_command(name: str) -> None:
    """Run one command of vllm-overlay on this terminal."""
    status = subprocess.run([COMMAND, name], check=False).returncode
    if status:
        raise Ended(status)


def fail(what: str, status: int, log: Path) -> NoReturn:
    """Show the end of a child's log and end with its status."""
    status = shell_status(status)
    print(last_lines(log, 12), file=sys.stderr)
    print(f"vllm-overlay demo: {what}, exit status {status}; all of it: {log}", file=sys.stderr)
    raise Ended(status)


if __name__ == "__main__":
    sys.exit(main())
