"""Hands the server to the checks, and collects what became of each."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, TextIO

import pytest

from vllm_overlay.client import NOT_SPOKEN, Client, Generation, generation
from vllm_overlay.runs import Run
from vllm_overlay.smoke.metrics import Metrics

NEEDED = 2  # without health and models, nothing else can be asked
SHOWN_EXCHANGES = 4  # a failure is explained by what was asked last
Ask = Callable[..., Generation]


@dataclass
class Plugin:
    """The options and fixtures of one run. ``out`` gets a line per check; None for none."""

    url: str
    expectations: tuple[Mapping[str, str], ...]
    run: Run | None
    out: TextIO | None
    checks: list[dict[str, Any]] = field(default_factory=list)
    clients: list[Client] = field(default_factory=list)

    @property
    def failed(self) -> int:
        return sum(not check["ok"] for check in self.checks)

    def summary(self) -> str:
        """Return the last line for people."""
        skipped = sum(check["skipped"] for check in self.checks)
        passed = len(self.checks) - self.failed - skipped
        return f"{passed} passed, {self.failed} failed, {skipped} left out"

    @pytest.fixture(scope="session", name="model")
    def model(self) -> dict[str, Any]:
        """The first model that the server lists: id and max_model_len."""
        client = Client(self.url, "")
        reply = client.get("/v1/models")
        assert reply.status == 200, f"GET /v1/models answered {reply.status} {reply.text[:300]}"
        listed: list[dict[str, Any]] = reply.json()["data"]
        assert listed, "GET /v1/models lists no model"
        named = self.run.served_model if self.run else listed[0]["id"]
        found = next((one for one in listed if one["id"] == named), None)
        assert found, f"GET /v1/models lists {[one['id'] for one in listed]}, not {named!r}"
        return found

    @pytest.fixture(name="server")
    def server(self) -> Client:
        """A client that names no model; its exchanges are shown if the check fails."""
        self.clients.append(Client(self.url, ""))
        return self.clients[-1]

    @pytest.fixture(name="client")
    def client(self, server: Client, model: dict[str, Any]) -> Client:
        """A client of the served model."""
        server.model = model["id"]
        return server

    @pytest.fixture(scope="session", name="chat")
    def chat(self, model: dict[str, Any]) -> bool:
        """Whether the model is asked as a chat: a base model has no chat template."""
        reply = Client(self.url, model["id"]).ask("Hello", chat=True, max_tokens=1)
        assert reply.status == 200 or reply.status in NOT_SPOKEN, f"{reply.status} {reply.text}"
        return reply.status == 200

    @pytest.fixture(name="ask")
    def ask(self, client: Client, chat: bool) -> Ask:
        """Ask for one greedy generation: ``ask(prompt, max_tokens=…) -> Generation``."""
        return lambda prompt, **options: generation(client.ask(prompt, chat=chat, **options))

    @pytest.fixture(name="metrics")
    def metrics(self, client: Client) -> Callable[[], Metrics]:
        """Read /metrics now."""

        def read() -> Metrics:
            reply = client.get("/metrics")
            assert reply.status == 200, f"GET /metrics answered {reply.status}"
            client.exchanges.pop()  # pages of text that explain nothing
            return Metrics.parse(reply.text)

        return read

    @pytest.fixture(name="run")
    def node_run(self) -> Run:
        """The run record of a server of this node."""
        if self.run is None:
            pytest.skip("the server is not one that vllm-overlay started on this node")
        return self.run

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Give one known answer of the recipe to each ``expected``."""
        if "expected" in metafunc.fixturenames:
            nothing = pytest.param({}, id="none", marks=pytest.mark.skip("the recipe names none"))
            known = [pytest.param(one, id=one["prompt"]) for one in self.expectations]
            metafunc.parametrize("expected", known or [nothing])

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Ask nothing more of a server that is not there."""
        for check in self.checks[:NEEDED]:
            if not check["ok"]:
                pytest.skip(f"{check['name']} failed")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: Any
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.failed:
            error = call.excinfo
            asked = [str(one) for client in self.clients for one in client.exchanges]
            said = error.exconly()
            if isinstance(error.value, AssertionError):
                said = str(error.value).partition("\nassert ")[0]  # the rest is pytest's own
            report.sections[:] = [("detail", "\n".join([str(said), *asked[-SHOWN_EXCHANGES:]]))]
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep one entry a check: its call, or the part before or after that went wrong."""
        if report.when != "call" and report.passed:
            return
        name = report.nodeid.partition("::")[2].removeprefix("check_")
        detail = ""
        if report.skipped:
            detail = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
        elif report.failed:
            detail = dict(report.sections)["detail"]
        self._note(name, not report.failed, report.skipped, detail.removeprefix("Skipped: "))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._note(report.nodeid, False, False, str(report.longrepr))

    def pytest_internalerror(self, excrepr: Any) -> None:
        self._note("pytest", False, False, str(excrepr))

    def pytest_runtest_teardown(self) -> None:
        self.clients.clear()

    def _note(self, name: str, ok: bool, skipped: bool, detail: str) -> None:
        self.checks.append({"name": name, "ok": ok, "skipped": skipped, "detail": detail})
        if self.out is not None:
            mark = "FAIL" if not ok else "left out" if skipped else "ok"
            lines = detail.splitlines()
            shown = f"{name}: {lines[0]}" if skipped and lines else name
            print(f"{mark:<8}  {shown}", file=self.out)
            if not ok:
                print("\n".join(f"          {line}" for line in lines), file=self.out)
            self.out.flush()
