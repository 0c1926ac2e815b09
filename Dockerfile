# docker build -t offloadkit .
# docker run --rm --gpus all --ipc=host -v "$PWD:/work" offloadkit train t5-3b pairs.jsonl --vram 24GiB
#
# torch's wheel brings CUDA. The C compiler stays in the image: Triton compiles by it when training starts.
# .ci/run carries out the COPY and RUN lines without Docker, so each is one line.
FROM python:3.13-slim
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends gcc libc6-dev
RUN pip install --no-cache-dir torch==2.13.0
WORKDIR /source
COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE ./
COPY offloadkit offloadkit
RUN pip install --no-cache-dir .
RUN cd / && python -c "import offloadkit.kernels.cpu as cpu; assert cpu.available()"
WORKDIR /work
ENTRYPOINT ["offloadkit"]
