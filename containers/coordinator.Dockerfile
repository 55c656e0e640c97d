# The coordinator with everything a server needs: ledger (SQLite, PostgreSQL), evaluation by torch on the CPU, live page, bundles.
#   docker build -f containers/coordinator.Dockerfile -t edgefl-coordinator .
FROM python:3.11-slim-bookworm AS wheel
WORKDIR /source
COPY . .
RUN python -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.11-slim-bookworm
COPY --from=wheel /wheels /wheels
# torch from its own index: PyPI's brings gigabytes for graphics cards. One layer, so that what pip leaves is not kept.
RUN wheel="$(echo /wheels/*.whl)" \
 && python -m pip install --no-cache-dir --index-url https://download.pytorch.org/whl/cpu 'torch>=2.8,<2.14' \
 && python -m pip install --no-cache-dir "edgefl-toolkit[coordinator,train,export,web,postgresql] @ file://$wheel" \
 && useradd --uid 10001 --user-group --no-create-home --home-dir /tmp edgefl \
 && install -d -o edgefl -g edgefl -m 0700 /fleet /runs
ENV HOME=/tmp PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /runs
VOLUME ["/runs", "/fleet"]
ENTRYPOINT ["edgefl-coordinator"]
CMD ["--help"]
