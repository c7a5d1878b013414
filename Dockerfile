# Images of attencode: targets cpu (the default), gpu, ray, export and baked.
#
#   docker build -t attencode:cpu .                        (or buildah build --format docker, podman build)
#   docker build -t attencode:export --target export .
#   docker run --rm -v models:/models attencode:export export HUB-ID-OR-FOLDER -o /models/model
#   docker run --rm -v models:/models:ro -p 50051:50051 --read-only --tmpfs /tmp --cap-drop ALL attencode:cpu
#
# cpu     serves /models/model on processors. RUNTIME is the extra that it is built with: `amd`, the build of ONNX
#         Runtime with OpenVINO inside, is the default because it runs on the x86-64 processors of both makers, and a
#         cluster's nodes may be of either. `openvino` is for Intel alone, with a newer ONNX Runtime; `cpu` is ONNX
#         Runtime by itself, and the one for ARM.
# gpu     serves on NVIDIA GPUs; the node brings the driver, the image CUDA's libraries.
# ray     has Ray Serve besides, for a RayService's head and workers; RUNTIME=gpu for workers with GPUs.
# export  turns a checkpoint into an artifact and checks it: an initContainer's image, the only one with torch.
# baked   is SERVER (cpu, gpu or ray) with MODEL in it: a hub id, or /checkpoint, the build context of that name:
#         docker build --target baked --build-arg MODEL=/checkpoint --build-context checkpoint=FOLDER .
#
# Every package but torch is installed by version and hash from deploy/constraints (`make lock`); torch by version, from
# PyTorch's index of builds without CUDA where that can be reached. Python is 3.11, for which they are resolved and on
# which the tests run. What is in an image stands in its /opt/attencode/sbom.json (CycloneDX). To pin the base by digest, or take it from a mirror: --build-arg PYTHON_IMAGE=NAME@sha256:DIGEST
# Health, ports and settings: README.md, "In containers".
ARG PYTHON_IMAGE=docker.io/library/python:3.11-slim-bookworm
ARG SERVER=cpu

# ---------------------------------------------------------------- what is built once for all
FROM ${PYTHON_IMAGE} AS builder
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /build
COPY deploy/constraints/build.txt ./
# The environment that is built has no pip of its own: nothing is installed where it runs.
RUN python3 -m venv tools && tools/bin/pip install --require-hashes --no-deps -r build.txt && \
    python3 -m venv --without-pip /opt/attencode
COPY pyproject.toml LICENSE README.md attencode.py src/
COPY model src/model
COPY service src/service
COPY deploy/install.sh ./
RUN tools/bin/pip wheel --no-build-isolation --no-deps --wheel-dir wheels ./src

# What every image has in common. `/models` is where artifacts are mounted, or written by an export; /tmp must be
# writable, an emptyDir or tmpfs where the root file system is not.
FROM ${PYTHON_IMAGE} AS runtime
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="attencode" \
      org.opencontainers.image.description="Text to embeddings, hidden states and attention weights, over gRPC" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
RUN install -d -o 65532 -g 65532 /models
ENV PATH=/opt/attencode/bin:${PATH} HOME=/tmp PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 65532:65532
WORKDIR /
ENTRYPOINT ["attencode"]

# A server: on every interface of its container, a client's gRPC as its own health check.
FROM runtime AS server
ENV ATTENCODE_HOST=0.0.0.0
EXPOSE 50051 9090
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 CMD ["attencode", "health"]
CMD ["serve", "/models/model"]

# ---------------------------------------------------------------- cpu
FROM builder AS cpu-packages
ARG RUNTIME=amd
COPY deploy/constraints/${RUNTIME}.txt packages.txt
RUN ./install.sh packages.txt

FROM server AS cpu
COPY --from=cpu-packages /opt/attencode /opt/attencode

# ---------------------------------------------------------------- export, artifact
FROM builder AS export-packages
ARG TORCH=torch==2.13.0
COPY deploy/constraints/export.txt packages.txt
RUN ./install.sh packages.txt "${TORCH}"

FROM runtime AS export
COPY --from=export-packages /opt/attencode /opt/attencode
CMD ["export", "--help"]

# Empty unless the build names a context `checkpoint`.
FROM scratch AS checkpoint

FROM export AS artifact
ARG MODEL=sentence-transformers/all-MiniLM-L6-v2
ARG PRECISION=float32
RUN --mount=type=bind,from=checkpoint,target=/checkpoint \
    attencode export "${MODEL}" --precision "${PRECISION}" -o /models/model

# ---------------------------------------------------------------- gpu
FROM builder AS gpu-packages
COPY deploy/constraints/gpu.txt packages.txt
RUN ./install.sh packages.txt

FROM server AS gpu
# What the NVIDIA container toolkit reads: all GPUs that the container is given, CUDA and nvidia-smi.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=gpu-packages /opt/attencode /opt/attencode

# ---------------------------------------------------------------- ray
FROM builder AS ray-packages
ARG RUNTIME=amd
COPY deploy/constraints/ray-${RUNTIME}.txt packages.txt
RUN ./install.sh packages.txt

# KubeRay's own start command goes through bash, its health checks through wget where they are not HTTP.
FROM server AS ray
HEALTHCHECK NONE
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 0:0
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --no-install-recommends -y wget && rm -rf /var/lib/apt/lists/*
USER 65532:65532
COPY --from=ray-packages /opt/attencode /opt/attencode

# ---------------------------------------------------------------- baked, and the default
FROM ${SERVER} AS baked
COPY --from=artifact /models/model /models/model

FROM cpu
