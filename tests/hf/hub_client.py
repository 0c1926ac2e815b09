"""A separate process: HF_ENDPOINT is read at import, as for users.

One line of JSON per request and answer. Request: {"what": "model" | "lazy model" | "tokenizer" | "dataset",
"name": ...}. Answer: a summary of the loaded object, or {"error": class, "message": ...}.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
from typing import Any


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # progress bars and prints of libraries are not answers
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = read(request["what"], request["name"])
        except Exception as error:
            answer = {"error": type(error).__name__, "message": str(error)}
        answers.write(json.dumps(answer) + "\n")


def read(what: str, name: str) -> dict[str, Any]:
    from offloadkit.hf.data import load_dataset_like
    from offloadkit.hf.source import resolve
    from tests.hf.tiny import build_model, load_model

    if what == "lazy model":
        model, materialise = build_model(name)
        assert materialise is not None
        materialise(list(model.parameters()))
        return {"weights": {key: digest(value) for key, value in model.state_dict().items()}}
    if what == "model":
        state = load_model(name).state_dict()
        threads = [thread.name for thread in threading.enumerate() if "conversion" in thread.name]
        return {"weights": {key: digest(value) for key, value in state.items()}, "threads": threads}
    if what == "tokenizer":
        return {"ids": resolve(name).load_tokenizer()("the cat")["input_ids"]}
    return {"rows": load_dataset_like(name).to_list()}


def digest(tensor: Any) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


if __name__ == "__main__":
    main()
