"""What must be the same on every node, and how a difference is told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import FIX, PLAN
from vllm_overlay.activate import statement
from vllm_overlay.activate.statement import PER_NODE, differences, facts, told


def found(environ: dict[str, str], **plan: Any) -> list[tuple[str, str, str]]:
    """Return where a node with this environment and plan differs from the head."""
    head = facts(PLAN.body(), {"PATH": "/a"})
    return differences(head, facts(replace(PLAN, **plan).body(), {"PATH": "/b", **environ}))


@pytest.mark.parametrize(
    ("environ", "plan", "first"),
    [
        ({"VLLM_B": "1"}, {}, ("environment.VLLM_B", "unset", "1")),
        ({"NCCL_DEBUG": "INFO"}, {}, ("environment.NCCL_DEBUG", "unset", "INFO")),
        ({"GLOO_X": "1"}, {}, ("environment.GLOO_X", "unset", "1")),
        ({"UCX_TLS": "rc"}, {}, ("environment.UCX_TLS", "unset", "rc")),
        ({}, {"env": {"VLLM_A_FIX": "0"}}, ("env.VLLM_A_FIX", "1", "0")),
        (
            {},
            {"fixes": (replace(FIX, digest="2" * 64),)},
            ("fixes.a-fix.digest", "1" * 64, "2" * 64),
        ),
        ({}, {"fixes": ()}, ("fixes.a-fix.digest", "1" * 64, "unset")),
        (
            {},
            {"modules": {"vllm.a": {"source": {"sha256": "5"}}}},
            ("modules.vllm.a.source.sha256", "unset", "5"),
        ),
        ({}, {"vllm": {**PLAN.vllm, "version": "9.8"}}, ("vllm.version", "9.9.0", "9.8")),
        ({}, {"vllm": {**PLAN.vllm, "torch": "1"}}, ("vllm.torch", "2", "1")),
        ({}, {"nodes": {**PLAN.nodes, "build": "c"}}, ("nodes.build", "b" * 64, "c")),
        ({}, {"serve": {"max-num-seqs": 8}}, ("serve.max-num-seqs", "16", "8")),
        ({}, {"serve": {}}, ("serve.max-num-seqs", "16", "unset")),
        ({}, {"smoke": {"expect": []}}, ("smoke.expect", "unset", "[]")),
        ({}, {"model": "n"}, ("model", "m", "n")),
    ],
)
def test_a_difference_is_found_under_its_key(
    environ: dict[str, str], plan: dict[str, Any], first: tuple[str, str, str]
) -> None:
    assert found(environ, **plan)[0] == first


def test_equal_nodes_do_not_differ() -> None:
    assert found({}) == []


def test_addresses_devices_secrets_and_other_programs_variables_may_differ() -> None:
    secrets = {"VLLM_API_KEY": "a", "VLLM_HF_TOKEN": "b"}
    assert found({**dict.fromkeys(PER_NODE, "x"), **secrets, "OTHER": "1"}) == []


def test_what_explains_the_rest_is_told_first() -> None:
    other = found(
        {"VLLM_Z": "1"},
        fixes=(replace(FIX, digest="2" * 64),),
        env={"VLLM_CACHE_ROOT": "/c/2", **PLAN.env},
        cache_key="2",
    )
    line = told(other, 3, "b (10.0.0.2)", "a (10.0.0.1)")
    assert line == (
        "rank 3 on b (10.0.0.2) differs from the head on a (10.0.0.1) in fixes.a-fix.digest: "
        f"{'2' * 64} on b (10.0.0.2), {'1' * 64} on a (10.0.0.1) "
        "(and 4 more: environment.VLLM_Z, env.VLLM_CACHE_ROOT, cache_key)"
    )


def test_a_login_is_not_told_and_a_long_value_cut() -> None:
    other = found({"VLLM_X": "http://me:s3cret@host/" + "x" * 200})
    line = told(other, 1, "b", "a")
    assert "VLLM_X: http://…@host/xxx" in line and "s3cret" not in line and len(line) < 300


def test_a_process_above_that_ends_while_it_is_looked_at_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(pid: int) -> str:
        raise FileNotFoundError(2, "No such file or directory", f"/proc/{pid}/cmdline")

    monkeypatch.setattr(statement, "_line", lambda: iter(["4000000-1"]))
    monkeypatch.setattr(statement, "process_title", lambda pid: "VLLM::EngineCore")
    assert "engine-core 4000000" in statement.family_state(str(tmp_path))
    monkeypatch.setattr(statement, "process_title", ended)
    assert statement.family_state(str(tmp_path)) == "all with the plan"
