"""What can be said of the image's files without building it."""

from __future__ import annotations

import fnmatch
import re
from pathlib import Path

import yaml

from vllm_overlay.fix import load_fixes
from vllm_overlay.kda.files import LIBRARY, MANIFEST

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def test_bases_are_pinned_by_digest() -> None:
    bases = dict(re.findall(r"^ARG (\w+_BASE)=(.*)", DOCKERFILE, re.M))
    assert set(bases) == {"CPU_BASE", "CUDA_BASE"}
    for base in bases.values():
        assert re.fullmatch(r"[a-z/]+:[\w.-]+@sha256:[0-9a-f]{64}", base)
    stages = re.findall(r"^FROM (\S+) AS (\w+)$", DOCKERFILE, re.M)
    assert {base for base, _ in stages} == {"scratch", "${CPU_BASE}", "${CUDA_BASE}"}
    assert stages[-1] == ("${CUDA_BASE}", "cuda")  # the default target


def test_no_frontend_is_pulled() -> None:
    assert not re.search(r"^#\s*syntax\s*=", DOCKERFILE, re.M | re.I)


def test_the_default_vllm_has_its_lock() -> None:
    version = re.search(r"^ARG VLLM_VERSION=(.*)", DOCKERFILE, re.M)
    assert version
    lock = ROOT / f"requirements-cuda-{version[1]}.lock"
    assert re.search(rf"^vllm=={re.escape(version[1])} \\$", lock.read_text(), re.M)


def test_what_the_build_copies_is_let_through_and_secrets_are_not() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    let_through = [rule[1:] for rule in rules if rule.startswith("!")]
    copied = re.findall(r"^COPY (?:--chmod=\d+ )?(?!--)(\S+)", DOCKERFILE, re.M)
    bound = re.findall(r"type=bind,source=([^,]+)", DOCKERFILE)
    for source in {*copied, *bound}:
        name = source.replace("${VLLM_VERSION}", "0")
        assert any(fnmatch.fnmatch(name, rule) for rule in let_through), source
    assert not [rule for rule in let_through if rule in (".git", "compose", ".env")]


def test_the_cuda_image_builds_the_kda_library_into_the_package_before_it_gives_up_root() -> None:
    stage = DOCKERFILE[DOCKERFILE.index("FROM ${CUDA_BASE} AS cuda") :]
    steps = [
        "--no-build-isolation /src",
        "ARG KDA_ARCHS=",
        'RUN [ -z "${KDA_ARCHS}" ] || python -m vllm_overlay.kda.build --arch "${KDA_ARCHS}"\n',
        "USER 10001:10001",
    ]
    assert [stage.count(step) for step in steps] == [1] * len(steps)
    assert steps == sorted(steps, key=stage.index)
    assert DOCKERFILE.count("kda.build") == 1  # nothing for the cpu image
    compose = yaml.safe_load((ROOT / "compose/serve.yaml").read_text())
    assert "KDA_ARCHS" in compose["services"]["serve"]["build"]["args"]


def test_a_library_of_this_checkout_reaches_no_image() -> None:
    """It would be of this machine's choice, and stand beside the one that the image builds."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    rule = "vllm_overlay/kda/kda_step.*"
    assert lines.index(rule) > lines.index("!vllm_overlay")
    assert rule in (ROOT / ".gitignore").read_text().splitlines()
    assert all(fnmatch.fnmatch(f"vllm_overlay/kda/{name}", rule) for name in (LIBRARY, MANIFEST))


def test_compose_passes_the_flag_of_every_fix_on() -> None:
    """What it does not list stays in the caller's shell, unseen."""
    compose = yaml.safe_load((ROOT / "compose/serve.yaml").read_text())
    listed = compose["services"]["serve"]["environment"]
    flags = {fix.flag.name for fix in load_fixes(ROOT / "fixes").values() if fix.flag}
    assert {name for name in listed if name.startswith("VLLM_")} == {*flags, "VLLM_API_KEY"}
    assert all(listed[flag] is None for flag in flags)  # no default but the recipe's
