# groupwise with all of its suite.
#   docker build -t groupwise .                                            for a CPU
#   docker build -t groupwise:cuda --build-arg INDEX=https://pypi.org/simple .    for CUDA, as the package index has it
#   docker run --rm -v "$PWD/results:/groupwise/results" groupwise python run.py scale=demo
#   docker run --rm --gpus all -v "$HOME/data:/data" groupwise:cuda python run.py task=cifar
FROM python:3.12-slim

# The index with torch and torchvision as CPU builds; the pins of both are in requirements.txt.
ARG INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1 GROUPWISE_DATA=/data

# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc git libc6-dev make \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 user \
    && install --directory --owner=user /groupwise /data

WORKDIR /groupwise
COPY requirements.txt ./
RUN PIP_EXTRA_INDEX_URL="$INDEX" pip install --requirement requirements.txt
COPY --chown=user . .
RUN pip install --no-deps --editable .

USER 1000
CMD ["python", "run.py", "task=cifar", "clip=adaptive_layer", "scale=demo"]
