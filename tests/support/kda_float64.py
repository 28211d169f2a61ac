"""Courses of KDA's speculative steps, and what float64 makes of them. On any device, with torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

DIM = 128  # of keys and values
FAR = 60.0  # a logit that takes a gate or a sigmoid to its end


@dataclass(frozen=True)
class Case:
    """Sizes and kind of a course: ``rows`` requests that each make ``steps`` steps.

    ``decay`` is random, at its ``bound`` (without a bound: far beyond fp32's range), ``long`` (near
    1), ``faint`` (a little below 1) or ``uneven`` (bound and long, a channel each in turn). ``beta`` is random, ``low`` or
    ``high``. ``keys`` are random or ``parallel``, nearly. ``scale`` is that of the first states.
    ``ragged`` windows have 1 to ``window`` tokens. Each step accepts ``accepted`` tokens of each
    window, or any number from 1 on.
    """

    decay: str = "random"
    beta: str = "random"
    keys: str = "random"
    scale: float = 1.0
    lower_bound: float | None = -5.0
    window: int = 8
    ragged: bool = False
    accepted: int | None = None
    heads: int = 4
    rows: int = 6
    steps: int = 3
    state: torch.dtype = torch.float32

    @property
    def watched(self) -> range:
        """The steps whose outputs are compared: all of a short course, the last of a long one."""
        return range(0 if self.steps < 8 else self.steps - 1, self.steps)


@dataclass(frozen=True)
class Tokens:
    """The activations of a step, [1, tokens, heads, DIM] and [1, tokens, heads], packed by row."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    gate: torch.Tensor
    beta: torch.Tensor
    start_loc: torch.Tensor


@dataclass(frozen=True)
class Outcome:
    """Outputs [tokens, heads, DIM] of the watched steps; states that the last one began from."""

    outputs: list[torch.Tensor]
    state: torch.Tensor


class Course:
    """The inputs of a case, in bfloat16, laid out as a layer has them.

    ``start`` [rows, heads, DIM, DIM] in the state's dtype; ``lens`` and ``accepted`` int32
    [steps, rows]. Each step's part of a tensor begins at a multiple of 16 bytes: Triton would
    compile a kernel anew where one does not.
    """

    def __init__(self, case: Case, device: str, seed: int = 0) -> None:
        self.case = case
        steps, rows, heads = case.steps, case.rows, case.heads
        dice = torch.Generator(device).manual_seed(seed)
        choice = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=dice, device=device)

        lens = torch.full((steps, rows), case.window)
        if case.ragged:
            lens = torch.randint(1, case.window + 1, (steps, rows), generator=choice)
            lens[:, 0] = case.window
        accepted = 1 + (torch.rand(steps, rows, generator=choice) * lens).long()
        if case.accepted is not None:
            accepted = torch.full_like(lens, case.accepted)
        owner = torch.arange(rows).repeat(steps).repeat_interleave(lens.flatten()).to(device)
        self.ends = [0, *lens.sum(1).cumsum(0).tolist()]
        tokens = self.ends[-1]
        mixed = normal(tokens, 3, heads, DIM)
        if case.keys == "parallel":
            mixed[:, 1] = normal(rows, heads, DIM)[owner] + 0.01 * mixed[:, 1]
        self.mixed = mixed.flatten(1).bfloat16()
        logits = normal(tokens, heads, DIM)
        ends = {"bound": FAR, "long": -FAR, "faint": -11.0}
        if case.decay == "uneven":
            logits[..., ::2] += FAR
            logits[..., 1::2] -= FAR
        self.gate = (logits + ends.get(case.decay, 0.0)).bfloat16()
        beta = {"low": -12.0, "high": 12.0}.get(case.beta, 0.0)
        self.column = -(-heads // 8) * 8  # where beta begins in its buffer
        self.beta = (normal(tokens, 3 * self.column) + beta).bfloat16()
        self.a_log = torch.rand(heads, generator=dice, device=device) - 1
        self.gate_bias = normal(heads * DIM)
        self.start = (case.scale * normal(rows, heads, DIM, DIM)).to(case.state)
        self.lens, self.accepted = aligned(lens, device), aligned(accepted, device)
        ends_of_rows = torch.nn.functional.pad(lens.cumsum(1), (1, 0))
        self.start_loc = aligned(ends_of_rows, device)

    def tokens(self, step: int) -> Tokens:
        heads, part = self.case.heads, slice(self.ends[step], self.ends[step + 1])
        q, k, v = (
            columns.unflatten(-1, (heads, DIM))
            for columns in self.mixed[None, part].split(heads * DIM, -1)
        )
        beta = self.beta[None, part, self.column : self.column + heads]
        return Tokens(q, k, v, self.gate[None, part], beta, self.start_loc[step])


def aligned(counts: torch.Tensor, device: str | torch.device) -> torch.Tensor:
    """Return counts [steps, n] as int32, every step's at a multiple of 16 bytes."""
    steps, count = counts.shape
    wide = torch.zeros(steps, -(-count // 4) * 4, dtype=torch.int32, device=device)
    wide[:, :count] = counts.to(device)
    return wide[:, :count]


def replay(
    course: Course, step: int, state: torch.Tensor, counts: torch.Tensor, *, outputs: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run the first ``counts`` [rows] tokens of each window from ``state``, in float64.

    Returns the states after them and, if asked for, the packed outputs of whole windows.
    """
    case, tokens = course.case, course.tokens(step)
    places = torch.arange(case.window, device=state.device)
    index = tokens.start_loc[:-1, None] + places  # [rows, window]
    live = places < counts[:, None]
    index = torch.where(places < course.lens[step][:, None], index, 0)
    q, k, v, gate, beta = (
        part[0][index].double() for part in (tokens.q, tokens.k, tokens.v, tokens.gate, tokens.beta)
    )
    q = q * (q.square().sum(-1, keepdim=True) + 1e-6).rsqrt() * DIM**-0.5
    k = k * (k.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
    logits = gate + course.gate_bias.double().view(case.heads, DIM)
    rate = course.a_log.double().exp()[:, None]
    if case.lower_bound is None:
        gate = -rate * torch.nn.functional.softplus(logits)
    else:
        gate = case.lower_bound * torch.sigmoid(rate * logits)
    decay = torch.where(live[..., None, None], gate.exp(), 1.0)
    beta = torch.where(live[..., None], beta.sigmoid(), 0.0)
    found = []
    for t in range(case.window):
        state = state * decay[:, t, :, None]
        u = beta[:, t, :, None] * (v[:, t] - (state @ k[:, t, ..., None])[..., 0])
        state = torch.addcmul(state, u[..., None], k[:, t, :, None])
        if outputs:
            found.append((state @ q[:, t, ..., None])[..., 0])
    if not outputs:
        return state, None
    return state, torch.stack(found, 1)[places < course.lens[step][:, None]]


def float64(course: Course) -> Outcome:
    """Return what a course comes to in float64, from first states as they were rounded."""
    case, state, outputs = course.case, course.start.double(), []
    for step in range(case.steps):
        if step in case.watched:
            outputs.append(replay(course, step, state, course.lens[step], outputs=True)[1])
        if step < case.steps - 1:
            state, _ = replay(course, step, state, course.accepted[step], outputs=False)
    return Outcome([output for output in outputs if output is not None], state)


def errors(got: Outcome, want: Outcome) -> dict[str, float]:
    """Return relative Frobenius errors: of outputs, the worst step's, as they are and rounded to
    bfloat16, and of the states. NaN anywhere is an error of infinity."""

    def error(some: torch.Tensor, right: torch.Tensor) -> float:
        found = float((some.double() - right).norm() / right.norm())
        return found if found == found else float("inf")

    pairs = list(zip(got.outputs, want.outputs, strict=True))
    return {
        "outputs": max(error(some, right) for some, right in pairs),
        "rounded": max(error(some.bfloat16(), right) for some, right in pairs),
        "state": error(got.state, want.state),
    }


CASES = {
    "random": Case(),
    "decay_at_bound": Case(decay="bound"),
    "long_memory": Case(decay="long"),
    "uneven_decay": Case(decay="uneven"),
    "beta_near_0": Case(beta="low"),
    "beta_near_1": Case(beta="high"),
    "parallel_keys": Case(keys="parallel"),
    "parallel_keys_kept": Case(keys="parallel", beta="high", decay="long"),
    "small_states": Case(scale=1e-3),
    "large_states": Case(scale=1e3),
    "ragged": Case(ragged=True, rows=12),
    "ragged_window_5": Case(ragged=True, rows=12, window=5),
    "window_5": Case(window=5),
    "window_1": Case(window=1),
    "unbounded": Case(lower_bound=None),
    "unbounded_at_once_gone": Case(lower_bound=None, decay="bound"),
    "unbounded_faint_decay": Case(lower_bound=None, decay="faint"),
    "unbounded_long_memory": Case(lower_bound=None, decay="long", beta="high"),
}
