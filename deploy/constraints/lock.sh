#!/usr/bin/env bash
# Writes the exact versions and hashes that the images are built from: one file beside this script for each
# set of extras that the Dockerfile installs. `make lock` runs it; what is locked stays as it is unless
# pyproject.toml forbids it, or `UPGRADE=1 make lock` takes the newest versions.
#
# ONNX Runtime with OpenVINO names sympy for its tools alone: 86 MB that a server never imports.
# An export checks its graphs with ONNX Runtime, so export.txt has that too.
# torch is in export.txt's resolution but not in the file: its wheels for processors alone come from an index of
# PyTorch's own, so the Dockerfile installs it by version, and without what PyPI's build needs for CUDA.
set -euo pipefail
cd "$(dirname "$0")"
UV=${UV:-uv}
TORCH=${TORCH:-torch==2.13.0}
lock() {  # FILE WHAT-UV-READS ...
    local file=$1 && shift
    [[ -n ${UPGRADE:-} ]] && rm -f "$file"
    "$UV" pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate \
        --no-emit-index-url --custom-compile-command "make lock" --output-file "$file" "$@" >/dev/null
    echo "$file: $(grep -c '^[a-z].*==' "$file") packages"
}

project=../../pyproject.toml
unused=(--no-emit-package sympy --no-emit-package mpmath)
for runtime in amd openvino cpu gpu; do
    lock "$runtime.txt" --extra "$runtime" --extra otel "${unused[@]}" "$project"
done
for runtime in amd gpu; do
    lock "ray-$runtime.txt" --extra ray --extra "$runtime" --extra otel "${unused[@]}" "$project"
done
outside=(--no-emit-package torch --no-emit-package triton --no-emit-package cuda-bindings
    --no-emit-package cuda-pathfinder --no-emit-package cuda-toolkit)
lock export.txt --extra export --extra cpu --constraint <(echo "$TORCH") "${outside[@]}" "$project"
# what else PyPI's torch wants for CUDA
sed -i '/^nvidia-/,/[^\\]$/d' export.txt
lock build.txt <(printf '%s\n' 'cyclonedx-bom>=7' 'pip>=25' 'setuptools>=77' uv)
