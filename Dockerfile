# Two images of vLLM with the overlay: `cuda` (the default) and `cpu`. docs/docker.md has the
# build arguments and how to refresh a pin.
#
# The bases are pinned by the digests of their multi-architecture indexes.
ARG CUDA_BASE=nvidia/cuda:13.0.2-devel-ubuntu24.04@sha256:5dc1bca23d05bd37b011be68ec470c03b403a5da07ec3a86e41af9470e9d0cc6
ARG CPU_BASE=debian:bookworm-slim@sha256:88200866dfff7ea7f5cbcb6ec7c8a701889efe6fe859fe64d6990e4b07ea4171

# torch's CPU wheel, if it is not fetched from TORCH_INDEX: `--build-context wheels=DIR` replaces
# this empty stage by a folder.
FROM scratch AS wheels

# What both images carry besides Python packages.
FROM scratch AS overlay
COPY --chmod=755 entrypoint.sh /opt/vllm-overlay/
COPY recipes /opt/vllm-overlay/recipes/
COPY fixes /opt/vllm-overlay/fixes/

# ---- cpu -----------------------------------------------------------------------------------------
FROM ${CPU_BASE} AS cpu
SHELL ["/bin/sh", "-euc"]
# torch.compile needs a C++ compiler and Python's headers at run time, vLLM's library libnuma.
# hadolint ignore=DL3008
RUN apt-get update; \
    apt-get install -y --no-install-recommends \
      ca-certificates g++ libnuma1 python3-dev python3-venv; \
    rm -rf /var/lib/apt/lists/*; \
    python3 -m venv /opt/venv
# vLLM picks the AVX-512 build of its library by itself, also where the CPU has no AVX-512.
ENV PATH=/opt/venv/bin:$PATH \
    VLLM_TARGET_DEVICE=cpu
ARG TORCH_VERSION=2.13.0+cpu
ARG TORCH_INDEX=
COPY requirements-cpu.lock /tmp/
# hadolint ignore=DL3013
RUN --mount=type=cache,target=/root/.cache/pip \
    --mount=type=bind,from=wheels,target=/wheels \
    pip install --no-deps --require-hashes --only-binary :all: -r /tmp/requirements-cpu.lock; \
    pip install --no-deps --only-binary :all: --find-links /wheels \
      ${TORCH_INDEX:+--index-url "${TORCH_INDEX}"} "torch==${TORCH_VERSION}" || { \
      echo "no torch ${TORCH_VERSION} found; pass --build-context wheels=DIR or --build-arg TORCH_INDEX=URL" >&2; \
      exit 1; }
# 1: Ray too, for recipes with distributed-executor-backend ray.
ARG RAY=
COPY requirements-ray.lock /tmp/
RUN --mount=type=cache,target=/root/.cache/pip \
    [ -z "${RAY}" ] || pip install --no-deps --require-hashes --only-binary :all: \
      -r /tmp/requirements-ray.lock
RUN --mount=type=bind,source=tools/name_vllm.py,target=/tmp/name_vllm.py \
    python /tmp/name_vllm.py

RUN groupadd --gid 10001 overlay; \
    useradd --uid 10001 --gid 10001 --no-create-home --home-dir /var/lib/vllm-overlay \
      --shell /usr/sbin/nologin overlay; \
    install -d -o overlay -g overlay /var/lib/vllm-overlay
ENV HOME=/var/lib/vllm-overlay \
    VLLM_OVERLAY_HOME=/var/lib/vllm-overlay
VOLUME /var/lib/vllm-overlay
EXPOSE 8000
ENTRYPOINT ["/opt/vllm-overlay/entrypoint.sh"]
WORKDIR /var/lib/vllm-overlay
# From here on come the parts of this repository: an edit of them leaves vLLM's layers alone.
RUN --mount=type=bind,source=pyproject.toml,target=/src/pyproject.toml \
    --mount=type=bind,source=README.md,target=/src/README.md \
    --mount=type=bind,source=LICENSE,target=/src/LICENSE \
    --mount=type=bind,source=vllm_overlay,target=/src/vllm_overlay \
    pip install --no-cache-dir --no-deps --no-index --no-build-isolation /src
COPY --from=overlay /opt/vllm-overlay /opt/vllm-overlay
USER 10001:10001

# ---- cuda ----------------------------------------------------------------------------------------
# The toolkit stays in the image: FlashInfer, DeepGEMM and TileLang compile kernels at run time.
FROM ${CUDA_BASE} AS cuda
SHELL ["/bin/sh", "-euc"]
# git: a source build of vLLM fetches its kernel libraries with it.
# hadolint ignore=DL3008
RUN apt-get update; \
    apt-get install -y --no-install-recommends ca-certificates g++ git python3-dev python3-venv; \
    rm -rf /var/lib/apt/lists/*; \
    python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
# The version names the lock file; `source` builds vLLM from its source distribution.
ARG VLLM_VERSION=0.33.0
ARG VLLM_BUILD=wheel
ARG TORCH_CUDA_ARCH_LIST=
ARG MAX_JOBS=
COPY requirements-cuda-${VLLM_VERSION}.lock /tmp/requirements-cuda.lock
RUN --mount=type=cache,target=/root/.cache/pip \
    case "${VLLM_BUILD}" in \
      wheel) set -- --only-binary :all: ;; \
      source) set -- --no-binary vllm ;; \
      *) echo "VLLM_BUILD is 'wheel' or 'source'; found '${VLLM_BUILD}'" >&2; exit 2 ;; \
    esac; \
    [ -n "${TORCH_CUDA_ARCH_LIST}" ] || unset TORCH_CUDA_ARCH_LIST; \
    [ -n "${MAX_JOBS}" ] || unset MAX_JOBS; \
    pip install --no-deps --require-hashes "$@" -r /tmp/requirements-cuda.lock
ARG RAY=
COPY requirements-ray.lock /tmp/
RUN --mount=type=cache,target=/root/.cache/pip \
    [ -z "${RAY}" ] || pip install --no-deps --require-hashes --only-binary :all: \
      -r /tmp/requirements-ray.lock

RUN groupadd --gid 10001 overlay; \
    useradd --uid 10001 --gid 10001 --no-create-home --home-dir /var/lib/vllm-overlay \
      --shell /usr/sbin/nologin overlay; \
    install -d -o overlay -g overlay /var/lib/vllm-overlay
ENV HOME=/var/lib/vllm-overlay \
    VLLM_OVERLAY_HOME=/var/lib/vllm-overlay
VOLUME /var/lib/vllm-overlay
EXPOSE 8000
ENTRYPOINT ["/opt/vllm-overlay/entrypoint.sh"]
WORKDIR /var/lib/vllm-overlay
RUN --mount=type=bind,source=pyproject.toml,target=/src/pyproject.toml \
    --mount=type=bind,source=README.md,target=/src/README.md \
    --mount=type=bind,source=LICENSE,target=/src/LICENSE \
    --mount=type=bind,source=vllm_overlay,target=/src/vllm_overlay \
    pip install --no-cache-dir --no-deps --no-index --no-build-isolation /src
# Into the package's own folder, where it is looked for. Empty: no library, and Triton is used.
ARG KDA_ARCHS=90,100
RUN [ -z "${KDA_ARCHS}" ] || python -m vllm_overlay.kda.build --arch "${KDA_ARCHS}"
COPY --from=overlay /opt/vllm-overlay /opt/vllm-overlay
USER 10001:10001
