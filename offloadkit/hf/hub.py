"""Resolve model names, check model folders, and translate errors of the hub and of file readers."""

from __future__ import annotations

import difflib
import os
import pickle
import re
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from offloadkit.checkpoint.folder import why_broken
from offloadkit.errors import (
    DataError,
    DownloadError,
    ModelAccessError,
    ModelError,
    ModelNotFoundError,
    OffloadkitError,
    cut,
    shown,
)
from offloadkit.facts.calls import as_here
from offloadkit.facts.files import read_json, why_no_model_name, why_no_name, why_not_plain
from offloadkit.hf.presets import PRESETS

_CONNECTION_CLASSES = {"TransportError", "LocalEntryNotFoundError", "XetDownloadError", "ChunkedEncodingError"}
"""Class names, because huggingface_hub versions use different HTTP libraries."""
_HUB_NAME = re.compile(r"(?:[\w.-]+/)?[\w.-]+", re.ASCII)


def locate(name_or_path: str | os.PathLike[str]) -> str:
    """Resolve `name_or_path` to an existing folder or a hub name; a preset gives its hub name. Raises
    `ModelNotFoundError`.
    """
    name = os.fspath(name_or_path)
    if (why := why_no_model_name(name)) is not None:
        raise ModelNotFoundError(f"no model {shown(name)}: {why}. Pass a folder, a preset or a hub name")
    folder = Path(name).expanduser()
    if name and folder.is_dir():
        return str(folder)
    if name in PRESETS:
        return PRESETS[name].hub_name
    if name.lower().endswith("gguf"):
        raise ModelError(_gguf_message(name))
    if name and folder.is_file() and folder.suffix.lower() in (".jsonl", ".csv", ".parquet"):
        raise ModelNotFoundError(f"{name!r} is a file of rows, not a model: the model comes first, then the rows")
    if name and folder.is_file():
        raise ModelNotFoundError(f"{name!r} is a file: pass its folder, {str(folder.parent)!r}")
    looks_like_path = isinstance(name_or_path, os.PathLike) or name.startswith((".", "~", "/")) or name.count("/") > 1
    if looks_like_path or not _HUB_NAME.fullmatch(name):
        raise ModelNotFoundError(no_model_message(name, "it is not a hub name (owner/name)"))
    return name


def _gguf_message(name: str) -> str:
    return (
        f"{name!r} has its weights in GGUF, a format for inference that cannot be trained: pass the model that it was "
        "converted from, a folder or hub name with a config.json and .safetensors files"
    )


def check_folder(source: str) -> None:
    """Check a model's folder; hub names pass.

    Raises:
        ModelNotFoundError: the folder has no config.json. The message names subfolders that have one.
        ModelError: the folder's weights are in GGUF alone, or are an adapter of PEFT; and see `check_files`.
    """
    folder = Path(source)
    if not folder.is_dir():
        return
    check_files(folder)
    if any(folder.glob("*.gguf")) and not any(any(folder.glob(f"*.{end}")) for end in ("safetensors", "bin")):
        raise ModelError(_gguf_message(source))
    if (folder / "config.json").is_file():
        return
    if (folder / "adapter_config.json").is_file():
        task = str(read_json(folder / "adapter_config.json").get("task_type"))
        auto_class = {"SEQ_2_SEQ_LM": "ForSeq2SeqLM", "SEQ_CLS": "ForSequenceClassification"}.get(task, "ForCausalLM")
        raise ModelError(
            f"the folder {source!r} has an adapter of PEFT, not a model: load both by "
            f"peft.AutoPeftModel{auto_class}.from_pretrained({source!r}, is_trainable=True), and pass the model"
        )
    inner = sorted(path.parent.name for path in folder.glob("*/config.json"))
    hint = f"; did you mean one of its folders: {', '.join(inner)}?" if inner else ""
    raise ModelNotFoundError(f"the folder {source!r} has no config.json, so save_pretrained did not write it{hint}")


_READ_OF_A_MODEL = (".json", ".safetensors", ".bin", ".jinja", ".model", ".txt")
_SIZE = re.compile(
    r"(^|_)(size|dims?|layers?|heads?|embeddings|positions|buckets|labels|experts|inner|embd|ff|kv|model|head|layer)$"
)
_LARGEST_SIZE, MOST_LABELS = 2**31, 1_000_000
_MOST = {r"(^|_)layers?$": 4_096, "labels": MOST_LABELS, "vocab": 2**24, "positions": 2**27}
"""Limits far above any model. Building or planning a larger one would take minutes."""


_LARGEST_NUMBER = 3e38


def check_files(folder: Path) -> None:
    """Check the files of a model or tokenizer before other libraries read them.

    Raises `ModelError` if a file is a folder, device or pipe, a JSON file is broken or has unusable values, or a weight
    index names a file outside the folder.
    """
    for path in sorted(folder.iterdir()):
        if path.suffix in _READ_OF_A_MODEL and (other := why_not_plain(path)) is not None:
            raise ModelError(f"{path} cannot be read: it is {other}, not a file. {_PUT_IN_PLACE}")
        if path.name in _OBJECTS or path.name.endswith(".index.json"):
            _check_json(path)


def _check_json(path: Path) -> None:
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read ({error}): it is truncated or corrupt. {_PUT_IN_PLACE}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} contains {shown(content)}, but an object is needed. {_PUT_IN_PLACE}")
    limit = content.get("model_max_length")
    if path.name == "tokenizer_config.json" and limit is not None and not _is_number(limit):
        raise ModelError(f"{path}: model_max_length is {shown(limit)}, but a number is needed. {_PUT_IN_PLACE}")
    for name, value in content.items():
        ids = value if isinstance(value, list) else [value]
        if name.endswith("_token_id") and not all(each is None or type(each) is int for each in ids):
            raise ModelError(f"{path}: {name} is {shown(value)}, but a whole number is needed. {_PUT_IN_PLACE}")
    if path.name == "config.json":
        named = content.get("architectures")
        if named is not None and not (isinstance(named, list) and all(isinstance(each, str) for each in named)):
            raise ModelError(f"{path}: architectures is {shown(named)}, but a list of names is needed. {_PUT_IN_PLACE}")
        for name, value in _numbers(content):
            most = next((most for words, most in _MOST.items() if re.search(words, name)), _LARGEST_SIZE)
            least = -most if name.endswith("_layer") else 0  # an index, which may count from the last layer
            if not least <= value <= most and _SIZE.search(name):
                raise ModelError(f"{path}: {name} is {shown(value)}, which no model has. {_PUT_IN_PLACE}")
            if _LARGEST_NUMBER < abs(value) != float("inf"):
                raise ModelError(f"{path}: {name} is {shown(value)}, which fp32 cannot represent. {_PUT_IN_PLACE}")
    if path.name.endswith(".index.json"):
        _check_index(path, content)


_OBJECTS = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "adapter_config.json",
)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _numbers(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _numbers(each, key)
    elif _is_number(value):
        yield name, value


def _check_index(path: Path, content: dict[str, Any]) -> None:
    names = content.get("weight_map")
    if not isinstance(names, dict) or not isinstance(content.get("metadata"), dict):
        raise ModelError(f"{path} has no metadata, or no weight_map from tensors to files. {_PUT_IN_PLACE}")
    for tensor, name in names.items():
        if not isinstance(name, str) or why_no_name(name) or os.path.isabs(name) or ".." in Path(name).parts:
            raise ModelError(
                f"{path}: the weight {shown(tensor)} should be in {shown(name)}, which is not the name of a file in "
                f"that folder. {_PUT_IN_PLACE}"
            )
        if (other := why_not_plain(path.parent / name)) is not None:
            raise ModelError(f"{path.parent / name} cannot be read: it is {other}, not a file. {_PUT_IN_PLACE}")


def where_to_look(source: str) -> dict[str, bool]:
    """Arguments of `from_pretrained`: read only the hub's cache if the hub does not answer."""
    return {"local_files_only": not os.path.isdir(source) and not hub_answers()}


@contextmanager
def readable_hub_errors(name: str, *, kind: str = "model", found: bool = False, file: str = "") -> Iterator[None]:
    """Translate errors of reading `name` from the hub or a folder into offloadkit's errors.

    Args:
        kind: "model", "tokenizer" or "dataset".
        found: a part was read before, so the name exists even if the connection is lost.
        file: the file whose values are used, for the message if they are unusable.

    Raises:
        ModelNotFoundError, ModelAccessError, ModelError: depends on the error. `DataError` for a dataset.
        DownloadError: the connection broke, or the hub answered 429 or 5xx.
    """
    try:
        yield
    except OffloadkitError:
        raise
    except Exception as error:
        translated = _translate(error, name, kind, found, file)
        if translated is None:
            raise
        raise translated from error


@contextmanager
def readable_push_errors() -> Iterator[None]:
    """Translate errors of creating a hub repository, before training, into offloadkit's errors.

    Raises:
        ModelAccessError: the token is missing or may not write.
        DownloadError: the hub cannot be reached.
    """
    without = "or leave push_to_hub out; nothing was trained or saved yet, and output_dir is as it was"
    try:
        yield
    except Exception as error:
        chain = list(causes(error))
        if any(_status(link) in (401, 403) for link in chain) or "LocalTokenNotFoundError" in map(_class_name, chain):
            todo = (
                f"set the environment variable HF_TOKEN to a token that may write (hub_model_id says where), {without}"
            )
            raise ModelAccessError(
                f"push_to_hub: the hub refuses to create the repository ({error}): {todo}"
            ) from error
        if _is_lost(chain) or (isinstance(error, OSError) and not hub_answers()):
            todo = f"check the connection and run again, {without}"
            raise DownloadError(f"push_to_hub: the hub could not be reached ({chain[-1]}): {todo}") from error
        raise


def hub_answers() -> bool:
    """Whether the hub answers one request. The hub's client would retry for 20 s."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except Exception:  # the class of a connection error depends on the HTTP library
        return False
    return True


def no_model_message(name: str, reason: str) -> str:
    """Message for an unknown model: the attempts, and the preset that was meant or what else to pass."""
    guess = nearest_preset(name)
    todo = (
        f"did you mean {guess!r}?"
        if guess is not None
        else "pass a folder that save_pretrained wrote, a preset such as 't5-3b' or 'llama-3.1-8b', or a hub name such "
        "as 'google/flan-t5-base'"
    )
    return f"no model {name!r}: there is no such folder, no preset of that name, and {reason}; {todo}"


_SIZE_WORD = re.compile(r"\d+(?:\.\d+)?[bm]\b|small|base|large")
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


def nearest_preset(name: str) -> str | None:
    """The preset that is spelled most like `name`; None if none is near. Numbers count more than letters."""

    def lower(text: str) -> str:
        return text.lower().replace("xxl", "11b").replace("xl", "3b")  # sizes of T5

    def features(text: str) -> tuple[str, list[str], list[str]]:
        model = lower(text).rpartition("/")[2]
        return re.sub(r"[^a-z0-9]", "", lower(text)), _NUMBER.findall(model), _SIZE_WORD.findall(model)

    def score(preset: str) -> tuple[float, int]:
        letters, *others = features(preset)
        alike = difflib.SequenceMatcher(None, wanted_letters, letters).ratio()
        differ = [bool(each) and each != other for each, other in zip(wanted, others, strict=True)]
        return alike - 0.1 * differ[0] - 0.2 * differ[1], -len(preset)

    wanted_letters, *wanted = features(name)
    kind = [preset for preset in PRESETS if ("/" in preset) == ("/" in name) and preset != name]
    best = max(kind, key=score)
    return best if score(best)[0] >= 0.7 else None


def unreachable(name: str, kind: str) -> OffloadkitError:
    """The error for a name that is not cached, while the hub does not answer."""
    from huggingface_hub import constants

    why = f"the hub at {constants.ENDPOINT} could not be reached"
    todo = "check the connection and run again"
    if constants.HF_HUB_OFFLINE:
        why, todo = "HF_HUB_OFFLINE is set, so the hub was not asked", "unset it and run again"
    if kind == "model" and name not in PRESETS:
        guess = nearest_preset(name)
        where = "no folder, preset or download on this machine has that name"
        return ModelNotFoundError(
            f"no model {name!r}: {where}, and {why}; {f'did you mean {guess!r}?' if guess else todo}"
        )
    resumes = "" if constants.HF_HUB_OFFLINE else ": a rerun resumes with the files that are still missing"
    todo = todo.capitalize() + resumes
    why += ", and its cache on this machine has nothing of that name"
    if kind == "dataset":
        return DataError(f"no dataset {name!r}: there is no such file, and {why}. {todo}")
    if kind == "tokenizer":
        other = "or pass tokenizer='byte' (one token a byte) for random weights, or a folder"
        return ModelNotFoundError(f"the tokenizer of {name!r} is missing: {why}. {todo}; {other}")
    command = "offloadkit train --random-weights --tokenizer byte"
    without = as_here(command, "init='random' with tokenizer='byte'") + " needs no network"
    return ModelNotFoundError(f"the files of {name!r} are on the hub, but {why}. {todo}; {without}")


def _translate(error: BaseException, name: str, kind: str, found: bool, file: str) -> OffloadkitError | None:
    chain = list(causes(error))
    status = next((code for code in map(_status, chain) if code is not None), None)
    class_names = {cls.__name__ for link in chain for cls in type(link).__mro__}

    if "GatedRepoError" in class_names or (status in (401, 403) and "RepositoryNotFoundError" not in class_names):
        refused = DataError if kind == "dataset" else ModelAccessError
        return refused(_access_message(name, kind, status))
    if class_names & {"RepositoryNotFoundError", "HFValidationError", "DatasetNotFoundError"}:
        private = (
            f"A private or gated repository gives the same answer: accept its licence at {_page(name, kind)} and set "
            "HF_TOKEN"
        )
        if kind == "dataset":
            return DataError(f"no dataset {name!r}: there is no such file, and the hub knows none. {private}")
        message = no_model_message(name, "the hub knows none")
        return ModelNotFoundError(f"{message if message.endswith('?') else message + '.'} {private}")
    if status is not None and (status == 429 or status >= 500):
        return DownloadError(f"the hub answered {status} for {name!r}. {_RERUN}")
    if _is_lost(chain) or (
        kind != "dataset" and isinstance(error, OSError) and not os.path.isdir(name) and not hub_answers()
    ):
        if found or _snapshots(name, kind).is_dir():
            missing = f"no connection to the hub while files of {name!r} are missing ({chain[-1]})"
            return DownloadError(f"{missing}. {_RERUN}")
        return unreachable(name, kind)
    if kind == "dataset":
        return None
    is_cut = "PytorchStreamReader" in str(error)
    if is_cut or "SafetensorError" in class_names or isinstance(error, pickle.UnpicklingError):
        return ModelError(
            f"{_broken_weights(name)} of {name!r} cannot be read ({chain[-1]}): it is corrupt, or contains more "
            f"than plain tensors. {_PUT_IN_PLACE if os.path.isdir(name) else 'Delete it to fetch it again'}"
        )
    if kind == "model" and isinstance(error, OSError) and "no file named" in str(error) and os.path.isdir(name):
        return ModelError(f"the folder {name!r} has no weights: {_DRAW} ({error})")
    if "OutOfMemoryError" in class_names or isinstance(error, MemoryError):
        return None
    if file and not _is_ours(error):
        said = f"{type(error).__name__}: {cut(str(error))}"
        return ModelError(f"{file} of {name!r} has unusable values ({said}). {_PUT_IN_PLACE}")
    if "ignore_mismatched_sizes" in str(error):
        return ModelError(
            f"{name!r} cannot be loaded: its weights have other shapes than its config.json says. {_PUT_IN_PLACE}"
        )
    if isinstance(error, OSError | ValueError | ImportError | RuntimeError):
        unlike = " (by its config.json)" if os.path.isdir(name) and isinstance(error, ValueError | RuntimeError) else ""
        return ModelError(f"{name!r} cannot be loaded{unlike}: {cut(str(error))}")
    is_of_files = isinstance(error, _OF_BROKEN_FILES) or "StrictDataclassError" in class_names
    if (is_of_files or type(error) is Exception) and not _is_ours(error):
        why = f"its config.json, or another file of it, is broken ({type(error).__name__}: {cut(str(error))})"
        return ModelError(f"{name!r} cannot be loaded: {why}. {_PUT_IN_PLACE}")
    return None


_OF_BROKEN_FILES = (TypeError, LookupError, AttributeError, ArithmeticError, AssertionError, EOFError)


def _is_ours(error: BaseException) -> bool:
    """Whether this package raised the error. Such an error is a bug and is not translated."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and Path(frames[-1].filename).is_relative_to(Path(__file__).parent.parent)


def _broken_weights(name: str) -> str:
    folders = [Path(name)] if os.path.isdir(name) else list(_snapshots(name, "model").glob("*"))
    files = [path for folder in folders for end in ("safetensors", "bin") for path in sorted(folder.glob(f"*.{end}"))]
    broken = [path for path in files if why_broken(path)] or files
    return f"the weight file {broken[0]}" if len(broken) == 1 else "a weight file"


_DRAW = 'init="random" (--random-weights) draws some; or pass the folder that save_pretrained wrote them to'
_PUT_IN_PLACE = "Put a complete copy in its place"
_RERUN = "Run the same command again: it resumes with the files that are still missing"


def _access_message(name: str, kind: str, status: int | None) -> str:
    where = "(https://huggingface.co/settings/tokens)"
    token = f"set the environment variable HF_TOKEN to a token of an account that has access {where}"
    if os.environ.get("HF_TOKEN"):
        token = "HF_TOKEN is set, but its account has no access yet"
    return (
        f"the hub does not provide {name!r} (HTTP {status or 403}): it is private or behind a licence. Accept the "
        f"licence at {_page(name, kind)}, and {token}; then run again"
    )


def _page(name: str, kind: str) -> str:
    return f"https://huggingface.co/{'datasets/' if kind == 'dataset' else ''}{name}"


def _snapshots(name: str, kind: str) -> Path:
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    repo_type = "dataset" if kind == "dataset" else "model"
    return Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=name, repo_type=repo_type), "snapshots")


def causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _is_lost(chain: Sequence[BaseException]) -> bool:
    class_names = {kind.__name__ for link in chain for kind in type(link).__mro__}
    return bool(class_names & _CONNECTION_CLASSES) or any(
        isinstance(link, ConnectionError | TimeoutError) for link in chain
    )


def _class_name(error: BaseException) -> str:
    return type(error).__name__


def _status(error: BaseException) -> int | None:
    code = getattr(getattr(error, "response", None), "status_code", None)
    return code if isinstance(code, int) else None
