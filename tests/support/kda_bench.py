"""The forms that bench.kda_step times do the same step, at a small size in the interpreter.

``python -m tests.support.kda_bench`` prints a JSON line: the largest relative difference of each
form's outputs from the exact form's, by step. Needs vLLM with glm5next-recoverssm applied.
"""

from __future__ import annotations

import json

# isort: off
from tests.support import interpreter  # before vLLM
import torch
from bench.glm5next_recoverssm import Setup
from bench.kda_forms import FORMS
from vllm_overlay.kda.verify import fold_verify
# isort: on

interpreter.rebind()
STEPS = ((3, 8), (1, 2))  # accepted tokens of two requests


def outputs(form: str, *, state: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Return the outputs of all layers, by step, for a form on a setup of its own."""
    setup = Setup(1, 2, layers=5, state=state, device="cpu")
    for layer in setup.layers:
        layer["stock"][setup.slots[:, 0].long()] = layer["state"][setup.blocks.long()]
    step = FORMS[form](setup, fold_verify)
    found = []
    for accepted in STEPS:
        step.forward()
        found.append(torch.stack([layer["out"].float() for layer in setup.layers]))
        step.commit(torch.tensor(accepted, dtype=torch.int32))
        if form == "stock":  # it always reads the first slot: move the accepted state there
            for layer in setup.layers:
                last = setup.slots[torch.arange(2), torch.tensor(accepted) - 1]
                layer["stock"][setup.slots[:, 0].long()] = layer["stock"][last.long()]
    return found


if __name__ == "__main__":
    want = outputs("exact")
    print(
        json.dumps(
            {
                form: [
                    float((a - b).norm() / b.norm())
                    for a, b in zip(outputs(form), want, strict=True)
                ]
                for form in FORMS
            }
        )
    )
