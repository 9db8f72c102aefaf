# NOT BUILT HERE, NOT RUN ON GPU: written from the requirements of the engines, never built or run on a machine with a GPU.
# vLLM and Megatron-Core with Transformer Engine:
#   docker build -f docker/gpu.Dockerfile -t compassrl-gpu .
#   docker run --gpus all --ipc host -v "$PWD/runs:/runs" compassrl-gpu train one-gpu --run-dir /runs/first
# It runs as an ordinary user, 1000 or yours (--user "$(id -u)"), who must own the folder of the runs.
# Docker's profiles forbid namespaces and mounts, and hide a part of /proc, so the sandbox of verifier
# `code` needs these flags (run with the image for CPUs, not here):
#   docker run --security-opt seccomp=unconfined --security-opt apparmor=unconfined \
#     --security-opt systempaths=unconfined ...
FROM nvidia/cuda:13.0.1-cudnn-devel-ubuntu24.04
ENV PYTHONUNBUFFERED=1 NVTE_FRAMEWORK=pytorch
RUN apt-get update && apt-get install -y --no-install-recommends bubblewrap git python3-dev \
    python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /compassrl
COPY . .
RUN python3 -m venv .venv && .venv/bin/pip install --no-cache-dir uv \
    && .venv/bin/uv pip install --no-cache -p .venv/bin/python torch==2.13.0 setuptools wheel pybind11 ninja \
    && .venv/bin/uv pip install --no-cache -p .venv/bin/python --no-build-isolation-package transformer-engine-torch \
       ".[gpu,report,maths,data]" \
    && .venv/bin/python -c "import compassrl.runs.cli" && install -d -o 1000 /runs
USER 1000
WORKDIR /runs
ENTRYPOINT ["/compassrl/.venv/bin/compassrl"]
CMD ["--help"]
