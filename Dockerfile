# vLLM's image with this plugin. Built from the repository's root:
#   docker build --tag vllm-w8a8 .    (for its label: --build-arg VERSION=...)
#   docker run --gpus all --ipc host --publish 8000:8000 --volume /path/to/models:/models:ro vllm-w8a8 /models/MODEL
# The arguments are those of `vllm-w8a8 serve`.

# The wheel is built apart: neither its tools nor the sources are in the image.
FROM python:3.12-slim-bookworm AS wheel
WORKDIR /src
COPY . .
RUN python -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheel .

FROM vllm/vllm-openai:v0.33.0
ARG VERSION=unknown
LABEL org.opencontainers.image.title="vllm-w8a8-plugin" \
      org.opencontainers.image.description="vLLM with int8 weights and int8 activations (W8A8)" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}"

# vLLM is no requirement of the wheel, and what else it needs the image has: pip leaves these as they are.
RUN --mount=type=bind,from=wheel,source=/wheel,target=/wheel \
    PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --no-cache-dir /wheel/*.whl \
    && useradd --create-home --uid 10001 --shell /usr/sbin/nologin w8a8

# Compiled kernels, GGUF metadata and the Hub's cache lie in the user's home: a volume there keeps them.
USER 10001
WORKDIR /home/w8a8
ENV HOME=/home/w8a8 \
    VLLM_NO_USAGE_STATS=1

EXPOSE 8000
# Large models take minutes to load.
HEALTHCHECK --interval=30s --timeout=10s --start-period=15m --retries=3 \
    CMD ["python3", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=5)"]
ENTRYPOINT ["vllm-w8a8", "serve"]
