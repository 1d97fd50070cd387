# fastgen-serve on CPUs, one copy of a model without Ray, from this repository alone:
#   docker build -t fastgen .
#   docker run --rm -p 127.0.0.1:8000:8000 fastgen facebook/bart-large-cnn
# On x86, add --build-arg TORCH_INDEX=ADDRESS, the index of torch's builds for the CPU: else pip takes the CUDA build.
ARG PYTHON=3.11

FROM python:${PYTHON}-slim AS build
ARG TORCH_INDEX=""
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/fastgen
ENV PATH=/opt/fastgen/bin:$PATH
WORKDIR /source
COPY constraints.txt ./
# torch first and alone: no other requirement may choose its build.
RUN pip install ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} -c constraints.txt torch 'setuptools>=77'
COPY . ./
# torch is here, so that the operators are compiled now: the image needs no compiler.
RUN pip install --no-build-isolation -c constraints.txt '.[serve]'

FROM python:${PYTHON}-slim
COPY --from=build /opt/fastgen /opt/fastgen
# `required`: an error where the operators are not native, in place of a slower service.
ENV PATH=/opt/fastgen/bin:$PATH FASTGEN_NATIVE=required PYTHONUNBUFFERED=1
RUN python -c "import torch, fastgen.ops; assert fastgen.ops.is_native(torch.device('cpu'))"
# A user without rights, by number, so that Kubernetes can tell that it is not root.
RUN useradd --create-home --uid 10001 fastgen
USER 10001
WORKDIR /home/fastgen
EXPOSE 8000
# Liveness, as in examples/kubernetes.yaml; for another port, or TLS, give `docker run` a --health-cmd.
HEALTHCHECK --interval=30s --timeout=5s --start-period=180s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health/live', timeout=4)"]
ENTRYPOINT ["fastgen-serve", "--local", "--host", "0.0.0.0", "--port", "8000"]
