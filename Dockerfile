# docker build -t pipeloom .                        on CPUs
# docker build -t pipeloom-cuda --build-arg BASE=nvidia/cuda:12.8.1-runtime-ubuntu24.04 --build-arg TORCH= .      on GPUs
# docker run --rm --shm-size 2g pipeloom train tiny
ARG BASE=python:3.12-slim
FROM ${BASE}
# The wheels of torch for CPUs are smaller by gigabytes; empty: those of the usual index, with CUDA.
ARG TORCH=https://download.pytorch.org/whl/cpu
ARG EXTRAS=train,hf,data,opt
RUN command -v python3 >/dev/null && python3 -m venv --help >/dev/null \
    || (apt-get update -qq && apt-get install -y -qq --no-install-recommends python3 python3-venv && rm -rf /var/lib/apt/lists/*)
WORKDIR /pipeloom
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
RUN python3 -m venv /venv \
    && /venv/bin/pip install --no-cache-dir ${TORCH:+--extra-index-url ${TORCH}} -c constraints.txt ".[${EXTRAS}]"
ENV PATH=/venv/bin:${PATH}
WORKDIR /work
ENTRYPOINT ["pipeloom"]
