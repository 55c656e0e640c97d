# The agent of one device, for x86-64 and arm64. torch on the CPU, unless TORCH_INDEX names another build's index.
#   docker build -f containers/agent.Dockerfile -t edgefl-agent .
#   docker buildx build --platform linux/amd64,linux/arm64 -f containers/agent.Dockerfile .
#   with an NVIDIA card: --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu128, and docker run --gpus all
FROM python:3.11-slim-bookworm AS wheel
WORKDIR /source
COPY . .
RUN python -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.11-slim-bookworm
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY --from=wheel /wheels /wheels
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends tini && rm -rf /var/lib/apt/lists/* \
 && wheel="$(echo /wheels/*.whl)" \
 && python -m pip install --no-cache-dir --index-url "$TORCH_INDEX" 'torch>=2.8,<2.14' \
 && python -m pip install --no-cache-dir "edgefl-toolkit[train] @ file://$wheel" \
 && useradd --uid 10001 --user-group --no-create-home --home-dir /state edgefl \
 && install -d -o edgefl -g edgefl -m 0700 /state
ENV HOME=/state PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /state
VOLUME ["/state"]
# Whether the agent runs and gives signs of life; a broker that is away is no fault of its.
HEALTHCHECK --interval=60s --timeout=20s --start-period=60s CMD ["edgefl-agent", "status", "--state", "/state"]
ENTRYPOINT ["tini", "--", "edgefl-agent"]
CMD ["run", "--state", "/state", "--data", "/data"]
