"""Each check against a server that is wrong in one thing: exactly that check must fail."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.fake_server import fake_server
from vllm_overlay.smoke import run_smoke
from vllm_overlay.smoke.metrics import Metrics

EXPECT = [{"prompt": "What is the capital of France?", "contains": "Paris"}]
KNOWN = f"known_answer[{EXPECT[0]['prompt']}]"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_overlay.smoke.check_engine.PATIENCE", 2.0)


def smoke(url: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    status = run_smoke(url, EXPECT, as_json=True)
    return status, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("fault", [(), ("no chat",)], ids=["chat", "base model"])
def test_a_good_server_passes(fault: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server(*fault) as fake:
        status, result = smoke(fake.url, capsys)
    assert [check for check in result["checks"] if not check["ok"]] == []
    assert (status, result["ok"]) == (0, True)
    left_out = {check["name"] for check in result["checks"] if check["skipped"]}
    assert left_out == {"receipts", "every_fix_is_applied_somewhere", "overlay_metrics"}
    assert len(result["checks"]) == 14


@pytest.mark.parametrize(
    ("fault", "check", "said"),
    [
        ("nonsense", KNOWN, "expected 'Paris' in 'The capital is Rome.'"),
        ("models", "models", "lists no model"),
        ("metrics", "metrics", "lacks vllm:num_requests_waiting"),
        ("stream", "streamed_is_not_streamed", "streamed ' capital is Paris.', not streamed"),
        ("cut", "streamed_is_not_streamed", "ended without [DONE]"),
        ("unsorted", "logprobs", "not sorted: token 0 'The'"),
        ("improbable", "logprobs", "a probability above one"),
        ("infinite", "logprobs", "not finite"),
        ("chosen", "logprobs", "not among the top"),
        ("heavy", "logprobs", "more than one in all"),
        ("lost token", "logprobs", "5 tokens, but 4 with logprobs"),
        ("short", "eight_at_once", "expected 16 tokens each"),
        ("deaf", "cancelled_request_frees_its_slot", "for a client that had hung up"),
        ("stuck", "cancelled_request_frees_its_slot", "no request is running after hanging up"),
        ("long", "too_long_prompt_is_refused", "expected 400, got 200"),
        ("prefix", "prefix_cache", "0 tokens from the prefix cache, expected at least 16"),
        ("prefix nonsense", "prefix_cache", "from the cache 'nonsense'"),
    ],
)
def test_a_fault_fails_its_check_alone(
    fault: str, check: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with fake_server(fault) as fake:
        status, result = smoke(fake.url, capsys)
    failed = {one["name"]: one["detail"] for one in result["checks"] if not one["ok"]}
    assert list(failed) == [check]
    assert said in failed[check]
    assert (status, result["ok"]) == (1, False)


def test_an_answer_that_changes_fails(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server("random") as fake:
        _, result = smoke(fake.url, capsys)
    failed = {one["name"] for one in result["checks"] if not one["ok"]}
    assert failed == {"greedy_twice_the_same", "streamed_is_not_streamed", "prefix_cache"}


def test_an_engine_that_a_long_prompt_kills_fails(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server("dies of length") as fake:
        _, result = smoke(fake.url, capsys)
    failed = {one["name"]: one["detail"] for one in result["checks"] if not one["ok"]}
    assert "EngineDeadError" in failed["too_long_prompt_is_refused"]


def test_a_failure_shows_what_was_asked_and_what_came_back(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with fake_server("nonsense") as fake:
        status = run_smoke(fake.url, EXPECT)
    out = capsys.readouterr().out
    assert status == 1
    assert f"FAIL      {KNOWN}\n          expected 'Paris' in 'The capital is Rome.'\n" in out
    assert f"          asked: POST {fake.url}/v1/chat/completions" in out
    assert "          came back: 200 {" in out
    assert out.endswith("10 passed, 1 failed, 3 left out\n")


def test_no_server_is_one_failure(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server() as fake:
        url = fake.url
    status, result = smoke(url, capsys)
    (failed,) = [check for check in result["checks"] if not check["ok"]]
    assert status == 1
    assert failed["name"] == "health"
    assert "Connection refused" in failed["detail"]
    assert all(check["skipped"] for check in result["checks"] if check["ok"])


def test_without_known_answers_the_rest_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server("nonsense") as fake:
        assert run_smoke(fake.url, []) == 0
    assert "left out  known_answer[none]: the recipe names none\n" in capsys.readouterr().out


def test_a_model_without_prefix_caching_is_not_asked_for_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with fake_server("no prefix cache") as fake:
        _, result = smoke(fake.url, capsys)
    (check,) = [one for one in result["checks"] if one["name"] == "prefix_cache"]
    assert check["skipped"]
    assert check["detail"] == "prefix caching is off for this model"


def test_the_options_of_the_user_s_own_pytest_stay_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_ADDOPTS", "--no-such-option")
    with fake_server() as fake:
        status, _ = smoke(fake.url, capsys)
    assert status == 0


def test_metrics_are_read_with_their_labels() -> None:
    text = '# HELP a x\na{b="c \\" d",e="{1}"} 2.5\na_total 3\nnot a sample\n\n'
    metrics = Metrics.parse(text)
    assert metrics.named("a")[0].labels == {"b": 'c \\" d', "e": "{1}"}
    assert metrics.total("a") == 5.5
    assert metrics.total("a", e="{1}") == 2.5
    with pytest.raises(LookupError, match="has no z"):
        metrics.total("z")
