# The package and its report, without a GPU:
#   docker build -f docker/cpu.Dockerfile -t compassrl .
#   docker run -v "$PWD/runs:/runs" compassrl train tiny-cpu --run-dir /runs/first
FROM python:3.11-slim-bookworm
RUN apt-get update && apt-get install -y --no-install-recommends make && rm -rf /var/lib/apt/lists/*
WORKDIR /compassrl
COPY . .
RUN make .venv/.core
ENTRYPOINT ["/compassrl/.venv/bin/compassrl"]
CMD ["--help"]
