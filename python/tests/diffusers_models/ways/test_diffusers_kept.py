"""Ways that are kept in a file from one run to the next."""

import json

import pytest
import tiny_transformers as tiny
from split_models import all_raise, case
from test_diffusers_ways import chosen

import kyklos
from kyklos.diffusers import parallelize

MADE = "Wan"


def runs(paths, forwards, **options):
    """For each rank the ways of so many forwards that keep theirs in ``paths``, by rank."""
    made = case(MADE)
    models = made.copies(2)

    def work(group):
        with parallelize(models[group.rank], group, keep=paths[group.rank], **options) as handle:
            seen = []
            for _ in range(forwards):
                assert made.error(tiny.call(models[group.rank], made.inputs)) <= made.tolerance
                seen.append(handle.way)
            return seen

    return kyklos.run_local(2, work, device="cpu")


@pytest.fixture
def kept(tmp_path):
    """A file with a way, and the way."""
    made, path = case(MADE), tmp_path / "ways.json"
    models = made.copies(2)

    def work(group):
        with parallelize(models[group.rank], group, keep=path) as handle:
            chosen(handle, lambda: tiny.call(models[group.rank], made.inputs))
            tiny.call(models[group.rank], made.inputs)
            return handle.way

    return path, kyklos.run_local(2, work, device="cpu")[0]


def test_the_next_run_begins_with_the_way_of_the_last_one(kept, tmp_path):
    path, way = kept
    (entry,) = json.loads(path.read_text())
    assert entry["name"] == way and entry["transformer"] == "WanTransformer3DModel" and entry["seconds"] > 0
    # Rank 1 has no such file, and needs none.
    assert runs([path, tmp_path / "none.json"], 3) == [[way] * 3] * 2
    assert list(tmp_path.iterdir()) == [path] and json.loads(path.read_text()) == [entry]


@pytest.mark.parametrize("field", ["devices", "transformer", "latents", "wire"])
def test_ways_of_other_groups_are_left_and_stay(kept, field):
    path, way = kept
    (entry,) = json.loads(path.read_text())
    other = {"devices": [[1, 2], [3, 4]], "transformer": "Other", "latents": [[1, 2]], "wire": None}[field]
    entry |= {field: other} if field != "wire" else {"shares": [1, 1], "entries": [], "pair": None, "execution": {"mesh": "1x2", "wire": "int8"}}
    path.write_text(json.dumps([entry]))
    assert runs([path, path], 3) == [["equal shares"] * 3] * 2
    assert json.loads(path.read_text()) == [entry]


@pytest.mark.parametrize("wrong", ["no JSON", "[1]", "{}", "pair", "shares", "no way", "two ways", "execution", "latents", "NaN", "Infinity"])
def test_files_of_another_kind_are_refused(kept, wrong):
    path, _ = kept
    (entry,) = json.loads(path.read_text())
    way = {"shares": [], "entries": [], "pair": None, "execution": {}}
    changed = {
        "pair": way | {"pair": [0, 2]},
        "shares": way | {"shares": [1, 0]},
        "no way": way,
        "two ways": way | {"pair": [0, 1], "entries": [1, 1]},
        "latents": {"latents": [3]},
        "NaN": {"seconds": float("nan")},
        "Infinity": {"seconds": float("inf")},
        "execution": way | {"shares": [1, 1], "execution": {"mesh": 3}},
    }
    path.write_text(json.dumps([entry | changed[wrong]]) if wrong in changed else wrong)
    models = case(MADE).copies(2)
    all_raise(2, lambda group: parallelize(models[group.rank], group, keep=path), "ways")


def test_a_file_that_cannot_be_written_is_a_warning(tmp_path):
    made = case(MADE)
    models = made.copies(2)

    def work(group):
        with parallelize(models[group.rank], group, keep=tmp_path / "no folder" / "ways.json") as handle:
            chosen(handle, lambda: tiny.call(models[group.rank], made.inputs))

    with pytest.warns(UserWarning, match="the way of forwards is not kept"):
        kyklos.run_local(2, work, device="cpu")


def test_keep_beside_options_that_say_the_way_is_refused(tmp_path):
    models = case(MADE).copies(2)
    all_raise(2, lambda group: parallelize(models[group.rank], group, keep=tmp_path / "x", mesh="1x2"), "leave one of them out")
