"""Loading by hub name from a small server through HF_ENDPOINT: checkpoints, refusals, broken connections."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from transformers import T5ForConditionalGeneration

from offloadkit.errors import DownloadError, ModelAccessError
from offloadkit.hf import hub as hub_errors
from tests.hf import tiny
from tests.hf.hub_client import digest
from tests.hf.hub_server import Hub, Repository, running_hub

ROOT = Path(__file__).parents[2]
Ask = Callable[[str, str], dict[str, Any]]


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with running_hub() as hub:
        yield hub


@pytest.fixture(scope="module")
def ask(hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """Makes a process that reads HF_ENDPOINT load an object, and returns its answer.

    The process has an empty cache and no token. It takes seconds to start, so its tests are slow.
    """
    home = tmp_path_factory.mktemp("hf_home")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    own = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with (home / "stderr").open("w") as stderr:
        command = [sys.executable, "-m", "tests.hf.hub_client"]
        process = subprocess.Popen(
            command, env=kept | own, cwd=home, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True
        )

        def ask(what: str, name: str) -> dict[str, Any]:
            assert process.stdin
            assert process.stdout
            process.stdin.write(json.dumps({"what": what, "name": name}) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
            assert line, (home / "stderr").read_text()
            return cast("dict[str, Any]", json.loads(line))

        yield ask
        process.communicate(timeout=30)


@pytest.fixture(scope="module")
def model() -> T5ForConditionalGeneration:
    torch.manual_seed(0)
    return T5ForConditionalGeneration(tiny.t5_config())


def weights(model: torch.nn.Module) -> dict[str, str]:
    return {name: digest(value) for name, value in model.state_dict().items()}


@pytest.mark.slow
def test_single_safetensors_file(hub: Hub, ask: Ask, model: T5ForConditionalGeneration, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    hub.add_folder("org/single", tmp_path)
    assert ask("model", "org/single")["weights"] == weights(model)
    assert "model.safetensors" in hub.downloads("org/single")


@pytest.mark.slow
def test_sharded_safetensors(hub: Hub, ask: Ask, model: T5ForConditionalGeneration, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    shards = {path.name for path in tmp_path.glob("model-*.safetensors")}
    assert len(shards) > 2
    hub.add_folder("org/sharded", tmp_path)
    assert ask("model", "org/sharded")["weights"] == weights(model)
    assert shards <= set(hub.downloads("org/sharded"))


@pytest.mark.slow
def test_old_bin_file_is_read_and_no_conversion_is_asked_for(
    hub: Hub, ask: Ask, model: T5ForConditionalGeneration, tmp_path: Path
) -> None:
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    hub.add_folder("org/old", tmp_path)
    answer = ask("model", "org/old")
    assert answer["weights"] == weights(model)
    assert answer["threads"] == []
    assert not any("discussions" in path for _, path in hub.requests)


@pytest.mark.slow
def test_preset_name_leads_to_its_repository(hub: Hub, ask: Ask, tmp_path: Path) -> None:
    tiny.llama_config().save_pretrained(tmp_path)
    tiny.word_tokenizer().save_pretrained(tmp_path)
    hub.add_folder("google/flan-t5-xl", tmp_path)
    assert ask("tokenizer", "flan-t5-3b")["ids"] == [1, 4, 6]


@pytest.mark.slow
@pytest.mark.parametrize("status", [401, 403])
def test_gated_model_names_the_token_and_the_licence_page(hub: Hub, ask: Ask, status: int) -> None:
    name = f"org/gated-{status}"
    hub.models[name] = Repository(refusal=(status, "GatedRepo"))
    answer = ask("model", name)
    assert answer["error"] == "ModelAccessError"
    assert "HF_TOKEN" in answer["message"]
    assert f"https://huggingface.co/{name}" in answer["message"]
    assert f"HTTP {status}" in answer["message"]
    assert ask("tokenizer", name)["error"] == "ModelAccessError"


@pytest.mark.slow
def test_token_without_the_right_is_refused(hub: Hub, ask: Ask) -> None:
    hub.models["org/forbidden"] = Repository(refusal=(403, None))
    answer = ask("model", "org/forbidden")
    assert answer["error"] == "ModelAccessError"
    assert "HF_TOKEN" in answer["message"]


@pytest.mark.slow
def test_private_model_looks_like_a_missing_one_and_the_message_says_so(hub: Hub, ask: Ask) -> None:
    hub.models["org/private"] = Repository(refusal=(401, "RepoNotFound"))
    answer = ask("model", "org/private")
    assert answer["error"] == "ModelNotFoundError"
    assert "HF_TOKEN" in answer["message"]
    assert "https://huggingface.co/org/private" in answer["message"]


@pytest.mark.slow
def test_name_that_does_not_exist_says_what_was_tried_and_what_is_close(ask: Ask) -> None:
    answer = ask("model", "google/flan-t5-bsae")
    assert answer["error"] == "ModelNotFoundError"
    for part in (
        "no such folder",
        "no preset",
        "the hub knows none",
        "did you mean 'google/flan-t5-base'?",
    ):
        assert part in answer["message"]


@pytest.mark.slow
def test_connection_that_drops_says_that_a_rerun_resumes_and_it_does(
    hub: Hub, ask: Ask, model: T5ForConditionalGeneration, tmp_path: Path
) -> None:
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    repository = hub.add_folder("org/drops", tmp_path)
    broken = sorted(name for name in repository.files if name.endswith(".safetensors"))[-1]
    repository.breaks_at = {broken: len(repository.files[broken]) // 2}
    answer = ask("model", "org/drops")
    assert answer["error"] == "DownloadError"
    assert "resumes" in answer["message"]

    fetched_before = [name for name in hub.downloads("org/drops") if name.endswith(".safetensors") and name != broken]
    assert fetched_before
    repository.breaks_at, hub.requests = {}, []
    assert ask("model", "org/drops")["weights"] == weights(model)
    fetched_again = hub.downloads("org/drops")
    assert broken in fetched_again
    assert not set(fetched_before) & set(fetched_again)


@pytest.mark.slow
def test_fault_of_the_hub_itself_is_a_download_error(hub: Hub, ask: Ask) -> None:
    hub.models["org/overloaded"] = Repository(refusal=(501, None))
    answer = ask("model", "org/overloaded")
    assert answer["error"] == "DownloadError"
    assert "501" in answer["message"]


@pytest.mark.slow
def test_dataset_by_hub_name(hub: Hub, ask: Ask) -> None:
    rows = [{"input": "a", "target": "b"}, {"input": "c", "target": "d"}]
    hub.datasets["org/pairs"] = Repository({"train.jsonl": "\n".join(map(json.dumps, rows)).encode()})
    assert ask("dataset", "org/pairs") == {"rows": rows}
    answer = ask("dataset", "org/none")
    assert answer["error"] == "DataError"
    assert "HF_TOKEN" in answer["message"]


@pytest.fixture
def hub_down(hub: Hub) -> Iterator[Callable[[], None]]:
    """Call it to switch the hub off until the test ends."""
    yield lambda: setattr(hub, "down", True)
    hub.down = False


@pytest.mark.slow
def test_without_a_network_the_cache_serves_and_a_missing_model_is_told_at_once(
    hub: Hub, ask: Ask, model: T5ForConditionalGeneration, tmp_path: Path, hub_down: Callable[[], None]
) -> None:
    model.save_pretrained(tmp_path)
    hub.add_folder("org/cached", tmp_path)
    assert "weights" in ask("model", "org/cached")
    hub.models["org/half-cached"] = Repository({"config.json": hub.models["org/cached"].files["config.json"]})
    assert "a file named" in ask("model", "org/half-cached")["message"]
    hub_down()
    assert ask("model", "org/cached")["weights"] == weights(model)
    start = time.monotonic()
    for name in ("org/never-seen", "t5-smal", "flan-t5-small"):
        answer = ask("model", name)
        assert answer["error"] == "ModelNotFoundError"
        assert f"the hub at {hub.url} could not be reached" in answer["message"]
    assert "init='random' with tokenizer='byte' needs no network" in answer["message"]
    answer = ask("tokenizer", "flan-t5-small")
    assert answer["error"] == "ModelNotFoundError"
    assert answer["message"].startswith("the tokenizer of 'google/flan-t5-small' is missing: the hub at ")
    assert answer["message"].endswith("or pass tokenizer='byte' (one token a byte) for random weights, or a folder")
    assert ask("model", "org/half-cached")["error"] == "DownloadError"
    assert ask("dataset", "org/never-seen")["error"] == "DataError"
    assert time.monotonic() - start < 10  # the hub's client alone retries every request for 20 s


# ---- pushing --------------------------------------------------------------------------------------------------------


def refused(status: int) -> Exception:
    error = OSError(f"{status} of the hub")
    error.response = SimpleNamespace(status_code=status)  # type: ignore[attr-defined]
    return error


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (
            ConnectionError("no route"),
            DownloadError,
            r"could not be reached \(no route\): check .* nothing was trained",
        ),
        (refused(401), ModelAccessError, "refuses to create the repository .*HF_TOKEN .*leave push_to_hub out"),
        (refused(403), ModelAccessError, "HF_TOKEN"),
        (ValueError("no such form of a name"), ValueError, "^no such form of a name$"),
    ],
)
def test_errors_of_pushing_say_what_to_do(
    error: Exception, kind: type[Exception], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_errors, "hub_answers", lambda: False)
    with pytest.raises(kind, match=words), hub_errors.readable_push_errors():
        raise error
