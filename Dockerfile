# handgrad with its CUDA kernels; the host needs NVIDIA's driver and container toolkit, nothing else.
#
#   docker build --tag handgrad .
#   docker run --rm --gpus all --ipc host handgrad                                     # doctor: is everything there?
#   docker run --rm --gpus all --ipc host --volume "$PWD:/work" handgrad train --data shards/mine --gpus 8
#
# Add --stop-timeout 300 to the last one: `docker stop` kills after ten seconds otherwise, in the middle of a large model's save.
FROM python:3.12-slim
# Triton builds its launchers with a C compiler. CUDA's libraries come with the wheels of torch.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/handgrad
COPY pyproject.toml constraints.txt README.md LICENSE NOTICE ./
COPY handgrad handgrad
COPY climb climb
RUN pip install --no-cache-dir --constraint constraints.txt '.[gpu]'
WORKDIR /work
ENTRYPOINT ["handgrad"]
CMD ["doctor"]
