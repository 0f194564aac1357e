#!/usr/bin/env bash
# An engine of one's own for the testbed in containers, where there is none and no registry to pull from; Debian 12, as root:
#   compose/engine.sh install        Debian's docker.io and mmdebstrap
#   compose/engine.sh base DIR       DIR/base.tar, a Debian 12 with python3, from Debian's archive
#   compose/engine.sh start DIR      an engine with all it has in DIR, on unix://DIR/docker.sock
#   compose/engine.sh import DIR     that base as the image prfaas-base:bookworm
#   compose/engine.sh stop DIR       the engine, its bridge and its files gone
set -euo pipefail
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
what=${1:?one of install, base, start, import, stop}
folder=${2:-}
[ "$what" = install ] || : "${folder:?the folder of the engine}"
export DOCKER_HOST=unix://$folder/docker.sock

case $what in
install)
    command -v dockerd >/dev/null && command -v mmdebstrap >/dev/null && exit 0
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends docker.io iptables iproute2 mmdebstrap >/dev/null
    ;;
base)
    mkdir -p "$folder"
    mmdebstrap --quiet --format=tar --variant=minbase --include=python3,python3-venv,ca-certificates bookworm "$folder/base.tar.part"
    mv "$folder/base.tar.part" "$folder/base.tar"
    ;;
start)
    mkdir -p "$folder"
    nohup dockerd --data-root "$folder/data" --exec-root "$folder/exec" --pidfile "$folder/dockerd.pid" \
        -H "$DOCKER_HOST" --storage-driver overlay2 >"$folder/dockerd.log" 2>&1 &
    for _ in $(seq 300); do
        docker version >/dev/null 2>&1 && exit 0
        sleep 0.1
    done
    tail -n 15 "$folder/dockerd.log" >&2
    echo "error: the engine did not start within 30 s (above, and in $folder/dockerd.log)" >&2
    exit 2
    ;;
import)
    docker import -c 'ENV LANG=C.UTF-8' "$folder/base.tar" prfaas-base:bookworm >/dev/null
    ;;
stop)
    pid=$(cat "$folder/dockerd.pid" 2>/dev/null || true)
    if [ -n "$pid" ]; then
        kill "$pid" 2>/dev/null || true
        for _ in $(seq 200); do
            kill -0 "$pid" 2>/dev/null || break
            sleep 0.1
        done
        ip link delete docker0 2>/dev/null || true
    fi
    awk -v folder="$folder/" 'index($2, folder) == 1 { print $2 }' /proc/mounts | sort -r | xargs -r umount
    rm -rf "$folder"
    ;;
*)
    echo "error: $what: not one of install, base, start, import, stop" >&2
    exit 2
    ;;
esac
