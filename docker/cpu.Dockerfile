# BUILT AND RUN ONCE, with Docker 20.10 and cgroup 1, as the ordinary user; no registry was at hand,
# so Debian 12 with its own Python 3.11 had the name of the base. No automatic test builds it.
# The package and its report, without a GPU:
#   docker build -f docker/cpu.Dockerfile -t compassrl .
#   docker run -v "$PWD/runs:/runs" compassrl train tiny-cpu --run-dir /runs/first
# It runs as an ordinary user, 1000 or yours (--user "$(id -u)"), who must own the folder of the runs.
# Docker's profiles forbid namespaces and mounts, and hide a part of /proc, so the sandbox of verifier
# `code` needs these flags. The first and the last were needed there, the tests of the sandbox passed
# with them, and without them it refused to run; the second is for AppArmor, which was not there:
#   docker run --security-opt seccomp=unconfined --security-opt apparmor=unconfined \
#     --security-opt systempaths=unconfined ...
FROM python:3.11-slim-bookworm
RUN apt-get update && apt-get install -y --no-install-recommends make bubblewrap \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /compassrl
COPY . .
RUN make .venv/.core && useradd --uid 1000 --create-home trainer \
    && install -d -o trainer /runs
USER trainer
WORKDIR /runs
ENTRYPOINT ["/compassrl/.venv/bin/compassrl"]
CMD ["--help"]
