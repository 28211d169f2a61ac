"""Which CUDA library is loaded, and why one is refused. No GPU: a capability stands for one."""

from __future__ import annotations

import ctypes
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.kdalib import CODE, COMPILER, compiled, lay
from vllm_overlay.activate.planfile import sha256
from vllm_overlay.kda import files, native
from vllm_overlay.kda.files import FOLDER, LIBRARY, MANIFEST, SOURCE

H200 = (9, 0)
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C compiler")


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return compiled(tmp_path_factory.mktemp("code"))


@pytest.fixture
def folder(tmp_path: Path, code: bytes) -> Path:
    return lay(tmp_path / "kda", code)


def test_a_library_is_loaded_once(folder: Path, code: bytes) -> None:
    found = native.look(H200, folder)
    assert isinstance(found, native.Native)
    assert (found.path, found.sha256, found.arch) == (folder / LIBRARY, sha256(code), "sm_90")
    assert found.handle.kda_step_launch(None, None) == 1
    (folder / LIBRARY).unlink()
    assert native.look(H200, folder) is found


@pytest.mark.parametrize(
    ("capability", "arch"),
    [
        ((9, 0), "sm_90"),
        ((10, 0), "sm_100"),
        ((10, 3), "sm_100"),
        ((11, 0), "compute_100"),
        ((12, 1), "compute_100"),
    ],
)
def test_a_gpu_runs_the_code_of_its_generation_or_the_ptx_of_the_highest(
    folder: Path, capability: tuple[int, int], arch: str
) -> None:
    found = native.look(capability, folder)
    assert isinstance(found, native.Native)
    assert found.arch == arch


def test_ptx_is_only_there_for_the_highest(tmp_path: Path, code: bytes) -> None:
    both = lay(tmp_path / "both", code, (80, 100))
    assert native.look(H200, both) == (f"no CUDA library for sm_90 in {both}: it has sm_80, sm_100")
    older = lay(tmp_path / "older", code, (89, 86))
    found = [native.look(capability, older) for capability in ((8, 6), (8, 8), (8, 9), (9, 0))]
    assert [isinstance(one, native.Native) and one.arch for one in found] == [
        "sm_86", "sm_86", "sm_89", "compute_89",
    ]  # fmt: skip
    assert (
        native.look((8, 0), older) == f"no CUDA library for sm_80 in {older}: it has sm_86, sm_89"
    )


def alter(name: str, change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def change_manifest(folder: Path) -> None:
        said = json.loads((folder / name).read_text())
        change(said)
        (folder / name).write_text(json.dumps(said))

    return change_manifest


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda f: (f / LIBRARY).unlink(), "no CUDA library in {f}"),
        (lambda f: (f / MANIFEST).unlink(), f"{{f}}/{MANIFEST} cannot be read: No such file"),
        (lambda f: (f / SOURCE).unlink(), f"{{f}}/{SOURCE} cannot be read: No such file"),
        (lambda f: (f / LIBRARY).write_bytes(b"x"), f"is not the one that {MANIFEST} describes"),
        (lambda f: (f / SOURCE).write_text("// new\n"), f"was built from another {SOURCE}"),
        (lambda f: (f / MANIFEST).write_text("{"), "cannot be used: JSONDecodeError"),
        (lambda f: (f / MANIFEST).write_text("[]"), "cannot be used: TypeError"),
        (alter(MANIFEST, lambda m: m.pop("source")), "cannot be used: KeyError: 'source'"),
        (alter(MANIFEST, lambda m: m.update(schema=2)), "cannot be used: ValueError"),
        (alter(MANIFEST, lambda m: m.update(architectures=[])), "cannot be used: ValueError"),
        (lambda f: f.chmod(0o777), "{f} may be written by anybody"),
        (lambda f: (f / LIBRARY).chmod(0o666), f"{{f}}/{LIBRARY} may be written by anybody"),
        (lambda f: (f / MANIFEST).chmod(0o666), f"{{f}}/{MANIFEST} may be written by anybody"),
    ],
)  # fmt: skip
def test_what_is_not_to_be_trusted_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Path], Any], says: str
) -> None:
    spoil(folder)
    found = native.look(H200, folder)
    assert isinstance(found, str) and says.format(f=folder) in found and "\n" not in found
    monkeypatch.setattr(native, "FOLDER", folder)
    assert native.identity() == "none"


def test_a_library_of_another_user_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files.os, "geteuid", lambda: 12345)
    other = folder / LIBRARY
    try:
        files.os.chown(other, 54321, -1)
    except PermissionError:
        pytest.skip("only root can give a file away")
    refusal = f"{other} belongs to user 54321, who owns no part of this program"
    assert native.look.__wrapped__(H200, folder) == refusal
    monkeypatch.setattr(files, "__file__", str(other))  # the package is of that user's, too
    assert isinstance(native.look.__wrapped__(H200, folder), native.Native)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda f: compiled(f, abi=9), f"has ABI 9, and {native.ABI} is wanted: build it again"),
        (lambda f: compiled(f, code=CODE.splitlines()[0]), "undefined symbol: kda_step_launch"),
        (lambda _: b"no library", "cannot be loaded"),
    ],
)
def test_a_library_that_does_not_fit_this_program_is_refused(
    tmp_path: Path, make: Callable[[Path], bytes], says: str
) -> None:
    found = native.look(H200, lay(tmp_path / "kda", make(tmp_path)))
    assert isinstance(found, str) and says in found and str(tmp_path / "kda" / LIBRARY) in found


def test_the_arguments_lie_as_in_the_source(tmp_path: Path) -> None:
    source = (FOLDER / SOURCE).read_text()
    struct = source[source.index("struct KdaStepArgs {") :].split("};")[0] + "};"
    names = [name for name, _ in native.Arguments._fields_]
    shown = "".join(f'printf("%zu\\n", offsetof(struct KdaStepArgs, {name}));' for name in names)
    main = f'int main(void) {{ {shown} printf("%zu\\n", sizeof(struct KdaStepArgs)); return 0; }}'
    head = "#include <stddef.h>\n#include <stdint.h>\n#include <stdio.h>\n"
    (tmp_path / "main.c").write_text(f"{head}{struct}\n{main}\n")
    assert COMPILER
    subprocess.run([COMPILER, "-o", tmp_path / "main", tmp_path / "main.c"], check=True)
    found = subprocess.run([tmp_path / "main"], capture_output=True, text=True, check=True).stdout
    wanted = [getattr(native.Arguments, name).offset for name in names]
    assert [int(line) for line in found.split()] == [*wanted, ctypes.sizeof(native.Arguments)]
    declared = re.sub(r"//.*|[*]", "", struct).replace(",", " ")
    words = set(re.findall(r"\b[a-z_0-9]+\b", declared.split("{")[1]))
    assert set(names) == words - {"const", "void", "float", "int", "int64_t", "int32_t"}


@pytest.mark.parametrize(
    ("change", "misfit"),
    [
        ({}, ""),
        ({"size": 9}, "heads of 128 and 128, windows of 9"),
        ({"keys": 64}, "heads of 64 and 64, windows of 8"),
        ({"activation": "float16"}, "q of torch.float16"),
        ({"beta": "float32"}, "beta of torch.float32"),
        ({"out": "float16"}, "out of torch.float16"),
        ({"state": "float16"}, "state of torch.float16"),
        (
            {"kept_from": 2},
            "the records' corrections where not each part begins at a multiple of 16 bytes",
        ),
        ({"out_from": 1}, "out where not"),  # bf16 pairs are stored together
        ({"state_from": 2}, "state where not"),  # the copy engine wants multiples of 16 bytes
        ({"q_step": 4}, "q where not"),  # tokens of a projection for four heads
        ({"q_step": 8}, ""),
        # As compute capability 12.0 has.
        ({"memory": 101376}, "with 101376 bytes of shared memory"),
        ({"memory": 101376, "state": "bfloat16"}, ""),
    ],
)
def test_what_the_library_takes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], misfit: str
) -> None:
    torch = pytest.importorskip("torch")
    given = {"size": 8, "keys": 128, "activation": "bfloat16", "state": "float32"} | change
    keys, activation = given["keys"], getattr(torch, given["activation"])
    room = SimpleNamespace(shared_memory_per_block_optin=given.get("memory", 232448))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: room)

    def part(*shape: int, dtype: Any, first: int = 0) -> Any:
        size = math.prod(shape)
        return torch.zeros(size + 16, dtype=dtype)[first : first + size].view(shape)

    wide = part(1, 8, 2 * keys + given.get("q_step", 0), dtype=activation)
    like = {name: part(1, 8, 2, keys, dtype=activation) for name in ("q", "k", "v", "gate")}
    like["q"] = wide[:, :, : 2 * keys].unflatten(2, (2, keys))
    window = SimpleNamespace(
        **like,
        beta=part(1, 8, 2, dtype=getattr(torch, given.get("beta", given["activation"]))),
        key_size=keys,
        value_size=keys,
        size=given["size"],
    )
    state = part(
        3, 2, keys, keys, dtype=getattr(torch, given["state"]), first=given.get("state_from", 0)
    )
    first = given.get("kept_from", 0)
    kept = {
        name: part(4, 2, 8, keys, dtype=torch.float32, first=first) for name in ("keys", "gates")
    }
    records = SimpleNamespace(**kept, corrections=kept["keys"])
    kind = getattr(torch, given.get("out", given["activation"]))
    out = part(1, 8, 2, keys, dtype=kind, first=given.get("out_from", 0))
    found = native.look(H200, folder)
    assert isinstance(found, native.Native)
    said = found.misfit(window, state, records, out)
    assert misfit in said and bool(said) is bool(misfit)


def test_a_device_that_is_no_nvidia_gpu_uses_triton() -> None:
    pytest.importorskip("torch")
    assert native.library("cpu") is None
    assert native.form("cpu") == "triton: no CUDA library for cpu"


def test_a_rocm_gpu_is_no_cuda_one_whatever_torch_calls_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 4))
    monkeypatch.setattr(native, "FOLDER", folder)
    assert native.form("cuda:0") == "triton: no CUDA library for ROCm"


@pytest.mark.parametrize("present", [True, False])
def test_the_form_names_the_code_or_the_reason(
    folder: Path, code: bytes, monkeypatch: pytest.MonkeyPatch, present: bool
) -> None:
    """The real device is in tests/gpu."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    capability = H200 if present else (8, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(native, "FOLDER", folder)
    digest = sha256(code)
    if present:
        assert native.form("cuda:1") == f"cuda sm_90 {digest[:12]}"
        assert native.identity() == digest
    else:
        why = f"no CUDA library for sm_80 in {folder}: it has sm_90, sm_100"
        assert native.form("cuda:1") == f"triton: {why}"
        assert native.identity() == "none"  # another rank may run the same file


def test_looking_imports_no_torch(folder: Path, code: bytes) -> None:
    script = (
        "import pathlib, sys; from vllm_overlay.kda import native\n"
        f"native.FOLDER = pathlib.Path({str(folder)!r})\n"
        "print(native.identity(), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == f"{sha256(code)} False\n", done.stderr
