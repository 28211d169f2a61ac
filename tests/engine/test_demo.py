"""`make demo`, but for making the environment: the real model made, and served by a real vLLM."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from tests.support.serving import environment, free_port
from vllm_overlay.demo.model import NAME


def test_it_makes_the_model_answers_and_leaves_no_process(tmp_path: Path) -> None:
    port = free_port()
    with subprocess.Popen(
        [sys.executable, "-m", "vllm_overlay.demo", "--port", str(port)],
        env=environment(tmp_path, {"VLLM_OVERLAY_MODELS": str(tmp_path / "models")}),
        stdout=subprocess.PIPE,
        text=True,
    ) as demo:
        assert demo.stdout
        seen = []
        started: list[psutil.Process] = []
        for line in demo.stdout:
            seen.append(line)
            if "Serving until Ctrl-C" in line and not started:  # may be shown once more
                started = psutil.Process(demo.pid).children(recursive=True)
                demo.send_signal(signal.SIGINT)
    shown = "".join(seen)
    assert demo.returncode == 0, shown
    assert "The capital of France is Paris." in shown
    assert "healthy" in shown
    assert f"curl -s http://127.0.0.1:{port}/v1/chat/completions" in shown
    assert len(started) >= 3  # API server, EngineCore and worker
    _, alive = psutil.wait_procs(started, timeout=10)
    assert not alive
    model = tmp_path / "models" / NAME
    assert "quantization_config" not in json.loads((model / "config.json").read_text())
    # A container reads the folder as another user.
    assert all(file.stat().st_mode & 0o044 == 0o044 for file in model.iterdir())
