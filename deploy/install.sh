#!/bin/sh
# Fills /opt/attencode of the Dockerfile's builder: the packages of a file of deploy/constraints, each by version and
# hash, and attencode's own wheel; with a second argument torch too, the build without CUDA where it can be reached.
# /opt/attencode/sbom.json then says what is there (CycloneDX).
set -eu
tools/bin/pip --python /opt/attencode/bin/python install --require-hashes --no-deps -r "$1"
tools/bin/pip --python /opt/attencode/bin/python install --no-index --no-deps wheels/*.whl
# Wheels cannot hold links, so OpenVINO's libraries lie in ONNX Runtime's folder three times over, under the names that
# are linked against: 65 MB.
for library in /opt/attencode/lib/python3*/site-packages/onnxruntime/capi/lib*.so.*; do
    first="${library%%.so.*}.so"
    if cmp -s "$library" "$first"; then
        ln -sf "${first##*/}" "$library"
    fi
done
if [ -n "${2-}" ]; then
    tools/bin/uv pip install --python /opt/attencode/bin/python --no-cache --torch-backend=cpu "$2" ||
        tools/bin/pip --python /opt/attencode/bin/python install "$2"
fi
tools/bin/cyclonedx-py environment /opt/attencode/bin/python --of JSON --sv 1.6 --output-reproducible \
    --output-file /opt/attencode/sbom.json
