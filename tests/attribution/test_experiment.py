"""An experiment file is read exactly, and whatever is wrong with it is one line that names file, line and field."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from magic_pipeline.attribution.experiment import (
    Experiment,
    load_experiment,
    load_experiments,
    parse_experiment,
    recipe_content,
)
from magic_pipeline.attribution.experiment_settings import TableSchedule
from magic_pipeline.attribution.located_yaml import read_yaml
from magic_pipeline.attribution.optimizer_settings import AdamWSettings, SGDSettings
from magic_pipeline.errors import InputError

COMPLETE = """\
name: digits
storage: s3://bucket/prefix
storage_options: {key: abc, secret: "top secret"}
task: {type: digits_classifier, hidden: 64}
init: weights.npz
training:
  seed: 7
  epochs: 3
  batch_size: 50
  microbatch_size: 25
  dtype: float64
  mode: eval
  clip_norm: 1
  order: order.npz
  optimizer: {name: adamw, lr: 1e-3, betas: [0.9, 0.99], eps: 1E-8, eps_root: .5, weight_decay: 0}
  schedule: {name: table, values: rates.npz}
attribution:
  unit: example
  segment_steps: 4
  query_batch: 8
  memory_budget: 1.5GiB
  save_every: 3
  threads: 2
  chunk: auto
ranks: 1
queries: {file: queries.jsonl}
validation: {lds: {subsets: 10, drop_fraction: 0.1}}
device: cpu
"""
MINIMAL = "name: digits\ntask: {type: digits_classifier}\n"


def write(folder: Path, text: str, name: str = "x.yaml") -> Path:
    for file in ("weights.npz", "order.npz", "rates.npz", "queries.jsonl"):
        (folder / file).touch()
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def message(path: Path) -> str:
    """What is wrong with the file, without the file's name, which must come first."""
    with pytest.raises(InputError) as caught:
        load_experiment(path)
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith(f"{path}: ")
    return text.removeprefix(f"{path}: ")


def test_every_field_is_read(tmp_path: Path) -> None:
    experiment = load_experiment(write(tmp_path, COMPLETE))
    training, attribution = experiment.training, experiment.attribution
    assert (experiment.name, experiment.storage_url, experiment.device) == ("digits", "s3://bucket/prefix", "cpu")
    assert experiment.storage_options == {"key": "abc", "secret": "top secret"}
    assert (experiment.task.type, experiment.task.settings) == ("digits_classifier", {"hidden": 64})
    assert (training.seed, training.epochs, training.batch_size, training.microbatch_size) == (7, 3, 50, 25)
    assert (training.dtype, training.mode, training.clip_norm, training.order) == ("float64", "eval", 1.0, "order.npz")
    assert training.optimizer == AdamWSettings(
        name="adamw", lr=1e-3, betas=(0.9, 0.99), eps=1e-8, eps_root=0.5, weight_decay=0.0
    )
    assert training.schedule == TableSchedule(name="table", values="rates.npz")
    assert attribution.memory_budget == 3 * 2**29
    assert (attribution.segment_steps, attribution.query_batch, attribution.save_every) == (4, 8, 3)
    assert (attribution.threads, attribution.chunk, attribution.unit) == (2, "auto", "example")
    assert experiment.queries.file == "queries.jsonl"
    assert experiment.validation.lds is not None
    assert (experiment.validation.lds.subsets, experiment.validation.lds.drop_fraction) == (10, (0.1,))


def test_name_and_task_are_enough(tmp_path: Path) -> None:
    experiment = load_experiment(write(tmp_path, MINIMAL))
    assert experiment.storage_url == str(tmp_path / ".magic/store")
    assert (experiment.storage_folder, experiment.ranks, experiment.device) == ("digits", 1, "auto")
    assert experiment.training.optimizer == AdamWSettings(name="adamw")
    assert experiment.attribution.save_every == "segment"
    assert experiment.queries == type(experiment.queries)()


def test_only_the_named_optimizer_s_fields_are_accepted(tmp_path: Path) -> None:
    sgd = MINIMAL + "training:\n  optimizer: {name: sgd, lr: 0.1, momentum: 0.9, nesterov: true}\n"
    expected = SGDSettings(name="sgd", lr=0.1, momentum=0.9, nesterov=True)
    assert load_experiment(write(tmp_path, sgd)).training.optimizer == expected
    wrong = MINIMAL + "training:\n  optimizer:\n    name: sgd\n    betas: [0.9, 0.99]\n"
    assert message(write(tmp_path, wrong)) == (
        "line 6: training.optimizer.betas: unknown field; known here: lr, groups, name, momentum, nesterov, dampening, weight_decay"
    )


@pytest.mark.parametrize(
    ("added", "expected"),
    [
        (
            "training:\n  seed: 1\n  batch_sise: 5\n",
            "line 5: training.batch_sise: unknown field; did you mean batch_size?",
        ),
        ("training: {lr: 1}\n", "line 3: training.lr: unknown field; did you mean training.optimizer.lr?"),
        ("batch_size: 5\n", "line 3: batch_size: unknown field; did you mean training.batch_size?"),
        ("training:\n  epochs: '3'\n", "line 4: training.epochs: should be a valid integer, found '3'"),
        ("training: {seed: true}\n", "line 3: training.seed: should be a valid integer, found True"),
        ("training: {clip_norm: 0}\n", "line 3: training.clip_norm: should be greater than 0, found 0"),
        ("training: {clip_norm: .nan}\n", "line 3: training.clip_norm: should be a valid number, found '.nan'"),
        ("training: 3\n", "line 3: training: should be a mapping of fields, found 3"),
        ("training: {dtype: float8}\n", "line 3: training.dtype: should be 'float32' or 'float64', found 'float8'"),
        (
            "training: {dtype: bfloat16}\n",
            "line 3: training.dtype: has to be float32 or float64: less rounds away what scores are made of, found 'bfloat16'",
        ),
        (
            "training: {batch_size: 4, microbatch_size: 5}\n",
            "line 3: training: microbatch_size (5) exceeds batch_size (4)",
        ),
        (
            "training: {optimizer: {lr: 1}}\n",
            "line 3: training.optimizer.name: missing; one of sgd, adam, adamw, adagrad, rmsprop, muon",
        ),
        (
            "training:\n  optimizer:\n    name: adamant\n",
            "line 5: training.optimizer.name: should be one of sgd, adam, adamw, adagrad, rmsprop, muon, found 'adamant'",
        ),
        (
            "training:\n  optimizer:\n    name: adamw\n    betas:\n      - 0.9\n      - 1.5\n",
            "line 8: training.optimizer.betas.1: should be less than 1, found 1.5",
        ),
        (
            "training: {optimizer: {name: sgd, nesterov: true}}\n",
            "line 3: training.optimizer: nesterov needs a momentum above 0 and no dampening",
        ),
        (
            "training:\n  schedule: {name: linear, values: rates.npz}\n",
            "line 4: training.schedule.values: unknown field; known here: name, warmup_steps",
        ),
        (
            "training: {schedule: {name: table}}\n",
            (
                "line 3: training.schedule.values: missing; "
                "a file with one learning rate per training step; they replace the optimizer's lr"
            ),
        ),
        ("ranks: 0\n", "line 3: ranks: should be greater than or equal to 1, found 0"),
        ("ranks: 4\nprocesses: 3\n", "line 4: processes: should be auto or a divisor of ranks (4), found 3"),
        (
            "attribution: {unit: word}\n",
            "line 3: attribution.unit: should be 'example', 'token' or 'document', found 'word'",
        ),
        (
            "attribution: {save_every: 0}\n",
            "line 3: attribution.save_every: should be segment or a whole number of at least 1, found 0",
        ),
        (
            "attribution: {memory_budget: 8 gigs}\n",
            (
                "line 3: attribution.memory_budget: should be auto, a size such as 8GiB or 512MB, "
                "or a whole number of bytes, found '8 gigs'"
            ),
        ),
        ("queries: {file: queries.jsonl, split: test}\n", "line 3: queries: takes either file, or split and count"),
        ("queries: {count: 3}\n", "line 3: queries: count needs a split"),
        ("init: weights.bin\n", "line 3: init: should be a .pt, .safetensors or .npz file, found 'weights.bin'"),
        (
            "ranks: two\nqueriez: 1\ndevices: 2\n",
            "line 4: queriez: unknown field; did you mean queries? (and 2 more)",
        ),
    ],
)
def test_a_wrong_field_is_named_with_its_line(tmp_path: Path, added: str, expected: str) -> None:
    assert message(write(tmp_path, MINIMAL + added)) == expected


def test_a_missing_field_comes_after_its_misspelling(tmp_path: Path) -> None:
    assert (
        message(write(tmp_path, "name: x\ntaks: {type: a}\n"))
        == "line 2: taks: unknown field; did you mean task? (and 1 more)"
    )
    assert message(write(tmp_path, "name: x\n")).startswith("task: missing; what is attributed")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "the file is empty; an experiment needs at least name and task"),
        ("# only a comment\n", "the file is empty; an experiment needs at least name and task"),
        ("- a\n- b\n", "should be a mapping of fields (name: ..., task: ...), found a list"),
        ("just words\n", "should be a mapping of fields (name: ..., task: ...), found a str"),
        ("name: [1\n", "line 2: not valid YAML: expected ',' or ']', but got '<stream end>'"),
        ("name: x\n\ttask: y\n", "line 2: not valid YAML: found character '\\t' that cannot start any token"),
        ("name: x\nname: y\n", "line 2: not valid YAML: the field 'name' is given twice (first on line 1)"),
        (
            "name: x\ntask:\n  a: 1\n  b: 2\n  a: 3\n",
            "line 5: not valid YAML: the field 'a' is given twice (first on line 3)",
        ),
        ("name: x\n3: y\n", "line 2: not valid YAML: field names must be strings; put quotes around it"),
        ("a: &a [*a]\n", "line 1: not valid YAML: found unconstructable recursive node"),
        ("a: *b\n", "line 1: not valid YAML: found undefined alias 'b'"),
        ("a: 1\n---\nb: 2\n", "line 2: not valid YAML: but found another document"),
    ],
)
def test_what_is_no_mapping_or_no_yaml_is_said(tmp_path: Path, text: str, expected: str) -> None:
    assert message(write(tmp_path, text)) == expected


def test_no_tag_can_make_a_python_object(tmp_path: Path) -> None:
    found = message(write(tmp_path, "name: !!python/object/apply:os.getcwd []\n"))
    assert found.startswith("line 1: not valid YAML: could not determine a constructor for the tag")


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    assert message(tmp_path / "none.yaml") == "there is no such file"
    (tmp_path / "folder.yaml").mkdir()
    assert message(tmp_path / "folder.yaml") == "cannot be read: Is a directory"
    (tmp_path / "latin.yaml").write_bytes(b"name: caf\xe9\n")
    assert message(tmp_path / "latin.yaml").startswith("not valid YAML: ")


def test_numbers_words_and_merges_are_those_of_yaml_1_2(tmp_path: Path) -> None:
    settings = (
        "{a: 1e-3, b: -2E5, c: no, d: 12:30, e: 010, f: 0x1F, g: 2020-01-01, h: ~, i: True, j: 1., k: .5, l: '1e-3'}"
    )
    experiment = load_experiment(write(tmp_path, f"name: x\ntask:\n  type: t\n  s: {settings}\n"))
    assert experiment.task.settings["s"] == {
        "a": 1e-3, "b": -2e5, "c": "no", "d": "12:30", "e": 10, "f": 31,
        "g": "2020-01-01", "h": None, "i": True, "j": 1.0, "k": 0.5, "l": "1e-3",
    }  # fmt: skip
    merged = "name: x\ntask: &t {type: t, a: 1}\ntraining:\n  seed: 3\nvalidation: {}\n"
    assert load_experiment(write(tmp_path, merged)).training.seed == 3
    override = "name: x\ntask:\n  type: t\n  base: &b {a: 1, c: 2}\n  own: {<<: *b, a: 3}\n"
    assert load_experiment(write(tmp_path, override)).task.settings["own"] == {"a": 3, "c": 2}


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("init", "init: none.npz\n"),
        ("training.order", "training: {order: none.npz}\n"),
        ("training.schedule.values", "training: {schedule: {name: table, values: none.npz}}\n"),
        ("queries.file", "queries: {file: none.npz}\n"),
    ],
)
def test_a_file_that_is_not_there_is_named_with_field_and_path(tmp_path: Path, field: str, text: str) -> None:
    assert message(write(tmp_path, MINIMAL + text)) == f"line 3: {field}: there is no file {tmp_path / 'none.npz'}"


def test_paths_are_relative_to_the_experiment_s_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, MINIMAL + "storage: ../store\nqueries: {file: queries.jsonl}\n")
    monkeypatch.chdir(tmp_path)
    experiment = load_experiment("x.yaml")
    monkeypatch.chdir("/")
    assert experiment.path == Path("x.yaml")
    assert experiment.folder == tmp_path
    assert experiment.storage_url == str(tmp_path.parent / "store")
    assert experiment.resolve("queries.jsonl") == tmp_path / "queries.jsonl"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert parse_experiment({"name": "x", "task": {"type": "t"}, "storage": "~/s"}).storage_url == str(
        tmp_path / "home/s"
    )


def test_secrets_are_never_shown(tmp_path: Path) -> None:
    experiment = load_experiment(write(tmp_path, COMPLETE))
    assert "top secret" not in repr(experiment) + str(experiment) + experiment.model_dump_json() + experiment.text
    assert "top secret" not in message(write(tmp_path, MINIMAL + "storage_options: 'top secret'\n"))
    assert "top secret" not in message(write(tmp_path, MINIMAL + "storage_options: [top secret\n"))
    assert message(write(tmp_path, MINIMAL + "storage: ftp://me:top secret@host/x\n")) == (
        "line 3: storage: holds a password; put it into the environment or into storage_options"
    )
    with pytest.raises(ValidationError) as caught:
        Experiment.model_validate({"name": "x", "task": {"type": "t"}, "storage_options": "top secret"})
    assert "top secret" not in str(caught.value)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize(
    "options",
    [
        "  key: me\n  secret: top secret # mine\n\n",
        " {key: me, secret: top secret}\n",
        ' {key: me, secret:\n  "top secret"} # mine\n',
        "\n- top secret\n",
        " &o {secret: top secret}\n",
    ],
)
def test_the_text_is_the_file_s_but_for_the_storage_options(tmp_path: Path, options: str, encoding: str) -> None:
    if options.startswith("  "):
        options = f"\n{options}"
    before, after = "# ä comment\nname: x\nstorage_options:", "# the task\ntask: {type: t}\n"
    path = tmp_path / "x.yaml"
    path.write_text(before + options + after, encoding=encoding)
    text = read_yaml(path).text_without("storage_options").removeprefix("\ufeff")
    assert text.startswith(before) and text.endswith("task: {type: t}\n")
    assert "(not shown)" in text and "secret" not in text
    assert read_yaml(path).text_without("none").removeprefix("\ufeff") == before + options + after


def test_the_text_is_that_which_was_read(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL + "# a comment\n")
    experiment = load_experiment(path)
    path.write_text("name: later\n")
    assert experiment.text == MINIMAL + "# a comment\n"


@pytest.mark.parametrize("name", ["Digits", "1x", "a-b", "", "x" * 41, "é", "a\n"])
def test_names_that_groups_refuse_are_refused(name: str) -> None:
    with pytest.raises(InputError, match=r"^name: "):
        parse_experiment({"name": name, "task": {"type": "t"}})


@pytest.mark.parametrize("task_type", ["digits", "own_model:Wine", "a.b.c:D"])
def test_task_types_are_names_or_classes(task_type: str) -> None:
    assert parse_experiment({"name": "x", "task": {"type": task_type}}).task.type == task_type
    for wrong in (f"{task_type}:", f"{task_type}:1", f"../{task_type}", ""):
        with pytest.raises(InputError, match=r"^task\.type: "):
            parse_experiment({"name": "x", "task": {"type": wrong}})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object(), {1, 2}, b"x"])
def test_task_settings_are_plain_finite_data(value: object) -> None:
    with pytest.raises(InputError, match=r"^task: the setting 'a' should be plain, finite data"):
        parse_experiment({"name": "x", "task": {"type": "t", "a": [value]}})


def test_an_experiment_does_not_change_and_crosses_processes(tmp_path: Path) -> None:
    experiment = load_experiment(write(tmp_path, COMPLETE))
    with pytest.raises(ValidationError, match="frozen"):
        experiment.name = "other"
    copy = pickle.loads(pickle.dumps(experiment))
    assert copy == experiment
    assert (copy.folder, copy.path, copy.storage_options) == (tmp_path, experiment.path, experiment.storage_options)


def recipe(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {"name": "x", "task": {"type": "t", "hidden": 4}}
    return recipe_content(parse_experiment(base | changes), split_matters=False)


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "y"},
        {"storage": "s3://elsewhere"},
        {"storage_name": "old"},
        {"device": "cpu"},
        {"queries": {"split": "test", "count": 3}},
        {"validation": {"lds": {"subsets": 3}}},
        {
            "attribution": {
                "segment_steps": 2,
                "query_batch": 3,
                "memory_budget": 5,
                "save_every": 1,
                "threads": 1,
                "chunk": 1,
            }
        },
        {"training": {"microbatch_size": 5}},
        {"training": {"optimizer": {"name": "adamw", "weight_decay": 0.01}}},
    ],
)
def test_what_changes_no_number_is_not_in_the_recipe(changes: dict[str, Any]) -> None:
    assert recipe(**changes) == recipe()


@pytest.mark.parametrize(
    "changes",
    [
        {"task": {"type": "t", "hidden": 5}},
        {"task": {"type": "u", "hidden": 4}},
        {"training": {"optimizer": {"name": "adamw", "lr": 2e-3}}},
        {"training": {"optimizer": {"name": "adamw", "eps_root": 0}}},
        {"training": {"optimizer": {"name": "sgd"}}},
        {"training": {"schedule": {"name": "linear", "warmup_steps": 1}}},
        {"training": {"schedule": {"name": "cosine"}}},
        {"training": {"seed": 1}},
        {"training": {"epochs": 3}},
        {"training": {"batch_size": 51}},
        {"training": {"dtype": "float64"}},
        {"training": {"mode": "eval"}},
        {"training": {"clip_norm": 1}},
    ],
)
def test_what_changes_numbers_is_in_the_recipe(changes: dict[str, Any]) -> None:
    assert recipe(**changes) != recipe()


def test_the_recipe_is_plain_data_without_paths(tmp_path: Path) -> None:
    experiment = load_experiment(write(tmp_path, COMPLETE))
    content = json.dumps(recipe_content(experiment, split_matters=True), allow_nan=False)
    for path in ("weights.npz", "order.npz", "rates.npz", "queries.jsonl", "bucket", str(tmp_path)):
        assert path not in content
    assert recipe_content(experiment, split_matters=True)["training"]["microbatch_size"] == 25
    assert json.dumps(recipe(training={"clip_norm": 1})) == json.dumps(recipe(training={"clip_norm": 1.0}))


def test_a_bad_file_costs_only_its_own_experiment(tmp_path: Path) -> None:
    write(tmp_path, MINIMAL.replace("digits\n", "good\n", 1), "b.yaml")
    write(tmp_path, "name: [1\n", "a.yml")
    (tmp_path / "c.yaml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "d.yaml").symlink_to(tmp_path / "gone.yaml")
    for ignored in ("notes.txt", ".hidden.yaml"):
        write(tmp_path, "nonsense", ignored)
    found = load_experiments(tmp_path)
    assert [path.name for path in found] == ["a.yml", "b.yaml", "c.yaml", "d.yaml"]
    assert [isinstance(result, Experiment) for result in found.values()] == [False, True, False, False]


def test_two_experiments_of_one_name_are_both_refused_and_name_each_other(tmp_path: Path) -> None:
    for name in ("a.yaml", "b.yaml"):
        write(tmp_path, MINIMAL, name)
    write(tmp_path, MINIMAL.replace("digits\n", "other\n", 1), "c.yaml")
    a, b, c = load_experiments(tmp_path).values()
    assert str(a) == f"{tmp_path / 'a.yaml'}: name: the name digits is also used in {tmp_path / 'b.yaml'}"
    assert str(b) == f"{tmp_path / 'b.yaml'}: name: the name digits is also used in {tmp_path / 'a.yaml'}"
    assert isinstance(c, Experiment)


def test_a_folder_that_is_not_there_has_no_experiments(tmp_path: Path) -> None:
    assert load_experiments(tmp_path / "none") == {}
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="should be a folder of experiment files, found a file"):
        load_experiments(tmp_path / "file")


def sections(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    yield model
    for field in model.model_fields.values():
        for choice in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(choice, type) and issubclass(choice, BaseModel):
                yield from sections(choice)


def test_every_field_is_described() -> None:
    found = set(sections(Experiment))
    assert len(found) == 23
    undescribed = [(s.__name__, name) for s in found for name, field in s.model_fields.items() if not field.description]
    assert undescribed == []


def test_the_shipped_experiments_are_right() -> None:
    shipped = load_experiments(Path(__file__).parents[2] / "experiments")
    assert {path.stem: result for path, result in shipped.items() if not isinstance(result, Experiment)} == {}
    assert len(shipped) >= 3
