# The proxy alone; the engines run in containers of their own (configs/compose.yaml).
#   docker build -t splitproxy .
#   docker run -v ./splitproxy.toml:/etc/splitproxy/splitproxy.toml:ro -v sessions:/sessions -p 127.0.0.1:8080:8080 splitproxy
# The base needs python3 >= 3.11 with venv; a plain Debian with python3-venv serves as well.
ARG BASE=python:3.12-slim

FROM ${BASE} AS build
# Only for networks whose traffic is signed by an authority of their own: the path of a CA bundle in the base, and a
# package index of their own. Neither reaches the final stage.
ARG PIP_CERT
ARG PIP_INDEX_URL
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY splitproxy splitproxy
# pip lives in a venv of its own, so that the one which is copied on holds no installer.
RUN python3 -m venv /opt/pip \
 && python3 -m venv --without-pip /opt/splitproxy \
 && /opt/pip/bin/python3 -m pip --python /opt/splitproxy/bin/python3 install .

FROM ${BASE}
LABEL org.opencontainers.image.title="splitproxy" \
      org.opencontainers.image.description="Reverse proxy that lets one LLM engine read long prompts and another write the answers" \
      org.opencontainers.image.licenses="Apache-2.0"
# Engines that share /sessions must run as this user, too: the folder is open to nobody else, because a session file
# tells as much as the prompt it was made from.
RUN groupadd --gid 10001 splitproxy \
 && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin splitproxy \
 && install -d -m 0700 -o splitproxy -g splitproxy /sessions
COPY --from=build /opt/splitproxy /opt/splitproxy
ENV PATH=/opt/splitproxy/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
VOLUME /sessions
EXPOSE 8080
STOPSIGNAL SIGTERM
# A proxy that listens elsewhere than on port 8080 gets its address from SPLITPROXY_LISTEN; then both sides read the same.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=3 \
  CMD ["python3", "-c", "import http.client, os, sys; c = http.client.HTTPConnection(os.environ.get('SPLITPROXY_LISTEN', '0.0.0.0:8080'), timeout=4); c.request('GET', '/health'); sys.exit(c.getresponse().status != 200)"]
ENTRYPOINT ["splitproxy"]
CMD ["serve", "-c", "/etc/splitproxy/splitproxy.toml"]
