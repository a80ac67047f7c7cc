"""The nodes and what the page reads."""

from __future__ import annotations

import json
import sys
import types

import pytest
from conftest import FOLDER, Model, pack
from kyklos_pack.override import previous_of

SETTINGS = {"enabled": True, "smallest_tokens": 8, "wire": "same"}


def apply(model, **settings):
    (got,) = pack.NODE_CLASS_MAPPINGS["KyklosHelpers"]().apply(model, **{**SETTINGS, **settings})
    return got


def invite(*args, **options):
    return pack.NODE_CLASS_MAPPINGS["KyklosInvite"]().invite(*args, **options)


def test_the_model_is_cloned(helpers):
    model = Model({"other": {"of": "another pack"}})
    shared = apply(model)
    assert "optimized_attention_override" not in model.options
    assert shared.options["other"] == model.options["other"]
    # Clones of it keep the very same override, although they copy deeply.
    assert shared.clone().options["optimized_attention_override"] is shared.options["optimized_attention_override"]


def test_a_clone_that_keeps_its_options_does_not_change_the_model(helpers):
    class Shallow(Model):
        def clone(self):
            made = Model()
            made.model_options = self.model_options
            return made

    model = Shallow()
    assert "optimized_attention_override" in apply(model).options and not model.options


def test_a_disabled_node_opens_nothing(helpers):
    model = Model()
    assert apply(model, enabled=False) is model
    assert helpers.module.opened == []


def test_a_second_node_replaces_the_first(helpers):
    def another(original, *args, **kwargs):
        return original(*args, **kwargs)

    once = apply(Model({"optimized_attention_override": another}))
    twice = apply(once)
    first, second = (model.options["optimized_attention_override"] for model in (once, twice))
    assert first is not second and second.kyklos_previous is another and previous_of(second) is another


def test_helpers_are_opened_once_by_what_they_are(helpers):
    apply(Model())
    apply(Model(), names=" b, a ,", devices="wgpu:1")
    apply(Model(), names="a,b", devices=" wgpu:1,")
    apply(Model(), wire="f16")
    assert helpers.module.opened == [(None, [], "same"), (["a", "b"], ["wgpu:1"], "same"), (None, [], "f16")]


def test_without_kyklos_the_node_says_so(sharing, monkeypatch):
    monkeypatch.setitem(sys.modules, "kyklos", None)
    with pytest.raises(RuntimeError, match="not installed"):
        apply(Model())
    monkeypatch.setitem(sys.modules, "kyklos", types.ModuleType("kyklos"))
    with pytest.raises(RuntimeError, match="no helpers"):
        apply(Model())


def test_inputs_have_the_names_of_the_arguments():
    import inspect

    for node in pack.NODE_CLASS_MAPPINGS.values():
        inputs = node.INPUT_TYPES()
        function = inspect.signature(getattr(node, node.FUNCTION)).parameters
        assert [*inputs["required"], *inputs.get("optional", {})] == [name for name in function if name != "self"]
    assert pack.NODE_CLASS_MAPPINGS.keys() == pack.NODE_DISPLAY_NAME_MAPPINGS.keys()
    assert (FOLDER / pack.WEB_DIRECTORY / "kyklos_helpers.js").is_file()


def test_an_invitation_has_a_code_that_says_the_token(helpers, monkeypatch, tmp_path):
    segno, _ = pytest.importorskip("segno"), pytest.importorskip("torch")
    folders = types.ModuleType("folder_paths")
    folders.get_temp_directory = lambda: str(tmp_path)
    monkeypatch.setitem(sys.modules, "folder_paths", folders)
    given = invite(" laptop ", address=" ", port=0)
    token, command, image = given["result"]
    assert helpers.invited == ("laptop", None, None)
    assert command == f"kyklos help-out {token}" and given["ui"]["kyklos_command"] == [command]
    assert image.shape[0] == 1 and image.shape[1] == image.shape[2] and image.shape[3] == 3
    modules = segno.make(token, error="m", micro=False).symbol_size(scale=1, border=4)[0]
    assert image.shape[1] == 8 * modules
    assert set(image.unique().tolist()) == {0.0, 1.0} and image[0, 0, 0, 0] == 1
    (shown,) = given["ui"]["images"]
    assert (tmp_path / shown["filename"]).read_bytes().startswith(b"\x89PNG") and shown["type"] == "temp"


def test_without_a_folder_for_previews_there_is_none(helpers, monkeypatch):
    pytest.importorskip("segno"), pytest.importorskip("torch")
    monkeypatch.setitem(sys.modules, "folder_paths", None)
    assert "images" not in invite("laptop", address="10.0.0.1", port=4000)["ui"]
    assert helpers.invited == ("laptop", "10.0.0.1", 4000)


def test_the_page_reads_helpers_and_counts(helpers, sharing):
    assert sharing.status() == {"open": False, "helpers": [], "shared": 0, "alone": {}, "error": ""}
    opened = sharing.open_helpers()
    opened.counts.shared = 3
    opened.counts.local("fewer than 8 tokens")
    # The same helper by its name is one row.
    sharing.open_helpers("laptop").counts.local("fewer than 8 tokens")
    got = json.loads(json.dumps(sharing.status()))
    assert [helper["name"] for helper in got["helpers"]] == ["laptop"]
    assert got["open"] and got["shared"] == 3 and got["alone"] == {"fewer than 8 tokens": 2}
    helpers.status = lambda: 1 / 0
    assert "ZeroDivisionError" in sharing.status()["error"]
    sharing.close_helpers()
    assert helpers.closed and not sharing.status()["open"]


def test_reasons_are_bounded(sharing):
    counts = sharing.Counts()
    for reason in range(3 * sharing.MOST_REASONS):
        counts.local(str(reason))
    assert len(counts.alone) == sharing.MOST_REASONS + 1 and sum(counts.alone.values()) == 3 * sharing.MOST_REASONS


def test_both_lists_of_requirements_agree():
    lines = (FOLDER / "requirements.txt").read_text().splitlines()
    project = pytest.importorskip("tomllib").loads((FOLDER / "pyproject.toml").read_text())
    assert [line for line in lines if not line.startswith("#")] == project["project"]["dependencies"]


def test_workflows_use_the_nodes_as_they_are():
    for file in sorted((FOLDER / "workflows").glob("*.json")):
        workflow = json.loads(file.read_text())
        nodes = workflow["nodes"] if "nodes" in workflow else list(workflow.values())
        kinds = {node.get("type") or node["class_type"] for node in nodes}
        assert pack.NODE_CLASS_MAPPINGS.keys() <= kinds, file.name
        for node in nodes:
            kind = pack.NODE_CLASS_MAPPINGS.get(node.get("type") or node["class_type"])
            if kind is None:
                continue
            inputs = {name: spec for part in kind.INPUT_TYPES().values() for name, spec in part.items()}
            if "class_type" in node:
                assert node["inputs"].keys() <= inputs.keys() and kind.INPUT_TYPES()["required"].keys() <= node["inputs"].keys()
            else:
                assert len(node["widgets_values"]) == sum(spec[0] != "MODEL" for spec in inputs.values())
