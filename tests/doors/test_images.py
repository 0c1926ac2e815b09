"""`finetune` on conversations with images: tiny models learn the colours of pictures."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path
from typing import Any

import datasets
import pandas
import pytest
import torch
import transformers
from transformers import AutoModelForImageTextToText, AutoProcessor, LlamaForCausalLM, Trainer, TrainingArguments
from typer.testing import CliRunner

import offloadkit
from offloadkit import OffloadConfig, Placement
from offloadkit.doors import finetuning
from offloadkit.doors.cli import app
from offloadkit.engine.values import is_constant
from offloadkit.errors import ConfigError, DataError, ModelError
from offloadkit.hf.columns import BY_NAME, ColumnOptions
from offloadkit.hf.images import ImageRows, labels_of, prepare_images
from offloadkit.hf.longest import longest_of_sizes
from offloadkit.hf.source import resolve
from offloadkit.hf.speech import SpeechRows
from tests import images, speech
from tests.hf import tiny
from tests.images import FAMILIES, picture, rows
from tests.runs import check_resumed, losses


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Gemma 3 and its processor."""
    path = tmp_path_factory.mktemp("images") / "gemma"
    for part in images.gemma():
        part.save_pretrained(path)
    return path


OPTIONS: dict[str, Any] = {
    "batch_size": 2,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "monitor": False,
    "use_cpu": True,
}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForImageTextToText.from_pretrained(folder).state_dict()


MARKS = {
    "gemma": ("<start_of_turn>model\n", "<end_of_turn>\n"),
    "qwen": ("<|im_start|>assistant\n", "<|im_end|>\n"),
    "idefics": ("\nAssistant:", "<end_of_utterance>\n"),
}


def by_transformers(name: str, path: Path, model: Any, steps: int) -> list[float]:
    """Losses of the same rows by transformers' Trainer, with a collator that calls the processor."""
    _, processor = FAMILIES[name]()
    begin, end = (processor.tokenizer(mark)["input_ids"] for mark in MARKS[name])

    def collate(batch: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        texts, pictures = [], []
        for row in batch:
            texts.append(processor.apply_chat_template(row["messages"]))
            parts = [part for message in row["messages"] for part in message["content"]]
            pictures.append([part["image"] for part in parts if part["type"] == "image"])
        processor.tokenizer.padding_side = "right"
        made = processor(text=texts, images=pictures, padding=True, add_special_tokens=False, return_tensors="pt")
        labels = torch.full_like(made["input_ids"], -100)
        for ids, row in zip(made["input_ids"].tolist(), labels, strict=True):
            at = [place for place in range(len(ids)) if ids[place - len(begin) : place] == begin]
            for first in at:
                last = next(place for place in range(first, len(ids)) if ids[place : place + len(end)] == end)
                row[first : last + len(end)] = torch.tensor(ids[first : last + len(end)])
        return {**made, "labels": labels}

    args = TrainingArguments(
        output_dir=str(path), per_device_train_batch_size=2, learning_rate=2e-3, adam_epsilon=1e-4, logging_steps=1,
        max_steps=steps, use_cpu=True, report_to="none", remove_unused_columns=False, save_strategy="no",
        train_sampling_strategy="sequential", lr_scheduler_type="constant",
    )  # fmt: skip
    trainer = Trainer(model, args, train_dataset=rows(), data_collator=collate)  # type: ignore[arg-type]
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_learns_as_by_transformers_trainer(name: str, tmp_path: Path) -> None:
    how = OPTIONS | {"train_sampling_strategy": "sequential", "lr_scheduler_type": "constant", "max_steps": 6}
    how |= {"learning_rate": 2e-3, "adam_epsilon": 1e-4}
    model, processor = FAMILIES[name]()
    result = offloadkit.finetune(model, rows(), tokenizer=processor, output_dir=tmp_path / "ours", **how)
    plain, _ = FAMILIES[name]()
    theirs = by_transformers(name, tmp_path / "plain", plain, 6)
    print(losses(result), theirs)
    assert losses(result) == pytest.approx(theirs, rel=1e-6)
    assert theirs[-1] < 0.95 * theirs[0]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "part"), [("gemma", "vision_tower"), ("qwen", "visual")])
def test_frozen_eyes_keep_their_bits_and_the_rest_is_trained(name: str, part: str, tmp_path: Path) -> None:
    model, processor = FAMILIES[name]()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    how = OPTIONS | {"freeze": part, "max_steps": 3}
    result = offloadkit.finetune(model, rows(), tokenizer=processor, output_dir=tmp_path, **how)
    after = weights(result.model_dir)
    kept = {key for key, value in before.items() if torch.equal(value, after[key])}
    assert kept == {key for key in before if f".{part}." in key}
    assert kept
    frozen = sum(each.numel() for each in getattr(model.model, part).parameters())
    assert result.plan.num_trainable_parameters == result.plan.num_parameters - frozen


@pytest.mark.slow
def test_a_folder_trains_from_the_command_line_and_its_processor_is_saved(folder: Path, tmp_path: Path) -> None:
    """From rows whose pictures are files. The dry run counts the longest row, with the tokens of its pictures."""
    lines = []
    for number, row in enumerate(rows(6)):
        names = []
        for message in row["messages"]:
            for part in message["content"]:
                if part["type"] == "image":
                    names.append(str(tmp_path / f"{number}-{len(names)}.png"))
                    part.pop("image").save(names[-1])
        lines.append(json.dumps({"messages": row["messages"], "images": names}))
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    command = ["train", str(folder), str(tmp_path / "rows.jsonl"), "--batch-size", "2", "--freeze", "vision_tower"]
    command += ["--max-steps", "2", "--output", str(tmp_path / "out"), "use_cpu=True"]
    dry = CliRunner().invoke(app, [*command, "--dry-run"])
    assert dry.exit_code == 0, dry.output
    assert "2 x 80 tokens a step" in dry.output
    assert "6 rows to train on" in dry.output
    assert not (tmp_path / "out").exists()
    done = CliRunner().invoke(app, [*command, "eval_dataset=0.2"])
    assert done.exit_code == 0, done.output
    saved: Any = AutoProcessor.from_pretrained(tmp_path / "out" / "model")
    assert saved.image_seq_length == 4
    assert saved.chat_template == images.gemma()[1].chat_template
    card = (tmp_path / "out" / "model" / "README.md").read_text()
    assert "import AutoModelForImageTextToText, AutoProcessor" in card
    shown = [line for line in done.output.splitlines() if "->" in line]
    assert shown
    assert "colour?" in shown[0]


@pytest.mark.slow
def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(folder: Path, tmp_path: Path) -> None:
    check_resumed(folder, rows(), tmp_path, weights, OPTIONS)


@pytest.mark.slow
def test_two_placements_and_half_precision_give_equal_bits(folder: Path, tmp_path: Path) -> None:
    found = []
    for name, placement in (("kept", Placement()), ("away", Placement(weights="ram", activations="checkpoint"))):
        offload = OffloadConfig(working_dtype="bf16", placement=placement)
        run = offloadkit.finetune(folder, rows(), output_dir=tmp_path / name, max_steps=2, offload=offload, **OPTIONS)
        found.append(weights(run.model_dir))
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


TEXTS_OF_PARTS = [
    {"messages": [{"role": role, "content": [{"type": "text", "text": "a"}]} for role in ("user", "assistant")]}
] * 2


def test_text_alone_is_saved_with_the_processor_that_was_named(folder: Path) -> None:
    source = resolve(folder)
    processor = AutoProcessor.from_pretrained(folder)
    for given, has_images in (
        *((each, True) for each in (None, str(folder), folder, processor)),
        *((each, False) for each in (processor.tokenizer, "byte")),
    ):
        saved = finetuning._saved_with(source, given, source.load_tokenizer(given))
        assert hasattr(saved, "image_processor") == has_images, given


@pytest.mark.slow
def test_text_alone_trains_the_same_model(folder: Path, tmp_path: Path) -> None:
    data = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}] * 4
    _, processor = images.gemma()
    processor.chat_template = (
        "{{ bos_token }}{% for message in messages %}{{ message['role'] }} {{ message['content'] }}\n{% endfor %}"
    )
    result = offloadkit.finetune(folder, data, tokenizer=processor, output_dir=tmp_path, max_steps=2, **OPTIONS)
    assert weights(result.model_dir).keys() == weights(folder).keys()
    assert AutoProcessor.from_pretrained(result.model_dir).chat_template == processor.chat_template
    own = offloadkit.finetune(folder, TEXTS_OF_PARTS, output_dir=tmp_path / "own", max_steps=1, **OPTIONS)
    assert AutoProcessor.from_pretrained(own.model_dir).image_seq_length == 4
    assert result.plan.rows is not None
    assert result.plan.rows.input_length < 64


@pytest.mark.slow
@pytest.mark.parametrize("what", ["images", "sound"])
def test_no_row_is_decoded_to_learn_its_length(
    what: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rows are read in a step, and as many for the plan of each of two largest batches."""
    kind: Any = ImageRows if what == "images" else SpeechRows
    read: list[int] = []
    own = kind.__getitem__
    monkeypatch.setattr(kind, "__getitem__", lambda self, index: [read.append(index), own(self, index)][1])
    model, data = (folder, rows(32)) if what == "images" else (speech.model(), speech.rows(32))
    more = {} if what == "images" else {"tokenizer": speech.processor()}
    result = offloadkit.finetune(model, data, output_dir=tmp_path, max_steps=1, **OPTIONS, **more)
    assert len(losses(result)) == 1
    assert 2 <= len(read) <= 10


@pytest.mark.slow
def test_adapters_are_trained_and_load_by_peft(folder: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    result = offloadkit.finetune(folder, rows(), output_dir=tmp_path, lora=4, max_steps=3, **OPTIONS)
    assert "from peft import AutoPeftModel\n" in (result.model_dir / "README.md").read_text()
    loaded = peft.AutoPeftModel.from_pretrained(result.model_dir).state_dict()
    trained = result.model.state_dict()
    assert trained.keys() == loaded.keys()
    assert all(torch.equal(value, loaded[name]) for name, value in trained.items())
    assert isinstance(peft.AutoPeftModel.from_pretrained(result.model_dir).get_base_model(), type(images.gemma()[0]))


# -- the plan


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_a_plan_from_the_config_has_an_image_in_each_row(name: str, tmp_path: Path) -> None:
    model, _ = FAMILIES[name]()
    model.config.save_pretrained(tmp_path)
    made = offloadkit.plan(tmp_path, batch_size=2, max_input_length=64)
    text = offloadkit.plan(tmp_path, batch_size=2, max_input_length=64, packing=True) if name == "qwen" else None
    assert made.rows is not None
    assert (made.rows.batch_size, made.rows.input_length) == (2, 64)
    work = made.basis.work
    assert work is not None
    blocks = {stage.block.split(".")[1] for stage in work.stages if stage.block}
    assert len(blocks) == 2  # the blocks that see, and those that write
    assert text is None or text.basis.work is None or text.basis.work.vram_bytes < work.vram_bytes


_WIDE = {"hidden_size": 2304, "num_hidden_layers": 1, "vocab_size": 300_000}
WIDE = {
    "gemma4": transformers.Gemma4Config(text_config=_WIDE, vision_config={"num_hidden_layers": 1}, audio_config=None),
    "smolvlm": transformers.SmolVLMConfig(
        text_config=_WIDE | {"model_type": "llama", "num_attention_heads": 32},
        vision_config={"num_hidden_layers": 1, "image_size": 384, "patch_size": 14}, scale_factor=3,
    ),
    "mistral3": transformers.Mistral3Config(
        text_config=_WIDE | {"model_type": "mistral"}, vision_config={"model_type": "pixtral", "num_hidden_layers": 1}
    ),
    "llava": transformers.LlavaConfig(
        text_config=_WIDE | {"model_type": "llama", "num_attention_heads": 32}, vision_feature_layer=-1,
        vision_config={"model_type": "clip_vision_model", "num_hidden_layers": 1, "image_size": 336, "patch_size": 14},
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", WIDE)
def test_a_model_of_a_real_width_is_planned_with_images_of_a_real_size(name: str, tmp_path: Path) -> None:
    """Masks of tokens x features, and pixel values, have too many elements to keep their values."""
    WIDE[name].save_pretrained(tmp_path)
    made = offloadkit.plan(tmp_path, batch_size=2)
    assert made.rows is not None
    assert (made.rows.batch_size, made.rows.input_length) == (2, 1024)


def prepared(data: Any, name: str = "qwen", **options: Any) -> Any:
    model, processor = FAMILIES[name]()
    how: dict[str, Any] = {"max_input_length": None, "column_options": BY_NAME} | options
    return prepare_images(data, None, processor, model.config, torch.float32, **how)[0]


def unlike_rows() -> list[dict[str, Any]]:
    """Row 2 has the most patches, row 5 the most tokens."""
    data = rows(8)[:3] + rows(8)[4:7]
    data[2]["messages"][0]["content"][0]["image"] = picture(True, 16, 16)
    data[5]["messages"][0]["content"][1]["text"] = "colour?" * 9
    return data


def test_the_largest_batches_by_tokens_and_by_patches_keep_their_grids() -> None:
    found = prepared(unlike_rows())
    call = longest_of_sizes([(found.dataset, found.collator)], 1)
    calls = [call, *call.alternatives]
    assert sorted(len(each.kwargs["pixel_values"]) for each in calls) == [32, 64]
    assert sorted(each.kwargs["input_ids"].shape[1] for each in calls) == [64, 112]
    assert all(each.kwargs["image_grid_thw"].prod(1).sum() == len(each.kwargs["pixel_values"]) for each in calls)
    assert [size[0] for size in found.dataset.sizes] == [
        found.collator([row])["attention_mask"].sum() for row in found.dataset
    ]


def test_pixels_that_are_too_many_to_keep_are_no_padding_of_rows() -> None:
    """Idefics 3 leaves out images of zeros. Without values, it could not be traced."""
    found = prepared(rows(), "idefics")
    pixels = longest_of_sizes([(found.dataset, found.collator)], 8).kwargs["pixel_values"]
    assert pixels.shape == (8, 10, 3, 8, 8)
    assert is_constant(pixels)
    assert pixels.all()


@pytest.mark.slow
def test_a_run_is_planned_for_the_row_with_the_most_patches(tmp_path: Path) -> None:
    needed = []
    for number, data in enumerate((unlike_rows(), unlike_rows()[:2] + unlike_rows()[3:])):
        model, processor = images.qwen()
        how = OPTIONS | {"max_steps": 1, "batch_size": 1}
        run = offloadkit.finetune(model, data, tokenizer=processor, output_dir=tmp_path / str(number), **how)
        assert run.plan.rows is not None
        assert run.plan.rows.input_length == 112
        assert run.plan.basis.work is not None
        needed.append(run.plan.basis.work.vram_bytes)
    assert needed[0] >= needed[1]


# -- rows


def test_what_the_assistant_says_is_learned_and_no_place_of_an_image() -> None:
    for name in FAMILIES:
        _, processor = FAMILIES[name]()
        found = prepared(rows(), name)
        batch = found.collator([found.dataset[index] for index in (0, 3)])
        end = MARKS[name][1]
        said = [
            processor.tokenizer.decode(ids[labels >= 0]).replace(" ", "")
            for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True)
        ]
        assert said == [f"red{end}", f"bluesky{end}red{end}"]
        assert (batch["labels"][batch["labels"] >= 0] == batch["input_ids"][batch["labels"] >= 0]).all()


@pytest.mark.parametrize("kind", ["list", "table", "frame"])
def test_the_template_writes_the_tools_of_a_row(kind: str) -> None:
    tools = [[{"name": "colour", "of": {"red": 1}}], [{"name": "size", "of": {"width": "px"}}], None]
    data: Any = [{**row, "tools": given} for row, given in zip(rows(3), tools, strict=True)]
    if kind == "frame":
        data[2].pop("tools")
        data = pandas.DataFrame(data)
    if kind == "table":
        names = {"messages": [], "images": []} | {"tools": tools}
        names["images"] = [[part["image"] for part in row["messages"][0]["content"][:1]] for row in data]
        for row in data:
            texts = [{"role": each["role"], "content": each["content"][-1]["text"]} for each in row["messages"]]
            names["messages"].append(texts)
        data = datasets.Dataset.from_dict(names, on_mixed_types="use_json")
    model, processor = FAMILIES["qwen"]()
    processor.chat_template = "{% if tools %}{{ tools | tojson }}{% endif %}" + processor.chat_template
    how: dict[str, Any] = {"max_input_length": None, "column_options": BY_NAME}
    found = prepare_images(data, None, processor, model.config, torch.float32, **how)[0]
    texts = [processor.tokenizer.decode(found.collator([row])["input_ids"][0]) for row in found.dataset]
    for text, given in zip(texts, tools, strict=True):
        assert text.split("<|im_start|>")[0] == (json.dumps(given) if given else "")


def test_an_image_in_an_answer_is_not_learned() -> None:
    data = rows(1)
    data[0]["messages"][1]["content"].append({"type": "image", "image": picture(True)})
    found = prepared(data)
    batch = found.collator([found.dataset[0]])
    image = images.qwen()[1].image_token_id
    assert (batch["input_ids"] == image).sum() == 12
    assert (batch["labels"][batch["input_ids"] == image] == -100).all()
    assert (batch["labels"] >= 0).any()


def test_images_after_the_last_answer_are_left_out() -> None:
    """They teach nothing, and a prediction of that answer would have pixels without a place."""
    data = rows(1)
    data[0]["messages"].append({"role": "user", "content": [{"type": "image", "image": picture(True)}]})
    batches = [found.collator([found.dataset[0]]) for found in (prepared(data), prepared(rows(1)))]
    assert all(torch.equal(value, batches[1][name]) for name, value in batches[0].items())


def encoded(image: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize("kind", ["image", "images", "path", "bytes", "Dataset", "nested", "parquet", "first"])
def test_images_are_given_in_many_ways(kind: str, tmp_path: Path) -> None:
    """Each gives the batch of images in the messages."""
    data = rows(2)
    expected = prepared(data)
    pictures = [row["messages"][0]["content"][0]["image"] for row in data]
    made: Any = [json.loads(json.dumps(row, default=lambda image: None)) for row in data]
    for index, (row, image) in enumerate(zip(made, pictures, strict=True)):
        path = tmp_path / f"{index}.png"
        path.write_bytes(encoded(image))
        part = row["messages"][0]["content"][0]
        del part["image"]
        if kind == "path":
            part["path"] = str(path)
        elif kind == "nested":
            part["image"] = {"bytes": encoded(image), "path": None}
        else:
            row |= {"image": image} if kind == "image" else {"images": [encoded(image) if kind == "bytes" else image]}
        if kind == "first":
            row["messages"] = [
                {"role": each["role"], "content": "".join(part.get("text", "") for part in each["content"])}
                for each in row["messages"]
            ]
    if kind in ("Dataset", "nested", "parquet"):
        made = datasets.Dataset.from_list(made)
        if kind == "parquet":
            made.to_parquet(str(tmp_path / "rows.parquet"))
            made = str(tmp_path / "rows.parquet")
    found = prepared(made)
    batches = [each.collator([each.dataset[index] for index in range(2)]) for each in (expected, found)]
    assert all(torch.equal(value, batches[1][name]) for name, value in batches[0].items())


def test_rows_without_an_image_are_learned_beside_others() -> None:
    data = [*rows(2), {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]
    for name in FAMILIES:
        found = prepared(data, name)
        model, _ = FAMILIES[name]()
        for chosen in ((0, 2), (2,)):
            batch = found.collator([found.dataset[index] for index in chosen])
            assert ("pixel_values" in batch) == (len(chosen) == 2)
            assert torch.isfinite(model(**batch).loss)


def test_longer_rows_are_left_out_with_their_number(caplog: pytest.LogCaptureFixture) -> None:
    data = [*rows(4), {"messages": rows(1)[0]["messages"][:1]}]
    with caplog.at_level(logging.WARNING):
        found = prepared(data, max_input_length=60)
    assert len(found.dataset) == 3
    assert (
        "1 of 5 rows left out: with the tokens of their images they are longer than max_input_length=60" in caplog.text
    )
    assert "the longest has 82" in caplog.text
    assert "1 of 5 rows left out: they have nothing to learn" in caplog.text


def test_a_text_that_the_processor_changes_names_its_row() -> None:
    assert labels_of([1, 2, 3, 2, 3], [((2,), (3,)), ((2,), (3,))], 0) == [-100, -100, 3, -100, 3]
    with pytest.raises(DataError, match="row 7: the processor writes a message of the assistant in other tokens"):
        labels_of([1, 2, 256, 512], [((), (1,)), ((), (3,))], 7)


# -- refusals


def with_content(*parts: Any, **columns: Any) -> list[dict[str, Any]]:
    messages = [{"role": "user", "content": list(parts)}, {"role": "assistant", "content": "a"}]
    return [*rows(1), {"messages": messages, **columns}]


IMAGE = {"type": "image"}


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (with_content({"type": "image", "image": "gone.png"}), "row 1 has an image that cannot be opened (gone.png)"),
        (with_content({"type": "image", "image": b"no image"}), "row 1 has an image that cannot be opened: "),
        (with_content(IMAGE, images=[]), "row 1 has 0 images and 1 place for them in 'messages'"),
        (with_content(IMAGE, images=[None]), "row 1 has 0 images and 1 place for them in 'messages'"),
        (with_content(IMAGE, images=[picture(True)] * 2), "row 1 has 2 images and 1 place for them in 'messages'"),
        (with_content("a", IMAGE, {"type": "video"}), "row 1 has a part of the type 'video'"),
        (
            with_content(IMAGE | {"image": picture(True)}, image=picture(True)),
            "row 1 has images in 'messages' and in a column of their own",
        ),
        (with_content({"type": "text", "text": "<|image_pad|>"}), "row 1 has 0 images, and the chat template of the"),
        (
            with_content({"type": "image", "image": picture(True, 1, 900)}),
            "row 1 has an image of 1 x 900 pixels, wh",
        ),
        ([{"images": [picture(True)]}], "need a column of 'messages'. Columns found: images"),
        ([{"messages": rows(1)[0]["messages"][:1]}], "none of the 1 rows teaches anything"),
        (lambda: iter(rows(1)), "streams of images are not supported"),
    ],
)
def test_rows_that_cannot_be_learned_are_refused(data: Any, told: str) -> None:
    with pytest.raises(DataError) as error:
        prepared(data)
    assert told in str(error.value)


def test_rows_too_long_for_the_limit_are_refused_with_their_length() -> None:
    with pytest.raises(DataError, match="with their images they have at least 41 tokens, and max_input_length=40 all"):
        prepared(rows(1), max_input_length=40)


def test_other_models_processors_and_options_are_refused(folder: Path, tmp_path: Path) -> None:
    options: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"tokenizer": "byte"}, ConfigError, "must be the processor of a model that sees images, with its image_proc"),
        ({"tokenizer": speech.processor()}, ConfigError, "with its image_processor and tokenizer"),
        ({"template": "{messages}"}, ConfigError, "leave out template="),
        ({"packing": True}, ConfigError, "packing=True is for text, and the rows have images"),
        ({"baseline": "measure"}, ConfigError, "baseline='measure' is for text"),
        ({"label_smoothing_factor": 0.1}, ConfigError, "label_smoothing_factor=0.1 is for text"),
        ({"max_input_length": 4}, DataError, "with their images they have at least 38 tokens"),
    ]
    for given, kind, told in options:
        with pytest.raises(kind, match=told):
            offloadkit.finetune(folder, rows(1), output_dir=tmp_path / "out", batch_size=1, **given)
    with pytest.raises(ConfigError, match="max_input_length=4 leaves no room for an image of gemma3"):
        offloadkit.plan(folder, max_input_length=4)
    beside = [{"messages": [{"role": "user", "content": "a"}], "image": picture(True)}]
    for stream in (lambda: iter(rows(1)), lambda: iter(beside)):
        with pytest.raises(DataError, match="streams of images are not supported"):
            offloadkit.finetune(folder, stream, max_steps=1, output_dir=tmp_path / "out", batch_size=1)
    sound = [{"messages": [{"role": "user", "content": [{"type": "audio"}]}]}]
    with pytest.raises(DataError, match="row 0 has a part of the type 'audio' in 'messages', and finetune learns text"):
        offloadkit.finetune(folder, sound, output_dir=tmp_path / "out", batch_size=1)
    with pytest.raises(ModelError, match="pass tokenizer= its processor"):
        offloadkit.finetune(images.gemma()[0], rows(1), output_dir=tmp_path / "out", batch_size=1)


def test_a_model_without_a_processor_says_what_is_missing(tmp_path: Path) -> None:
    model, processor = images.gemma()
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path)
    processor.tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"no processor can be loaded from .*preprocessor_config\.json"):
        offloadkit.finetune(tmp_path, rows(1), init="random", output_dir=tmp_path / "out", batch_size=1)


def test_a_processor_that_needs_a_package_says_which(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*args: Any, **kwargs: Any) -> None:
        raise ImportError("\nQwen2VLVideoProcessor requires the Torchvision library but it was not found. Check out")

    monkeypatch.setattr(AutoProcessor, "from_pretrained", read)
    with pytest.raises(ModelError, match=r"cannot be loaded: Qwen2VL.* requires the Torchvision library .*found\. In"):
        offloadkit.finetune(folder, rows(1), output_dir=tmp_path / "out", batch_size=1)


def test_a_model_of_text_refuses_images(tmp_path: Path) -> None:
    model = LlamaForCausalLM(tiny.llama_config(hidden_size=32))
    words = tiny.word_tokenizer(chat_template=tiny.CHAT_TEMPLATE)
    beside = [{"messages": [{"role": "user", "content": "a"}], "images": [picture(True)]}]
    path = tmp_path / "rows.jsonl"
    named = [{"role": "user", "content": [IMAGE | {"path": "a.png"}]}, {"role": "assistant", "content": "b"}]
    path.write_text(json.dumps({"messages": named}))
    for data in (rows(1), beside, datasets.Dataset.from_list(beside), datasets.Dataset.from_list(rows(1)), path):
        with pytest.raises(DataError, match=r"takes? text alone: pass a model that sees images"):
            offloadkit.finetune(model, data, tokenizer=words, output_dir=tmp_path / "out", batch_size=1)


@pytest.mark.slow
def test_a_model_of_text_takes_rows_of_text_with_an_unread_column_of_images(tmp_path: Path) -> None:
    model, words = LlamaForCausalLM(tiny.llama_config(hidden_size=32)), tiny.word_tokenizer()
    data = [{"text": "the cat", "image": "a.png"}, {"text": "a dog", "image": "[b.png"}]
    result = offloadkit.finetune(model, data, tokenizer=words, output_dir=tmp_path, max_steps=1, **OPTIONS)
    assert len(losses(result)) == 1


def test_a_named_column_holds_the_conversations() -> None:
    data = [{"chat": row["messages"]} for row in rows(2)]
    assert len(prepared(data, column_options=ColumnOptions("chat")).dataset) == 2
