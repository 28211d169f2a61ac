"""What a fix notes at run time: from its call in a real process to the commands that show it."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.support.node import Node
from tests.support.sandbox import Sandbox
from vllm_overlay.activate.notes import note
from vllm_overlay.cluster import cluster_table, node_rows, own_rows
from vllm_overlay.receipts import read
from vllm_overlay.status import status_rows, status_table

CHOOSES = """
from vllm_overlay.activate.notes import note

def install(module):
    def greet():
        for layer in range(3):
            note("chooser", "kernel", "cuda sm_90")
        return "chosen"
    module.greet = greet
    return {"greet": greet}
"""
NOTES = {"chooser": {"kernel": "triton: no CUDA library in /opt/lib/kda"}}


def entry(receipt: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = [fix for fix in receipt["fixes"] if fix["name"] == name]
    return dict(found)


@pytest.fixture
def chooser(sandbox: Sandbox) -> Sandbox:
    sandbox.hook("chooser", "vllm.sampler", CHOOSES)
    sandbox.added("other", "vllm.extra", "X = 1\n")
    return sandbox


def test_what_a_fix_chose_stands_in_the_receipt_of_its_process(chooser: Sandbox) -> None:
    run = chooser.code("import vllm.user as u; print(u.greet())")
    assert run.stdout == "chosen\n", run.stderr
    (receipt,) = chooser.receipts()
    applied = {"state": "applied", "modules": {"vllm.sampler": "applied"}}
    assert entry(receipt, "chooser") == {
        "name": "chooser", **applied, "notes": {"kernel": "cuda sm_90"},
    }  # fmt: skip
    assert "notes" not in entry(receipt, "other")
    assert chooser.plan_path
    (found,) = read(chooser.plan_path.parent)
    assert found.notes == {"chooser": {"kernel": "cuda sm_90"}}


def test_a_receipt_is_written_anew_only_for_what_is_new(chooser: Sandbox) -> None:
    count = (
        "import os, vllm.user as u; count = []; replace = os.replace\n"
        "os.replace = lambda *a: (count.append(a), replace(*a))\n"
        "u.greet(); u.greet(); print(len(count))\n"
        "from vllm_overlay.activate.notes import note\n"
        "note('chooser', 'kernel', 'triton'); note('chooser', 'form', 'a'); print(len(count))"
    )
    run = chooser.code(count)
    assert run.stdout == "1\n3\n", run.stderr
    (receipt,) = chooser.receipts()
    assert entry(receipt, "chooser")["notes"] == {"kernel": "triton", "form": "a"}


def test_a_forked_child_carries_on_its_parents_notes(chooser: Sandbox) -> None:
    run = chooser.code(
        "import os, vllm.user as u; u.greet(); child = os.fork()\nif child: os.waitpid(child, 0)"
    )
    assert run.returncode == 0, run.stderr
    notes = [entry(receipt, "chooser")["notes"] for receipt in chooser.receipts()]
    assert notes == [{"kernel": "cuda sm_90"}] * 2


def test_what_is_noted_before_vllm_is_imported_comes_with_the_first_receipt(
    chooser: Sandbox,
) -> None:
    run = chooser.code(
        "from vllm_overlay.activate.notes import note; note('other', 'a', 'b'); import os\n"
        "folder = os.path.dirname(os.environ['VLLM_OVERLAY_PLAN']) + '/receipts'\n"
        "print(os.path.exists(folder)); import vllm"
    )
    assert run.stdout == "False\n", run.stderr
    assert entry(chooser.receipts()[0], "other")["notes"] == {"a": "b"}


def test_only_a_fix_of_the_plan_can_note(chooser: Sandbox) -> None:
    run = chooser.code(
        "import vllm; from vllm_overlay.activate.notes import note; note('choser', 'a', 'b')"
    )
    says = "ValueError: the plan applies no fix 'choser'; it applies ['chooser', 'other']"
    assert run.returncode == 1 and says in run.stderr
    assert not [fix for receipt in chooser.receipts() for fix in receipt["fixes"] if "notes" in fix]


def test_a_note_that_cannot_be_written_ends_the_process(chooser: Sandbox) -> None:
    run = chooser.code(
        "import os, shutil, vllm.user as u\n"
        "folder = os.path.dirname(os.environ['VLLM_OVERLAY_PLAN']) + '/receipts'\n"
        "shutil.rmtree(folder); open(folder, 'w').close(); u.greet(); print('on')"
    )
    assert run.returncode == 78 and run.stdout == "" and "receipt" in run.stderr


def test_without_a_plan_there_is_nothing_to_do() -> None:
    note("chooser", "kernel", "cuda sm_90")


def shown(table: Any, width: int = 200) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(table)
    return console.export_text()


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path, fixes={"chooser": ("vllm.a",), "plain": ("vllm.b",)})


def noting(node: Node) -> list[dict[str, Any]]:
    """Return what a receipt has of the fixes, if the first has noted something."""
    states = {name: dict.fromkeys(modules, "applied") for name, modules in node.fixes.items()}
    return [{"name": n, "modules": m, "notes": NOTES.get(n, {})} for n, m in states.items()]


def test_status_shows_notes_where_there_are_some(node: Node) -> None:
    with node.process("VLLM::APIServer_0") as server:
        node.write_run(server)
        silent = status_rows(node.home, node.proc)
        assert [row["notes"] for row in silent["processes"]] == [{}]
        assert "notes" not in shown(status_table(silent))
        with node.process("VLLM::Worker_TP0", fixes=noting(node)) as worker:
            rows = status_rows(node.home, node.proc)
    assert {row["pid"]: row["notes"] for row in rows["processes"]} == {server: {}, worker: NOTES}
    assert json.loads(json.dumps(rows)) == rows
    text = shown(status_table(rows))
    assert "chooser kernel: triton: no CUDA library in /opt/lib/kda" in text
    narrow = shown(status_table(rows), width=70)
    assert "kda" in narrow and "…" not in narrow  # a reason is folded, never cut


def test_the_rows_of_a_node_carry_its_notes_to_the_head(node: Node) -> None:
    with node.process("VLLM::Worker_TP0", fixes=noting(node)) as worker:
        run = {"pid": worker, "node": {"rank": 1, "address": "10.0.0.2"}}
        (row,) = own_rows(node.folder, run)
        assert row["notes"] == NOTES
        assert row in [{**row, **found} for found in node_rows(node.folder)]
    node.write_receipt(os.getpid(), fixes=noting(node))  # who asks is no row of `status`
    assert [row["notes"] for row in node_rows(node.folder) if row["pid"] == os.getpid()] == [NOTES]
    found = {"recipe": "demo", "nodes": 2, "plan": "a" * 64, "rows": [row]}
    assert "chooser kernel: triton: no CUDA library in /opt/lib/kda" in shown(cluster_table(found))
    found["rows"] = [{**row, "notes": {}}]
    assert "notes" not in shown(cluster_table(found))


@pytest.mark.parametrize("call", ['note("chooser", "kernel", 8)', 'note("chooser", 8, "x")'])
def test_a_note_that_is_no_text_leaves_the_receipt_as_it_was(chooser: Sandbox, call: str) -> None:
    run = chooser.code(
        "import vllm.user as u; u.greet()\n"
        "from vllm_overlay.activate.notes import note\n"
        f"try: {call}\n"
        "except TypeError as error: print(error)\n"
        "import vllm.extra\n"
    )
    assert run.stdout.endswith("both must be text\n"), run.stderr
    (receipt,) = chooser.receipts()
    assert entry(receipt, "chooser")["notes"] == {"kernel": "cuda sm_90"}
    assert entry(receipt, "other")["state"] == "applied"
