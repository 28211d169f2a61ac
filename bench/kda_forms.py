"""The forms of a KDA step that bench.kda_step times, all on the layers of one ``Setup``.

Each is made of a setup and has ``forward``, the verify of all layers, and ``commit``, what follows
once it is known how many tokens were accepted of each request (int32 [requests]).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from vllm.models.kimi_k3.nvidia.ops import recoverssm as k3

from bench.glm5next_recoverssm import DIM, WINDOW, Setup
from vllm_overlay.kda.folds import Commits, Ledger
from vllm_overlay.kda.operands import Records, Window
from vllm_overlay.kda.verify import Verify

LOWER_BOUND = -5.0


class Step(Protocol):
    """A form of the step on a setup's layers."""

    def forward(self) -> None:
        """Verify every layer's windows."""

    def commit(self, accepted: torch.Tensor) -> None:
        """Commit the accepted tokens of every layer."""


class Stock:
    """A state after every token: nothing is left to commit."""

    def __init__(self, setup: Setup, _verify: Verify) -> None:
        self.setup = setup

    def forward(self) -> None:
        self.setup.forward("stock")

    def commit(self, accepted: torch.Tensor) -> None:
        pass


class Exact:
    """The fix glm5next-recoverssm: records, and their fold after sampling."""

    def __init__(self, setup: Setup, _verify: Verify) -> None:
        self.setup = setup

    def forward(self) -> None:
        self.setup.forward("fix")

    def commit(self, accepted: torch.Tensor) -> None:
        self.setup.commit("fix", accepted)


class Fast:
    """Verifies that fold what the step before has accepted; a commit of counts and windows.

    ``unit``: its records are unit keys and decays in fp32, as GLM-5.3-Flash's fix has them, or keys
    and gates as they came.
    """

    def __init__(self, setup: Setup, verify: Verify, *, unit: bool = True) -> None:
        self.setup, self.verify, self.unit = setup, verify, unit
        rows, device = setup.rows, torch.device(setup.device)
        self.slots = torch.randperm(rows, device=device).int()
        self.pending = torch.zeros(rows, dtype=torch.int32, device=device)
        turn = torch.zeros_like(self.pending)  # of all groups
        self.groups = [
            (
                replace(Ledger.create(rows, 2, device), turn=turn),
                [(layer, self._records()) for layer in layers],
            )
            for layers in setup.groups
        ]

    def _records(self) -> Records:
        rows, heads = 2 * (self.setup.rows + 1), self.setup.heads
        new: dict[str, Any] = {"dtype": torch.float32, "device": self.setup.device}
        if self.unit:
            parts = torch.zeros(rows, WINDOW, 3, heads, DIM, **new).permute(2, 0, 3, 1, 4)
            return Records(parts[2], parts[0], parts[1], unit=True)
        pairs = torch.zeros(
            rows, heads, WINDOW, 2 * DIM, dtype=torch.bfloat16, device=self.setup.device
        )
        corrections = torch.zeros(rows, heads, WINDOW, DIM, **new)
        keys, gates = pairs.split(DIM, -1)
        return Records(corrections, keys, gates, unit=False)

    def forward(self) -> None:
        setup = self.setup
        for ledger, layers in self.groups:
            folds = ledger.plan(self.slots, self.pending, setup.blocks, by_record=False)
            for layer, records in layers:
                rows = (ledger.write_rows, setup.rows)
                window = window_of(setup, layer)
                self.verify(window, layer["state"], records, *rows, folds, layer["out"])

    def commit(self, accepted: torch.Tensor) -> None:
        setup = self.setup
        setup.plan(accepted)
        setup.table.compact(setup.rows)
        lens, _, *targets = setup.contexts[0].plan.unbind(1)
        ledger, _ = self.groups[0]
        ledger.settle(self.slots, self.pending, Commits(lens, setup.blocks, *targets), None)


def window_of(setup: Setup, layer: dict[str, Any]) -> Window:
    """Return the operands of a layer's verify."""
    q, k, v = layer["qkv"]
    return Window(
        q=q,
        k=k,
        v=v,
        gate=layer["gate"],
        beta=layer["beta"],
        a_log=layer["a_log"],
        gate_bias=layer["bias"],
        lower_bound=LOWER_BOUND,
        start_loc=setup.start,
        blocks=setup.blocks,
        size=WINDOW,
    )


class KimiK3:
    """vLLM's RecoverSSM for Kimi-K3, one commit a group."""

    def __init__(self, setup: Setup, _verify: Verify) -> None:
        self.setup = setup
        sizes = (setup.rows, setup.heads, WINDOW, DIM, torch.bfloat16, torch.device(setup.device))
        self.records = [
            [k3.KDARecoverSSMRecords.allocate(*sizes) for _ in layers] for layers in setup.groups
        ]
        self.contexts = [
            k3.KDARecoverSSMCommitContext.create(
                [self._layer(*pair) for pair in zip(layers, records, strict=True)],
                spec_query_len=WINDOW,
                max_num_reqs=setup.rows,
            )
            for layers, records in zip(setup.groups, self.records, strict=True)
        ]

    def _layer(self, layer: dict[str, Any], records: Any) -> SimpleNamespace:
        return SimpleNamespace(
            kv_cache=(layer["conv"], layer["state"]),
            recoverssm_records=records,
            A_log=layer["a_log"],
            dt_bias=layer["bias"],
            local_num_heads=self.setup.heads,
            head_dim=DIM,
            gate_lower_bound=LOWER_BOUND,
        )

    def forward(self) -> None:
        setup = self.setup
        for layers, kept in zip(setup.groups, self.records, strict=True):
            for layer, records in zip(layers, kept, strict=True):
                k3.kda_recoverssm_verify(
                    *layer["qkv"],
                    layer["gate"],
                    layer["beta"],
                    layer["a_log"],
                    layer["bias"],
                    LOWER_BOUND,
                    layer["state"],
                    records,
                    setup.start,
                    setup.blocks,
                    WINDOW,
                    layer["out"],
                )

    def commit(self, accepted: torch.Tensor) -> None:
        for context in self.contexts:
            context.commit(accepted, self.setup.blocks, self.setup.start)


FORMS: dict[str, Callable[[Setup, Verify], Step]] = {
    "stock": Stock,
    "exact": Exact,
    "fast": Fast,
    "k3": KimiK3,
    "fast-raw": partial(Fast, unit=False),
}
