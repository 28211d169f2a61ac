"""What the kernels' benches share: replayed graphs, medians, launches, and compiling in threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import psutil
import torch
import triton
from triton.runtime.jit import JITFunction

Call = Callable[[], object]


def graph(call: Call) -> Callable[[], None]:
    """Return the replay of what ``call`` launches, which runs once before."""
    call()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        call()
    replay: Callable[[], None] = captured.replay
    return replay


def median_ms(call: Call, rep: float = 60) -> float:
    """Return the median ms of a call, the L2 cache cleared before each; ``rep`` ms of them."""
    return float(triton.testing.do_bench(call, warmup=15, rep=rep, return_mode="median"))


def launches(call: Call) -> int:
    """Count the kernels that a call starts."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        call()
        torch.cuda.synchronize()
    return len([event for event in profiled.events() if event.device_type == DeviceType.CUDA])


def copy_ceiling() -> float:
    """Return bytes a second, read and written, of a copy of 4 GiB."""
    source = torch.empty(1 << 32, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return float(2 * source.numel() / median_ms(lambda: target.copy_(source)) * 1e3)


def machine(ceiling: float) -> dict[str, str]:
    """Return what a measurement keeps of the GPU; ``ceiling`` in bytes a second."""
    return {
        "name": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "copy_bytes_per_s": f"{ceiling:.4g}",
    }


@contextmanager
def only_compiled() -> Iterator[None]:
    """In this context, a launch compiles its kernel and does not start it."""
    launch = JITFunction.run

    def warm(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return launch(self, *args, grid=grid, warmup=True, **options)

    JITFunction.run = warm
    try:
        yield
    finally:
        JITFunction.run = launch


def compile_all(calls: Iterable[Call], workers: int) -> float:
    """Compile what the calls launch, in threads; return the seconds it took."""
    began = time.monotonic()
    pool = ThreadPoolExecutor(workers)
    with only_compiled(), triton.AsyncCompileMode(pool, ignore_errors=True):
        for call in calls:
            call()
    pool.shutdown()
    return time.monotonic() - began


def seconds_used() -> float:
    """Return the seconds since this process began."""
    return time.time() - psutil.Process().create_time()
