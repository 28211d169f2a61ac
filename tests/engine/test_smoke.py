"""The smoke checks and the known answer of `health`, against a real server."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

from tests.support.serving import Server

CHECKS = [
    "health",
    "models",
    "metrics",
    "known_answer[What is the capital of France?]",
    "greedy_twice_the_same",
    "streamed_is_not_streamed",
    "logprobs",
    "eight_at_once",
    "cancelled_request_frees_its_slot",
    "too_long_prompt_is_refused",
    "prefix_cache",
    "receipts",
    "every_fix_is_applied_somewhere",
    "overlay_metrics",
]


def test_every_check_passes_and_none_is_left_out(server: Server) -> None:
    done = server.cli("smoke", "--json")
    result = json.loads(done.stdout)
    assert [check["name"] for check in result["checks"]] == CHECKS
    assert [check for check in result["checks"] if not check["ok"] or check["skipped"]] == []
    assert (done.returncode, result["ok"]) == (0, True)


def test_a_server_without_fixes_has_none_to_show(server_without_fixes: Server) -> None:
    done = server_without_fixes.cli("smoke", "--json")
    checks = json.loads(done.stdout)["checks"]
    assert [check for check in checks if not check["ok"]] == []
    assert [check["name"] for check in checks if check["skipped"]] == ["overlay_metrics"]
    assert done.returncode == 0


def test_a_url_alone_leaves_out_what_only_its_node_can_tell(
    server: Server, server_without_fixes: Server
) -> None:
    """Asked with the state folder of another server of this machine."""
    done = server_without_fixes.cli("smoke", "--json", "--url", server.url)
    checks = json.loads(done.stdout)["checks"]
    left_out = {check["name"] for check in checks if check["skipped"]}
    assert left_out == {
        "known_answer[none]",
        "receipts",
        "every_fix_is_applied_somewhere",
        "overlay_metrics",
    }
    assert done.returncode == 0


def test_many_health_checks_at_once_agree(server: Server) -> None:
    with ThreadPoolExecutor(4) as pool:
        done = list(pool.map(lambda _: server.cli("health", "--json"), range(4)))
    assert [one.returncode for one in done] == [0] * 4
    answers = {json.loads(one.stdout)["checks"][2]["detail"] for one in done}
    assert answers == {"asked 'What is the capital of France?': 'The capital of France is Paris.'"}
