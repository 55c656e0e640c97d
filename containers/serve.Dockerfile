# `edgefl serve` on the processor, for x86-64 and arm64; no torch in it.
#   docker build -f containers/serve.Dockerfile -t edgefl-serve .
#   docker run -d --memory 2g -p 127.0.0.1:8481:8481 -e EDGEFL_SERVE_TOKEN=… -v /srv/har:/bundles:ro edgefl-serve /bundles --name har --host 0.0.0.0:8481
FROM python:3.11-slim-bookworm AS wheel
WORKDIR /source
COPY . .
RUN python -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.11-slim-bookworm
COPY --from=wheel /wheels /wheels
RUN wheel="$(echo /wheels/*.whl)" \
 && python -m pip install --no-cache-dir "edgefl-toolkit[serve] @ file://$wheel" \
 && useradd --uid 10001 --user-group --no-create-home --home-dir /tmp edgefl
ENV HOME=/tmp PYTHONUNBUFFERED=1
USER 10001:10001
EXPOSE 8481
HEALTHCHECK --interval=60s --timeout=10s --start-period=60s CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8481/v2/health/ready', timeout=5)"]
ENTRYPOINT ["edgefl", "serve"]
CMD ["/bundles", "--host", "0.0.0.0:8481"]
