#!/bin/sh
# A user's first job: a training loop left checkpoint.pt; look at it, check it, make it a folder that Hugging Face
# loads, and prove that nothing changed on the way. `make demo` runs this; no torch is needed.
#
#   examples/demo.sh [OUT]        ANYCKPT and PYTHON may name the program and the interpreter
set -eu

here=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
anyckpt=${ANYCKPT:-anyckpt}
python=${PYTHON:-python3}
out=${1:-demo-out}
cd "$here"
checkpoint=tests/data/trainer/checkpoint.pt

if [ -t 1 ]; then bold=$(printf '\033[1m') plain=$(printf '\033[0m'); else bold='== ' plain=''; fi
step() {
    printf '\n%s%s%s\n' "$bold" "$1" "$plain"
    shift
    program=$1
    shift
    printf '$ %s %s\n\n' "$(basename "$program")" "$*"
    "$program" "$@"
}

rm -rf "$out"
mkdir -p "$out"

step "1. What is it, is it whole, is it safe?" "$anyckpt" "$checkpoint"
step "2. Is every byte as it should be?" "$anyckpt" verify --deep "$checkpoint"
step "3. Make it a Hugging Face folder, and prove every byte against the source" \
    "$anyckpt" convert "$checkpoint" "$out/hf" --to hf --prove
step "4. Are they the same model? (exit status 0 says yes)" "$anyckpt" diff "$checkpoint" "$out/hf"
step "5. The new folder, checked by itself" "$anyckpt" verify --deep "$out/hf"

printf '\nWritten to %s:\n' "$out/hf"
ls -l "$out/hf"

if "$python" -c 'import torch, transformers' 2>/dev/null; then
    printf '\nThe judge: transformers loads the folder, and must give the logits of the live model\n'
    HF_HUB_OFFLINE=1 "$python" - "$out/hf" tests/data/truth.json <<'PY'
import json
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, truth = sys.argv[1], json.load(open(sys.argv[2]))
tokens = AutoTokenizer.from_pretrained(folder)(truth["prompt"], return_tensors="pt")["input_ids"]
with torch.no_grad():
    logits = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")(tokens).logits[0, -1]
worst = (logits - torch.tensor(truth["prompt_logits"])).abs().max().item()
print(f"largest difference of a logit: {worst:g}")
sys.exit(worst > 1e-5)
PY
else
    printf '\n(transformers is not installed here; `make test` has it load this folder and compare logits.)\n'
fi

printf '\nDone: %s was read without torch and without running anything in it, and %s holds the same weights, bit for bit.\n' \
    "$checkpoint" "$out/hf"
