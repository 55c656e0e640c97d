# The agent on a Jetson with JetPack 6.1 or 6.2, built on the device. NOT TESTED (constraints/jetpack-6.txt has the sources).
#   docker build -f containers/agent-l4t.Dockerfile -t edgefl-agent .
#   docker run -d --runtime nvidia --group-add video --restart on-failure -v edgefl-state:/state -v /srv/data:/data:ro edgefl-agent
FROM nvcr.io/nvidia/l4t-jetpack:r36.4.0
ARG TORCH_INDEX=https://pypi.jetson-ai-lab.io/jp6/cu126
COPY . /source
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends python3-venv tini && rm -rf /var/lib/apt/lists/* \
 && python3 -m venv /opt/edgefl \
 && /opt/edgefl/bin/python -m pip install --no-cache-dir --no-deps --index-url "$TORCH_INDEX" \
    --constraint /source/constraints/jetpack-6.txt torch \
 && /opt/edgefl/bin/python -m pip install --no-cache-dir "edgefl-toolkit[train] @ file:///source" \
 && rm -rf /source \
 && useradd --uid 10001 --user-group --no-create-home --home-dir /state edgefl \
 && install -d -o edgefl -g edgefl -m 0700 /state
ENV HOME=/state PYTHONUNBUFFERED=1 PATH=/opt/edgefl/bin:$PATH
USER 10001:10001
WORKDIR /state
VOLUME ["/state"]
HEALTHCHECK --interval=60s --timeout=20s --start-period=60s CMD ["edgefl-agent", "status", "--state", "/state"]
ENTRYPOINT ["tini", "--", "edgefl-agent"]
CMD ["run", "--state", "/state", "--profile", "jetson-orin-nano-8gb", "--data", "/data"]
