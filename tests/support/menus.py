"""Files in the form of the vllm-project/recipes collection, about models that do not exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_overlay.errors import ConfigError, ConfigErrors
from vllm_overlay.importer import convert
from vllm_overlay.importer_write import render
from vllm_overlay.recipe import Recipe, load_recipe

SMALL = """
meta:
  title: "Comet 7B"
  slug: "comet-7b"
  date_added: 2026-08-01
  tasks: [text]
model:
  model_id: "acme/comet-7b"
  min_vllm_version: "0.30.0"
  architecture: dense
  base_args: ["--trust-remote-code"]
  base_env: {}
features: {}
opt_in_features: []
variants:
  default:
    precision: bf16
    vram_minimum_gb: 17
    tp: 1
compatible_strategies: [single_node_tp]
hardware_overrides: {}
strategy_overrides: {}
guide: |
  ## Overview
  Not for machines.
"""

LARGE = """
meta:
  title: "Comet 400B"
  slug: "comet-400b"
  provider: "Acme"
  description: "Acme's hybrid mixture
    of experts"
  date_added: 2026-09-02
  tasks:
    - text
  hardware:
    h200: verified

model:
  model_id: "acme/comet-400b"
  min_vllm_version: "0.31.0"
  docker_image: "example/comet:preview"
  architecture: moe
  context_length: 1048576
  base_args:
    - "--trust-remote-code"
    - "--gpu-memory-utilization"
    - "0.90"
    - "--block_size=64"
    - "--attention-config"
    - '{"backend": "TRITON_MLA", "depth": {"a": 1, "b": 2}}'
    - "--compilation-config.pass_config.fuse=true"
  base_env:
    VLLM_ENGINE_READY_TIMEOUT_S: "3600"
    OMP_NUM_THREADS: 8

dependencies:
  - note: "kernels"
    command: "uv pip install comet-kernels==1.2"

features:
  tool_calling:
    description: "Tool calls"
    args: ["--enable-auto-tool-choice", "--tool-call-parser", "comet"]
  spec_decoding:
    description: "Draft tokens with one of two methods"
    default_mode: mtp
    modes:
      mtp:
        args: ["--speculative-config", '{"method":"mtp","num_speculative_tokens":3}']
        hardware: {amd: unsupported}
      drafter:
        label: "Drafter"
        args:
          - "--speculative-config"
          - '{"method":"drafter","model":"acme/comet-draft"}'
      fused:
        variants: [fused]
        args: ["--speculative-config", '{"method":"fused"}']
  long_context:
    description: "Two million tokens"
    args: ["--max-model-len", "2097152"]
    env: {VLLM_ALLOW_LONG_MAX_MODEL_LEN: "1"}
    hardware_overrides:
      hopper:
        args: ["--max-model-len", "1572864"]
  offload:
    description: "A second tier"
    args: ["--kv-transfer-config", "{}"]
    companion: {label: "store", command: "store --serve"}
  clustered:
    description: "Only on several nodes"
    strategies: [multi_node_tp]
    args: ["--enable-x"]

opt_in_features: [spec_decoding, long_context]

variants:
  default:
    precision: bf16
    vram_minimum_gb: 960
    description: "The original weights"
    hardware_overrides:
      h200: &h200
        extra_args: ["--max-num-seqs", "16"]
  fp8:
    model_id: "acme/comet-400b-fp8"
    precision: fp8
    vram_minimum_gb: 480
    tp: {h200: 4, default: 8}
    description: "Eight bits"
    extra_args:
      - "--no-trust-remote-code"
      - "--attention-config"
      - '{"backend": "FLASHMLA"}'
    extra_env: {VLLM_USE_DEEP_GEMM: "0"}
    hardware_overrides:
      h200: *h200
  fused:
    model_id: "acme/comet-400b-fused"
    min_vllm_version: "0.33.0"
    default_modes: {spec_decoding: fused}
  tomorrow:
    model_id: "acme/comet-400b-next"
    nightly_required: true

compatible_strategies: [single_node_tp, multi_node_tp, pd_cluster]

strategy_min_gpus: 8

hardware_overrides:
  hopper:
    extra_args:
      - "--moe-backend marlin"
      - "--max-num-seqs"
      - "8"
    extra_env: {VLLM_USE_V2_MODEL_RUNNER: "1"}
  amd:
    extra_args: ["--attention-backend", "TRITON_ATTN"]

strategy_overrides:
  pd_cluster:
    prefill: {parallelism: tep}

novelty: {of: tomorrow}

guide: |
  Read me.
"""


class Made:
    """An imported recipe, loaded again, and what was said about it."""

    def __init__(self, folder: Path, menu: str, **options: object) -> None:
        file = folder / "menu.yaml"
        file.write_text(menu)
        given = {"name": None, "vllm": None, "hardware": (), **options}
        imported = convert(file, **given)  # type: ignore[arg-type]
        self.folder = folder
        self.file = folder / "made.yaml"
        self.text = render(imported.body, file)
        self.file.write_text(self.text)
        self.notes = [str(note).replace(f"{file}:", "") for note in imported.notes]
        self.recipe = self.variant(None)

    def variant(self, name: str | None) -> Recipe:
        return load_recipe(str(self.file), folder=self.folder, variant=name)

    def said(self, *words: str) -> str:
        """Return the one note that holds all the words."""
        (found,) = [note for note in self.notes if all(word in note for word in words)]
        return found


def refusal(folder: Path, menu: str, **options: object) -> ConfigError:
    with pytest.raises((ConfigError, ConfigErrors)) as caught:
        Made(folder, menu, **options)
    error = caught.value
    (one,) = error.errors if isinstance(error, ConfigErrors) else (error,)
    assert isinstance(one, ConfigError)
    assert "\n" not in str(one)
    return one
