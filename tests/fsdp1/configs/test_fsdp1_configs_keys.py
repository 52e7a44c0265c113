"""Random configurations of every format, a target or an error and one note for each key; and what the tables hold."""

import pytest
import torch.nn as nn
from config_keys import KEYS, section
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_models import Decoder

from shardkit import PlanError
from shardkit.errors import TranslationError
from shardkit.fsdp1.configs import accelerate, from_config, read_config, roll, trainers
from shardkit.fsdp1.configs.target import Ranks, accelerate2, notes_on_accelerate
from shardkit.replacements import SUPPORT

UNKNOWN = st.dictionaries(st.sampled_from(["zz", "q_x", "Qqq", "0", "zz.top"]), st.integers(), max_size=3)


def leaves(config, notes, path=""):
    """The places of the keys of a configuration: those of a section, unless a note is on the section itself."""
    answered = {note.argument for note in notes}
    for key, value in config.items():
        place = f"{path}.{key}" if path else str(key)
        below = [argument for argument in answered if argument.startswith(f"{place}.")]
        if isinstance(value, dict) and value and place not in answered and below:
            yield from leaves(value, notes, place)
        else:
            yield place


@pytest.mark.parametrize("name", KEYS)
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_every_key_is_answered_for_once(name, data):
    unknown = data.draw(UNKNOWN)
    config = data.draw(section(KEYS[name])) | unknown
    ranks = Ranks(data.draw(st.sampled_from([None, 16])), data.draw(st.sampled_from([None, 8])))
    try:
        reading = read_config(config, ranks, format=name)
    except TranslationError:
        return
    arguments = [note.argument for note in reading.notes if note.argument != "units"]
    assert sorted(arguments) == sorted(leaves(config, reading.notes))
    assert all(note.support in SUPPORT and note.sentence.endswith((".", "?")) for note in reading.notes)
    if name == "accelerate":  # the others have keys of their own
        assert unknown.keys() == {note.argument for note in reading.notes if note.support == "unknown"}
    assert accelerate2(reading.target)
    try:
        translation = from_config(config, MODEL, world_size=16, ranks_per_node=8, format=name)
    except (TranslationError, PlanError):
        return
    translation.plan.check()
    assert translation.plan.mesh.size <= 16  # fewer where other axes share the ranks
    assert all(note.support in ("noted", "refused") for note in notes_on_accelerate(reading.target))


def test_every_answer_of_every_table_is_a_fate_and_a_sentence():
    modules = (accelerate, trainers, roll)
    names = [(module, name) for module in modules for name, kind in module.__annotations__.items() if kind == "Table"]
    assert len(names) > 10
    for module, name in names:
        table = getattr(module, name)
        words = [word for words in table for word in words.split()]
        assert len(words) == len(set(words)), (module, name)
        for row in table.values():
            for answer in answers_of(row):
                support, _, sentence = answer.partition(": ")
                assert (support in SUPPORT, sentence.endswith(".")) == (True, True), (module, name, answer)


def answers_of(row):
    """The answers of a line of a table, after a look that it has one for each value."""
    if isinstance(row, str):
        return [row]
    if callable(row.answers):
        return [row.answers(row.default)]
    if isinstance(row.answers, str):
        return [row.answers]
    assert row.default in row.answers
    if True in row.answers:
        assert row.answers.keys() == {True, False, row.default}
    else:
        assert all(row.kind.parse(value) == value for value in row.answers.keys() - {None})
    return row.answers.values()


class Model(Decoder):
    """With the names that transformers' models have."""

    _no_split_modules = ("Block", "Absent")

    def get_input_embeddings(self) -> nn.Module:
        return self.embed


MODEL = Model()
