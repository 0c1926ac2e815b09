#!/usr/bin/env bash
# The runs behind README's tables and charts, each by its name, on one GPU of 140 GB: bash benchmarks/tables.sh w1 growth
# Results go to $OUT (benchmarks/results), commits are git's or $COMMIT.
set -uo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-benchmarks/results}
commit=(${COMMIT:+--commit "$COMMIT"})
t5=(--model t5-3b --tokens 512+128)
llama=(--model llama-3.2-3b --tokens 1024)

steps() { # FILE OPTIONS...
    python -m benchmarks.run steps --out "$OUT/$1.json" "${commit[@]}" "${@:2}"
}

w1() { steps t5-3b-8x640-24gib-peers-h200 "${t5[@]}" --batch 8 --budget 24 --engine planned planned-compiled gpu-ours gpu ao zero2; }
w2() { steps t5-3b-32x640-16gib-h200 "${t5[@]}" --batch 32 --budget 16 --engine planned planned-compiled gpu-ours gpu ao --ckpt gpu ao; }
w3() { steps t5-3b-1x640-6gib-h200 "${t5[@]}" --batch 1 --budget 6 --engine planned planned-compiled gpu-ours gpu zero3 --ckpt zero3; }
w5() { steps t5-3b-8x640-24gib-2-cores-h200 "${t5[@]}" --batch 8 --budget 24 --cores 2 --engine planned planned-compiled gpu-ours gpu ao; }
w6() { steps llama-3b-8x1024-h200 "${llama[@]}" --batch 8 --budget 48 24 --engine planned planned-compiled gpu-ours gpu ao zero2 roundpipe; }
w7() { steps llama-3b-32x1024-24gib-h200 "${llama[@]}" --batch 32 --budget 24 --engine planned planned-compiled gpu-ours gpu zero2 roundpipe --ckpt gpu gpu-ours zero2; }

growth() {
    python -m benchmarks.growth --out "$OUT/growth-h200.json" "${commit[@]}"
    python -m benchmarks.growth --out "$OUT/growth-h200.json" "${commit[@]}" --engine planned --compile
}

attention() { python -m benchmarks.attention --out "$OUT/attention-h200.json" "${commit[@]}"; }
plans() { python -m benchmarks.plans --out "$OUT/plans-h200.json" "${commit[@]}"; }
blog() { # GIB
    python -m offloadkit compare t5-small t5-base t5-large t5-3b t5-11b --vram "$1GiB" --ram 64GiB --output "$OUT/blog-$1"
}
blog11() { blog 11; }
blog24() { blog 24; }

[ $# -gt 0 ] || { grep -oE '^[a-z0-9]+\(\)' "$0" | tr -d '()' | grep -vE '^(steps|blog)$' | xargs; exit 2; }
for name in "$@"; do "$name"; done
